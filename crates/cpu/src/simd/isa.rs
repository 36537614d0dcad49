//! Instruction sets as capability tokens: a value of [`Avx2`], [`AvxVnni`], [`Avx512`],
//! [`Avx512Vbmi`], [`Amx`], [`Neon`], [`I8mm`], [`Bf16`] or [`Simd128`] proves that the CPU has the
//! instructions.
//!
//! A set is one list of features. It generates both `detect` of the token and a macro, named like
//! the set, that compiles functions with those features: no kernel uses an undetected feature.

use kvant_backend::BackendError;

use super::amx::Amx;

/// Defines a token and the macro of its set, on the processors of one architecture. `$d` is a
/// dollar sign for the inner macro.
macro_rules! set {
    ($(#[$doc:meta])* $Token:ident, $compile:ident!, $d:tt, $arch:tt by $detected:ident!, $($feature:tt),+) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $Token(());

        impl $Token {
            /// Returns the token if this CPU has the instructions.
            pub fn detect() -> Option<Self> {
                #[cfg(target_arch = $arch)]
                if $(std::arch::$detected!($feature))&&+ {
                    return Some(Self(()));
                }
                None
            }
        }

        /// Compiles functions with the features that the token of the set proves.
        #[cfg(target_arch = $arch)]
        macro_rules! $compile {
            ($d($d function:item)+) => {
                $d(#[target_feature($(enable = $feature),+)] $d function)+
            };
        }
        #[cfg(target_arch = $arch)]
        pub(crate) use $compile;
    };
}

set! {
    /// Proof of AVX2, FMA and F16C.
    Avx2, avx2!, $, "x86_64" by is_x86_feature_detected!, "avx2", "fma", "f16c"
}
set! {
    /// Proof of AVX-VNNI (`vpdpbusd` on 256 bits: laptops since 2021), and of everything [`Avx2`]
    /// proves.
    AvxVnni, avx_vnni!, $, "x86_64" by is_x86_feature_detected!, "avx2", "fma", "f16c", "avxvnni"
}
set! {
    /// Proof of AVX-512 F, BW, DQ, VL and VNNI, of POPCNT and BMI, and of everything [`Avx2`]
    /// proves.
    Avx512, avx512!, $, "x86_64" by is_x86_feature_detected!, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx2",
    "fma", "f16c", "popcnt", "bmi1", "bmi2"
}
set! {
    /// Proof of AVX-512 VBMI (`vpermb`, lookups among 64 bytes: servers since 2019), and of
    /// everything [`Avx512`] proves.
    Avx512Vbmi, avx512vbmi!, $, "x86_64" by is_x86_feature_detected!, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni",
    "avx512vbmi", "avx2", "fma", "f16c", "popcnt", "bmi1", "bmi2"
}
set! {
    /// Proof of NEON and its dot products of signed bytes (`sdot`: Apple since the M1, servers
    /// since 2019).
    Neon, neon!, $, "aarch64" by is_aarch64_feature_detected!, "neon", "dotprod"
}
set! {
    /// Proof of I8MM (dot products of unsigned bytes with signed ones, `usdot`, and 2x2 matrix
    /// products of bytes, `smmla` and `usmmla`: since 2021), and of everything [`Neon`] proves.
    I8mm, i8mm!, $, "aarch64" by is_aarch64_feature_detected!, "neon", "dotprod", "i8mm"
}
set! {
    /// Proof of 2x2 matrix products of bf16 (`bfmmla`: since 2021), and of everything [`I8mm`]
    /// proves.
    Bf16, bf16!, $, "aarch64" by is_aarch64_feature_detected!, "neon", "dotprod", "i8mm", "bf16"
}

/// Proof of WebAssembly SIMD: a module built with it (`-C target-feature=+simd128`) runs nowhere
/// else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Simd128(());

impl Simd128 {
    /// Returns the token if this module was built with SIMD.
    pub fn detect() -> Option<Self> {
        cfg!(all(target_arch = "wasm32", target_feature = "simd128")).then_some(Self(()))
    }
}

impl From<AvxVnni> for Avx2 {
    fn from(_: AvxVnni) -> Self {
        Self(())
    }
}

impl From<Avx512Vbmi> for Avx512 {
    fn from(_: Avx512Vbmi) -> Self {
        Self(())
    }
}

impl From<I8mm> for Neon {
    fn from(_: I8mm) -> Self {
        Self(())
    }
}

impl From<Bf16> for I8mm {
    fn from(_: Bf16) -> Self {
        Self(())
    }
}

/// The kernel set of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust: the reference for every other set.
    Scalar,
    /// 256-bit kernels.
    Avx2(Avx2),
    /// 256-bit kernels with dot products of bytes.
    AvxVnni(AvxVnni),
    /// 512-bit kernels.
    Avx512(Avx512),
    /// 512-bit kernels with lookups among 64 bytes, which speed up the trellis-coded KV types.
    Avx512Vbmi(Avx512Vbmi),
    /// The matrix unit for the GEMMs and the attention of prefill, with the bits of the 512-bit
    /// kernels; the 512-bit kernels for everything else.
    Amx(Amx),
    /// 128-bit kernels with dot products of signed bytes.
    Neon(Neon),
    /// 128-bit kernels with dot products of unsigned bytes, which speed up attention, and 2x2
    /// matrix products, which speed up prefill: all with the bits of [`Isa::Neon`].
    I8mm(I8mm),
    /// 128-bit kernels of WebAssembly.
    Simd128(Simd128),
    /// The kernels of the matrix unit, on a strict emulation of it beside 256-bit vectors; debug
    /// builds have it, for tests on machines without a unit.
    #[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
    Soft(Avx2),
}

impl Isa {
    /// Returns every kernel set this CPU can run, slowest first; tests enumerate it.
    pub fn available() -> Vec<Self> {
        let avx2 = Avx2::detect().map(Self::Avx2);
        let avx_vnni = AvxVnni::detect().map(Self::AvxVnni);
        let avx512 = Avx512::detect().map(Self::Avx512);
        let avx512_vbmi = Avx512Vbmi::detect().map(Self::Avx512Vbmi);
        let amx = Amx::detect().map(Self::Amx);
        let sets = std::iter::once(Self::Scalar);
        #[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
        let sets = sets.chain(Avx2::detect().map(Self::Soft));
        let sets = sets.chain(avx2).chain(avx_vnni);
        let neon = Neon::detect().map(Self::Neon);
        let simd128 = Simd128::detect().map(Self::Simd128);
        let i8mm = I8mm::detect().map(Self::I8mm);
        sets.chain(avx512).chain(avx512_vbmi).chain(amx).chain(neon).chain(i8mm).chain(simd128).collect()
    }

    /// Returns the fastest kernel set of this CPU, or the one that `KVANT_ISA` names.
    ///
    /// # Errors
    /// When `KVANT_ISA` names an unknown set or one this CPU lacks.
    pub fn from_env() -> Result<Self, BackendError> {
        let sets = Self::available();
        let Some(requested) = std::env::var_os("KVANT_ISA") else {
            return Ok(*sets.last().expect("scalar is always available"));
        };
        let requested = requested.to_string_lossy();
        sets.iter().copied().find(|isa| isa.name() == requested).ok_or_else(|| BackendError::Setting {
            name: "KVANT_ISA",
            expected: format!(
                "this CPU has {} (the sets are scalar, avx2, avxvnni, avx512, avx512vbmi, amx, neon, i8mm, simd128)",
                sets.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
            ),
            got: requested.into_owned(),
        })
    }

    /// Returns the set whose kernels multiply weights: lookups among 64 bytes make no difference
    /// there.
    pub(crate) fn of_products(self) -> Self {
        match self {
            Self::Avx512Vbmi(token) => Self::Avx512(token.into()),
            isa => isa,
        }
    }

    /// Returns the set of the vector kernels beside a matrix unit, which run everything but matrix
    /// products.
    pub(crate) fn of_vectors(self) -> Self {
        match self {
            Self::Amx(amx) => Self::Avx512Vbmi(amx.vectors()),
            #[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
            Self::Soft(vectors) => Self::Avx2(vectors),
            isa => isa,
        }
    }

    /// Returns whether a matrix unit is part of the set.
    pub fn has_matrix_unit(self) -> bool {
        self.of_vectors() != self
    }

    /// Returns whether products of many rows can be computed in bf16: by a matrix unit, or by
    /// [`Bf16`] beside [`Isa::I8mm`].
    pub fn multiplies_bf16(self) -> bool {
        self.has_matrix_unit() || matches!(self, Self::I8mm(_)) && Bf16::detect().is_some()
    }

    /// Returns `scalar`, `avx2`, `avxvnni`, `avx512`, `avx512vbmi`, `amx`, `neon`, `i8mm` or
    /// `simd128`, as in `KVANT_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2(_) => "avx2",
            Self::AvxVnni(_) => "avxvnni",
            Self::Avx512(_) => "avx512",
            Self::Avx512Vbmi(_) => "avx512vbmi",
            Self::Amx(_) => "amx",
            Self::Neon(_) => "neon",
            Self::I8mm(_) => "i8mm",
            Self::Simd128(_) => "simd128",
            #[cfg(all(any(test, debug_assertions), target_arch = "x86_64"))]
            Self::Soft(_) => "soft",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalar_is_always_available_and_names_are_distinct() {
        let names: Vec<_> = Isa::available().iter().map(|isa| isa.name()).collect();
        assert_eq!(names[0], "scalar");
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), names.len(), "{names:?}");
    }
}
