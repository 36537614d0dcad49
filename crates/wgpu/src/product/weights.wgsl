// Reads 32 weights of any type, as they lie in a file (kvant_codec's block32, kquant, iq4, fp4 and tq have the layouts).

@group(0) @binding(2) var<storage, read> weights: array<u32>;

// What was read last.
var<private> w: array<f32, 32>;

fn byte_at(at: u32) -> u32 {
    return (weights[at / 4u] >> (8u * (at % 4u))) & 255u;
}

// Two and four bytes that begin anywhere.
fn two_at(at: u32) -> u32 {
    return byte_at(at) | (byte_at(at + 1u) << 8u);
}

fn word_at(at: u32) -> u32 {
    let shift = 8u * (at % 4u);
    let low = weights[at / 4u];
    if shift == 0u { return low; }
    return (low >> shift) | (weights[at / 4u + 1u] << (32u - shift));
}

fn half_at(at: u32) -> f32 {
    return unpack2x16float(two_at(at)).x;
}

fn signed_byte(byte: u32) -> f32 {
    return f32(i32(byte << 24u) >> 24u);
}

// Codes in nibbles: value i in the low half of byte i, value i + 16 in the high half.
fn nibble(at: u32, i: u32) -> u32 {
    return (byte_at(at + i % 16u) >> (4u * (i / 16u))) & 15u;
}

// Weights 32 g .. 32 g + 32 of a row of `n` that begins at byte `row`. Of types without blocks the last may be fewer: zeros.
fn read_weights(dtype: u32, row: u32, g: u32, n: u32) {
    switch dtype {
        case F32, F16, BF16: { read_floats(dtype, row, g, n); }
        case Q4_0, Q4_1, Q5_0, Q5_1: { read_legacy(dtype, row, g); }
        case Q8_0: {
            let block = row + 34u * g;
            let d = half_at(block);
            for (var i = 0u; i < 32u; i += 4u) {
                let four = word_at(block + 2u + i);
                w[i] = signed_byte(four) * d;
                w[i + 1u] = signed_byte(four >> 8u) * d;
                w[i + 2u] = signed_byte(four >> 16u) * d;
                w[i + 3u] = signed_byte(four >> 24u) * d;
            }
        }
        case Q2_K: { read_q2_k(row + 84u * (g / 8u), g % 8u); }
        case Q3_K: { read_q3_k(row + 110u * (g / 8u), g % 8u); }
        case Q4_K: { read_q4_k(row + 144u * (g / 8u), g % 8u, false); }
        case Q5_K: { read_q4_k(row + 176u * (g / 8u), g % 8u, true); }
        case Q6_K: { read_q6_k(row + 210u * (g / 8u), g % 8u); }
        case IQ4_NL: {
            let block = row + 18u * g;
            let d = half_at(block);
            for (var i = 0u; i < 32u; i++) { w[i] = IQ4_LEVELS[nibble(block + 2u, i)] * d; }
        }
        case IQ4_XS: {
            let block = row + 136u * (g / 8u);
            let run = g % 8u;
            let low = (byte_at(block + 4u + run / 2u) >> (4u * (run % 2u))) & 15u;
            let high = (two_at(block + 2u) >> (2u * run)) & 3u;
            let d = half_at(block) * (f32(low | (high << 4u)) - 32.0f);
            for (var i = 0u; i < 32u; i++) { w[i] = IQ4_LEVELS[nibble(block + 8u + 16u * run, i)] * d; }
        }
        case MXFP4: {
            let block = row + 17u * g;
            let power = byte_at(block);
            // The least power of two has no exponent of its own; levels count twice.
            let d = 0.5f * bitcast<f32>(select(power << 23u, 1u << 22u, power == 0u));
            for (var i = 0u; i < 32u; i++) { w[i] = E2M1_LEVELS[nibble(block + 1u, i)] * d; }
        }
        case NVFP4: {
            let block = row + 36u * (g / 2u);
            for (var i = 0u; i < 32u; i++) {
                let sub = 2u * (g % 2u) + i / 16u;
                let byte = byte_at(block + 4u + 8u * sub + i % 8u);
                w[i] = E2M1_LEVELS[(byte >> (4u * (i / 8u % 2u))) & 15u] * (0.5f * small_float(byte_at(block + sub)));
            }
        }
        default: { read_rotated(dtype, row, g); }
    }
}

fn read_floats(dtype: u32, row: u32, g: u32, n: u32) {
    for (var i = 0u; i < 32u; i++) {
        let at = 32u * g + i;
        if at >= n {
            w[i] = 0.0f;
        } else if dtype == F32 {
            w[i] = bitcast<f32>(weights[row / 4u + at]);
        } else if dtype == F16 {
            w[i] = half_at(row + 2u * at);
        } else {
            w[i] = bitcast<f32>(two_at(row + 2u * at) << 16u);
        }
    }
}

fn read_legacy(dtype: u32, row: u32, g: u32) {
    let has_min = dtype == Q4_1 || dtype == Q5_1;
    let has_fifth = dtype == Q5_0 || dtype == Q5_1;
    let size = 18u + select(0u, 2u, has_min) + select(0u, 4u, has_fifth);
    let block = row + size * g;
    let nibbles = block + size - 16u;
    let d = half_at(block);
    var fifth = 0u;
    if has_fifth { fifth = word_at(nibbles - 4u); }
    var min = 0.0f;
    var zero = select(8.0f, 16.0f, has_fifth);
    if has_min {
        min = half_at(block + 2u);
        zero = 0.0f;
    }
    for (var i = 0u; i < 16u; i += 4u) {
        let word = word_at(nibbles + i);
        for (var k = 0u; k < 4u; k++) {
            let j = i + k;
            let byte = word >> (8u * k);
            let low = (byte & 15u) | (((fifth >> j) & 1u) << 4u);
            let high = ((byte >> 4u) & 15u) | (((fifth >> (j + 16u)) & 1u) << 4u);
            w[j] = (f32(low) - zero) * d + min;
            w[j + 16u] = (f32(high) - zero) * d + min;
        }
    }
}

fn read_q2_k(block: u32, run: u32) {
    let d = half_at(block + 80u);
    let m = half_at(block + 82u);
    for (var i = 0u; i < 32u; i++) {
        let scales = byte_at(block + 2u * run + i / 16u);
        let code = (byte_at(block + 16u + 32u * (run / 4u) + i) >> (2u * (run % 4u))) & 3u;
        w[i] = d * f32(scales & 15u) * f32(code) - m * f32(scales >> 4u);
    }
}

fn read_q3_k(block: u32, run: u32) {
    let d = half_at(block + 108u);
    for (var i = 0u; i < 32u; i++) {
        let j = 2u * run + i / 16u;
        let lower = (byte_at(block + 96u + j % 8u) >> (4u * (j / 8u))) & 15u;
        let upper = (byte_at(block + 104u + j % 4u) >> (2u * (j / 4u))) & 3u;
        let high = (byte_at(block + i) >> run) & 1u;
        let code = ((byte_at(block + 32u + 32u * (run / 4u) + i) >> (2u * (run % 4u))) & 3u) | (high << 2u);
        w[i] = d * (f32(lower | (upper << 4u)) - 32.0f) * (f32(code) - 4.0f);
    }
}

// q4_K, and q5_K with a fifth bit.
fn read_q4_k(block: u32, run: u32, has_fifth: bool) {
    let scales = block + 4u;
    var scale = byte_at(scales + run) & 63u;
    var min = byte_at(scales + run + 4u) & 63u;
    if run >= 4u {
        let both = byte_at(scales + run + 4u);
        scale = (both & 15u) | ((byte_at(scales + run - 4u) >> 6u) << 4u);
        min = (both >> 4u) | ((byte_at(scales + run) >> 6u) << 4u);
    }
    let d = half_at(block) * f32(scale);
    let m = half_at(block + 2u) * f32(min);
    let codes = block + 16u + select(0u, 32u, has_fifth) + 32u * (run / 2u);
    for (var i = 0u; i < 32u; i++) {
        var code = (byte_at(codes + i) >> (4u * (run % 2u))) & 15u;
        if has_fifth { code |= ((byte_at(block + 16u + i) >> run) & 1u) << 4u; }
        w[i] = d * f32(code) - m;
    }
}

fn read_q6_k(block: u32, run: u32) {
    let quarter = run % 4u;
    let d = half_at(block + 208u);
    for (var i = 0u; i < 32u; i++) {
        let low = (byte_at(block + 64u * (run / 4u) + 32u * (quarter % 2u) + i) >> (4u * (quarter / 2u))) & 15u;
        let high = (byte_at(block + 128u + 32u * (run / 4u) + i) >> (2u * quarter)) & 3u;
        let scale = signed_byte(byte_at(block + 192u + 2u * run + i / 16u));
        w[i] = d * scale * (f32(low | (high << 4u)) - 32.0f);
    }
}

// E4M3 without a sign. 127 is no number.
fn small_float(byte: u32) -> f32 {
    let exponent = (byte >> 3u) & 15u;
    let mantissa = f32(byte & 7u);
    if (byte & 127u) == 127u { return bitcast<f32>(0x7f800000u | byte); }
    if exponent == 0u { return mantissa / 512.0f; }
    return (1.0f + mantissa / 8.0f) * bitcast<f32>((exponent + 120u) << 23u);
}

// tq3_1s and tq4_1s: indices of levels, turned back.
fn read_rotated(dtype: u32, row: u32, g: u32) {
    let block = row + select(20u, 16u, dtype == TQ3_1S) * g;
    for (var i = 0u; i < 32u; i++) {
        let d = half_at(block + 2u * (i / 16u));
        if dtype == TQ3_1S {
            let eight = word_at(block + 4u + 3u * (i / 8u));
            w[i] = TQ3_LEVELS[(eight >> (3u * (i % 8u))) & 7u] * d;
        } else {
            w[i] = TQ4_LEVELS[(byte_at(block + 4u + i / 2u) >> (4u * (i % 2u))) & 15u] * d;
        }
    }
    for (var step = 1u; step < 32u; step *= 2u) {
        for (var i = 0u; i < 32u; i++) {
            if (i & step) != 0u { continue; }
            let a = w[i];
            let b = w[i + step];
            w[i] = a + b;
            w[i + step] = a - b;
        }
    }
    for (var i = 0u; i < 32u; i++) {
        w[i] *= select(TQ_FACTOR, -TQ_FACTOR, ((TQ_SIGNS >> i) & 1u) != 0u);
    }
}
