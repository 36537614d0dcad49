// Soft cap: x = cap tanh(x / cap), one value per thread. Non-finite values become NaN.

#include "bounded.cuh"
#include "half.cuh"

struct SoftCapParams {
    float* x;  // [n]
    unsigned n;
    float cap;
    float rate;
};

extern "C" __global__ void soft_cap(const __grid_constant__ SoftCapParams p) {
    wait_for_kernel_before();
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.x[i] = bounded(p.x[i], p.cap, p.rate);
}
