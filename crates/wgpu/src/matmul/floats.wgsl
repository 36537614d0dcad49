// Matrix products of float weights with f32 activations, one column after the other.

@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;

// Decodes four E4M3 bytes. Nothing is subnormal on the way, as devices may flush that to zero.
fn e4m3_to_vec4(word: u32) -> vec4<f32> {
    let bytes = (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
    let magnitude = bytes & vec4<u32>(127u);
    let normal = bitcast<vec4<f32>>((magnitude << vec4<u32>(20u)) + vec4<u32>(120u << 23u));
    let value = select(normal, vec4<f32>(magnitude) / 512.0f, magnitude < vec4<u32>(8u));
    return select(value, -value, bytes >= vec4<u32>(128u));
}

// Returns the levels of columns 4 q to 4 q + 3 of 32, nibbles, of which the first of two is high.
fn levels_to_vec4(bits: vec4<u32>, q: u32) -> vec4<f32> {
    let shifts = vec4<u32>(4u, 0u, 12u, 8u) + vec4<u32>(16u * (q % 2u));
    let code = (vec4<u32>(bits[q / 2u]) >> shifts) & vec4<u32>(15u);
    return bitcast<vec4<f32>>(vec4<u32>(LEVELS[code.x], LEVELS[code.y], LEVELS[code.z], LEVELS[code.w]));
}

// Adds the products of a slice of the columns with the rows from `x_row` on to `sums`.
fn multiply(x_row: u32, slice: u32) {
    let n_vectors = (p.n_in + COLUMNS - 1u) / COLUMNS;
    let last = (p.n_in - 1u) / 4u;
    // Vectors of 256 columns.
    let unit = 256u / COLUMNS;
    // Vectors of scales, four each.
    let scales = select(0u, (p.n_in / max(SCALE_COLUMNS, 1u) + 3u) / 4u, SCALE_COLUMNS > 0u);
    for (var first = slice * unit; first < n_vectors; first += SLICES * unit) {
        for (var c = first; c < min(first + unit, n_vectors); c++) {
            var w: array<array<vec4<f32>, QUADS>, OUTPUTS>;
            for (var o = 0u; o < OUTPUTS; o++) {
                let bits = vector(o, scales + c);
                if SCALE_COLUMNS > 0u {
                    let group = c * COLUMNS / max(SCALE_COLUMNS, 1u);
                    let scale = bitcast<f32>(vector(o, group / 4u)[group % 4u]);
                    for (var q = 0u; q < QUADS; q++) {
                        if HAS_LEVELS {
                            w[o][q] = levels_to_vec4(bits, q) * scale;
                        } else {
                            // Compiled for more quads, too, where there are levels.
                            w[o][q] = e4m3_to_vec4(bits[min(q, 3u)]) * scale;
                        }
                    }
                } else if TYPE == F32 {
                    w[o][0] = bitcast<vec4<f32>>(bits);
                } else if TYPE == F16 {
                    w[o][0] = vec4<f32>(unpack2x16float(bits.x), unpack2x16float(bits.y));
                    w[o][QUADS - 1u] = vec4<f32>(unpack2x16float(bits.z), unpack2x16float(bits.w));
                } else {
                    let lower = bitcast<vec4<f32>>(bits << vec4<u32>(16u));
                    let upper = bitcast<vec4<f32>>(bits & vec4<u32>(0xffff0000u));
                    w[o][0] = vec4<f32>(lower.x, upper.x, lower.y, upper.y);
                    w[o][QUADS - 1u] = vec4<f32>(lower.z, upper.z, lower.w, upper.w);
                }
            }
            for (var r = 0u; r < ROWS; r++) {
                let start = p.x_first + (x_row + r) * p.x_stride;
                for (var q = 0u; q < QUADS; q++) {
                    // Weights are zero beyond the last column, where another row may begin.
                    let v = x[start + min(c * QUADS + q, last)];
                    for (var o = 0u; o < OUTPUTS; o++) {
                        let weight = w[o][q];
                        sums[o][r] = fma(weight.w, v.w, fma(weight.z, v.z, fma(weight.y, v.y, fma(weight.x, v.x, sums[o][r]))));
                    }
                }
            }
        }
    }
}
