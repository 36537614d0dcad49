// The gate of a gated feed-forward layer: a(g) u, a(g) = g / (1 + exp(-z)); for SiLU z = g, for
// GELU z = g (A + B g^2). For the bounded SiLU z = RATE g, g is at most LIMIT, and 1 + u replaces
// u, which is clamped to [-LIMIT, LIMIT]. ReLU is g where it is positive; the normal distribution
// function has GELU's z and 1 instead of g.

#pragma once

#include "constants.cuh"

__device__ inline float gated(unsigned activation, float g, float u) {
    if (activation == BOUNDED) {
        // Comparisons, so that NaN is preserved.
        g = g > BOUND_LIMIT ? BOUND_LIMIT : g;
        u = 1.0f + (u > BOUND_LIMIT ? BOUND_LIMIT : u < -BOUND_LIMIT ? -BOUND_LIMIT : u);
        return g / (1.0f + expf(-(BOUND_RATE * g))) * u;
    }
    // A comparison, so that NaN is preserved.
    if (activation == RELU) return (g < 0.0f ? 0.0f : g) * u;
    bool is_normal = activation == NORMAL_CDF;
    float z = activation == GELU || is_normal ? g * (GELU_A + GELU_B * (g * g)) : g;
    return (is_normal ? 1.0f : g) / (1.0f + expf(-z)) * u;
}
