//! Instruction sets as capability tokens: a value of [`Avx2`], [`AvxVnni`] or [`Avx512`] proves that the CPU has the
//! instructions.

use kvant_backend::BackendError;

/// Proof of AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

/// Proof of AVX-VNNI (`vpdpbusd` on 256 bits: laptops since 2021), and of everything [`Avx2`] proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AvxVnni(());

/// Proof of AVX-512 F, BW, DQ, VL and VNNI, and of everything [`Avx2`] proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx512 {
    /// Whether AVX512_VBMI (`vpermb`, `vpmultishiftqb`) is there too.
    pub vbmi: bool,
    /// Whether AVX512_BF16 (`vdpbf16ps`) is there too.
    pub bf16: bool,
}

impl Avx2 {
    /// The token, if this CPU has the instructions.
    pub fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            return Some(Self(()));
        }
        None
    }
}

impl AvxVnni {
    /// The token, if this CPU has the instructions.
    pub fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if Avx2::detect().is_some() && is_x86_feature_detected!("avxvnni") {
            return Some(Self(()));
        }
        None
    }
}

impl Avx512 {
    /// The token, if this CPU has the instructions.
    pub fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
        {
            return Some(Self {
                vbmi: is_x86_feature_detected!("avx512vbmi"),
                bf16: is_x86_feature_detected!("avx512bf16"),
            });
        }
        None
    }
}

/// The kernel set of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust: the reference every other set is held to.
    Scalar,
    /// 256-bit kernels.
    Avx2(Avx2),
    /// 256-bit kernels with dot products of bytes.
    AvxVnni(AvxVnni),
    /// 512-bit kernels.
    Avx512(Avx512),
}

impl Isa {
    /// Every kernel set this CPU can run, slowest first; tests enumerate it.
    pub fn available() -> Vec<Self> {
        let avx2 = Avx2::detect().map(Self::Avx2);
        let avx_vnni = AvxVnni::detect().map(Self::AvxVnni);
        let avx512 = Avx512::detect().map(Self::Avx512);
        std::iter::once(Self::Scalar).chain(avx2).chain(avx_vnni).chain(avx512).collect()
    }

    /// The fastest kernel set of this CPU, or the one `KVANT_ISA` names.
    ///
    /// # Errors
    /// When `KVANT_ISA` names an unknown set or one this CPU lacks.
    pub fn from_env() -> Result<Self, BackendError> {
        let sets = Self::available();
        let Some(wanted) = std::env::var_os("KVANT_ISA") else {
            return Ok(*sets.last().expect("scalar is always available"));
        };
        let wanted = wanted.to_string_lossy();
        sets.iter().copied().find(|isa| isa.name() == wanted).ok_or_else(|| BackendError::Setting {
            name: "KVANT_ISA",
            expected: format!(
                "this CPU has {} (the sets are scalar, avx2, avxvnni, avx512)",
                sets.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
            ),
            got: wanted.into_owned(),
        })
    }

    /// `scalar`, `avx2`, `avxvnni` or `avx512`, as in `KVANT_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2(_) => "avx2",
            Self::AvxVnni(_) => "avxvnni",
            Self::Avx512(_) => "avx512",
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
        unique.dedup();
        assert_eq!(names, unique);
    }
}
