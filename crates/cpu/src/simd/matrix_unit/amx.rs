//! [`Unit`] on AMX. The instructions are inline assembly: this compiler has no intrinsics for them.
//! None but `tilerelease` is marked `nomem`, so that memory accesses of the kernel stay in order.

use std::arch::asm;
use std::marker::PhantomData;

use super::{MAX_WORDS, Products, ROWS, Row, SLOTS, Tiles, Unit};
use crate::simd::amx::Amx;

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes per row of each tile.
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    fn new(words: usize) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        for tile in 0..8 {
            let (rows, bytes) = match tile {
                0..4 => (ROWS, 64),
                4..6 => (ROWS, 4 * words),
                _ => (words, 64),
            };
            (config.rows[tile], config.bytes[tile]) = (rows as u8, bytes as u16);
        }
        config
    }
}

impl Unit for Amx {
    type Tiles = AmxTiles;

    /// Two tiles of rows, as for the weights of a product: fewer leave much of the unit idle, and
    /// vectors share unpacked codes as well. (Measured with products,
    /// docs/benchmarks/2026-11-22-amx.md; not with attention.)
    const MIN_QUERIES: usize = 2 * ROWS;
    // Codes are unpacked, and loaded from a distant cache, once for all of them
    // (docs/benchmarks/2026-11-25-amx.md).
    const QUERIES: usize = 384;

    #[inline]
    fn open(self, words: usize) -> AmxTiles {
        assert!((1..=MAX_WORDS).contains(&words), "{words} words");
        let config = Config::new(words);
        // SAFETY: the token proves the instruction and the system's permission; it reads 64 bytes,
        // a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
        AmxTiles {
            row_bytes: 4 * words,
            more_lines: words - 1,
            slots: [[Row::ZERO; ROWS]; SLOTS],
            this_thread: PhantomData,
        }
    }
}

/// The tiles of this thread, configured until this is dropped.
pub(crate) struct AmxTiles {
    /// Bytes per row of a tile of rows.
    row_bytes: usize,
    /// Lines of a tile of lines after the first.
    more_lines: usize,
    slots: [Products; SLOTS],
    this_thread: PhantomData<*const ()>,
}

impl Drop for AmxTiles {
    fn drop(&mut self) {
        // SAFETY: an `AmxTiles` exists only where AMX does. Releasing the tiles reduces the state
        // that a context switch saves.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// A product of tiles `C`, `A` and `B`.
macro_rules! product {
    ($instruction:literal) => {{
        const { assert!(C < 4 && (A == 4 || A == 5) && (B == 6 || B == 7)) };
        // SAFETY: tiles are configured while `self` lives, to shapes that fit each other, and the
        // compiler keeps nothing in them.
        unsafe {
            asm!(
                concat!($instruction, " tmm{c}, tmm{a}, tmm{b}"),
                c = const C,
                a = const A,
                b = const B,
                options(nostack, preserves_flags)
            );
        }
    }};
}

impl Tiles for AmxTiles {
    #[inline(always)]
    fn zero<const C: usize>(&mut self) {
        const { assert!(C < 4) };
        // SAFETY: tiles are configured while `self` lives, and the compiler keeps nothing in them.
        unsafe { asm!("tilezero tmm{c}", c = const C, options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    fn load_rows<const A: usize>(&mut self, bytes: &[u8], stride: usize) {
        const { assert!(A == 4 || A == 5) };
        assert!((ROWS - 1) * stride + self.row_bytes <= bytes.len());
        // SAFETY: as in `zero`; sixteen rows of so many words are read, which are within `bytes`.
        unsafe {
            asm!(
                "tileloadd tmm{a}, [{at} + {stride}*1]",
                a = const A,
                at = in(reg) bytes.as_ptr(),
                stride = in(reg) stride,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn load_lines<const B: usize>(&mut self, bytes: &[u8], stride: usize) {
        const { assert!(B == 6 || B == 7) };
        assert!(self.more_lines * stride + 64 <= bytes.len());
        // SAFETY: as in `zero`; as many lines as there are words are read, which are within
        // `bytes`.
        unsafe {
            asm!(
                "tileloadd tmm{b}, [{at} + {stride}*1]",
                b = const B,
                at = in(reg) bytes.as_ptr(),
                stride = in(reg) stride,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn dot_signed<const C: usize, const A: usize, const B: usize>(&mut self) {
        product!("tdpbssd");
    }

    #[inline(always)]
    fn dot_unsigned<const C: usize, const A: usize, const B: usize>(&mut self) {
        product!("tdpbsud");
    }

    #[inline(always)]
    fn dot_halves<const C: usize, const A: usize, const B: usize>(&mut self) {
        product!("tdpbf16ps");
    }

    #[inline(always)]
    fn load_sums<const C: usize>(&mut self, sums: &Products) {
        const { assert!(C < 4) };
        // SAFETY: as in `zero`; sixteen rows are read, which `sums` has.
        unsafe {
            asm!(
                "tileloadd tmm{c}, [{at} + {stride}*1]",
                c = const C,
                at = in(reg) sums.as_ptr(),
                stride = in(reg) size_of::<Row>(),
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn store_sums<const C: usize>(&mut self, sums: &mut Products) {
        const { assert!(C < 4) };
        store::<C>(sums);
    }

    #[inline(always)]
    fn store<const C: usize>(&mut self, slot: usize) {
        const { assert!(C < 4) };
        store::<C>(&mut self.slots[slot % SLOTS]);
    }

    #[inline(always)]
    fn stored(&self, slot: usize) -> &Products {
        &self.slots[slot % SLOTS]
    }
}

/// Stores tile `C`, one that [`AmxTiles`] has configured with sixteen rows, to `sums`.
#[inline(always)]
fn store<const C: usize>(sums: &mut Products) {
    // SAFETY: only `AmxTiles` calls this, which exists where AMX does; sixteen rows of 64 bytes are
    // written, which `sums` has.
    unsafe {
        asm!(
            "tilestored [{at} + {stride}*1], tmm{c}",
            c = const C,
            at = in(reg) sums.as_mut_ptr(),
            stride = in(reg) size_of::<Row>(),
            options(nostack, preserves_flags)
        );
    }
}
