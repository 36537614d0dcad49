//! The kernel sets of a device, and their selection.

use kvant_backend::BackendError;

use super::amx::Amx;
use super::tokens::{Avx2, Avx512, Avx512Vbmi, AvxVnni, Bf16, I8mm, Neon, Simd128};

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
    /// 512-bit kernels with lookups among 64 bytes, which speed up the trellis-coded types.
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

    /// Returns the instructions of kernels that multiply bytes, and before `look_up` them among 64,
    /// for `kvant doctor`.
    pub(crate) fn name_of_byte_products(self, look_up: bool) -> &'static str {
        match self.of_vectors() {
            Self::Avx512Vbmi(_) if look_up => "avx512vbmi",
            Self::Avx512(_) | Self::Avx512Vbmi(_) => "avx512vnni",
            isa => isa.name(),
        }
    }

    /// Returns the instructions of kernels that multiply floats: those of the set without what it
    /// adds for bytes.
    pub(crate) fn name_of_float_products(self) -> &'static str {
        match self {
            Self::AvxVnni(_) => "avx2",
            Self::Avx512Vbmi(_) | Self::Amx(_) => "avx512",
            Self::I8mm(_) => "neon",
            isa => isa.name(),
        }
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
