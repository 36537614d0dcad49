// Converts rows of activations to the inputs of products. A workgroup takes a row, which is
// normalized first if there is a weight for that. Rows of experts follow the order of a list of
// slots, slots_per_row of which share a row.
//
// Quantized rows are stored in tiles of four. For 32 columns a tile has 12 vectors: two of codes of
// each row, four to a word; the scales of the rows; then the contribution of a weight of 1, over
// columns 0 to 16, 16 to 32 and all. code = round(value / scale), scale = max |value| / 127.

struct Params {
    rows: u32,
    n: u32,              // columns
    first: u32,          // offset of the first row in values
    stride: u32,         // distance between rows in values
    padded: u32,         // columns of a padded row
    has_norm: u32,
    eps: f32,
    nan_bits: u32,       // the bits of NaN, which WGSL has no literal for
    slots_per_row: u32,  // 0 without a list
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> quads: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> weight_quads: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;
@group(0) @binding(4) var<storage, read> order: array<u32>;  // [rows]: slots

// Returns the row of x for row `i`; NONE for an empty position of the list.
fn source_row(i: u32) -> u32 {
    if p.slots_per_row == 0u { return i; }
    let slot = order[i];
    return select(slot / p.slots_per_row, NONE, slot == NONE);
}

fn norm_factor(squares: f32, thread: u32) -> f32 {
    return 1.0f / sqrt(sum(squares, thread) / f32(p.n) + p.eps);
}

// Returns one butterfly step of 32 values: sums and differences of those `distance` apart.
fn butterflies(old: array<vec4<f32>, 8>, distance: u32) -> array<vec4<f32>, 8> {
    var values = old;
    for (var q = 0u; q < 8u; q++) {
        let v = old[q];
        if distance == 1u {
            values[q] = vec4<f32>(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
        } else if distance == 2u {
            values[q] = vec4<f32>(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
        } else if (q & (distance / 4u)) == 0u {
            values[q] = v + old[q + distance / 4u];
        } else {
            values[q] = old[q - distance / 4u] - v;
        }
    }
    return values;
}

// Rotates 32 values as the tq types' weights are.
fn rotate_32(values: array<vec4<f32>, 8>) -> array<vec4<f32>, 8> {
    var v = values;
    for (var q = 0u; q < 8u; q++) {
        let signs = vec4<u32>(ROTATION_SIGNS >> (4u * q)) & vec4<u32>(1u, 2u, 4u, 8u);
        v[q] = select(v[q], -v[q], signs != vec4<u32>());
    }
    v = butterflies(butterflies(butterflies(butterflies(butterflies(v, 1u), 2u), 4u), 8u), 16u);
    for (var q = 0u; q < 8u; q++) { v[q] *= ROTATION_FACTOR; }
    return v;
}

// Writes group `g` of `row`.
fn write_quantized(row: u32, g: u32, values: array<vec4<f32>, 8>) {
    // Magnitudes keep their order as integers; NaN is above infinity.
    var max_bits = vec4<u32>();
    for (var q = 0u; q < 8u; q++) { max_bits = max(max_bits, bitcast<vec4<u32>>(values[q]) & vec4<u32>(0x7fffffffu)); }
    let largest = max(max(max_bits.x, max_bits.y), max(max_bits.z, max_bits.w));
    var scale = bitcast<f32>(largest) / 127.0f;
    var inverse = 127.0f / bitcast<f32>(largest);
    if largest <= bitcast<u32>(TINY) {
        scale = 0.0f;
        inverse = 0.0f;
    }
    let is_non_finite = largest >= 0x7f800000u;
    let tile = (row / 4u * (p.n / 32u) + g) * 48u;
    let tile_row = row % 4u;
    var half_sums = array<i32, 2>();
    for (var q = 0u; q < 8u; q++) {
        let rounded = vec4<i32>(clamp(round(values[q] * inverse), vec4<f32>(-127.0f), vec4<f32>(127.0f)));
        let codes = select(rounded, vec4<i32>(), vec4<bool>(is_non_finite));
        half_sums[q / 4u] += codes.x + codes.y + codes.z + codes.w;
        let bytes = bitcast<vec4<u32>>(codes) & vec4<u32>(255u);
        out[tile + 8u * tile_row + q] = bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
    }
    if is_non_finite { scale = bitcast<f32>(p.nan_bits); }
    out[tile + 32u + tile_row] = bitcast<u32>(scale);
    out[tile + 36u + tile_row] = bitcast<u32>(f32(half_sums[0]) * scale);
    out[tile + 40u + tile_row] = bitcast<u32>(f32(half_sums[1]) * scale);
    out[tile + 44u + tile_row] = bitcast<u32>(f32(half_sums[0] + half_sums[1]) * scale);
}

fn quantize_row(row: u32, source: u32, thread: u32, rotates: bool) {
    let start = (p.first + source * p.stride) / 4u;
    var factor = 1.0f;
    if p.has_norm != 0u {
        var squares = 0.0f;
        for (var i = thread; i < p.n / 4u; i += THREADS) {
            let v = quads[start + i];
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        factor = norm_factor(squares, thread);
    }
    for (var g = thread; g < p.n / 32u; g += THREADS) {
        var values: array<vec4<f32>, 8>;
        for (var q = 0u; q < 8u; q++) {
            values[q] = quads[start + 8u * g + q];
            if p.has_norm != 0u { values[q] = values[q] * factor * weight_quads[8u * g + q]; }
        }
        if rotates { values = rotate_32(values); }
        write_quantized(row, g, values);
    }
}

@compute @workgroup_size(THREADS)
fn quantize_rows(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = workgroup_index(group, groups);
    if row >= p.rows { return; }
    let source = source_row(row);
    if source == NONE { return; }
    quantize_row(row, source, thread, false);
}

@compute @workgroup_size(THREADS)
fn rotate_and_quantize_rows(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = workgroup_index(group, groups);
    if row >= p.rows { return; }
    let source = source_row(row);
    if source == NONE { return; }
    quantize_row(row, source, thread, true);
}

// Copies rows, unchanged or normalized, with zeros up to whole vectors.
@compute @workgroup_size(THREADS)
fn pad_rows(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = workgroup_index(group, groups);
    if row >= p.rows { return; }
    let source = source_row(row);
    if source == NONE { return; }
    let start = p.first + source * p.stride;
    var factor = 1.0f;
    if p.has_norm != 0u {
        var squares = 0.0f;
        for (var i = thread; i < p.n; i += THREADS) { squares += x[start + i] * x[start + i]; }
        factor = norm_factor(squares, thread);
    }
    for (var i = thread; i < p.padded; i += THREADS) {
        var value = 0.0f;
        if i < p.n { value = x[start + i]; }
        if p.has_norm != 0u && i < p.n { value = value * factor * weight[i]; }
        out[row * p.padded + i] = bitcast<u32>(value);
    }
}
