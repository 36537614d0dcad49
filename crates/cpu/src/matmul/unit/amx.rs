//! [`Unit`] on AMX. The instructions stand as text: this compiler has no names for them. None is said to leave memory alone, so that
//! what the kernel has between them stays there.

use std::arch::asm;
use std::marker::PhantomData;

use super::{Products, ROWS, SLOTS, Tiles, Unit};
use crate::isa::Amx;
use crate::matmul::kernels::PAIR;
use crate::matmul::panel::{GROUPS, Line};
use crate::matmul::quantise::Codes;

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Of a row of each tile.
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    fn new(groups: usize) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        for tile in 0..8 {
            let (rows, bytes) = match tile {
                0..4 => (ROWS, 64),
                4..6 => (ROWS, 4 * groups),
                _ => (groups, 64),
            };
            (config.rows[tile], config.bytes[tile]) = (rows as u8, bytes as u16);
        }
        config
    }
}

impl Unit for Amx {
    type Tiles = AmxTiles;

    #[inline]
    fn open(self, groups: usize) -> AmxTiles {
        assert!((1..=GROUPS).contains(&groups), "{groups} groups");
        let config = Config::new(groups);
        // SAFETY: the token proves the instruction and the system's leave; it reads 64 bytes, a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
        AmxTiles { groups, slots: [[Line::ZERO; ROWS]; SLOTS], this_thread: PhantomData }
    }
}

/// The tiles of this thread, configured until this is dropped.
pub(in crate::matmul) struct AmxTiles {
    groups: usize,
    slots: [Products; SLOTS],
    this_thread: PhantomData<*const ()>,
}

impl Drop for AmxTiles {
    fn drop(&mut self) {
        // SAFETY: an `AmxTiles` exists only where AMX does. Threads that give way have less to save again.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

impl Tiles for AmxTiles {
    #[inline(always)]
    fn zero<const C: usize>(&mut self) {
        const { assert!(C < 4) };
        // SAFETY: tiles are configured while `self` lives, and the compiler keeps nothing in them.
        unsafe { asm!("tilezero tmm{c}", c = const C, options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    fn load_rows<const A: usize>(&mut self, rows: &[Codes; ROWS], first_group: usize) {
        const { assert!(A == 4 || A == 5) };
        assert!(first_group + self.groups <= GROUPS);
        // SAFETY: as in `zero`; sixteen rows of so many groups are read, which lie within `rows`.
        unsafe {
            asm!(
                "tileloadd tmm{a}, [{at} + {stride}*1]",
                a = const A,
                at = in(reg) rows.as_ptr().cast::<i32>().add(first_group),
                stride = in(reg) size_of::<Codes>(),
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn load_panel<const B: usize>(
        &mut self,
        codes: &[[Line; PAIR]; GROUPS],
        first_group: usize,
        panel: usize,
    ) {
        const { assert!(B == 6 || B == 7) };
        assert!(first_group + self.groups <= GROUPS && panel < PAIR);
        // SAFETY: as in `zero`; as many lines as there are groups are read, which lie within `codes`.
        unsafe {
            asm!(
                "tileloadd tmm{b}, [{at} + {stride}*1]",
                b = const B,
                at = in(reg) codes.as_ptr().cast::<Line>().add(first_group * PAIR + panel),
                stride = in(reg) size_of::<[Line; PAIR]>(),
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
        const { assert!(C < 4 && (A == 4 || A == 5) && (B == 6 || B == 7)) };
        // SAFETY: as in `zero`; the configured shapes fit each other.
        unsafe {
            asm!(
                "tdpbssd tmm{c}, tmm{a}, tmm{b}",
                c = const C,
                a = const A,
                b = const B,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn store<const C: usize>(&mut self, slot: usize) {
        const { assert!(C < 4) };
        let slot = &mut self.slots[slot % SLOTS];
        // SAFETY: as in `zero`; sixteen lines are written, which `slot` has.
        unsafe {
            asm!(
                "tilestored [{at} + {stride}*1], tmm{c}",
                c = const C,
                at = in(reg) slot.as_mut_ptr(),
                stride = in(reg) size_of::<Line>(),
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn stored(&self, slot: usize) -> &Products {
        &self.slots[slot % SLOTS]
    }
}
