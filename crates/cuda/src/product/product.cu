// y = W x + bias, with the weights as they are in the file, in f32: a warp for each output feature and ROWS rows of x.
// Lane l decodes groups l, l + 32, ... of 32 weights each and multiplies them with all rows.

#include "weights.cuh"

#define ROWS 8

extern "C" __global__ void product(const __grid_constant__ ProductParams p) {
    u32 out = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (out >= p.n_out) return;
    u32 first = blockIdx.y * ROWS;
    const u8* row = p.w + p.row_bytes * out;

    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0.0f;
    for (u32 g = lane; 32 * g < p.n_in; g += 32) {
        float w[32];
        decode_group(row, g, p.n_in, p.book, w);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (first + r >= p.rows) break;
            const float* x = p.x + (size_t)(first + r) * p.n_in + 32 * g;
#pragma unroll
            for (u32 i = 0; i < 32; i++) {
                if (32 * g + i < p.n_in) sums[r] += w[i] * x[i];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (first + r >= p.rows) break;
        float sum = sums[r];
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) {
            float* y = p.y + (size_t)(first + r) * p.n_out + out;
            if (p.bias) sum += p.bias[out];
            *y = p.accumulate ? *y + sum : sum;
        }
    }
}
