// What tiles in the arena hold, value for value.

fn half_at(place: u32, index: u32) -> f32 {
    return from_half((arena[place + index / 2u] >> (16u * (index % 2u))) & 0xffffu);
}

fn float_at(dtype: u32, place: u32, index: u32) -> f32 {
    if dtype == F32 { return bitcast<f32>(arena[place + index]); }
    if dtype == F16 { return half_at(place, index); }
    return bitcast<f32>(((arena[place + index / 2u] >> (16u * (index % 2u))) & 0xffffu) << 16u);
}

// The four codes of lane `lane` of group `g` of a block of `n` dims whose planes begin at `planes`.
fn four_codes(dtype: u32, planes: u32, n: u32, g: u32, lane: u32) -> vec4<u32> {
    var four = 0u;
    switch dtype {
        case Q8_0: { four = arena[planes + 16u * g + lane]; }
        case TURBO2, TURBO2T: { four = (arena[planes + 4u * g + lane % 4u] >> (2u * (lane / 4u))) & 0x03030303u; }
        case TURBO3, TURBO3T: {
            four = (arena[planes + 4u * g + lane % 4u] >> (2u * (lane / 4u))) & 0x03030303u;
            let high = (arena[planes + n + 2u * g + lane / 8u] >> (4u * (lane % 8u))) & 15u;
            four |= ((high & 1u) << 2u) | ((high & 2u) << 9u) | ((high & 4u) << 16u) | ((high & 8u) << 23u);
        }
        default: { four = (arena[planes + 8u * g + lane % 8u] >> (4u * (lane / 8u))) & 0x0f0f0f0fu; }
    }
    return vec4<u32>(four & 255u, (four >> 8u) & 255u, (four >> 16u) & 255u, four >> 24u);
}

// The codes that come `back` places before those four in the sequence of a slice, which runs down columns of every 16th dim: those
// of 16 dims before; and before the first of a column is the last of the column to its left.
fn codes_before(dtype: u32, is_key: bool, planes: u32, n: u32, g: u32, lane: u32, back: u32) -> vec4<u32> {
    if g >= 4u * back { return four_codes(dtype, planes, n, g - 4u * back, lane); }
    let at = n / 4u + g - 4u * back;
    if !is_key { return four_codes(dtype, planes, n, at, (lane + 15u) % 16u); }
    let here = four_codes(dtype, planes, n, at, lane);
    let to_the_left = four_codes(dtype, planes, n, at / 4u * 4u + (at + 3u) % 4u, lane);
    return vec4<u32>(to_the_left.w, here.xyz);
}

// The levels of these codes, of tiles laid out as those of keys or of values.
fn four_levels(dtype: u32, is_key: bool, planes: u32, n: u32, g: u32, lane: u32) -> vec4<f32> {
    let codes = four_codes(dtype, planes, n, g, lane);
    if remembers(dtype) {
        let bits = code_bits(dtype);
        var windows = codes | (codes_before(dtype, is_key, planes, n, g, lane, 1u) << vec4<u32>(bits));
        if bits == 2u { windows |= codes_before(dtype, is_key, planes, n, g, lane, 2u) << vec4<u32>(2u * bits); }
        windows += (dtype - TURBO2T) * TRELLIS_WINDOWS;
        return vec4<f32>(
            TRELLIS_LEVELS[windows.x], TRELLIS_LEVELS[windows.y], TRELLIS_LEVELS[windows.z], TRELLIS_LEVELS[windows.w],
        );
    }
    if is_turbo(dtype) {
        let book = (dtype - TURBO2) * 16u;
        return vec4<f32>(
            CENTROIDS[book + codes.x], CENTROIDS[book + codes.y], CENTROIDS[book + codes.z], CENTROIDS[book + codes.w],
        );
    }
    return vec4<f32>(codes) - select(Q4_0_ZERO, Q8_0_ZERO, dtype == Q8_0);
}

fn most_dims(dtype: u32) -> u32 {
    return select(32u, 128u, is_turbo(dtype));
}
