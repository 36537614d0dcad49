// The gate by itself: u = a(g) u, one value per thread.

#include "gate.cuh"

struct GateParams {
    const float* g;  // [n]
    float* u;        // [n]
    unsigned n;
    unsigned activation;
};

extern "C" __global__ void gate(const __grid_constant__ GateParams p) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.u[i] = gated(p.activation, p.g[i], p.u[i]);
}
