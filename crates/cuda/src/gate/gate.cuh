// The gate of a gated feed-forward layer: a(g) u, a(g) = g / (1 + exp(-z)); for SiLU z = g, for GELU z = g (A + B g^2).

#pragma once

#include "constants.cuh"

__device__ inline float gated(unsigned activation, float g, float u) {
    float z = activation == GELU ? g * (GELU_A + GELU_B * (g * g)) : g;
    return g / (1.0f + expf(-z)) * u;
}
