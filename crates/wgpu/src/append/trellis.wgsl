// Trellis codes: the minimum-cost path through the trellis of a slice (Viterbi), in the integers of
// kvant_codec's `trellis`. Book 0 is turbo2t's, book 1 turbo3t's.

// Quantized inputs of the search, in the order of the code sequence.
var<private> steps: array<i32, 128>;
// Survivors of each step: the oldest bits of the minimum-cost path to each state.
var<private> came: array<u32, 128>;
var<private> costs: array<i32, MAX_STATES>;

fn bits_of(book: u32) -> u32 { return 2u + book; }
// Bits of state: those of a window that a step remembers.
fn rest_of(book: u32) -> u32 { return TRELLIS_WINDOW - bits_of(book); }
fn level_of(book: u32, window: u32) -> i32 { return i32(TRELLIS_TABLES[book * TRELLIS_WINDOWS + window]); }

// Returns the dim at position `p` of the code sequence of `n` dims.
fn dim_at(n: u32, p: u32) -> u32 {
    let column = n / TRELLIS_STRIDE;
    return TRELLIS_STRIDE * (p % column) + p / column;
}

// Returns the minimum cost of the four branches into `state` whose oldest bits are `first` and the
// next ones, after value `x`; its low bits hold the branch.
fn four_ways(book: u32, state: u32, first: u32, x: i32) -> i32 {
    let bits = bits_of(book);
    let oldest = vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u);
    let windows = vec4<u32>(state) | (oldest << vec4<u32>(rest_of(book)));
    let levels = vec4<i32>(
        level_of(book, windows.x), level_of(book, windows.y), level_of(book, windows.z), level_of(book, windows.w),
    );
    let from_states = windows >> vec4<u32>(bits);
    let so_far = vec4<i32>(costs[from_states.x], costs[from_states.y], costs[from_states.z], costs[from_states.w]);
    let tagged = (so_far & vec4<i32>(~TRELLIS_FREE)) | vec4<i32>(oldest);
    let ways = tagged - levels * (2 * TRELLIS_UNIT * x) + levels * levels * TRELLIS_SQUARE_UNIT;
    return min(min(ways.x, ways.y), min(ways.z, ways.w));
}

// Advances by value `x`; returns the survivors (`came`).
fn step_through(book: u32, x: i32) -> u32 {
    let bits = bits_of(book);
    let rest = rest_of(book);
    var after = costs;
    var tags = 0u;
    for (var state = 0u; state < 1u << rest; state++) {
        var least = four_ways(book, state, 0u, x);
        if bits == 3u { least = min(least, four_ways(book, state, 4u, x)); }
        after[state] = least;
        tags |= (u32(least) & ((1u << bits) - 1u)) << (bits * state);
    }
    costs = after;
    return tags;
}

// Returns the window of the step that ended in `state`, from the survivors `tags`.
fn window_of(book: u32, tags: u32, state: u32) -> u32 {
    let bits = bits_of(book);
    let oldest = (tags >> (bits * state)) & ((1u << bits) - 1u);
    return state | (oldest << rest_of(book));
}

// Returns the state at which the ring of the tail-biting trellis is cut: the one at the seam on the
// minimum-cost path across it.
fn seam(book: u32, n: u32) -> u32 {
    for (var state = 0u; state < MAX_STATES; state++) { costs[state] = 0; }
    for (var p = n - TRELLIS_LEAD; p < n; p++) { _ = step_through(book, steps[p]); }
    for (var p = 0u; p < TRELLIS_LEAD; p++) { came[p] = step_through(book, steps[p]); }
    var least = 0x7fffffff;
    for (var state = 0u; state < 1u << rest_of(book); state++) {
        least = min(least, (costs[state] & ~TRELLIS_FREE) | i32(state));
    }
    var state = u32(least & TRELLIS_FREE);
    for (var p = TRELLIS_LEAD; p > 0u; p--) { state = window_of(book, came[p - 1u], state) >> bits_of(book); }
    return state;
}

// Replaces the values of the slice by their codes; returns the scale.
fn encode_trellis(book: u32, n: u32) -> u32 {
    let norm = to_unit_variance(n);
    for (var p = 0u; p < n; p++) {
        // Ties to even.
        steps[p] = i32(round(clamp(row[dim_at(n, p)] * TRELLIS_PER_UNIT, -TRELLIS_MOST, TRELLIS_MOST)));
    }
    var state = seam(book, n);
    for (var other = 0u; other < MAX_STATES; other++) { costs[other] = select(TRELLIS_CLOSED, 0, other == state); }
    for (var p = 0u; p < n; p++) { came[p] = step_through(book, steps[p]); }
    var squares = 0u;
    for (var p = n; p > 0u; p--) {
        let window = window_of(book, came[p - 1u], state);
        row[dim_at(n, p - 1u)] = f32(state & ((1u << bits_of(book)) - 1u));
        let level = level_of(book, window);
        squares += u32(level * level);
        state = window >> bits_of(book);
    }
    // The norm of a level of one is the root of 1 / 204,800: of 2^13 times 25, which the other side
    // of the quotient takes.
    let part = right(norm.m, 5u);
    let of_25 = plus(plus(left(part, 4u), left(part, 3u)), part);
    return scale_of(normal(of_25, norm.exponent + 5), normal(vec2<u32>(squares, 0u), -13));
}
