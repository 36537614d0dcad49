// Layers with several residual streams (AltUp, arXiv 2301.13310), and the sparse feed-forward
// layers beside them (statistical top-k, arXiv 2506.06644).

#include "constants.cuh"
#include "gate.cuh"
#include "half.cuh"
#include "sum.cuh"

struct MixParams {
    const float* coefs;  // [rows, n_out, n_in]
    const float* x;      // [n_in, rows, width]
    float* y;            // [n_out, rows, width]
    unsigned rows;
    unsigned n_in;
    unsigned n_out;
    unsigned width;
};

// y[i] = sum over j of coefs[row, i, j] x[j], one value per thread.
extern "C" __global__ void mix_streams(const __grid_constant__ MixParams p) {
    wait_for_kernel_before();
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x, stream = (size_t)p.rows * p.width;
    if (at >= p.n_out * stream) return;
    unsigned i = at / stream;
    size_t of = at % stream;
    const float* coefs = p.coefs + (of / p.width * p.n_out + i) * p.n_in;
    float sum = 0.0f;
    for (unsigned j = 0; j < p.n_in; j++) sum += coefs[j] * p.x[j * stream + of];
    p.y[at] = sum;
}

struct RowsParams {
    const float* of;  // [rows, width]
    float* y;         // [rows, width]
    unsigned width;
    float deviations;
};

// y = rms(of) y, one block per row.
extern "C" __global__ void scale_by_rms(const __grid_constant__ RowsParams p) {
    __shared__ float warps[THREADS / 32];
    wait_for_kernel_before();
    const float* of = p.of + (size_t)blockIdx.x * p.width;
    float* y = p.y + (size_t)blockIdx.x * p.width;
    float squares = 0.0f;
    for (unsigned i = threadIdx.x; i < p.width; i += THREADS) squares += of[i] * of[i];
    float rms = sqrtf(add_over_block<THREADS>(squares, warps) / (float)p.width);
    for (unsigned i = threadIdx.x; i < p.width; i += THREADS) y[i] *= rms;
}

// y = gelu(max(0, of - cutoff)) y, cutoff the mean of the row and some of its standard deviations.
extern "C" __global__ void gate_sparsely(const __grid_constant__ RowsParams p) {
    __shared__ float warps[2][THREADS / 32];
    wait_for_kernel_before();
    const float* of = p.of + (size_t)blockIdx.x * p.width;
    float* y = p.y + (size_t)blockIdx.x * p.width;
    float sum = 0.0f, squares = 0.0f;
    for (unsigned i = threadIdx.x; i < p.width; i += THREADS) sum += of[i];
    float mean = add_over_block<THREADS>(sum, warps[0]) / (float)p.width;
    for (unsigned i = threadIdx.x; i < p.width; i += THREADS) squares += (of[i] - mean) * (of[i] - mean);
    float deviation = sqrtf(add_over_block<THREADS>(squares, warps[1]) / (float)p.width);
    float cutoff = mean + p.deviations * deviation;
    for (unsigned i = threadIdx.x; i < p.width; i += THREADS) {
        // A comparison, so that NaN is preserved.
        float above = of[i] <= cutoff ? 0.0f : of[i] - cutoff;
        y[i] = gated(GELU, 0.0f, above, y[i]);
    }
}
