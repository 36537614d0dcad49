// Reads tiles, sixteen values at a time, as four vectors of four.
//
// A word of a plane holds codes of four lanes that are four apart, `lane`, `lane + 4` and so on,
// four codes of each. Decoded, it is four vectors, one for each of these lanes: for keys a lane is
// a token and its codes four dims, for values it is a dim and they are four tokens.

alias Sixteen = array<vec4<f32>, 4>;

fn two_halves(address: u32, index: u32) -> vec2<f32> {
    return unpack2x16float(word_at(address + index / 2u));
}

fn half_at(address: u32, index: u32) -> f32 {
    let two = two_halves(address, index);
    return select(two.x, two.y, index % 2u == 1u);
}

// Returns floats `index`, which is even, and the next one.
fn two_floats(dtype: u32, address: u32, index: u32) -> vec2<f32> {
    if dtype == F32 { return vec2<f32>(bitcast<f32>(word_at(address + index)), bitcast<f32>(word_at(address + index + 1u))); }
    if dtype == F16 { return two_halves(address, index); }
    let word = word_at(address + index / 2u);
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}

fn float_at(dtype: u32, address: u32, index: u32) -> f32 {
    if dtype == F32 { return bitcast<f32>(word_at(address + index)); }
    let two = two_floats(dtype, address, index);
    return select(two.x, two.y, index % 2u == 1u);
}

// Returns the high bits of 3-bit codes of group `g`, for all its lanes.
fn high_bits(dtype: u32, planes: u32, n: u32, g: u32) -> vec2<u32> {
    if code_bits(dtype) != 3u || STAGE == NO_CODES { return vec2<u32>(); }
    return vec2<u32>(word_at(planes + n + 2u * g), word_at(planes + n + 2u * g + 1u));
}

// Returns the codes of lanes `lane`, from 0 to 3, and those four, eight and twelve further of group
// `g` of a block of `n` dims whose planes begin at `planes`, a byte for each code.
fn codes_of_lanes(dtype: u32, planes: u32, g: u32, lane: u32, high: vec2<u32>) -> vec4<u32> {
    let bits = code_bits(dtype);
    if bits == 8u {
        let at = planes + 16u * g + lane;
        return vec4<u32>(word_at(at), word_at(at + 4u), word_at(at + 8u), word_at(at + 12u));
    }
    if bits == 4u {
        let at = planes + 8u * g + lane;
        let two = vec2<u32>(word_at(at), word_at(at + 4u));
        return vec4<u32>(two, two >> vec2<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
    }
    let low = (vec4<u32>(word_at(planes + 4u * g + lane)) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(0x03030303u);
    if bits == 2u { return low; }
    let four = (vec4<u32>(high.xx, high.yy) >> (vec4<u32>(4u * lane) + vec4<u32>(0u, 16u, 0u, 16u))) & vec4<u32>(15u);
    // Moves bit i of a 4-bit number to byte i.
    return low | (((four * 0x00204081u) & vec4<u32>(0x01010101u)) << vec4<u32>(2u));
}

// Returns the codes `lag` positions before the four codes of lane `lane` in the code sequence of a
// slice, which runs down columns of every 16th dim: those of 16 dims before; the predecessor of the
// first of a column is the last of the column to its left.
fn preceding_codes(dtype: u32, is_key: bool, planes: u32, n: u32, g: u32, lane: u32, lag: u32) -> u32 {
    if g >= 4u * lag { return codes_of_lane(dtype, planes, n, g - 4u * lag, lane); }
    let at = n / 4u + g - 4u * lag;
    if !is_key { return codes_of_lane(dtype, planes, n, at, (lane + 15u) % 16u); }
    let here = codes_of_lane(dtype, planes, n, at, lane);
    let to_the_left = codes_of_lane(dtype, planes, n, at / 4u * 4u + (at + 3u) % 4u, lane);
    return (here << 8u) | (to_the_left >> 24u);
}

fn codes_of_lane(dtype: u32, planes: u32, n: u32, g: u32, lane: u32) -> u32 {
    let low = (word_at(planes + 4u * g + lane % 4u) >> (2u * (lane / 4u))) & 0x03030303u;
    if dtype != TURBO3T { return low; }
    let four = (word_at(planes + n + 2u * g + lane / 8u) >> (4u * (lane % 8u))) & 15u;
    return low | (((four * 0x00204081u) & 0x01010101u) << 2u);
}

fn bytes_of(four: u32) -> vec4<u32> {
    return vec4<u32>(four, four >> 8u, four >> 16u, four >> 24u) & vec4<u32>(255u);
}

// Returns the levels of trellis codes, of lane `lane`.
fn trellis_levels(dtype: u32, is_key: bool, planes: u32, n: u32, g: u32, lane: u32, codes: u32) -> vec4<f32> {
    let bits = code_bits(dtype);
    var windows = bytes_of(codes) | (bytes_of(preceding_codes(dtype, is_key, planes, n, g, lane, 1u)) << vec4<u32>(bits));
    if bits == 2u { windows |= bytes_of(preceding_codes(dtype, is_key, planes, n, g, lane, 2u)) << vec4<u32>(2u * bits); }
    windows += (dtype - TURBO2T) * TRELLIS_WINDOWS;
    return vec4<f32>(
        TRELLIS_LEVELS[windows.x], TRELLIS_LEVELS[windows.y], TRELLIS_LEVELS[windows.z], TRELLIS_LEVELS[windows.w],
    );
}

// Returns whether a stage of attention looks levels up.
fn does_lookup(is_of_keys: bool) -> bool {
    return STAGE >= WHOLE || STAGE == select(ONLY_VALUES, ONLY_KEYS, is_of_keys);
}

// Returns the levels of codes of four lanes, of tiles with the layout of keys (`is_key`) or of
// values.
fn sixteen_levels(
    dtype: u32, is_key: bool, is_of_keys: bool, planes: u32, n: u32, g: u32, lane: u32, high: vec2<u32>,
) -> Sixteen {
    var levels = Sixteen();
    if STAGE == NO_CODES { return levels; }
    let codes = codes_of_lanes(dtype, planes, g, lane, high);
    for (var f = 0u; f < 4u; f++) {
        if is_turbo(dtype) && !does_lookup(is_of_keys) {
            levels[f] = vec4<f32>(f32(codes[f] & 15u));
        } else if is_trellis(dtype) {
            levels[f] = trellis_levels(dtype, is_key, planes, n, g, lane + 4u * f, codes[f]);
        } else if is_turbo(dtype) {
            levels[f] = lookup(dtype, codes[f]);
        } else {
            levels[f] = vec4<f32>(bytes_of(codes[f])) - vec4<f32>(select(Q4_0_ZERO, Q8_0_ZERO, dtype == Q8_0));
        }
    }
    return levels;
}

// Returns four of the sixteen floats from `row` on, contiguous or four apart.
fn four_floats(dtype: u32, address: u32, row: u32, lane: u32, is_strided: bool) -> vec4<f32> {
    if STAGE == NO_CODES { return vec4<f32>(); }
    if is_strided {
        let at = row + lane;
        return vec4<f32>(
            float_at(dtype, address, at), float_at(dtype, address, at + 4u),
            float_at(dtype, address, at + 8u), float_at(dtype, address, at + 12u),
        );
    }
    return vec4<f32>(two_floats(dtype, address, row + 4u * lane), two_floats(dtype, address, row + 4u * lane + 2u));
}

fn max_dims(dtype: u32) -> u32 {
    return select(32u, 128u, is_turbo(dtype));
}

// Returns the slice of dim `d`: its dims, its first dim, its number.
fn slice_containing(dtype: u32, dim: u32, d: u32) -> vec3<u32> {
    let max_len = max_dims(dtype);
    var index = d / max_len;
    var at = index * max_len;
    var n = slice_at(dim, at, max_len);
    while d >= at + n {
        at += n;
        index += 1u;
        n = slice_at(dim, at, max_len);
    }
    return vec3<u32>(n, at, index);
}
