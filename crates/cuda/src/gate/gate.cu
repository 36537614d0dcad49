// Separate gates, one value per thread: u = a(g) u, those of whole rows, and those of recurrent
// layers and of attention; scaling by a factor; addition; and
// xIELU.

#include "gate.cuh"
#include "half.cuh"

struct GateParams {
    const float* g;  // [n]
    float* u;        // [n]
    unsigned n;
    unsigned activation;
    float limit;  // of the limited SiLU
    unsigned unused;
};

extern "C" __global__ void gate(const __grid_constant__ GateParams p) {
    wait_for_kernel_before();
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.u[i] = gated(p.activation, p.limit, p.g[i], p.u[i]);
}

// s(g) y, s the logistic function (0), SiLU (1), the identity (2), softplus (3) or GELU (4).
__device__ inline float gated_by(unsigned kind, float g, float y) {
    if (kind == 4) return gated(GELU, 0.0f, g, y);
    if (kind == 2) return y * g;
    if (kind == 3) return y * ((g < 0.0f ? 0.0f : g) + log1pf(expf(-fabsf(g))));
    float divisor = 1.0f + expf(-g);
    return kind == 0 ? y / divisor : y * (g / divisor);
}

struct GateRowsParams {
    const float* g;  // [rows]
    float* y;        // [rows, cols]
    unsigned rows;
    unsigned cols;
    unsigned kind;
    unsigned unused;
};

// Gates of whole rows: y = s(g) y.
extern "C" __global__ void gate_rows(const __grid_constant__ GateRowsParams p) {
    wait_for_kernel_before();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)p.rows * p.cols) p.y[i] = gated_by(p.kind, p.g[i / p.cols], p.y[i]);
}

struct ScaleParams {
    float* x;  // [n]
    unsigned n;
    float by;
};

// x = by x.
extern "C" __global__ void scale(const __grid_constant__ ScaleParams p) {
    wait_for_kernel_before();
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.x[i] *= p.by;
}

struct AddParams {
    float* x;        // [n]
    const float* y;  // [n]
    unsigned n;
};

// x = x + y.
extern "C" __global__ void add(const __grid_constant__ AddParams p) {
    wait_for_kernel_before();
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.x[i] += p.y[i];
}

struct XieluParams {
    float* x;  // [n]
    unsigned n;
    float positive;
    float negative;
    float slope;
    float eps;
};

// x = x (p x + b) for positive x, else n (exp(min(x, eps)) - 1 - x) + b x. A NaN is not positive,
// and subtracted there.
extern "C" __global__ void xielu(const __grid_constant__ XieluParams p) {
    wait_for_kernel_before();
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    float x = p.x[i], bounded = x < p.eps ? x : p.eps;
    float below = p.negative * (expf(bounded) - 1.0f - x) + p.slope * x;
    p.x[i] = x > 0.0f ? x * (p.positive * x + p.slope) : below;
}

struct GateValuesParams {
    const float* g;  // [n]
    float* y;        // [n]
    unsigned n;
    unsigned kind;
};

// Gates of values: y = s(g) y.
extern "C" __global__ void gate_values(const __grid_constant__ GateValuesParams p) {
    wait_for_kernel_before();
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.y[i] = gated_by(p.kind, p.g[i], p.y[i]);
}
