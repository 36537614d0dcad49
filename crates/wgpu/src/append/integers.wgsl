// Arithmetic with the same bits as the codec, which uses f64, absent in WGSL: in 64-bit integers,
// (low, high), which no compiler approximates.

fn is_below(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn plus(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn minus(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn left(a: vec2<u32>, by: u32) -> vec2<u32> {
    if by == 0u { return a; }
    if by >= 64u { return vec2<u32>(0u, 0u); }
    if by >= 32u { return vec2<u32>(0u, a.x << (by - 32u)); }
    return vec2<u32>(a.x << by, (a.y << by) | (a.x >> (32u - by)));
}

fn right(a: vec2<u32>, by: u32) -> vec2<u32> {
    if by == 0u { return a; }
    if by >= 64u { return vec2<u32>(0u, 0u); }
    if by >= 32u { return vec2<u32>(a.y >> (by - 32u), 0u); }
    return vec2<u32>((a.x >> by) | (a.y << (32u - by)), a.y >> by);
}

fn is_zero(a: vec2<u32>) -> bool {
    return (a.x | a.y) == 0u;
}

// Returns the number of bits of `a`, from its highest set bit on.
fn length(a: vec2<u32>) -> u32 {
    return 64u - select(32u + countLeadingZeros(a.x), countLeadingZeros(a.y), a.y != 0u);
}

fn times(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let first = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let second = (a & 0xffffu) * (b >> 16u) + (first & 0xffffu);
    return vec2<u32>((second << 16u) | (low & 0xffffu), (a >> 16u) * (b >> 16u) + (first >> 16u) + (second >> 16u));
}

// m 2^exponent, where m has its highest bit set, or is 0.
struct Number {
    m: vec2<u32>,
    exponent: i32,
}

fn normal(m: vec2<u32>, exponent: i32) -> Number {
    if is_zero(m) { return Number(m, -100000); }
    let by = 64u - length(m);
    return Number(left(m, by), exponent - i32(by));
}

// Returns a b in 53 bits, rounded as f64 products are.
fn product_53(a: Number, b: vec2<u32>) -> Number {
    if is_zero(a.m) || is_zero(b) { return normal(vec2<u32>(0u, 0u), 0); }
    let low = times(a.m.x, b.x);
    let high = times(a.m.y, b.y);
    let middle = plus(times(a.m.y, b.x), vec2<u32>(low.y, 0u));
    let other = plus(times(a.m.x, b.y), vec2<u32>(middle.x, 0u));
    let upper = plus(plus(high, vec2<u32>(middle.y, 0u)), vec2<u32>(other.y, 0u));
    let lower = vec2<u32>(low.x, other.x);
    // The highest 64 bits of 128, and whether any of the others is set.
    if is_zero(upper) {
        return rounded_53(normal(lower, a.exponent), false);
    }
    let by = 64u - length(upper);
    let top = plus(left(upper, by), right(lower, 64u - by));
    return rounded_53(Number(top, a.exponent + 64 - i32(by)), !is_zero(left(lower, by)));
}

fn rounded_53(a: Number, has_more: bool) -> Number {
    let rest = a.m.x & 0x7ffu;
    var m = vec2<u32>(a.m.x & ~0x7ffu, a.m.y);
    let is_odd = (a.m.x & 0x800u) != 0u;
    if rest > 0x400u || (rest == 0x400u && (has_more || is_odd)) {
        m = plus(m, vec2<u32>(0x800u, 0u));
        if is_zero(m) { return Number(vec2<u32>(0u, 0x80000000u), a.exponent + 1); }
    }
    return Number(m, a.exponent);
}

fn is_larger(a: Number, b: Number) -> bool {
    if a.exponent != b.exponent { return a.exponent > b.exponent; }
    return is_below(b.m, a.m);
}

// Returns m 2^exponent as the nearest f32, ties to even; `has_more` means that the exact value is
// slightly larger.
fn nearest(m: u32, exponent: i32, has_more: bool) -> f32 {
    if m == 0u { return 0.0f; }
    let zeros = countLeadingZeros(m);
    let top = m << zeros;
    let rest = top & 255u;
    var mantissa = top >> 8u;
    if rest > 128u || (rest == 128u && (has_more || (mantissa & 1u) == 1u)) { mantissa += 1u; }
    // A mantissa that was rounded up to 2^24 carries into the exponent.
    let biased = exponent - i32(zeros) + 8 + 150;
    if biased < 1 { return 0.0f; }
    return bitcast<f32>((u32(biased - 1) << 23u) + mantissa);
}

struct Quotient {
    m: vec2<u32>,   // 54 bits, the first of which is the one before the point
    has_more: bool,
}

fn quotient_of(a: vec2<u32>, b: vec2<u32>) -> Quotient {
    var rest = a;
    var carry = false;
    var q = vec2<u32>(0u, 0u);
    for (var i = 0u; i < 54u; i++) {
        q = left(q, 1u);
        if carry || !is_below(rest, b) {
            rest = minus(rest, b);
            q.x |= 1u;
        }
        carry = rest.y >> 31u == 1u;
        rest = left(rest, 1u);
    }
    return Quotient(q, carry || !is_zero(rest));
}

// Returns the f32 nearest to the root of a / b.
fn root_of_ratio(a: Number, b: Number) -> f32 {
    let quotient = quotient_of(a.m, b.m);
    var q = left(quotient.m, 8u);
    var exponent = a.exponent - b.exponent - 61;
    if (exponent & 1) != 0 {
        q = left(q, 1u);
        exponent -= 1;
    }
    // Digit by digit.
    var root = vec2<u32>(0u, 0u);
    for (var at = 62i; at >= 0i; at -= 2i) {
        let bit = left(vec2<u32>(1u, 0u), u32(at));
        let tried = plus(root, bit);
        root = right(root, 1u);
        if !is_below(q, tried) {
            q = minus(q, tried);
            root = plus(root, bit);
        }
    }
    return nearest(root.x, exponent / 2, quotient.has_more || !is_zero(q));
}

// Returns the f32 nearest to a / b, both normal and positive.
fn ratio(a: f32, b: f32) -> f32 {
    let bits_a = bitcast<u32>(a);
    let bits_b = bitcast<u32>(b);
    let m_a = vec2<u32>(0u, ((bits_a & 0x7fffffu) | 0x800000u) << 8u);
    let m_b = vec2<u32>(0u, ((bits_b & 0x7fffffu) | 0x800000u) << 8u);
    let quotient = quotient_of(m_a, m_b);
    let rest = left(quotient.m, 10u);
    return nearest(rest.y, i32(bits_a >> 23u) - i32(bits_b >> 23u) - 31, quotient.has_more || rest.x != 0u);
}

// Returns the nearest f16, ties to even; finite and at most 65,504.
fn to_half(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    var mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    let exponent = i32(magnitude >> 23u) - 112;
    // Below 2^-14 f16 values are integer multiples of 2^-24.
    let shift = u32(select(clamp(14 - exponent, 14, 31), 13, exponent > 0));
    let kept = mantissa >> shift;
    let rest = mantissa & ((1u << shift) - 1u);
    let middle = 1u << (shift - 1u);
    let up = select(0u, 1u, rest > middle || (rest == middle && (kept & 1u) == 1u));
    if magnitude < 0x800000u { return sign; }
    if exponent > 0 { return sign | ((u32(exponent - 1) << 10u) + kept + up); }
    return sign | (kept + up);
}

// Clamps to [-max, max], max positive; NaN becomes 0. Compares bits, so that subnormal values are
// preserved.
fn clamped(value: f32, max: f32) -> f32 {
    let bits = bitcast<u32>(value);
    let magnitude = bits & 0x7fffffffu;
    if magnitude > 0x7f800000u { return 0.0f; }
    return bitcast<f32>((bits & 0x80000000u) | min(magnitude, bitcast<u32>(max)));
}
