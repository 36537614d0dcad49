// y = W x + bias for many rows of x, on tensor cores: a block has TILE output features and TILE rows, a warp 16 features.
//
// Per step of 64 weights: each of the 128 threads decodes one group of 32 weights to f16 in shared memory (64 features,
// 2 groups), all bring 64 x 64 halves of x there, and each warp multiplies with 32 mma of 16 x 8 x 16. Sums are f32.
// The rows of x, here in `codes`, are halves of whole steps, and `scales` what their products are multiplied by.

#include "weights.cuh"

#define FEATURES TILE
#define ROWS TILE
#define THREADS (2 * FEATURES)  // two groups of each feature
#define PITCH (STEP + 8)  // halves from row to row: 36 words, so that the 8 rows of a fragment lie in different banks

extern "C" __global__ void __launch_bounds__(THREADS) product_many(const __grid_constant__ ProductParams p) {
    __shared__ u32 weights[FEATURES * PITCH / 2];               // pairs of halves, [feature][k]
    __shared__ __align__(16) u32 inputs[ROWS * PITCH / 2];      // [row][k]
    u32 pitch = (p.n_in + STEP - 1) / STEP * STEP;
    u32 first_out = blockIdx.x * FEATURES;
    BlockRows rows = block_rows(p, ROWS);
    if (rows.n == 0) return;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 quad = lane / 4, t = lane % 4;

    float sums[ROWS / 8][4];
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
    }

    for (u32 k = 0; k < p.n_in; k += STEP) {
        {
            u32 feature = threadIdx.x / 2, g = k / 32 + threadIdx.x % 2;
            float w[32];
            if (first_out + feature < p.n_out && 32 * g < p.n_in) {
                decode_group(p.w + rows.skipped + p.row_bytes * (first_out + feature), g, p.n_in, p.book, w);
            } else {
#pragma unroll
                for (int i = 0; i < 32; i++) w[i] = 0.0f;
            }
            u32* to = weights + feature * (PITCH / 2) + threadIdx.x % 2 * 16;
#pragma unroll
            for (int i = 0; i < 16; i++) to[i] = pack_halves(w[2 * i], w[2 * i + 1]);
        }
        // Neighbouring threads read neighbouring eights.
#pragma unroll
        for (u32 i = threadIdx.x; i < ROWS * STEP / 8; i += THREADS) {
            u32 row = i / (STEP / 8), eight = i % (STEP / 8);
            uint4 halves = {};
            if (row < rows.n) {
                const u16* x = (const u16*)p.codes + x_row(p, rows.first + row) * pitch + k + 8 * eight;
                halves = *(const uint4*)x;
            }
            *(uint4*)(inputs + row * (PITCH / 2) + 4 * eight) = halves;
        }
        __syncthreads();
#pragma unroll
        for (int part = 0; part < STEP / 16; part++) {
            const u32* a_at = weights + (16 * warp + quad) * (PITCH / 2) + 8 * part + t;
            u32 a[4] = {a_at[0], a_at[8 * (PITCH / 2)], a_at[4], a_at[8 * (PITCH / 2) + 4]};
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++) {
                const u32* b_at = inputs + (8 * n + quad) * (PITCH / 2) + 8 * part + t;
                multiply(sums[n], a, b_at[0], b_at[4]);
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 out = first_out + 16 * warp + quad + 8 * (i / 2), row = 8 * n + 2 * t + i % 2;
            if (out >= p.n_out || row >= rows.n) continue;
            float sum = sums[n][i] * p.scales[x_row(p, rows.first + row)];
            if (p.bias) sum += p.bias[rows.bias + out];
            float* y = p.y + y_row(p, rows.first + row) * p.n_out + out;
            *y = p.accumulate ? *y + sum : sum;
        }
    }
}
