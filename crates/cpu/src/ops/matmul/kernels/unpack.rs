//! Unpacks lines of a coded panel for multiplication: a byte for each code, a float for each scale.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::marker::PhantomData;

use kvant_codec::DType;
use kvant_codec::fp4::ByteFloat;
use kvant_codec::grouped::LEN as GROUP_LEN;

use super::Chunk;
use super::prefetch::prefetch;
use crate::ops::matmul::panel::Line;
use crate::simd::matmul::format::{BLOCK, GROUPS, WeightFormat, WindowFactors};
use crate::simd::matmul::{Kernel, Simd};

/// Returns the factors of 32 columns, one register per group: codes, or their values in a table.
#[inline(always)]
pub(super) fn unpack<S: Simd, F: WeightFormat>(simd: S, lines: &[Line], part: usize) -> [S::Ints; GROUPS] {
    let lines = &lines[..F::LAYOUT.block];
    if let Some(factors) = F::WINDOWS {
        return windows(simd, lines, &factors, part);
    }
    let mut groups = codes::<S, F>(simd, lines, part);
    if let Some(table) = F::TABLE {
        for g in 0..GROUPS {
            groups[g] = simd.look_up(&table.bytes, groups[g]);
        }
    }
    groups
}

/// Returns the factors of 32 columns with predecessors. A byte of a pair of groups is the window of
/// its second; its first has the low bits of the pair before, a column further left where the ring
/// closes.
#[inline(always)]
fn windows<S: Simd>(simd: S, lines: &[Line], factors: &WindowFactors, part: usize) -> [S::Ints; GROUPS] {
    let [a, b, c] = [&lines[0], &lines[1], &lines[2]].map(|line| simd.load(&line.0, part));
    let last = simd.join(simd.join(simd.field(a, 6, 3), b, -4, 12), c, -2, 48);
    let pairs = [simd.field(a, 0, 63), simd.field(b, 0, 63), simd.field(c, 0, 63), last];
    let (mut groups, mut before) = ([simd.splat_i(0); GROUPS], simd.rotate_bytes(last));
    for m in 0..GROUPS / 2 {
        let first = simd.join(simd.field(pairs[m], 0, 56), before, 0, 7);
        groups[2 * m] = simd.look_up_64(&factors.predecessor_first, first);
        groups[2 * m + 1] = simd.look_up_64(&factors.index_first, pairs[m]);
        before = pairs[m];
    }
    groups
}

/// Returns the codes of 32 columns, one register per group.
#[inline(always)]
fn codes<S: Simd, F: WeightFormat>(simd: S, lines: &[Line], part: usize) -> [S::Ints; GROUPS] {
    match F::SPEC.bits {
        2 => fields(simd, lines, part, 2),
        3 => {
            let mut groups = fields(simd, lines, part, 2);
            let high = simd.load(&lines[2].0, part);
            for g in 0..GROUPS {
                groups[g] = simd.join(groups[g], high, 2 - g as i32, 4);
            }
            groups
        }
        4 => fields(simd, lines, part, 4),
        5 => {
            let mut groups = fields(simd, lines, part, 4);
            let high = simd.load(&lines[4].0, part);
            for g in 0..GROUPS {
                groups[g] = simd.join(groups[g], high, 4 - g as i32, 16);
            }
            groups
        }
        6 => {
            let mut groups = fields(simd, lines, part, 4);
            let high = [simd.load(&lines[4].0, part), simd.load(&lines[5].0, part)];
            for g in 0..GROUPS {
                groups[g] = simd.join(groups[g], high[g / 4], 4 - 2 * (g % 4) as i32, 48);
            }
            groups
        }
        bits => fields(simd, lines, part, bits),
    }
}

/// Reads the low lines: `8 / width` groups share a line.
#[inline(always)]
fn fields<S: Simd>(simd: S, lines: &[Line], part: usize, width: usize) -> [S::Ints; GROUPS] {
    let mask = (0xff >> (8 - width)) as u8;
    let mut groups = [simd.splat_i(0); GROUPS];
    for g in 0..GROUPS {
        let line = simd.load(&lines[g * width / 8].0, part);
        groups[g] = if width == 8 { line } else { simd.field(line, (g * width % 8) as i32, mask as i8) };
    }
    groups
}

/// Scales of sub-blocks as stored, a byte for each of sixteen rows: sub-block s in quarter s mod 4
/// of line s / 4.
pub(super) struct Stored {
    scales: [Line; 4],
    mins: [Line; 4],
}

impl Stored {
    pub(super) const ZERO: Self = Self { scales: [Line::ZERO; 4], mins: [Line::ZERO; 4] };

    /// Reads the header of a unit, if its scales share bytes.
    #[inline(always)]
    pub(super) fn read<S: Simd, F: WeightFormat>(&mut self, simd: S, header: &[Line]) {
        for part in 0..S::PARTS {
            self.read_part::<S, F>(simd, &header[..F::LAYOUT.header], part);
        }
    }

    #[inline(always)]
    fn read_part<S: Simd, F: WeightFormat>(&mut self, simd: S, header: &[Line], part: usize) {
        let Self { scales, mins } = self;
        match F::DTYPE.layout() {
            DType::Q2K => {
                for i in 0..4 {
                    let both = simd.load(&header[i].0, part);
                    simd.store(simd.field(both, 0, 15), &mut scales[i].0, part);
                    simd.store(simd.field(both, 4, 15), &mut mins[i].0, part);
                }
            }
            DType::Q4K | DType::Q5K | DType::Q3K => {
                let [a, b, top] = [&header[0], &header[1], &header[2]];
                let (a, b, top) = (simd.load(&a.0, part), simd.load(&b.0, part), simd.load(&top.0, part));
                let fields = [
                    simd.join(simd.field(a, 0, 15), top, 4, 48),
                    simd.join(simd.field(a, 4, 15), top, 2, 48),
                    simd.join(simd.field(b, 0, 15), top, 0, 48),
                    simd.join(simd.field(b, 4, 15), top, -2, 48),
                ];
                let [c, d] = if F::SPEC.has_min { mins.first_chunk_mut() } else { scales.last_chunk_mut() }
                    .expect("four lines");
                simd.store(fields[2], &mut c.0, part);
                simd.store(fields[3], &mut d.0, part);
                simd.store(fields[0], &mut scales[0].0, part);
                simd.store(fields[1], &mut scales[1].0, part);
            }
            _ => {}
        }
    }
}

/// Source of the scales of a part of a unit; each is computed when it is used.
pub(super) struct Scales<'a, S: Simd> {
    header: &'a [Line],
    stored: &'a Stored,
    part: usize,
    d: S::Floats,
    minus_dmin: S::Floats,
}

impl<'a, S: Simd> Scales<'a, S> {
    #[inline(always)]
    pub(super) fn new<F: WeightFormat>(simd: S, header: &'a [Line], stored: &'a Stored, part: usize) -> Self {
        let header = &header[..F::LAYOUT.header];
        // The f16 units of a super-block, or its factor; other formats do not read them.
        let units = &header[F::LAYOUT.header - 1].0;
        let d = match F::SPEC.has_factor {
            true => simd.bits_to_floats(simd.load(units, part)),
            false => simd.load_f16(units, 0, part),
        };
        let d = simd.mul(d, simd.splat(F::SCALE_FACTOR));
        let minus_dmin = simd.sub(simd.splat(0.0), simd.load_f16(units, 1, part));
        Self { header, stored, part, d, minus_dmin }
    }

    /// Returns the scale of sub-block `s`.
    #[inline(always)]
    pub(super) fn scale<F: WeightFormat>(&self, simd: S, s: usize) -> S::Floats {
        let factor = simd.splat(F::SCALE_FACTOR);
        if F::SPEC.book.is_some() {
            return simd.mul(simd.load_f16(&self.header[s / 2].0, s % 2, self.part), factor);
        }
        if F::WINDOWS.is_some() {
            let blocks_apart = F::SPEC.len / BLOCK;
            return simd.mul(simd.load_f16(&self.header[0].0, s / blocks_apart, self.part), factor);
        }
        match F::SPEC.float {
            Some(ByteFloat::E8M0) => {
                return simd.mul(simd.load_e8m0(&self.header[0].0, s, self.part), factor);
            }
            Some(ByteFloat::E4M3) => {
                let factor = if F::SPEC.has_factor { self.d } else { factor };
                return simd.mul(simd.load_e4m3(&self.header[s / 4].0, s % 4, self.part), factor);
            }
            None => {}
        }
        if F::SPEC.len == BLOCK {
            return simd.load_f16(&self.header[0].0, s % 2, self.part);
        }
        if F::SPEC.len == GROUP_LEN {
            return self.d;
        }
        let in_header = matches!(F::DTYPE.layout(), DType::Q6K | DType::IQ4XS);
        let lines = if in_header { self.header } else { &self.stored.scales };
        let stored = simd.load_bytes(&lines[s / 4].0, s % 4, self.part);
        simd.mul(self.d, simd.sub(stored, simd.splat(f32::from(F::SPEC.scale_zero))))
    }

    /// Returns the contribution of the minimum of sub-block `s`, for formats with a minimum.
    #[inline(always)]
    pub(super) fn min<F: WeightFormat>(&self, simd: S, s: usize) -> S::Floats {
        if F::SPEC.len == BLOCK {
            return simd.load_f16(&self.header[1].0, s % 2, self.part);
        }
        if F::SPEC.len == GROUP_LEN {
            let zero = simd.load_bytes(&self.header[0].0, 2, self.part);
            return simd.sub(simd.splat(0.0), simd.mul(self.d, zero));
        }
        simd.mul(self.minus_dmin, simd.load_bytes(&self.stored.mins[s / 4].0, s % 4, self.part))
    }
}

/// Unpacks `n_blocks` blocks from `lines`, which start at a unit, as panel `p` of a chunk. Factors
/// are unsigned, or, if `centred`, minus the one that represents zero.
pub(in crate::ops::matmul) struct Unpack<'a, F> {
    pub lines: &'a [Line],
    pub n_blocks: usize,
    pub p: usize,
    pub centred: bool,
    pub chunk: &'a mut Chunk,
    pub format: PhantomData<F>,
}

impl<F: WeightFormat> Kernel for Unpack<'_, F> {
    type Output = ();

    const LOOKS_UP_64: bool = F::WINDOWS.is_some();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { lines, n_blocks, p, centred, chunk, .. } = self;
        let layout = F::LAYOUT;
        let subs = BLOCK / F::SPEC.sub_len;
        let blocks_per_unit = layout.unit / BLOCK;
        let (mut stored, chunk_bytes) = (Stored::ZERO, size_of_val(lines));
        for (u, unit) in lines.chunks(layout.unit_lines(layout.unit)).enumerate() {
            // Prefetches the next chunk while this one is multiplied.
            prefetch(unit, chunk_bytes);
            let (header, lines) = unit.split_at(layout.header);
            stored.read::<S, F>(simd, header);
            let first = u * blocks_per_unit;
            for part in 0..S::PARTS {
                let scales = Scales::new::<F>(simd, header, &stored, part);
                for i in 0..blocks_per_unit.min(n_blocks - first) {
                    let mut codes = unpack::<S, F>(simd, &lines[i * layout.block..], part);
                    for g in 0..GROUPS {
                        if centred {
                            codes[g] = simd.less(codes[g], F::FACTOR_ZERO);
                        }
                        simd.store(codes[g], &mut chunk.codes[first + i][g][p].0, part);
                    }
                    for sub in 0..subs {
                        let scale = scales.scale::<F>(simd, i * subs + sub);
                        simd.store_floats(scale, &mut chunk.scales[first + i][sub][p].0, part);
                        if F::SPEC.has_min {
                            let min = scales.min::<F>(simd, i * subs + sub);
                            simd.store_floats(min, &mut chunk.mins[first + i][sub][p].0, part);
                        }
                    }
                }
            }
        }
    }
}
