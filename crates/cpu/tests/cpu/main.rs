//! Tests the kernels of every set of this CPU through the device: integration tests link the
//! library that is built anyway, while unit tests would compile all kernels once more.

mod attend;
mod matmul;
mod tuning;

use kvant_cpu::Isa;

/// Returns the sets with a matrix path for codes of many rows or queries, each with the set of its
/// vectors.
fn matrix_sets() -> Vec<[Isa; 2]> {
    let sets = Isa::available();
    let named = |name| sets.iter().copied().find(|isa| isa.name() == name);
    let pairs = [("soft", "avx2"), ("amx", "avx512vbmi"), ("i8mm", "neon")];
    pairs.into_iter().filter_map(|(other, vectors)| Some([named(other)?, named(vectors)?])).collect()
}
