//! Detects whether this process may use AMX, the matrix unit.
//!
//! Three conditions must hold: the CPU has the instructions; the operating system saves the tiles
//! of a preempted thread (a hypervisor may hide that); and Linux grants the process the 8 KB of
//! state, which it must request once.

use std::fmt;

use crate::simd::tokens::Avx512Vbmi;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
use crate::simd::tokens::{Bf16, I8mm};

/// Proof of AMX tiles with int8 and bf16 products (every AMX CPU has both), of the system's
/// permission to use them, and of everything that [`Avx512Vbmi`] proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amx(Avx512Vbmi);

impl Amx {
    /// Returns the token if this process can use the unit. Requests permission from the system.
    pub fn detect() -> Option<Self> {
        Avx512Vbmi::detect().filter(|_| MatrixUnit::find() == MatrixUnit::Usable).map(Self)
    }

    /// Returns the token of the vector kernels that run beside the unit.
    pub(crate) fn vectors(self) -> Avx512Vbmi {
        self.0
    }
}

/// Whether the CPU has a matrix unit, and what prevents this process from using it. `Display`
/// prints a few words: `absent`, or the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixUnit {
    /// The process can use it.
    Usable,
    /// The CPU has no matrix unit, or none with tiles of sixteen rows of 64 bytes and products of
    /// int8 and bf16.
    Absent,
    /// The CPU has no matrix unit, but vector instructions for 2x2 matrix products of int8 and
    /// perhaps bf16 (`smmla`, `bfmmla`).
    MatrixProducts {
        /// Whether bf16 products exist.
        bf16: bool,
    },
    /// The CPU has one, but the system does not save its tiles.
    NotEnabled,
    /// The system refused it to this process, with this error code.
    Refused(i32),
}

impl MatrixUnit {
    /// Detects the unit and requests permission from the system.
    pub fn find() -> Self {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        return x86::find();
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        I8mm::detect().map_or(Self::Absent, |_| Self::MatrixProducts { bf16: Bf16::detect().is_some() })
    }
}

impl fmt::Display for MatrixUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usable => write!(f, "AMX, tiles of bytes and bf16"),
            Self::Absent => write!(f, "absent"),
            Self::MatrixProducts { bf16 } => {
                write!(f, "none; 2x2 matrix instructions for int8{}", if *bf16 { " and bf16" } else { "" })
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

    /// Bits of CPUID leaf 7: tiles, and their products of int8 and bf16.
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    const AMX_BF16: u32 = 1 << 22;
    /// Bit of CPUID leaf 1: the system enabled `xsave`, and `xgetbv` reports the saved components.
    const OSXSAVE: u32 = 1 << 27;
    /// Components of the saved state: the tile configuration, and the tile data.
    const TILE_CONFIG: u64 = 1 << 17;
    const TILE_DATA: u64 = 1 << 18;
    const TILE_DATA_INDEX: libc::c_long = 18;
    /// `arch_prctl` code that requests a state component for this process.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;

    pub(super) fn find() -> MatrixUnit {
        let has = AMX_TILE | AMX_INT8 | AMX_BF16;
        if highest_leaf() < 0x1d || leaf(7, 0).edx & has != has || !has_whole_tiles() {
            return MatrixUnit::Absent;
        }
        let saved = TILE_CONFIG | TILE_DATA;
        // SAFETY: `xgetbv` exists where OSXSAVE is set, which is tested first.
        if leaf(1, 0).ecx & OSXSAVE == 0 || unsafe { saved_state() } & saved != saved {
            return MatrixUnit::NotEnabled;
        }
        // SAFETY: the call takes numbers and touches no memory of this process.
        match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA_INDEX) } {
            0 => MatrixUnit::Usable,
            _ => MatrixUnit::Refused(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    }

    /// Returns whether palette 1 has eight tiles of sixteen rows of 64 bytes, which the kernels
    /// require.
    fn has_whole_tiles() -> bool {
        let palette = leaf(0x1d, 1);
        (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff) == (64, 8, 16)
    }

    #[allow(unused_unsafe, reason = "newer compilers declare it safe")]
    fn leaf(leaf: u32, sub_leaf: u32) -> std::arch::x86_64::CpuidResult {
        // SAFETY: every x86-64 CPU has the instruction.
        unsafe { __cpuid_count(leaf, sub_leaf) }
    }

    #[allow(unused_unsafe, reason = "newer compilers declare it safe")]
    fn highest_leaf() -> u32 {
        // SAFETY: as in `leaf`.
        unsafe { __cpuid(0) }.eax
    }

    #[target_feature(enable = "xsave")]
    fn saved_state() -> u64 {
        // SAFETY: by the contract of this function.
        unsafe { _xgetbv(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detection_is_repeatable_and_agrees_with_the_token() {
        let found = MatrixUnit::find();
        assert_eq!(MatrixUnit::find(), found);
        let has_vectors = Avx512Vbmi::detect().is_some();
        assert_eq!(Amx::detect().is_some(), found == MatrixUnit::Usable && has_vectors, "{found}");
    }

    #[test]
    fn an_unusable_unit_is_reported_in_one_line() {
        let refused = MatrixUnit::Refused(1).to_string();
        assert!(
            refused.starts_with("AMX, not used: refused by the system (") && !refused.contains('\n'),
            "{refused}"
        );
        assert_eq!(MatrixUnit::Absent.to_string(), "absent");
        let [bytes, both] = [false, true].map(|bf16| MatrixUnit::MatrixProducts { bf16 }.to_string());
        assert_eq!(both, format!("{bytes} and bf16"));
    }
}
