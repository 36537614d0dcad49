//! Selection of the [`Lanes`](super::Lanes) of an [`Isa`](crate::simd::isa::Isa).

/// Calls a generic function with the [`Lanes`](super::Lanes) of an `Isa`; without vectors,
/// `$otherwise`.
macro_rules! with_lanes {
    ($isa:expr, $lanes:ident => $body:expr, _ => $otherwise:expr) => {
        match $isa.of_vectors() {
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::Avx2($lanes) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::AvxVnni($lanes) => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::Avx512(token) => {
                let $lanes = $crate::simd::vec16::Zmm(token);
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::simd::isa::Isa::Avx512Vbmi(token) => {
                let $lanes = $crate::simd::vec16::Zmm(token);
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::simd::isa::Isa::Neon(token) => {
                let $lanes = $crate::simd::vec128::Quads(token);
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::simd::isa::Isa::I8mm(token) => {
                let $lanes = $crate::simd::vec128::Quads(token);
                $body
            }
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            $crate::simd::isa::Isa::Simd128(token) => {
                let $lanes = $crate::simd::vec128::Quads(token);
                $body
            }
            _ => $otherwise,
        }
    };
}
pub(crate) use with_lanes;

/// Runs `op` on the vector set of `isa`; `None` for scalar.
#[cfg(test)]
pub(crate) fn run_on<O: super::Op>(isa: crate::simd::isa::Isa, op: O) -> Option<O::Output> {
    with_lanes!(isa, lanes => Some(super::Lanes::run(lanes, op)), _ => None)
}
