//! The kernels of every set that this CPU has, through the device: what reaches them all links the library that is built anyway,
//! while unit tests would have them compiled once more.

mod attend;
mod matmul;
mod tuning;

use kvant_cpu::Isa;

/// Sets that multiply codes of many rows or queries otherwise than vectors do, and those of the vectors beside that.
fn pairs() -> Vec<[Isa; 2]> {
    let sets = Isa::available();
    let named = |name| sets.iter().copied().find(|isa| isa.name() == name);
    let pairs = [("soft", "avx2"), ("amx", "avx512vbmi"), ("i8mm", "neon")];
    pairs.into_iter().filter_map(|(other, vectors)| Some([named(other)?, named(vectors)?])).collect()
}
