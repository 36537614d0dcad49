// Tiles in the layout of kvant_codec::tile: 16 tokens of one head, K or V. Addresses are in words.
//
// Quantized tiles are blocks of 32 dims (q8_0, q4_0), or of as many blocks of 128 as fit, then one
// of 64 and one of 32 where they do (turbo): 16 f16 scales, then groups of 64 codes. A group has 16
// lanes of 4 codes. For keys a lane is a token and its codes are 4 dims; for values a lane is a dim
// and its codes are 4 tokens.

const NONE: u32 = 0xffffffffu;

fn is_quantized(dtype: u32) -> bool {
    return dtype >= Q8_0;
}

fn is_turbo(dtype: u32) -> bool {
    return dtype >= TURBO2;
}

// Returns whether a type is trellis-coded: levels are looked up with the last six bits of the code
// sequence.
fn is_trellis(dtype: u32) -> bool {
    return dtype >= TURBO2T;
}

fn code_bits(dtype: u32) -> u32 {
    switch dtype {
        case Q8_0: { return 8u; }
        case TURBO2, TURBO2T: { return 2u; }
        case TURBO3, TURBO3T: { return 3u; }
        default: { return 4u; }  // Q4_0, TURBO4
    }
}

// Returns the dims of the slice that begins with dim `at` of `dim`, where slices have at most
// `max_len`.
fn slice_at(dim: u32, at: u32, max_len: u32) -> u32 {
    var n = max_len;
    while n > MIN_DIMS && n > dim - at { n /= 2u; }
    return min(n, dim - at);
}

// Returns the words before the block that is number `index` and begins with dim `first`.
fn block_word(dtype: u32, index: u32, first: u32) -> u32 {
    return index * SCALE_WORDS + first * code_bits(dtype) / 2u;
}

// Returns the index of a value in a float tile.
fn float_index(is_key: bool, dim: u32, slot: u32, d: u32) -> u32 {
    return select(slot * dim + d, d * TILE + slot, is_key);
}

fn from_half(bits: u32) -> f32 {
    let exponent = (bits >> 10u) & 31u;
    let mantissa = bits & 1023u;
    let sign = (bits & 0x8000u) << 16u;
    // Subnormal numbers are integer multiples of 2^-24.
    let magnitude = select(bitcast<u32>(f32(mantissa) * HALF_UNIT), ((exponent + 112u) << 23u) | (mantissa << 13u), exponent > 0u);
    return bitcast<f32>(sign | magnitude);
}
