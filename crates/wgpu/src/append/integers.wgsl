// Arithmetic with the same bits as the codec, which uses f64, absent in WGSL: in 64-bit integers,
// (low, high), which no compiler approximates.

fn is_less(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn add_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn sub_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn shl_u64(a: vec2<u32>, n: u32) -> vec2<u32> {
    if n == 0u { return a; }
    if n >= 64u { return vec2<u32>(0u, 0u); }
    if n >= 32u { return vec2<u32>(0u, a.x << (n - 32u)); }
    return vec2<u32>(a.x << n, (a.y << n) | (a.x >> (32u - n)));
}

fn shr_u64(a: vec2<u32>, n: u32) -> vec2<u32> {
    if n == 0u { return a; }
    if n >= 64u { return vec2<u32>(0u, 0u); }
    if n >= 32u { return vec2<u32>(a.y >> (n - 32u), 0u); }
    return vec2<u32>((a.x >> n) | (a.y << (32u - n)), a.y >> n);
}

fn is_zero(a: vec2<u32>) -> bool {
    return (a.x | a.y) == 0u;
}

// Returns the number of bits of `a`, from its highest set bit on.
fn bit_length(a: vec2<u32>) -> u32 {
    return 64u - select(32u + countLeadingZeros(a.x), countLeadingZeros(a.y), a.y != 0u);
}

fn mul_u32(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let first = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let second = (a & 0xffffu) * (b >> 16u) + (first & 0xffffu);
    return vec2<u32>((second << 16u) | (low & 0xffffu), (a >> 16u) * (b >> 16u) + (first >> 16u) + (second >> 16u));
}

// m 2^exponent, where m has its highest bit set, or is 0.
struct SoftFloat {
    m: vec2<u32>,
    exponent: i32,
}

fn normalized(m: vec2<u32>, exponent: i32) -> SoftFloat {
    if is_zero(m) { return SoftFloat(m, -100000); }
    let shift = 64u - bit_length(m);
    return SoftFloat(shl_u64(m, shift), exponent - i32(shift));
}

// Returns a b in 53 bits, rounded as f64 products are.
fn product_53(a: SoftFloat, b: vec2<u32>) -> SoftFloat {
    if is_zero(a.m) || is_zero(b) { return normalized(vec2<u32>(0u, 0u), 0); }
    let low = mul_u32(a.m.x, b.x);
    let high = mul_u32(a.m.y, b.y);
    let middle = add_u64(mul_u32(a.m.y, b.x), vec2<u32>(low.y, 0u));
    let cross = add_u64(mul_u32(a.m.x, b.y), vec2<u32>(middle.x, 0u));
    let upper = add_u64(add_u64(high, vec2<u32>(middle.y, 0u)), vec2<u32>(cross.y, 0u));
    let lower = vec2<u32>(low.x, cross.x);
    // The highest 64 bits of 128, and whether any of the others is set.
    if is_zero(upper) {
        return rounded_53(normalized(lower, a.exponent), false);
    }
    let shift = 64u - bit_length(upper);
    let top = add_u64(shl_u64(upper, shift), shr_u64(lower, 64u - shift));
    return rounded_53(SoftFloat(top, a.exponent + 64 - i32(shift)), !is_zero(shl_u64(lower, shift)));
}

fn rounded_53(a: SoftFloat, has_more: bool) -> SoftFloat {
    let dropped = a.m.x & 0x7ffu;
    var m = vec2<u32>(a.m.x & ~0x7ffu, a.m.y);
    let is_odd = (a.m.x & 0x800u) != 0u;
    if dropped > 0x400u || (dropped == 0x400u && (has_more || is_odd)) {
        m = add_u64(m, vec2<u32>(0x800u, 0u));
        if is_zero(m) { return SoftFloat(vec2<u32>(0u, 0x80000000u), a.exponent + 1); }
    }
    return SoftFloat(m, a.exponent);
}

fn is_larger(a: SoftFloat, b: SoftFloat) -> bool {
    if a.exponent != b.exponent { return a.exponent > b.exponent; }
    return is_less(b.m, a.m);
}

// Returns m 2^exponent as the nearest f32, ties to even; `has_more` means that the exact value is
// slightly larger.
fn nearest_f32(m: u32, exponent: i32, has_more: bool) -> f32 {
    if m == 0u { return 0.0f; }
    let zeros = countLeadingZeros(m);
    let top = m << zeros;
    let dropped = top & 255u;
    var mantissa = top >> 8u;
    if dropped > 128u || (dropped == 128u && (has_more || (mantissa & 1u) == 1u)) { mantissa += 1u; }
    // A mantissa that was rounded up to 2^24 carries into the exponent.
    let biased = exponent - i32(zeros) + 8 + 150;
    if biased < 1 { return 0.0f; }
    return bitcast<f32>((u32(biased - 1) << 23u) + mantissa);
}

struct Quotient {
    m: vec2<u32>,   // 54 bits, the first of which is the one before the point
    has_more: bool,
}

fn divide(a: vec2<u32>, b: vec2<u32>) -> Quotient {
    var remainder = a;
    var carry = false;
    var q = vec2<u32>(0u, 0u);
    for (var i = 0u; i < 54u; i++) {
        q = shl_u64(q, 1u);
        if carry || !is_less(remainder, b) {
            remainder = sub_u64(remainder, b);
            q.x |= 1u;
        }
        carry = remainder.y >> 31u == 1u;
        remainder = shl_u64(remainder, 1u);
    }
    return Quotient(q, carry || !is_zero(remainder));
}

// Returns the f32 nearest to the root of a / b.
fn root_of_ratio(a: SoftFloat, b: SoftFloat) -> f32 {
    let quotient = divide(a.m, b.m);
    var q = shl_u64(quotient.m, 8u);
    var exponent = a.exponent - b.exponent - 61;
    if (exponent & 1) != 0 {
        q = shl_u64(q, 1u);
        exponent -= 1;
    }
    // Digit by digit.
    var root = vec2<u32>(0u, 0u);
    for (var at = 62i; at >= 0i; at -= 2i) {
        let bit = shl_u64(vec2<u32>(1u, 0u), u32(at));
        let trial = add_u64(root, bit);
        root = shr_u64(root, 1u);
        if !is_less(q, trial) {
            q = sub_u64(q, trial);
            root = add_u64(root, bit);
        }
    }
    return nearest_f32(root.x, exponent / 2, quotient.has_more || !is_zero(q));
}

// Returns the f32 nearest to a / b, both normal and positive.
fn ratio_f32(a: f32, b: f32) -> f32 {
    let bits_a = bitcast<u32>(a);
    let bits_b = bitcast<u32>(b);
    let m_a = vec2<u32>(0u, ((bits_a & 0x7fffffu) | 0x800000u) << 8u);
    let m_b = vec2<u32>(0u, ((bits_b & 0x7fffffu) | 0x800000u) << 8u);
    let quotient = divide(m_a, m_b);
    let rest = shl_u64(quotient.m, 10u);
    return nearest_f32(rest.y, i32(bits_a >> 23u) - i32(bits_b >> 23u) - 31, quotient.has_more || rest.x != 0u);
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
    let dropped = mantissa & ((1u << shift) - 1u);
    let middle = 1u << (shift - 1u);
    let up = select(0u, 1u, dropped > middle || (dropped == middle && (kept & 1u) == 1u));
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
