//! Instruction sets as capability tokens: a value of [`Avx2`], [`AvxVnni`], [`Avx512`],
//! [`Avx512Vbmi`], [`Amx`](super::amx::Amx), [`Neon`], [`I8mm`], [`Bf16`] or [`Simd128`] proves
//! that the CPU has the instructions.
//!
//! A set is one list of features. It generates both `detect` of the token and a macro, named like
//! the set, that compiles functions with those features: no kernel uses an undetected feature.

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
