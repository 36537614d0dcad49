// The gate of a gated feed-forward layer: u *= silu(g), silu(g) = g / (1 + exp(-g)), one value per thread.

struct SiluParams {
    const float* g;  // [n]
    float* u;        // [n]
    unsigned n;
    unsigned unused;
};

extern "C" __global__ void silu_gate(const __grid_constant__ SiluParams p) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    float g = p.g[i];
    p.u[i] *= g / (1.0f + expf(-g));
}
