// The activations of feed-forward layers.

// g / (1 + exp(-z)).
fn gated(g: f32, z: f32) -> f32 {
    return g / (1.0f + exponential(-z));
}

// The z of GELU.
fn gelu_exponent(g: f32) -> f32 {
    return g * (GELU_A + GELU_B * (g * g));
}

// Comparisons, so that NaN is preserved.
fn at_most(limit: f32, x: f32) -> f32 {
    return select(x, limit, x > limit);
}

fn within(limit: f32, x: f32) -> f32 {
    return select(at_most(limit, x), -limit, x < -limit);
}

// a(g) u, a the activation `kind`, with a limit or not.
fn activated(kind: u32, limit: f32, g: f32, u: f32) -> f32 {
    if kind == SILU { return gated(g, g) * u; }
    if kind == GELU { return gated(g, gelu_exponent(g)) * u; }
    if kind == NORMAL_CDF { return gated(u, gelu_exponent(g)); }
    if kind == RELU { return select(g, 0.0f, g < 0.0f) * u; }
    if kind == CLAMPED {
        let clamped_g = at_most(limit, g);
        return gated(clamped_g, clamped_g) * within(limit, u);
    }
    if kind == LIMITED { return at_most(limit, gated(g, g)) * within(limit, u); }
    let bounded_g = at_most(BOUND_LIMIT, g);
    return gated(bounded_g, BOUND_RATE * bounded_g) * (1.0f + within(BOUND_LIMIT, u));
}
