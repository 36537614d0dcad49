//! AMX: whether this process may use the matrix unit.
//!
//! Three have to agree. The CPU has the instructions; the system saves the tiles of a thread that gives way (a hypervisor may hide
//! that); and Linux lets the process have the 8 KB that this takes, for which it wants to be asked once.

use std::fmt;

use crate::isa::Avx512Vbmi;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
use crate::isa::{Bf16, I8mm};

/// Proof of AMX tiles and their products of bytes and of bf16 (all CPUs that have any of them), of the system's leave to use them, and of everything [`Avx512Vbmi`] proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amx(Avx512Vbmi);

impl Amx {
    /// The token, if this process can use the unit. Asks the system for it.
    pub fn detect() -> Option<Self> {
        Avx512Vbmi::detect().filter(|_| MatrixUnit::find() == MatrixUnit::Usable).map(Self)
    }

    /// The vectors beside the unit.
    pub(crate) fn vectors(self) -> Avx512Vbmi {
        self.0
    }
}

/// Whether there is a matrix unit, and what keeps this process from using it. As text: a few words, `absent` or why it is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixUnit {
    /// It can be used.
    Usable,
    /// The CPU has none, or none with tiles of sixteen rows of 64 bytes and products of bytes and of bf16.
    Absent,
    /// The CPU has none, but vectors that multiply two rows by two, of bytes and perhaps of bf16.
    Squares {
        /// Whether of bf16.
        bf16: bool,
    },
    /// The CPU has one, but the system does not save its tiles.
    NotEnabled,
    /// The system refused it to this process, with this error.
    Refused(i32),
}

impl MatrixUnit {
    /// Looks for the unit and asks the system for it.
    pub fn find() -> Self {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        return x86::find();
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        I8mm::detect().map_or(Self::Absent, |_| Self::Squares { bf16: Bf16::detect().is_some() })
    }
}

impl fmt::Display for MatrixUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usable => write!(f, "AMX, tiles of bytes and bf16"),
            Self::Absent => write!(f, "absent"),
            Self::Squares { bf16 } => {
                write!(
                    f,
                    "none; vectors multiply two rows by two, of bytes{}",
                    if *bf16 { " and bf16" } else { "" }
                )
            }
            Self::NotEnabled => write!(f, "AMX, not used: the system does not save its tiles"),
            Self::Refused(error) => {
                write!(
                    f,
                    "AMX, not used: refused by the system ({})",
                    std::io::Error::from_raw_os_error(*error)
                )
            }
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod x86 {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    use super::MatrixUnit;

    /// Bits of leaf 7: tiles, and their products of bytes and of bf16.
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    const AMX_BF16: u32 = 1 << 22;
    /// Bit of leaf 1: the system has chosen what is saved, and `xgetbv` tells what.
    const OSXSAVE: u32 = 1 << 27;
    /// Components of the saved state: the configuration, and the tiles.
    const TILE_CONFIG: u64 = 1 << 17;
    const TILE_DATA: u64 = 1 << 18;
    const TILE_DATA_INDEX: libc::c_long = 18;
    /// `arch_prctl` that asks for a component for this process.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;

    pub(super) fn find() -> MatrixUnit {
        let has = AMX_TILE | AMX_INT8 | AMX_BF16;
        if highest_leaf() < 0x1d || leaf(7, 0).edx & has != has || !has_whole_tiles() {
            return MatrixUnit::Absent;
        }
        let saved = TILE_CONFIG | TILE_DATA;
        // SAFETY: `xgetbv` exists where OSXSAVE is told, which is looked at first.
        if leaf(1, 0).ecx & OSXSAVE == 0 || unsafe { saved_state() } & saved != saved {
            return MatrixUnit::NotEnabled;
        }
        // SAFETY: the call takes numbers and touches no memory of ours.
        match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA_INDEX) } {
            0 => MatrixUnit::Usable,
            _ => MatrixUnit::Refused(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    }

    /// Whether palette 1 has eight tiles of sixteen rows of 64 bytes, which the kernels are written for.
    fn has_whole_tiles() -> bool {
        let palette = leaf(0x1d, 1);
        (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff) == (64, 8, 16)
    }

    #[allow(unused_unsafe, reason = "newer compilers know that it is safe")]
    fn leaf(leaf: u32, sub_leaf: u32) -> std::arch::x86_64::CpuidResult {
        // SAFETY: every x86-64 CPU has the instruction.
        unsafe { __cpuid_count(leaf, sub_leaf) }
    }

    #[allow(unused_unsafe, reason = "newer compilers know that it is safe")]
    fn highest_leaf() -> u32 {
        // SAFETY: as in `leaf`.
        unsafe { __cpuid(0) }.eax
    }

    #[target_feature(enable = "xsave")]
    fn saved_state() -> u64 {
        // SAFETY: as of this function.
        unsafe { _xgetbv(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_usable_exactly_where_its_token_is_given_and_is_found_alike_again() {
        let found = MatrixUnit::find();
        assert_eq!(MatrixUnit::find(), found);
        let has_vectors = Avx512Vbmi::detect().is_some();
        assert_eq!(Amx::detect().is_some(), found == MatrixUnit::Usable && has_vectors, "{found}");
    }

    #[test]
    fn what_keeps_from_the_unit_is_told_in_one_line() {
        let refused = MatrixUnit::Refused(1).to_string();
        assert!(
            refused.starts_with("AMX, not used: refused by the system (") && !refused.contains('\n'),
            "{refused}"
        );
        assert_eq!(MatrixUnit::Absent.to_string(), "absent");
        let [bytes, both] = [false, true].map(|bf16| MatrixUnit::Squares { bf16 }.to_string());
        assert_eq!(both, format!("{bytes} and bf16"));
    }
}
