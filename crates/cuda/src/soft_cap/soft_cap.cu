// Bounds values smoothly: x = cap tanh(x / cap) (arXiv 2408.00118), one value per thread. What is not finite becomes NaN.

struct SoftCapParams {
    float* x;  // [n]
    unsigned n;
    float cap;
};

extern "C" __global__ void soft_cap(const __grid_constant__ SoftCapParams p) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    float x = p.x[i], e = expf(-2.0f / p.cap * fabsf(x));
    float bounded = p.cap * ((1.0f - e) / (1.0f + e));
    p.x[i] = (x < 0.0f ? -bounded : bounded) + 0.0f * x;
}
