// y = W x + bias in f32, for float weights. A block has 8 warps, a warp FEATURES output features
// and up to ROWS rows of x.
//
// Per step of 1,024 inputs lane l loads the group of 32 weights that starts at 32 l, and the block
// copies the inputs to shared memory, for each row; then each lane multiplies its weights with
// every row. A group of x is 33 words from the next, so that the lanes' reads fall into different
// banks; each read serves all features of the warp.

#include "weights.cuh"

#define STEP 1024
#define PITCH 33

extern "C" __global__ void __launch_bounds__(WARPS * 32) skinny_f32(const __grid_constant__ MatmulParams p) {
    __shared__ float inputs[ROWS][STEP / 32 * PITCH];
    wait_for_kernel_before();
    BlockMatrix mine = block_matrix(p);
    const MatrixParams& matrix = mine.matrix;
    u32 first_out = (mine.block * WARPS + threadIdx.x / 32) * FEATURES, lane = threadIdx.x % 32;
    BlockRows rows = block_rows(p, matrix, ROWS);
    const u8* w_of_rows = matrix.w + rows.w_offset;

    float sums[FEATURES][ROWS];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[f][r] = 0.0f;
    }
    for (u32 k = 0; k < p.n_in; k += STEP) {
        // Beyond the last group it is repeated, and multiplied by zeros.
        u32 g = min(k / 32 + lane, (p.n_in - 1) / 32);
        Group group[FEATURES];
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            // A feature beyond the last repeats it; the result is not stored.
            u32 out = min(first_out + f, matrix.n_out - 1);
            group[f] = read_group(w_of_rows + p.row_bytes * out, g, p.n_in, p.book);
        }
        for (u32 r = 0; r < ROWS && r < rows.n; r++) {
            const float* x = p.x + x_row(p, rows.first + r) * p.n_in + k;
            for (u32 i = threadIdx.x; i < STEP; i += WARPS * 32) {
                inputs[r][i / 32 * PITCH + i % 32] = k + i < p.n_in ? x[i] : 0.0f;
            }
        }
        __syncthreads();
        float w[FEATURES][32];
#pragma unroll
        for (int f = 0; f < FEATURES; f++) decode_group(group[f], p.book, w[f]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows.n) break;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                float x = inputs[r][lane * PITCH + i];
#pragma unroll
                for (int f = 0; f < FEATURES; f++) sums[f][r] = __fmaf_rn(w[f][i], x, sums[f][r]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        u32 out = first_out + f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows.n || out >= matrix.n_out) break;
            float sum = sums[f][r];
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == 0) {
                float* y = matrix.y + y_row(p, rows.first + r) * matrix.n_out + out;
                if (matrix.bias) sum += matrix.bias[rows.bias_offset + out];
                *y = matrix.accumulate ? *y + sum : sum;
            }
        }
    }
}
