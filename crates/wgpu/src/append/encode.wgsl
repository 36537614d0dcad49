// Encodes the slice in `row`, with the same bits as kvant-codec.

// The slice of a token that this thread holds.
var<private> row: array<f32, 128>;

// Computes D(after) H / sqrt(n) D(before) of the slice, in the codec's order of operations.
fn rotate(n: u32) {
    flip_signs(n, SIGNS_BEFORE_0, SIGNS_BEFORE_1, SIGNS_BEFORE_2, SIGNS_BEFORE_3);
    for (var h = 1u; h < n; h *= 2u) {
        for (var i = 0u; i < n; i++) {
            if (i & h) != 0u { continue; }
            let a = row[i];
            let b = row[i + h];
            row[i] = a + b;
            row[i + h] = a - b;
        }
    }
    let factor = select(select(FACTOR_32, FACTOR_64, n == 64u), FACTOR_128, n == 128u);
    for (var i = 0u; i < n; i++) { row[i] *= factor; }
    flip_signs(n, SIGNS_AFTER_0, SIGNS_AFTER_1, SIGNS_AFTER_2, SIGNS_AFTER_3);
}

fn flip_signs(n: u32, s0: u32, s1: u32, s2: u32, s3: u32) {
    var signs = array<u32, 4>(s0, s1, s2, s3);
    for (var i = 0u; i < n; i++) {
        let sign = ((signs[i / 32u] >> (i % 32u)) & 1u) << 31u;
        row[i] = bitcast<f32>(bitcast<u32>(row[i]) ^ sign);
    }
}

// Returns the sum of the squares of the first `n` values.
fn sum_of_squares(n: u32) -> SoftFloat {
    var max_exponent = 0u;
    for (var i = 0u; i < n; i++) { max_exponent = max(max_exponent, (bitcast<u32>(row[i]) >> 23u) & 255u); }
    var sum = vec2<u32>(0u, 0u);
    for (var i = 0u; i < n; i++) {
        let bits = bitcast<u32>(row[i]);
        let exponent = (bits >> 23u) & 255u;
        if exponent == 0u { continue; }
        let m = (bits & 0x7fffffu) | 0x800000u;
        sum = add_u64(sum, shr_u64(shl_u64(mul_u32(m, m), 8u), 2u * (max_exponent - exponent)));
    }
    return normalized(sum, 2 * (i32(max_exponent) - 150) - 8);
}

// Returns how many of the seven ascending thresholds from `at` on a magnitude reaches.
fn upper_level(at: u32, magnitude: u32) -> u32 {
    var index = select(0u, 4u, magnitude >= STEP_THRESHOLDS[at + 3u]);
    index += select(0u, 2u, magnitude >= STEP_THRESHOLDS[at + index + 1u]);
    return index + select(0u, 1u, magnitude >= STEP_THRESHOLDS[at + index]);
}

// Returns how many of the 15 boundaries between levels from `at` on a value reaches.
fn level_at(at: u32, value: f32) -> u32 {
    var index = select(0u, 8u, value >= MIDS[at + 7u]);
    index += select(0u, 4u, value >= MIDS[at + index + 3u]);
    index += select(0u, 2u, value >= MIDS[at + index + 1u]);
    return index + select(0u, 1u, value >= MIDS[at + index]);
}

// Returns the step size whose levels fit the slice of unit variance best: kvant_codec's
// `step::best`.
fn best_step(book: u32, n: u32) -> u32 {
    var best = 0u;
    var best_inner = normalized(vec2<u32>(0u, 0u), 0);
    var best_square = vec2<u32>(1u, 0u);
    for (var k = 0u; k < STEPS; k++) {
        var inner = vec2<u32>(0u, 0u);
        var square = vec2<u32>(0u, 0u);
        for (var i = 0u; i < n; i++) {
            let magnitude = u32(abs(row[i]) * STEP_ONE);
            let level = STEP_LEVELS[book * 8u + upper_level((book * STEPS + k) * 8u, magnitude)];
            inner = add_u64(inner, mul_u32(level, magnitude));
            square = add_u64(square, mul_u32(level, level));
        }
        let product = product_53(normalized(inner, 0), inner);
        if is_larger(product_53(product, best_square), product_53(best_inner, square)) {
            best = k;
            best_inner = product;
            best_square = square;
        }
    }
    return best;
}

// Scales the slice to unit variance, or to zeros where it counts as zero; returns the square of its
// norm.
fn to_unit_variance(n: u32) -> SoftFloat {
    for (var i = 0u; i < n; i++) { row[i] = clamped(row[i], HALF_MAX); }
    let norm = sum_of_squares(n);
    // Below a norm of 1e-10 a slice counts as zero.
    let is_tiny = !is_larger(norm, SoftFloat(vec2<u32>(TINY_LOW, TINY_HIGH), -i32(TINY_DOWN)));
    var factor = 0.0f;
    if !is_tiny { factor = root_of_ratio(normalized(vec2<u32>(n, 0u), 0), norm); }
    for (var i = 0u; i < n; i++) { row[i] *= factor; }
    if is_tiny { return SoftFloat(vec2<u32>(0u, 0u), 0); }
    return norm;
}

// Returns the scale of a slice of this norm whose levels have the norm `level_norm`, both squared.
fn scale_of(norm: SoftFloat, level_norm: SoftFloat) -> u32 {
    if is_zero(norm.m) { return 0u; }
    return to_half(clamped(root_of_ratio(norm, level_norm), HALF_MAX));
}

// Replaces the values of the slice by their codes in a codebook; returns the scale.
fn encode_turbo(book: u32, n: u32) -> u32 {
    let norm = to_unit_variance(n);
    let factor = STEP_FACTORS[best_step(book, n)];
    var level_norm = vec2<u32>(0u, 0u);
    for (var i = 0u; i < n; i++) {
        let index = level_at(book * 16u, row[i] * factor);
        row[i] = f32(index);
        let at = 2u * (book * 16u + index);
        level_norm = add_u64(level_norm, vec2<u32>(SQUARES[at], SQUARES[at + 1u]));
    }
    return scale_of(norm, normalized(level_norm, -i32(SQUARE_BITS)));
}

// Replaces 32 values from `first` on by their codes; returns the scale.
fn encode_block32(dtype: u32, first: u32) -> u32 {
    var extreme = 0.0f;
    for (var i = first; i < first + 32u; i++) {
        row[i] = clamped(row[i], HALF_MAX);
        if abs(row[i]) > abs(extreme) { extreme = row[i]; }
    }
    var d = extreme * -0.125f;
    if dtype == Q8_0 {
        d = 0.0f;
        if abs(extreme) >= MIN_NORMAL { d = ratio_f32(abs(extreme), 127.0f); }
    }
    let scale = to_half(select(d, min(d, Q8_0_MAX_SCALE), dtype == Q8_0));
    var inverse = 0.0f;
    if (to_half(clamped(d, HALF_MAX)) & 0x7fffu) != 0u {
        inverse = ratio_f32(1.0f, abs(d));
        if d < 0.0f { inverse = -inverse; }
    }
    for (var i = first; i < first + 32u; i++) {
        let quotient = row[i] * inverse;
        if dtype == Q8_0 {
            // Rounds halves away from zero.
            let whole = floor(abs(quotient));
            let rounded = whole + select(0.0f, 1.0f, abs(quotient) - whole >= 0.5f);
            row[i] = f32(Q8_0_ZERO) + select(rounded, -rounded, quotient < 0.0f);
        } else {
            let code = quotient + f32(Q4_0_ZERO) + 0.5f;
            row[i] = floor(clamp(code, 0.0f, 15.0f));
        }
    }
    return scale;
}
