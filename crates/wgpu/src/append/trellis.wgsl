// Trellis codes: the minimum-cost path through the trellis of a slice (Viterbi), in the integers of
// kvant_codec's `trellis`. Book 0 is turbo2t's, book 1 turbo3t's.

// Quantized inputs of the search, in the order of the code sequence.
var<private> steps: array<i32, 128>;
// Survivors of each step: the oldest bits of the minimum-cost path to each state.
var<private> survivors: array<u32, 128>;
var<private> costs: array<i32, MAX_STATES>;

fn book_bits(book: u32) -> u32 { return 2u + book; }
// Bits of state: those of a window that a step remembers.
fn state_bits(book: u32) -> u32 { return TRELLIS_WINDOW - book_bits(book); }
fn level_of(book: u32, window: u32) -> i32 { return i32(TRELLIS_TABLES[book * TRELLIS_WINDOWS + window]); }

// Returns the dim at position `p` of the code sequence of `n` dims.
fn dim_at(n: u32, p: u32) -> u32 {
    let column = n / TRELLIS_STRIDE;
    return TRELLIS_STRIDE * (p % column) + p / column;
}

// Returns the minimum cost of the four branches into `state` whose oldest bits are `first` and the
// next ones, after value `x`; its low bits hold the branch.
fn min_branch_cost(book: u32, state: u32, first: u32, x: i32) -> i32 {
    let bits = book_bits(book);
    let oldest = vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u);
    let windows = vec4<u32>(state) | (oldest << vec4<u32>(state_bits(book)));
    let levels = vec4<i32>(
        level_of(book, windows.x), level_of(book, windows.y), level_of(book, windows.z), level_of(book, windows.w),
    );
    let from_states = windows >> vec4<u32>(bits);
    let state_costs = vec4<i32>(costs[from_states.x], costs[from_states.y], costs[from_states.z], costs[from_states.w]);
    let tagged = (state_costs & vec4<i32>(~TRELLIS_TAG_MASK)) | vec4<i32>(oldest);
    let branch_costs = tagged - levels * (2 * TRELLIS_UNIT * x) + levels * levels * TRELLIS_SQUARE_UNIT;
    return min(min(branch_costs.x, branch_costs.y), min(branch_costs.z, branch_costs.w));
}

// Advances by value `x`; returns the survivors of the step.
fn viterbi_step(book: u32, x: i32) -> u32 {
    let bits = book_bits(book);
    let n_state_bits = state_bits(book);
    var new_costs = costs;
    var tags = 0u;
    for (var state = 0u; state < 1u << n_state_bits; state++) {
        var min_cost = min_branch_cost(book, state, 0u, x);
        if bits == 3u { min_cost = min(min_cost, min_branch_cost(book, state, 4u, x)); }
        new_costs[state] = min_cost;
        tags |= (u32(min_cost) & ((1u << bits) - 1u)) << (bits * state);
    }
    costs = new_costs;
    return tags;
}

// Returns the window of the step that ended in `state`, from the survivors `tags`.
fn window_of(book: u32, tags: u32, state: u32) -> u32 {
    let bits = book_bits(book);
    let oldest = (tags >> (bits * state)) & ((1u << bits) - 1u);
    return state | (oldest << state_bits(book));
}

// Returns the state at which the ring of the tail-biting trellis is cut: the one at the seam on the
// minimum-cost path across it.
fn seam_state(book: u32, n: u32) -> u32 {
    for (var state = 0u; state < MAX_STATES; state++) { costs[state] = 0; }
    for (var p = n - TRELLIS_SEAM_OVERLAP; p < n; p++) { _ = viterbi_step(book, steps[p]); }
    for (var p = 0u; p < TRELLIS_SEAM_OVERLAP; p++) { survivors[p] = viterbi_step(book, steps[p]); }
    var min_cost = 0x7fffffff;
    for (var state = 0u; state < 1u << state_bits(book); state++) {
        min_cost = min(min_cost, (costs[state] & ~TRELLIS_TAG_MASK) | i32(state));
    }
    var state = u32(min_cost & TRELLIS_TAG_MASK);
    for (var p = TRELLIS_SEAM_OVERLAP; p > 0u; p--) { state = window_of(book, survivors[p - 1u], state) >> book_bits(book); }
    return state;
}

// Replaces the values of the slice by their codes; returns the scale.
fn encode_trellis(book: u32, n: u32) -> u32 {
    let norm = to_unit_variance(n);
    for (var p = 0u; p < n; p++) {
        // Ties to even.
        steps[p] = i32(round(clamp(row[dim_at(n, p)] * TRELLIS_PER_UNIT, -TRELLIS_MAX_VALUE, TRELLIS_MAX_VALUE)));
    }
    var state = seam_state(book, n);
    for (var other = 0u; other < MAX_STATES; other++) { costs[other] = select(TRELLIS_FORBIDDEN_COST, 0, other == state); }
    for (var p = 0u; p < n; p++) { survivors[p] = viterbi_step(book, steps[p]); }
    var squares = 0u;
    for (var p = n; p > 0u; p--) {
        let window = window_of(book, survivors[p - 1u], state);
        row[dim_at(n, p - 1u)] = f32(state & ((1u << book_bits(book)) - 1u));
        let level = level_of(book, window);
        squares += u32(level * level);
        state = window >> book_bits(book);
    }
    // The norm of a level of one is the root of 1 / 204,800: of 2^13 times 25, which the other side
    // of the quotient takes.
    let scaled_norm = shr_u64(norm.m, 5u);
    let scaled_norm_25 = add_u64(add_u64(shl_u64(scaled_norm, 4u), shl_u64(scaled_norm, 3u)), scaled_norm);
    return scale_of(normalized(scaled_norm_25, norm.exponent + 5), normalized(vec2<u32>(squares, 0u), -13));
}
