//! Products of codes with the bytes of many queries, or of their weights, by a matrix unit. The
//! integer sums are those of [`kernels`](super::kernels), exactly, and the same float operations
//! follow one by one, so the bits are the same.
//!
//! Codes are stored in the layout of the unit: a group is a line, its lanes the columns. Rows of a
//! tile are queries, of any heads and tokens of the batch. A *product* is one plane of sixteen
//! queries with a panel: a tile of keys, or a column of sixteen dims of the values of a block.
//! Products are pipelined: the sums of a product are stored two products later and used in the one
//! after that, so that nothing waits for results in flight. Four tiles of sums rotate.

use std::ops::Range;

use super::shape::{BLOCK_TILES, Bytes, Lane, Scores, joined};
use super::weights::weighted;
use crate::simd::matrix_unit::{MAX_WORDS, Products, ROWS, Row, Tiles, Unit};
use crate::simd::vec16::{Lanes, Op};

/// Products between the start of sums and their store, and between the start and their use.
const STORED_AFTER: usize = 2;
const USED_AFTER: usize = 3;

/// Bytes of a line of codes.
const LINE: usize = 64;

/// The matrix path: multiplies codes instead of the vector kernels.
pub(super) trait MatrixPath {
    /// Proof that a thread may use it.
    type Proof: Copy + Send + Sync;

    /// Minimum queries for which it is used.
    const MIN_QUERIES: usize;
    /// Maximum queries that share one pass over the tokens.
    const QUERIES: usize;

    fn new(proof: Self::Proof) -> Self;

    /// Multiplies rows of `planes` planes, and passes the sums to the epilogue `take`.
    fn multiply<L: Lanes>(&mut self, lanes: L, of: Operands<'_>, planes: usize, take: impl Epilogue);
}

/// A matrix unit, with its current tile configuration.
pub(super) struct UnitPath<U: Unit> {
    unit: U,
    /// The configured number of words, and the tiles.
    tiles: Option<(usize, U::Tiles)>,
}

impl<U: Unit> UnitPath<U> {
    /// Returns the tiles, configured for products of `words` words.
    fn tiles(&mut self, words: usize) -> &mut U::Tiles {
        if self.tiles.as_ref().is_none_or(|(configured, _)| *configured != words) {
            // A thread has one configuration at a time.
            self.tiles = None;
            self.tiles = Some((words, self.unit.open(words)));
        }
        &mut self.tiles.as_mut().expect("tiles that were configured").1
    }
}

/// The operands of a product.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    /// Lines of the first panel; those of the next are `stride` bytes further.
    pub(super) panels: &'a [u8],
    pub(super) stride: usize,
    pub(super) n_panels: usize,
    /// Number of groups: 8, 16 or 32.
    pub(super) groups: usize,
    /// `[queries][planes]`, padded to a multiple of [`ROWS`] queries.
    pub(super) rows: &'a [Bytes],
    /// Index of the first word within a row.
    pub(super) at: usize,
    pub(super) queries: usize,
}

/// The epilogue of a product.
pub(super) trait Epilogue {
    /// Consumes the sums of some queries with a panel, by plane.
    fn take<L: Lanes, const P: usize>(
        &mut self,
        lanes: L,
        panel: usize,
        queries: Range<usize>,
        sums: [&Products; P],
    );
}

impl<U: Unit> MatrixPath for UnitPath<U> {
    type Proof = U;

    const MIN_QUERIES: usize = U::MIN_QUERIES;
    const QUERIES: usize = U::QUERIES;

    fn new(unit: U) -> Self {
        Self { unit, tiles: None }
    }

    fn multiply<L: Lanes>(&mut self, lanes: L, of: Operands<'_>, planes: usize, take: impl Epilogue) {
        let words = of.groups.min(MAX_WORDS);
        let tiles = self.tiles(words);
        match (of.groups / words, planes) {
            (1, 1) => lanes.run(Multiply::<_, _, 1, 1> { tiles, of, take }),
            (2, 1) => lanes.run(Multiply::<_, _, 2, 1> { tiles, of, take }),
            (1, 2) => lanes.run(Multiply::<_, _, 1, 2> { tiles, of, take }),
            (2, 2) => lanes.run(Multiply::<_, _, 2, 2> { tiles, of, take }),
            (parts, planes) => unreachable!("{parts} tiles of words against {planes} planes"),
        }
    }
}

/// Products of `H` tiles of words in `P` planes.
struct Multiply<'a, T, K, const H: usize, const P: usize> {
    tiles: &'a mut T,
    of: Operands<'a>,
    take: K,
}

/// Identifies a product.
#[derive(Clone, Copy, Default)]
struct ProductIndex {
    panel: usize,
    first_query: usize,
    plane: usize,
}

impl<T: Tiles, K: Epilogue, const H: usize, const P: usize> Op for Multiply<'_, T, K, H, P> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let n = self.of.n_panels * self.of.queries.div_ceil(ROWS) * P;
        let (mut begun, mut used) = (ProductIndex::default(), ProductIndex::default());
        for i in (0..n + USED_AFTER).step_by(4) {
            self.step::<L, 0, 2>(lanes, n, i, &mut begun, &mut used);
            self.step::<L, 1, 3>(lanes, n, i + 1, &mut begun, &mut used);
            self.step::<L, 2, 0>(lanes, n, i + 2, &mut begun, &mut used);
            self.step::<L, 3, 1>(lanes, n, i + 3, &mut begun, &mut used);
        }
    }
}

impl<T: Tiles, K: Epilogue, const H: usize, const P: usize> Multiply<'_, T, K, H, P> {
    /// Stores one of `n` products, starts product `i` and uses another, each where it exists.
    #[inline(always)]
    fn step<L: Lanes, const C: usize, const STORED: usize>(
        &mut self,
        lanes: L,
        n: usize,
        i: usize,
        begun: &mut ProductIndex,
        used: &mut ProductIndex,
    ) {
        if (STORED_AFTER..n + STORED_AFTER).contains(&i) {
            self.tiles.store::<STORED>(i - STORED_AFTER);
        }
        if i < n {
            self.begin::<L, C>(*begun);
            self.advance(begun);
        }
        if (USED_AFTER..n + USED_AFTER).contains(&i) {
            if used.plane + 1 == P {
                let mut sums = [self.tiles.stored(i - USED_AFTER); P];
                if P == 2 {
                    sums[0] = self.tiles.stored(i - USED_AFTER - 1);
                }
                let queries = used.first_query..self.of.queries.min(used.first_query + ROWS);
                self.take.take(lanes, used.panel, queries, sums);
            }
            self.advance(used);
        }
    }

    /// Advances through all planes of sixteen queries with a panel, then the next panel, then the
    /// next queries.
    #[inline(always)]
    fn advance(&self, place: &mut ProductIndex) {
        place.plane += 1;
        if place.plane == P {
            (place.plane, place.panel) = (0, place.panel + 1);
        }
        if place.panel == self.of.n_panels {
            (place.panel, place.first_query) = (0, place.first_query + ROWS);
        }
    }

    #[inline(always)]
    fn begin<L: Lanes, const C: usize>(&mut self, place: ProductIndex) {
        let Operands { panels, stride, rows, at, .. } = self.of;
        if P == 2 || place.panel == 0 {
            let rows = &rows[place.first_query * P + place.plane..];
            let (bytes, stride) = (&bytemuck::cast_slice(rows)[4 * at..], P * size_of::<Bytes>());
            self.tiles.load_rows::<4>(bytes, stride);
            if H == 2 {
                self.tiles.load_rows::<5>(&bytes[4 * MAX_WORDS..], stride);
            }
        }
        let lines = &panels[place.panel * stride..];
        self.tiles.zero::<C>();
        if place.plane == 0 {
            self.tiles.load_lines::<6>(lines, LINE);
        }
        self.dot::<L, C, 4, 6>(place.plane);
        if H == 2 {
            if place.plane == 0 {
                self.tiles.load_lines::<7>(&lines[MAX_WORDS * LINE..], LINE);
            }
            self.dot::<L, C, 5, 7>(place.plane);
        }
    }

    #[inline(always)]
    fn dot<L: Lanes, const C: usize, const A: usize, const B: usize>(&mut self, plane: usize) {
        if L::PARTS_SHARE_SUMS && P == 2 {
            self.tiles.dot_part::<C, A, B>(plane);
        } else {
            self.tiles.dot_unsigned::<C, A, B>();
        }
    }
}

/// Returns the sums of row `m` of a tile, one for each plane, with `start` added.
#[inline(always)]
fn started<L: Lanes, const P: usize>(lanes: L, sums: [&Products; P], m: usize, start: i32) -> [L::Ints; P] {
    // Sixteen sums have the layout of 64 codes.
    let mut sums = sums.map(|sums| lanes.codes_8(&sums[m].0));
    sums[P - 1] = lanes.add_i(sums[P - 1], lanes.splat_i(start));
    sums
}

/// Epilogue that adds to scores, as [`ScoreCodes`](super::kernels::ScoreCodes) does; the fields
/// are those of its [`KeyBlock`](super::kernels::KeyBlock) and
/// [`ByteChunk`](super::kernels::ByteChunk). A panel is a tile.
pub(super) struct AddScores<'a> {
    pub(super) scales: &'a [u8],
    pub(super) scale_stride: usize,
    pub(super) starts: &'a [i32],
    pub(super) factors: &'a [f32],
    pub(super) scores: &'a mut [Scores],
    pub(super) tile: usize,
    pub(super) is_first: bool,
}

impl Epilogue for AddScores<'_> {
    #[inline(always)]
    fn take<L: Lanes, const P: usize>(
        &mut self,
        lanes: L,
        panel: usize,
        queries: Range<usize>,
        sums: [&Products; P],
    ) {
        let scale =
            lanes.load_f16(self.scales[panel * self.scale_stride..].first_chunk().expect("16 scales"));
        let (starts, factors) = (&self.starts[queries.clone()], &self.factors[queries.clone()]);
        let (tile, scores) = (self.tile + panel, &mut self.scores[queries.clone()]);
        assert!(tile < BLOCK_TILES);
        for m in 0..starts.len().min(ROWS) {
            let sums = started(lanes, sums, m, starts[m]);
            let product = lanes.mul(lanes.to_floats(joined(lanes, sums)), scale);
            let out = &mut scores[m].0[tile];
            let before = if self.is_first { lanes.splat(0.0) } else { lanes.load(out) };
            lanes.store(lanes.mul_add(product, lanes.splat(factors[m]), before), out);
        }
    }
}

/// Epilogue that adds to outputs, as [`AccumulateCodes`](super::kernels::AccumulateCodes) does;
/// the fields are those of its [`ValueBlock`](super::kernels::ValueBlock) and
/// [`ByteChunk`](super::kernels::ByteChunk). A panel is a column of sixteen dims.
pub(super) struct AccumulateOutputs<'a> {
    pub(super) starts: &'a [i32],
    pub(super) factors: &'a [f32],
    pub(super) out: &'a mut [Lane],
    pub(super) width: usize,
    pub(super) lane: usize,
    /// Sums of all codes of each panel, for weights of one plane.
    pub(super) all: &'a [Row],
}

impl Epilogue for AccumulateOutputs<'_> {
    #[inline(always)]
    fn take<L: Lanes, const P: usize>(
        &mut self,
        lanes: L,
        panel: usize,
        queries: Range<usize>,
        sums: [&Products; P],
    ) {
        let all = lanes.codes_8(&self.all[panel].0);
        let (starts, factors) = (&self.starts[queries.clone()], &self.factors[queries.clone()]);
        let (width, first) = (self.width, queries.start * self.width + self.lane + panel);
        let out = &mut self.out[first..];
        for m in 0..starts.len().min(ROWS) {
            let sums = started(lanes, sums, m, starts[m]);
            let sum = lanes.to_floats(weighted(lanes, sums, all));
            let out = &mut out[m * width].0;
            lanes.store(lanes.mul_add(sum, lanes.splat(factors[m]), lanes.load(out)), out);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use kvant_codec::random::Random;

    use super::*;
    use crate::ops::attend::shape::BLOCK;
    use crate::ops::attend::weights::weight_offset;
    use crate::simd::isa::Isa;
    use crate::simd::matrix_unit::EmulatedUnit;
    use crate::simd::vec16::run_on;

    const QUERIES: usize = 20;

    /// Weights of one byte, multiplied by the unit.
    struct Mix<'a> {
        panels: &'a [u8],
        rows: &'a [Bytes],
        starts: &'a [i32],
        /// Sums of all codes of each panel.
        all: &'a [Row],
    }

    impl Op for Mix<'_> {
        type Output = (Vec<Lane>, i32);

        const MULTIPLIES_BYTES: bool = true;

        fn run<L: Lanes>(self, lanes: L) -> (Vec<Lane>, i32) {
            let Self { panels, rows, starts, all } = self;
            let mut out = vec![Lane([0.0; 16]); 2 * QUERIES];
            let (stride, groups, factors) = (16 * BLOCK, BLOCK / 4, &[1.0; QUERIES]);
            let of = Operands { panels, stride, n_panels: 2, groups, rows, at: 0, queries: QUERIES };
            let take = AccumulateOutputs { starts, factors, out: &mut out, width: 2, lane: 0, all };
            UnitPath::new(EmulatedUnit).multiply(lanes, of, 1, take);
            (out, weight_offset::<L>())
        }
    }

    #[test]
    fn weights_of_one_byte_count_as_much_as_they_are_stored_below() {
        let mut random = Random::new(1);
        let mut bytes = |n: usize| (0..n).map(|_| random.bits() as u8).collect::<Vec<_>>();
        let panels = bytes(2 * 16 * BLOCK);
        let all: Vec<Row> = panels
            .chunks(16 * BLOCK)
            .map(|panel| {
                let sum = |dim: usize| {
                    panel
                        .as_chunks::<64>()
                        .0
                        .iter()
                        .flat_map(|codes| &codes[4 * dim..4 * dim + 4])
                        .map(|&c| i32::from(c))
                        .sum::<i32>()
                };
                Row(bytemuck::cast(std::array::from_fn::<i32, 16, _>(sum)))
            })
            .collect();
        let mut rows = Vec::new();
        rows.resize_with(2 * ROWS, || Bytes(bytemuck::pod_read_unaligned(&bytes(BLOCK))));
        let starts: Vec<i32> = (0..QUERIES).map(|query| 1000 * query as i32 - 9000).collect();
        for isa in Isa::available() {
            let mix = Mix { panels: &panels, rows: &rows, starts: &starts, all: &all };
            let Some((out, below)) = run_on(isa, mix) else { continue };
            for (i, lane) in out.iter().enumerate() {
                let (query, groups) = (i / 2, panels[i % 2 * 16 * BLOCK..][..16 * BLOCK].as_chunks::<64>().0);
                for (dim, &got) in lane.0.iter().enumerate() {
                    let products = groups.iter().zip(&rows[query].0).flat_map(|(codes, weights)| {
                        let weight = |b: usize| i32::from(weights[b]) + below;
                        (0..4).map(move |b| i32::from(codes[4 * dim + b]) * weight(b))
                    });
                    let want = starts[query] + products.sum::<i32>();
                    assert_eq!(got, want as f32, "{isa:?}, query {query}, panel {}, dim {dim}", i % 2);
                }
            }
        }
    }
}
