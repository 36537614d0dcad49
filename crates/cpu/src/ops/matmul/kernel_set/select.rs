//! Selection of the [`KernelSet`](super::KernelSet) of an [`Isa`].

use crate::simd::isa::Isa;

/// Minimum rows that a matrix unit multiplies. Fewer leave most of the unit idle: from 32 on it is
/// faster for all weights, with 9 to 24 rows vectors are as fast or faster
/// (docs/benchmarks/2026-11-25-amx.md).
const MIN_UNIT_ROWS: usize = 32;

/// Returns the kernel set that multiplies `rows` rows.
pub(in crate::ops::matmul) fn of_rows(isa: Isa, rows: usize) -> Isa {
    match isa {
        Isa::Amx(_) if rows < MIN_UNIT_ROWS => isa.of_vectors(),
        isa => isa,
    }
}

/// Calls a generic function with the [`KernelSet`](super::KernelSet) that multiplies panels for an
/// [`Isa`]; without panels, `$otherwise`.
macro_rules! with_set {
    ($isa:expr, $set:ident => $body:expr, _ => $otherwise:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::Avx2($set) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::AvxVnni($set) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::Avx512(token) => {
                let $set = $crate::simd::matmul::avx512::Zmm(token);
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::Avx512Vbmi(token) => {
                let $set = $crate::simd::matmul::avx512::Zmm(token);
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::Amx(amx) => {
                let $set = $crate::ops::matmul::kernel_set::amx::AmxKernels {
                    vectors: $crate::simd::matmul::avx512::Zmm(amx.vectors()),
                    unit: amx,
                };
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::simd::isa::Isa::Neon(token) => {
                let $set = $crate::simd::vec128::Quads(token);
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::simd::isa::Isa::I8mm(token) => {
                let $set = $crate::ops::matmul::kernel_set::i8mm::I8mmKernels {
                    bytes: token,
                    halves: $crate::simd::tokens::Bf16::detect(),
                };
                $body
            }
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            $crate::simd::isa::Isa::Simd128(token) => {
                let $set = $crate::simd::vec128::Quads(token);
                $body
            }
            #[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
            $crate::simd::isa::Isa::Soft(vectors) => {
                let $set = $crate::ops::matmul::kernel_set::amx::AmxKernels {
                    vectors,
                    unit: $crate::simd::matrix_unit::EmulatedUnit,
                };
                $body
            }
            _ => $otherwise,
        }
    };
}
pub(in crate::ops::matmul) use with_set;
