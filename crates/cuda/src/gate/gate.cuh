// The gate of a gated feed-forward layer: a(g) u, a(g) = g / (1 + exp(-z)); for SiLU z = g, for
// GELU z = g (A + B g^2). For the bounded SiLU z = RATE g, g is at most LIMIT, and 1 + u replaces
// u, which is clamped to [-LIMIT, LIMIT]. ReLU is g where it is positive; the normal distribution
// function has GELU's z and 1 instead of g. The limited SiLU is at most `limit`, the clamped one
// that of at most `limit`, and u is clamped to [-limit, limit].

#pragma once

#include "constants.cuh"

// Comparisons, so that NaN is preserved.
__device__ inline float at_most(float limit, float x) { return x > limit ? limit : x; }
__device__ inline float within(float limit, float x) { return x < -limit ? -limit : at_most(limit, x); }

__device__ inline float gated(unsigned activation, float limit, float g, float u) {
    if (activation == BOUNDED) {
        g = at_most(BOUND_LIMIT, g);
        return g / (1.0f + expf(-(BOUND_RATE * g))) * (1.0f + within(BOUND_LIMIT, u));
    }
    if (activation == LIMITED) return at_most(limit, g / (1.0f + expf(-g))) * within(limit, u);
    if (activation == CLAMPED) {
        g = at_most(limit, g);
        return g / (1.0f + expf(-g)) * within(limit, u);
    }
    // A comparison, so that NaN is preserved.
    if (activation == RELU) return (g < 0.0f ? 0.0f : g) * u;
    bool is_normal = activation == NORMAL_CDF;
    float z = activation == GELU || is_normal ? g * __fmaf_rn(GELU_B, g * g, GELU_A) : g;
    return (is_normal ? 1.0f : g) / (1.0f + expf(-z)) * u;
}
