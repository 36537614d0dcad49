// Math functions whose accuracy WGSL leaves to the adapter.

const LOG2_E: f32 = 1.44269504f;
// ln 2 in two parts, the first with few bits, so that integer multiples of it are exact.
const LN_2_HIGH: f32 = 0.693359375f;
const LN_2_LOW: f32 = -2.12194440e-4f;

// Returns e^x within two units of the last place (the polynomial of Cephes' expf). NaN is
// preserved; overflow gives infinity.
fn exponential(x: f32) -> f32 {
    let bounded = clamp(x, -104.0f, 89.5f);
    let n = floor(bounded * LOG2_E + 0.5f);
    let r = (bounded - n * LN_2_HIGH) - n * LN_2_LOW;
    var p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    let e = p * (r * r) + r + 1.0f;
    // 2^n in two factors: at either end of the range it is not representable.
    let half_n = i32(n) / 2;
    let scaled = e * power_of_two(half_n) * power_of_two(i32(n) - half_n);
    // Compares bits: compilers assume that x equals itself.
    return select(scaled, x, (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u);
}

// Returns ln(1 + x) for x from 0 to 1, within two units of the last place (the polynomial of
// Cephes' logf).
fn log_1p(x: f32) -> f32 {
    // Around 1, so that the polynomial's argument is x itself, or (x - 1) / 2.
    let is_large = x > 0.41421356f;
    let r = select(x, 0.5f * (x - 1.0f), is_large);
    var p = 7.0376836292e-2f;
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    let rest = p * r * (r * r) - 0.5f * (r * r);
    return select(r + rest, r + (rest + LN_2_LOW) + LN_2_HIGH, is_large);
}

fn power_of_two(n: i32) -> f32 {
    return bitcast<f32>(u32(n + 127) << 23u);
}

// Returns tanh x, to a few units of 1.
fn hyperbolic_tangent(x: f32) -> f32 {
    let e = exponential(-2.0f * abs(x));
    let t = (1.0f - e) / (1.0f + e);
    return select(t, -t, x < 0.0f);
}

// Returns the number of this workgroup in a grid of two dimensions.
fn workgroup_index(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.x + group.y * groups.x;
}
