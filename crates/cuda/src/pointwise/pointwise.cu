// Functions of single values, one per thread: the activations of encoders.

#include "gate.cuh"
#include "half.cuh"

struct PointwiseParams {
    float* x;  // [n]
    u32 n;
    u32 function;
};

// GELU in its tanh form (0), GELU (1), SiLU (2), ReLU (3) or tanh (4).
extern "C" __global__ void apply(const __grid_constant__ PointwiseParams p) {
    wait_for_kernel_before();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    float x = p.x[i];
    if (p.function == 0) x = gated(GELU, 0.0f, x, 1.0f);
    if (p.function == 1) x *= 0.5f * (1.0f + erff(x * 0.707106781f));
    if (p.function == 2) x = x / (1.0f + expf(-x));
    // A comparison, so that NaN is preserved.
    if (p.function == 3) x = x < 0.0f ? 0.0f : x;
    if (p.function == 4) x = tanhf(x);
    p.x[i] = x;
}
