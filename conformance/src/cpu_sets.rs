//! The kernel sets of CPUs, and their arithmetic.

use kvant_codec::DType;

use crate::{Arithmetic, Attention};

/// A kernel set, with its arithmetic of GEMMs and of attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CpuSet {
    /// Its name, as `KVANT_ISA` selects it.
    pub isa: &'static str,
    /// Its name in messages.
    pub name: &'static str,
    /// Arithmetic of GEMMs.
    pub arithmetic: Arithmetic,
    /// Arithmetic of attention.
    pub attention: Attention,
}

impl CpuSet {
    /// Returns the set that `KVANT_ISA` selects by this name.
    pub fn of(isa: &str) -> Option<Self> {
        CPU_SETS.into_iter().find(|set| set.isa == isa)
    }
}

/// Every kernel set.
pub const CPU_SETS: [CpuSet; 10] = [
    set("scalar", "cpu-scalar", Arithmetic::Float, Attention::Exact),
    // Its 16-bit sums must not saturate.
    set("avx2", "cpu-avx2", Arithmetic::EightBit, SHORT_BYTES),
    // A software matrix unit, with these vector kernels.
    set("soft", "cpu-soft", Arithmetic::EightBit, SHORT_BYTES),
    set("avxvnni", "cpu-avxvnni", Arithmetic::EightBit, WHOLE_BYTES),
    set("avx512", "cpu-avx512", Arithmetic::EightBit, WHOLE_BYTES),
    set("avx512vbmi", "cpu-avx512vbmi", Arithmetic::EightBit, WHOLE_BYTES),
    set("amx", "cpu-amx", Arithmetic::EightBit, WHOLE_BYTES),
    set("neon", "cpu-neon", Arithmetic::EightBit, WHOLE_BYTES),
    set("i8mm", "cpu-i8mm", Arithmetic::EightBit, WHOLE_BYTES),
    set("simd128", "cpu-simd128", Arithmetic::EightBit, WHOLE_BYTES),
];

/// V types whose weights may have one byte of 127 steps, and of 255.
const COARSE: [DType; 3] = [DType::Turbo2, DType::Turbo3, DType::Turbo2T];
const TURBO: [DType; 5] = [DType::Turbo2, DType::Turbo3, DType::Turbo4, DType::Turbo2T, DType::Turbo3T];
const SHORT_BYTES: Attention = Attention::Integers { byte: 64.0, split: 8191.0, dithered: (127.0, &COARSE) };
const WHOLE_BYTES: Attention = Attention::Integers { byte: 127.0, split: 32639.0, dithered: (255.0, &TURBO) };

/// A line of the table.
const fn set(isa: &'static str, name: &'static str, arithmetic: Arithmetic, attention: Attention) -> CpuSet {
    CpuSet { isa, name, arithmetic, attention }
}
