//! Coded panels with activations in 8 bits, by a matrix unit. The integer sums are those of
//! [`codes`](super::codes), exactly, and the same float operations follow one by one, so the bits
//! are the same.
//!
//! The products of a sub-block are one instruction, a *step*. Steps are pipelined: the sums of a
//! step are stored two steps later and used in the one after that, so that nothing waits for
//! results in flight. Four tiles of sums rotate. Vector operations are interleaved with those of
//! the unit: a core has few physical tiles beyond the architectural ones, and stalls at the
//! instruction that needs one more.

#![expect(clippy::needless_range_loop, reason = "one index runs over several arrays of registers")]

use std::marker::PhantomData;
use std::ops::Range;

use super::codes::{subs, which};
use super::{CHUNK_BLOCKS, Chunk, Sums};
use crate::ops::matmul::panel::Line;
use crate::ops::matmul::partition::PAIR;
use crate::ops::matmul::quantize::{Codes, Tile};
use crate::simd::matmul::format::{GROUPS, WeightFormat};
use crate::simd::matmul::{Kernel, MAX_PARTS, Simd};
use crate::simd::matrix_unit::{Products, ROWS, SLOTS, Tiles};

/// Steps between the start of sums and their store, and between the start and their use.
const STORED_AFTER: usize = 2;
const USED_AFTER: usize = 3;
/// Rows that are added between two operations of the unit.
const QUARTER: usize = ROWS / 4;

/// Adds the products of a chunk, centred, with a tile of as many blocks to `sums`. The unit is
/// configured for a sub-block's groups.
pub(in crate::ops::matmul) struct MultiplyTiles<'a, F, U> {
    pub unit: &'a mut U,
    pub chunk: &'a Chunk,
    pub tile: Tile<'a, ROWS>,
    pub sums: &'a mut Sums<ROWS>,
    pub format: PhantomData<F>,
}

/// The sums of a panel with a tile.
type Totals<S> = [[<S as Simd>::Floats; ROWS]; MAX_PARTS];

impl<F: WeightFormat, U: Tiles> Kernel for MultiplyTiles<'_, F, U> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Tile { codes, scales, weighted, .. } = self.tile;
        if [codes.len(), scales.len(), weighted.len()] == [CHUNK_BLOCKS; 3] {
            self.steps::<S, true>(simd);
        } else {
            self.steps::<S, false>(simd);
        }
    }
}

impl<F: WeightFormat, U: Tiles> MultiplyTiles<'_, F, U> {
    /// Runs all steps. `WHOLE` for a whole chunk: then the number of steps is a constant, and
    /// bounds checks vanish.
    #[inline(always)]
    fn steps<S: Simd, const WHOLE: bool>(&mut self, simd: S) {
        let mut totals = [[simd.splat(0.0); ROWS]; MAX_PARTS];
        let n_steps = PAIR * self.panel_steps::<WHOLE>();
        for step in (0..n_steps + USED_AFTER).step_by(SLOTS) {
            if WHOLE && step >= USED_AFTER && step + SLOTS <= n_steps {
                self.four_steps::<S, WHOLE, true>(simd, step, &mut totals);
            } else {
                self.four_steps::<S, WHOLE, false>(simd, step, &mut totals);
            }
        }
    }

    /// Returns the number of steps of one panel; those of the second follow those of the first.
    #[inline(always)]
    fn panel_steps<const WHOLE: bool>(&self) -> usize {
        subs::<F>() * if WHOLE { CHUNK_BLOCKS } else { self.tile.codes.len() }
    }

    /// Returns the panel of a step, and its index within that panel.
    #[inline(always)]
    fn panel<const WHOLE: bool>(&self, step: usize) -> (usize, usize) {
        let of_panel = self.panel_steps::<WHOLE>();
        if WHOLE {
            return (step / of_panel % PAIR, step % of_panel);
        }
        let panel = usize::from(step >= of_panel);
        (panel, step - panel * of_panel)
    }

    /// Runs one step for each slot. `BUSY` if each of them starts sums and uses others.
    #[inline(always)]
    fn four_steps<S: Simd, const WHOLE: bool, const BUSY: bool>(
        &mut self,
        simd: S,
        step: usize,
        totals: &mut Totals<S>,
    ) {
        self.step::<S, WHOLE, BUSY, 0, 2, 4, 6>(simd, step, totals);
        self.step::<S, WHOLE, BUSY, 1, 3, 5, 7>(simd, step + 1, totals);
        self.step::<S, WHOLE, BUSY, 2, 0, 4, 6>(simd, step + 2, totals);
        self.step::<S, WHOLE, BUSY, 3, 1, 5, 7>(simd, step + 3, totals);
    }

    /// Stores the sums of one step, starts those of `step` and uses those of another, each where it
    /// exists.
    #[inline(always)]
    fn step<
        S: Simd,
        const WHOLE: bool,
        const BUSY: bool,
        const C: usize,
        const STORED: usize,
        const A: usize,
        const B: usize,
    >(
        &mut self,
        simd: S,
        step: usize,
        totals: &mut Totals<S>,
    ) {
        let n_steps = PAIR * self.panel_steps::<WHOLE>();
        let begins = BUSY || step < n_steps;
        let uses = BUSY || (USED_AFTER..n_steps + USED_AFTER).contains(&step);
        let used = if uses { step - USED_AFTER } else { 0 };
        let (used_panel, used_of_panel) = self.panel::<WHOLE>(used);
        let factors = Factors::new::<F, U>(simd, self, used_panel, used_of_panel);
        let (panel, of_panel) = self.panel::<WHOLE>(if begins { step } else { 0 });
        let (block, group) = (of_panel / subs::<F>(), of_panel % subs::<F>() * (GROUPS / subs::<F>()));
        if uses && used_of_panel == 0 {
            self.fetch(simd, used_panel, totals);
        }
        if BUSY || (STORED_AFTER..n_steps + STORED_AFTER).contains(&step) {
            self.unit.store::<STORED>(step - STORED_AFTER);
        }
        if uses {
            factors.add::<F>(simd, self.unit.stored(used), 0..QUARTER, totals);
        }
        if begins {
            let rows = bytemuck::cast_slice(&self.tile.codes[block]);
            self.unit.load_rows::<A>(&rows[4 * group..], size_of::<Codes>());
        }
        if uses {
            factors.add::<F>(simd, self.unit.stored(used), QUARTER..2 * QUARTER, totals);
        }
        if begins {
            let lines = bytemuck::cast_slice(&self.chunk.codes[block]);
            let at = (group * PAIR + panel) * size_of::<Line>();
            self.unit.load_lines::<B>(&lines[at..], PAIR * size_of::<Line>());
        }
        if uses {
            factors.add::<F>(simd, self.unit.stored(used), 2 * QUARTER..3 * QUARTER, totals);
        }
        if begins {
            self.unit.zero::<C>();
            self.unit.dot_signed::<C, A, B>();
        }
        if uses {
            factors.add::<F>(simd, self.unit.stored(used), 3 * QUARTER..ROWS, totals);
            if used_of_panel + 1 == self.panel_steps::<WHOLE>() {
                self.put(simd, used_panel, totals);
            }
        }
    }

    /// Loads the sums that a panel adds to.
    #[inline(always)]
    fn fetch<S: Simd>(&self, simd: S, panel: usize, totals: &mut Totals<S>) {
        let sums = &self.sums[panel];
        for part in 0..S::PARTS {
            for t in 0..ROWS {
                totals[part][t] = simd.load_floats(&sums[t].0, part);
            }
        }
    }

    /// Stores these sums.
    #[inline(always)]
    fn put<S: Simd>(&mut self, simd: S, panel: usize, totals: &Totals<S>) {
        let sums = &mut self.sums[panel];
        for part in 0..S::PARTS {
            for t in 0..ROWS {
                simd.store_floats(totals[part][t], &mut sums[t].0, part);
            }
        }
    }
}

/// The factors on the sums of a sub-block.
struct Factors<'a, S: Simd> {
    /// Per row of weights, like the next two.
    scale: [S::Floats; MAX_PARTS],
    lifted: [S::Floats; MAX_PARTS],
    min: [S::Floats; MAX_PARTS],
    /// Per row of activations.
    steps: &'a [f32; ROWS],
    weighted: &'a [f32; ROWS],
}

impl<'a, S: Simd> Factors<'a, S> {
    #[inline(always)]
    fn new<F: WeightFormat, U: Tiles>(
        simd: S,
        of: &MultiplyTiles<'a, F, U>,
        panel: usize,
        step: usize,
    ) -> Self {
        let (block, sub) = (step / subs::<F>(), step % subs::<F>());
        let (chunk, tile) = (of.chunk, of.tile);
        let [mut scale, mut lifted, mut min] = [[simd.splat(0.0); MAX_PARTS]; 3];
        for part in 0..S::PARTS {
            scale[part] = simd.load_floats(&chunk.scales[block][sub][panel].0, part);
            lifted[part] = simd.lifted(scale[part]);
            if F::SPEC.has_min {
                min[part] = simd.load_floats(&chunk.mins[block][sub][panel].0, part);
            }
        }
        Self {
            scale,
            lifted,
            min,
            steps: &tile.scales[block],
            weighted: &tile.weighted[block][which::<F>(sub)],
        }
    }

    /// Adds the scaled sums of some rows, and the contribution of the minimum.
    #[inline(always)]
    fn add<F: WeightFormat>(&self, simd: S, sums: &Products, rows: Range<usize>, totals: &mut Totals<S>) {
        for part in 0..S::PARTS {
            for t in rows.clone() {
                let sum = simd.load(&sums[t].0, part);
                let scaled = if F::HAS_SHORT_SCALES {
                    simd.scaled(sum, self.scale[part], self.lifted[part])
                } else {
                    simd.mul(simd.to_floats(sum), self.scale[part])
                };
                let total = &mut totals[part][t];
                *total = simd.mul_add(scaled, simd.splat(self.steps[t]), *total);
                if F::SPEC.has_min {
                    *total = simd.mul_add(self.min[part], simd.splat(self.weighted[t]), *total);
                }
            }
        }
    }
}
