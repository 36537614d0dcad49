// RMS normalization (arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * weight, one block per row.
// LayerNorm (arXiv 1607.06450) is that of x - mean(x), plus a bias.

#include "constants.cuh"
#include "half.cuh"
#include "sum.cuh"

struct NormParams {
    const float* x;       // [rows, cols]
    const float* weight;  // [cols]
    const float* bias;    // [cols], of LayerNorm, or null
    float* y;             // [rows, cols]
    unsigned cols;
    float eps;
};

// Values of a thread whose loads wait for memory together: stores between them would keep them
// apart, as the compiler cannot tell that they write elsewhere.
constexpr unsigned AT_ONCE = 4;

// Loads values i, i + THREADS, .. of a row of `cols`, zeros beyond its end.
__device__ inline void load(const float* row, unsigned i, unsigned cols, float v[AT_ONCE]) {
    for (unsigned k = 0; k < AT_ONCE; k++, i += THREADS) v[k] = i < cols ? row[i] : 0.0f;
}

// Normalizes one row into y, or adds it to y.
__device__ inline void norm_row(const NormParams& p, float* warps, bool accumulate) {
    const float* x = p.x + (size_t)blockIdx.x * p.cols;
    float* y = p.y + (size_t)blockIdx.x * p.cols;
    float squares = 0.0f, v[AT_ONCE], weights[AT_ONCE], before[AT_ONCE];
    for (unsigned i = threadIdx.x; i < p.cols; i += AT_ONCE * THREADS) {
        load(x, i, p.cols, v);
        for (unsigned k = 0; k < AT_ONCE; k++) squares += v[k] * v[k];
    }
    float factor = 1.0f / sqrtf(add_over_block<THREADS>(squares, warps) / (float)p.cols + p.eps);
    for (unsigned i = threadIdx.x; i < p.cols; i += AT_ONCE * THREADS) {
        load(x, i, p.cols, v);
        load(p.weight, i, p.cols, weights);
        if (accumulate) load(y, i, p.cols, before);
        for (unsigned k = 0; k < AT_ONCE && i + THREADS * k < p.cols; k++) {
            float normed = v[k] * factor * weights[k];
            y[i + THREADS * k] = accumulate ? before[k] + normed : normed;
        }
    }
}

extern "C" __global__ void rms_norm(const __grid_constant__ NormParams p) {
    __shared__ float warps[THREADS / 32];
    wait_for_kernel_before();
    norm_row(p, warps, false);
}

extern "C" __global__ void add_normed(const __grid_constant__ NormParams p) {
    __shared__ float warps[THREADS / 32];
    wait_for_kernel_before();
    norm_row(p, warps, true);
}

extern "C" __global__ void layer_norm(const __grid_constant__ NormParams p) {
    __shared__ float warps[2][THREADS / 32];
    wait_for_kernel_before();
    const float* x = p.x + (size_t)blockIdx.x * p.cols;
    float* y = p.y + (size_t)blockIdx.x * p.cols;
    float sum = 0.0f, squares = 0.0f;
    for (unsigned i = threadIdx.x; i < p.cols; i += THREADS) sum += x[i];
    float mean = add_over_block<THREADS>(sum, warps[0]) / (float)p.cols;
    for (unsigned i = threadIdx.x; i < p.cols; i += THREADS) squares += (x[i] - mean) * (x[i] - mean);
    float factor = 1.0f / sqrtf(add_over_block<THREADS>(squares, warps[1]) / (float)p.cols + p.eps);
    for (unsigned i = threadIdx.x; i < p.cols; i += AT_ONCE * THREADS) {
        float v[AT_ONCE], weights[AT_ONCE], biases[AT_ONCE];
        load(x, i, p.cols, v);
        load(p.weight, i, p.cols, weights);
        if (p.bias) load(p.bias, i, p.cols, biases);
        for (unsigned k = 0; k < AT_ONCE && i + THREADS * k < p.cols; k++) {
            float normed = (v[k] - mean) * factor * weights[k];
            y[i + THREADS * k] = p.bias ? normed + biases[k] : normed;
        }
    }
}
