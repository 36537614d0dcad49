// Matrix products of quantized weights with activations in 8 bits (operand.wgsl), 32 columns at a
// time: int8 dot products of four. layout.rs documents the layouts. Constants of a type:
//
//   TYPE               the type, or the one whose layout it has
//   SEPARATE           separate bytes of a unit of 256 columns, at the start of the row
//   PAIRS_AT, BITS_AT  vectors of a unit before its planes; where the next is equal, there is none
//   GROUPS_AT, GROUP   vectors before those of 32 columns, and their number per 32 columns
//   ZERO               offset from the code of zero to 128 in each byte
//   HAS_MIN, HAS_HALVES, HAS_TABLE, HAS_WINDOWS
//   TABLE, UNIT        levels of codes, a signed byte each, and their unit in the scale
//   WINDOWS            levels of codes with predecessors, likewise

@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;  // [tiles of 4 rows, n_in / 32, 12]

// Data of a unit that all of its columns share.
struct UnitHeader {
    scales: vec4<u32>,
    extra: vec4<u32>,
}

// 32 weights: weight i is code i times scale[i / 16], plus min[i / 16]. Codes are signed bytes,
// four to a word.
struct Group {
    first: vec4<u32>,
    second: vec4<u32>,
    scale: vec2<f32>,
    min: vec2<f32>,
}

fn word_of(v: vec4<u32>, i: u32) -> u32 {
    let two = select(v.xy, v.zw, (i & 2u) != 0u);
    return select(two.x, two.y, (i & 1u) != 0u);
}

fn half_of(v: vec4<u32>, i: u32) -> f32 {
    return unpack2x16float(word_of(v, i / 2u) >> (16u * (i % 2u))).x;
}

fn byte_of(v: vec4<u32>, i: u32) -> u32 {
    return (word_of(v, i / 4u) >> (8u * (i % 4u))) & 255u;
}

fn signed_byte(byte: u32) -> f32 {
    return f32(i32(byte << 24u) >> 24u);
}

// Decodes E4M3 without a sign (and without an infinity: the largest is NaN).
fn e4m3_to_f32(byte: u32) -> f32 {
    let exponent = byte >> 3u;
    let mantissa = f32(byte & 7u);
    if exponent == 0u { return mantissa / 512.0f; }
    return (1.0f + mantissa / 8.0f) * bitcast<f32>((exponent + 120u) << 23u);
}

fn read_header(o: u32, unit: u32, at: u32) -> UnitHeader {
    var header: UnitHeader;
    if PAIRS_AT > 0u { header.scales = vector(o, at); }
    if PAIRS_AT > 1u { header.extra = vector(o, at + 1u); }
    if SEPARATE > 0u { header.extra = vector(o, unit * SEPARATE / 16u); }
    return header;
}

// Returns the scales of the halves of group `i` of a unit, and their minimums.
fn scales_of(header: UnitHeader, unit: u32, i: u32) -> vec4<f32> {
    if TYPE == Q4_K || TYPE == Q5_K {
        let at = 8u * (i % 4u);
        var scale = (header.scales.y >> at) & 63u;
        var min = (header.scales.z >> at) & 63u;
        if i >= 4u {
            scale = ((header.scales.w >> at) & 15u) | (((header.scales.y >> (at + 6u)) & 3u) << 4u);
            min = ((header.scales.w >> (at + 4u)) & 15u) | (((header.scales.z >> (at + 6u)) & 3u) << 4u);
        }
        let d = unpack2x16float(header.scales.x);
        return vec4<f32>(d.x * f32(scale), 0.0f, -(d.y * f32(min)), 0.0f);
    }
    if TYPE == Q2_K {
        let d = unpack2x16float(word_of(header.extra, unit % 4u));
        let first = byte_of(header.scales, 2u * i);
        let second = byte_of(header.scales, 2u * i + 1u);
        let scales = d.x * vec2<f32>(f32(first & 15u), f32(second & 15u));
        return vec4<f32>(scales, -(d.y * vec2<f32>(f32(first >> 4u), f32(second >> 4u))));
    }
    if TYPE == Q3_K {
        let d = UNIT * half_of(header.scales, 6u);
        var scales: vec2<f32>;
        for (var s = 0u; s < 2u; s++) {
            let j = 2u * i + s;
            let lower = (byte_of(header.scales, j % 8u) >> (4u * (j / 8u))) & 15u;
            let upper = (byte_of(header.scales, 8u + j % 4u) >> (2u * (j / 4u))) & 3u;
            scales[s] = d * (f32(lower | (upper << 4u)) - 32.0f);
        }
        return vec4<f32>(scales, 0.0f, 0.0f);
    }
    if TYPE == Q6_K {
        let d = half_of(header.extra, unit % 8u);
        let first = signed_byte(byte_of(header.scales, 2u * i));
        return vec4<f32>(d * first, d * signed_byte(byte_of(header.scales, 2u * i + 1u)), 0.0f, 0.0f);
    }
    if TYPE == IQ4_XS {
        let first = word_of(header.extra, 2u * (unit % 2u));
        let lower = (word_of(header.extra, 2u * (unit % 2u) + 1u) >> (4u * i)) & 15u;
        let scale = lower | (((first >> (16u + 2u * i)) & 3u) << 4u);
        return vec4<f32>(UNIT * unpack2x16float(first).x * (f32(scale) - 32.0f), 0.0f, 0.0f, 0.0f);
    }
    if TYPE == Q4_G128 {
        let word = word_of(header.extra, 2u * (unit % 2u) + i / 4u);
        let d = unpack2x16float(word).x;
        return vec4<f32>(d, 0.0f, -(d * f32((word >> 16u) & 255u)), 0.0f);
    }
    if TYPE == TQ3T {
        return vec4<f32>(UNIT * half_of(header.extra, 2u * (unit % 4u) + i / 4u), 0.0f, 0.0f, 0.0f);
    }
    if TYPE == MXFP4 {
        let power = byte_of(header.extra, 8u * (unit % 2u) + i);
        // The smallest power of two is subnormal.
        return vec4<f32>(UNIT * bitcast<f32>(select(power << 23u, 1u << 22u, power == 0u)), 0.0f, 0.0f, 0.0f);
    }
    if TYPE == NVFP4_G256 {
        let f = UNIT * bitcast<f32>(word_of(header.extra, unit % 4u));
        let first = f * e4m3_to_f32(byte_of(header.scales, 2u * i));
        return vec4<f32>(first, f * e4m3_to_f32(byte_of(header.scales, 2u * i + 1u)), 0.0f, 0.0f);
    }
    if TYPE == NVFP4 {
        let first = UNIT * e4m3_to_f32(byte_of(header.scales, 2u * i));
        return vec4<f32>(first, UNIT * e4m3_to_f32(byte_of(header.scales, 2u * i + 1u)), 0.0f, 0.0f);
    }
    let d = UNIT * half_of(header.scales, i);
    if HAS_HALVES { return vec4<f32>(d, UNIT * half_of(header.extra, i), 0.0f, 0.0f); }
    if HAS_MIN { return vec4<f32>(d, 0.0f, half_of(header.extra, i), 0.0f); }
    return vec4<f32>(d, 0.0f, 0.0f, 0.0f);
}

// Returns the levels of codes, one per byte.
fn lookup_levels(codes: vec4<u32>) -> vec4<u32> {
    var levels = vec4<u32>();
    for (var j = 0u; j < 4u; j++) {
        let index = (codes >> vec4<u32>(8u * j)) & vec4<u32>(15u);
        let level = vec4<u32>(
            byte_of(TABLE, index.x),
            byte_of(TABLE, index.y),
            byte_of(TABLE, index.z),
            byte_of(TABLE, index.w),
        );
        levels |= level << vec4<u32>(8u * j);
    }
    return levels;
}

// Returns the levels of windows, one per byte: a code and, above it, its predecessor.
fn lookup_windows(codes: vec4<u32>, before: vec4<u32>) -> vec4<u32> {
    let windows = codes | (before << vec4<u32>(3u));
    var levels = vec4<u32>();
    for (var word = 0u; word < 4u; word++) {
        for (var j = 0u; j < 4u; j++) {
            let window = (windows[word] >> (8u * j)) & 63u;
            levels[word] |= ((WINDOWS[window / 4u] >> (8u * (window % 4u))) & 255u) << (8u * j);
        }
    }
    return levels;
}

// Returns the bits of `mask` of a word, shifted.
fn fields(word: u32, shifts: vec4<u32>, mask: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> shifts) & vec4<u32>(mask);
}

// Converts codes to signed bytes.
fn signed_codes(codes: vec4<u32>) -> vec4<u32> {
    if HAS_TABLE { return lookup_levels(codes); }
    if HAS_MIN { return codes; }
    // No byte carries over: each sum is at most 255.
    return (codes + vec4<u32>(ZERO)) ^ vec4<u32>(0x80808080u);
}

// Reads group `i` of a unit whose planes begin at vector `at`.
fn read_group(o: u32, unit: u32, at: u32, i: u32, header: UnitHeader) -> Group {
    var first = vec4<u32>();
    var second = vec4<u32>();
    if GROUP == 1u {
        let nibbles = vector(o, at + GROUPS_AT + i);
        first = nibbles & vec4<u32>(0x0f0f0f0fu);
        second = (nibbles >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
    } else if GROUP == 2u {
        first = vector(o, at + GROUPS_AT + 2u * i);
        second = vector(o, at + GROUPS_AT + 2u * i + 1u);
    }
    if BITS_AT > PAIRS_AT {
        let pairs = vector(o, at + PAIRS_AT + i / 2u);
        let two = select(pairs.xy, pairs.zw, i % 2u == 1u);
        let shift = vec4<u32>(select(0u, 4u, GROUP > 0u));
        let shifts = vec4<u32>(0u, 2u, 4u, 6u);
        first |= fields(two.x, shifts, 0x03030303u) << shift;
        second |= fields(two.y, shifts, 0x03030303u) << shift;
    }
    if GROUPS_AT > BITS_AT {
        let bits = word_of(vector(o, at + BITS_AT + i / 4u), i % 4u);
        let shift = vec4<u32>(select(2u, 4u, GROUP > 0u));
        first |= fields(bits, vec4<u32>(0u, 1u, 2u, 3u), 0x01010101u) << shift;
        second |= fields(bits, vec4<u32>(4u, 5u, 6u, 7u), 0x01010101u) << shift;
    }
    let scales = scales_of(header, unit, i);
    if HAS_WINDOWS {
        // The ring closes a code further left.
        let around = (second.w << 8u) | (second.w >> 24u);
        let levels = lookup_windows(first, vec4<u32>(around, first.xyz));
        return Group(levels, lookup_windows(second, vec4<u32>(first.w, second.xyz)), scales.xy, scales.zw);
    }
    return Group(signed_codes(first), signed_codes(second), scales.xy, scales.zw);
}

fn dot_i8(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

// Adds the products of 32 columns with a row, at index `at` in the tile, to `sum`.
fn add_products(sum: f32, group: Group, tile: u32, at: u32) -> f32 {
    let first = dot_i8(x[tile + 2u * at], group.first);
    let second = dot_i8(x[tile + 2u * at + 1u], group.second);
    let scale = bitcast<f32>(x[tile + 8u][at]);
    if HAS_HALVES {
        var result = fma(f32(first) * group.scale.x, scale, sum);
        if HAS_MIN { result = fma(group.min.x, bitcast<f32>(x[tile + 9u][at]), result); }
        result = fma(f32(second) * group.scale.y, scale, result);
        if HAS_MIN { result = fma(group.min.y, bitcast<f32>(x[tile + 10u][at]), result); }
        return result;
    }
    let result = fma(f32(first + second) * group.scale.x, scale, sum);
    if HAS_MIN { return fma(group.min.x, bitcast<f32>(x[tile + 11u][at]), result); }
    return result;
}

// Adds the products of a slice of the columns with the rows from `x_row` on to `sums`.
fn multiply(x_row: u32, slice: u32) {
    let n_units = (p.n_in + 255u) / 256u;
    let n_groups = p.n_in / 32u;
    let units_at = (n_units * SEPARATE + 15u) / 16u;
    for (var unit = slice; unit < n_units; unit += SLICES) {
        let at = units_at + unit * (GROUPS_AT + 8u * GROUP);
        var headers: array<UnitHeader, OUTPUTS>;
        for (var o = 0u; o < OUTPUTS; o++) { headers[o] = read_header(o, unit, at); }
        let n = min(8u, n_groups - 8u * unit);
        for (var i = 0u; i < n; i++) {
            var weight_groups: array<Group, OUTPUTS>;
            for (var o = 0u; o < OUTPUTS; o++) { weight_groups[o] = read_group(o, unit, at, i, headers[o]); }
            for (var r = 0u; r < ROWS; r++) {
                let tile = ((x_row / 4u + r / 4u) * n_groups + 8u * unit + i) * 12u;
                // A variable index only if there is one row.
                let tile_row = select(r % 4u, x_row % 4u, ROWS == 1u);
                for (var o = 0u; o < OUTPUTS; o++) { sums[o][r] = add_products(sums[o][r], weight_groups[o], tile, tile_row); }
            }
        }
    }
}
