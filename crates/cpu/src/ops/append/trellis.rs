//! The Viterbi search of `kvant_codec::trellis` for sixteen rows at once, one lane each.
//!
//! Costs are the integers of the codec, so that the codes equal the codec's exactly. A transition
//! takes two instructions: a dot product of pairs (its slope with the value, its square with a
//! constant), and a minimum. The low bits of a cost hold its predecessor, so that the minimum
//! selects both; the predecessors of all states form one word per row and step, and the backtrace
//! is vector code too.

use kvant_codec::Trellis;
use kvant_codec::tile::TILE;
use kvant_codec::trellis::{
    BRANCH_FACTORS, COST_TAG_MASK, FORBIDDEN_COST, LEVELS, SEAM_OVERLAP, WINDOW, dim_at,
};

use crate::simd::vec16::Lanes;

/// Finds the codes of sixteen slices of unit variance, in steps of `BITS` bits over `STATES`
/// states. Returns the norms of the decoded slices.
#[inline(always)]
pub(super) fn encode<L: Lanes, const BITS: usize, const STATES: usize, const N: usize>(
    lanes: L,
    trellis: &Trellis,
    z: &[[f32; N]; TILE],
    codes: &mut [[u8; N]; TILE],
) -> [f64; TILE] {
    let viterbi = Viterbi::<BITS, STATES>::new(trellis);
    // `values` and `backpointers` are in the order of the trellis sequence.
    let mut values = [[0; 64]; N];
    for (p, value) in values.iter_mut().enumerate() {
        let z: [f32; TILE] = std::array::from_fn(|t| z[t][dim_at(N, p)] * Trellis::PER_UNIT);
        lanes.store_codes(viterbi.pair(lanes, lanes.round(lanes.load(&z))), value);
    }
    let mut backpointers = [[0; 64]; N];

    let mut costs = [lanes.splat_i(0); STATES];
    for value in &values[N - SEAM_OVERLAP..] {
        viterbi.step(lanes, &mut costs, lanes.codes_8(value));
    }
    for (value, backpointers) in values[..SEAM_OVERLAP].iter().zip(&mut backpointers) {
        lanes.store_codes(viterbi.step(lanes, &mut costs, lanes.codes_8(value)), backpointers);
    }
    let mut seam = viterbi.cheapest(lanes, &costs);
    for backpointers in backpointers[..SEAM_OVERLAP].iter().rev() {
        seam = viterbi.backtrace(lanes, seam, lanes.codes_8(backpointers)).0;
    }

    let mut costs = viterbi.costs_from(lanes, seam);
    for (value, backpointers) in values.iter().zip(&mut backpointers) {
        lanes.store_codes(viterbi.step(lanes, &mut costs, lanes.codes_8(value)), backpointers);
    }
    let (mut state, mut squares) = (seam, lanes.splat_i(0));
    for (p, backpointers) in backpointers.iter().enumerate().rev() {
        let (before, window) = viterbi.backtrace(lanes, state, lanes.codes_8(backpointers));
        let level = lanes.and_i(lanes.look_up_64(window, &viterbi.magnitudes), lanes.splat_i(0xff));
        squares = lanes.dot_pairs(squares, level, level);
        let found = lanes.low_bytes(lanes.and_i(state, lanes.splat_i((1 << BITS) - 1)));
        for (codes, &code) in codes.iter_mut().zip(found.as_flattened()) {
            codes[dim_at(N, p)] = code as u8;
        }
        state = before;
    }
    let mut sums = [0; 64];
    lanes.store_codes(squares, &mut sums);
    std::array::from_fn(|t| Trellis::norm(u32::from_le_bytes(sums.as_chunks().0[t])))
}

/// The trellis, in the form that the steps of all rows read.
struct Viterbi<const BITS: usize, const STATES: usize> {
    /// Slopes and squares of all windows, as pairs.
    branches: [i32; LEVELS],
    /// Magnitudes of all levels.
    magnitudes: [u8; LEVELS],
}

impl<const BITS: usize, const STATES: usize> Viterbi<BITS, STATES> {
    /// Position of the oldest bits of a window.
    const OLDEST: usize = WINDOW - BITS;

    #[inline(always)]
    fn new(trellis: &Trellis) -> Self {
        Self {
            branches: std::array::from_fn(|window| pair(trellis.branch(window))),
            magnitudes: trellis.levels().map(i8::unsigned_abs),
        }
    }

    /// Returns values in the form that a step takes.
    #[inline(always)]
    fn pair<L: Lanes>(&self, lanes: L, quarters: L::Ints) -> L::Ints {
        let low = lanes.shift_left(quarters, lanes.splat_i(BRANCH_FACTORS[0].ilog2() as i32));
        lanes.or_i(lanes.and_i(low, lanes.splat_i(0xffff)), lanes.splat_i(pair([0, BRANCH_FACTORS[1]])))
    }

    /// Updates the costs of all states after a value, and returns, in one word, the oldest bits
    /// with which each state is reached.
    #[inline(always)]
    fn step<L: Lanes>(&self, lanes: L, costs: &mut [L::Ints; STATES], value: L::Ints) -> L::Ints {
        let mut before = *costs;
        for (state, cost) in before.iter_mut().enumerate() {
            let tag = lanes.splat_i((state >> (Self::OLDEST - BITS)) as i32);
            *cost = lanes.or_i(lanes.and_i(*cost, lanes.splat_i(!COST_TAG_MASK)), tag);
        }
        let mut backpointers = lanes.splat_i(0);
        for (state, cost) in costs.iter_mut().enumerate() {
            let mut min_cost = lanes.splat_i(i32::MAX);
            for oldest in 0..1 << BITS {
                let window = state | oldest << Self::OLDEST;
                let branch = lanes.splat_i(self.branches[window]);
                min_cost = lanes.min_i(min_cost, lanes.dot_pairs(before[window >> BITS], value, branch));
            }
            let tag = lanes.and_i(min_cost, lanes.splat_i((1 << BITS) - 1));
            backpointers =
                lanes.or_i(backpointers, lanes.shift_left(tag, lanes.splat_i((BITS * state) as i32)));
            *cost = min_cost;
        }
        backpointers
    }

    /// Returns the cheapest states.
    #[inline(always)]
    fn cheapest<L: Lanes>(&self, lanes: L, costs: &[L::Ints; STATES]) -> L::Ints {
        let mut min_cost = lanes.splat_i(i32::MAX);
        for (state, &cost) in costs.iter().enumerate() {
            let tagged =
                lanes.or_i(lanes.and_i(cost, lanes.splat_i(!COST_TAG_MASK)), lanes.splat_i(state as i32));
            min_cost = lanes.min_i(min_cost, tagged);
        }
        lanes.and_i(min_cost, lanes.splat_i(COST_TAG_MASK))
    }

    /// Returns costs that let paths begin in these states only.
    #[inline(always)]
    fn costs_from<L: Lanes>(&self, lanes: L, states: L::Ints) -> [L::Ints; STATES] {
        let open = lanes.shift_left(lanes.splat_i(1), states);
        let mut costs = [open; STATES];
        for (state, cost) in costs.iter_mut().enumerate() {
            let is_open = lanes.and_i(lanes.shift_right(open, lanes.splat_i(state as i32)), lanes.splat_i(1));
            // All ones for a closed state; the mask keeps the bit of the prohibitive cost.
            let is_closed = lanes.add_i(is_open, lanes.splat_i(-1));
            *cost = lanes.and_i(is_closed, lanes.splat_i(FORBIDDEN_COST));
        }
        costs
    }

    /// Returns the predecessors of `states`, which were reached as `backpointers` records, and the
    /// windows of that step.
    #[inline(always)]
    fn backtrace<L: Lanes>(&self, lanes: L, states: L::Ints, backpointers: L::Ints) -> (L::Ints, L::Ints) {
        let mut place = states;
        for _ in 1..BITS {
            place = lanes.add_i(place, states);
        }
        let oldest = lanes.and_i(lanes.shift_right(backpointers, place), lanes.splat_i((1 << BITS) - 1));
        let window = lanes.or_i(states, lanes.shift_left(oldest, lanes.splat_i(Self::OLDEST as i32)));
        (lanes.shift_right(window, lanes.splat_i(BITS as i32)), window)
    }
}

/// Packs two 16-bit halves into a lane.
fn pair([low, high]: [i16; 2]) -> i32 {
    i32::from(low as u16) | i32::from(high) << 16
}
