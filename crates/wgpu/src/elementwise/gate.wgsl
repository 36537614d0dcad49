// The activations of feed-forward layers.

// g / (1 + exp(-z)).
fn gated(g: f32, z: f32) -> f32 {
    return g / (1.0f + exponential(-z));
}

// The z of GELU.
fn gelu_exponent(g: f32) -> f32 {
    return g * (GELU_A + GELU_B * (g * g));
}

// a(g) u, a the activation `kind`.
fn activated(kind: u32, g: f32, u: f32) -> f32 {
    if kind == SILU { return gated(g, g) * u; }
    if kind == GELU { return gated(g, gelu_exponent(g)) * u; }
    if kind == NORMAL_CDF { return gated(u, gelu_exponent(g)); }
    if kind == RELU { return select(g, 0.0f, g < 0.0f) * u; }
    // Comparisons, so that NaN is preserved.
    let bounded_g = select(g, BOUND_LIMIT, g > BOUND_LIMIT);
    let bounded_u = select(u, BOUND_LIMIT, u > BOUND_LIMIT);
    return gated(bounded_g, BOUND_RATE * bounded_g) * (1.0f + select(bounded_u, -BOUND_LIMIT, bounded_u < -BOUND_LIMIT));
}
