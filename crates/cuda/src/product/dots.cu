// y = W x + bias from codes: weights as they are in the file, inputs in 8 bits (quantise.cu), whole-number dot products.
// A block has 8 warps, a warp FEATURES output features and up to ROWS rows of x.
//
// Lane l takes groups l, l + 32, ... of 32 weights: with code c and input code q, scales s and t, a group adds
// t (s sum(c q) + m sum(q)), 8 dp4a and a few operations. Of q4_0 that is about 45 instructions and 18 bytes per group,
// a third of what an H200 can issue in the time it reads them.

#include "codes.cuh"

#define WARPS 8
#define FEATURES 2
#define STEP 32  // groups
#define PITCH 9  // words from group to group in shared memory: odd, so that lanes read from different banks

struct DotsParams {
    const u8* w;                // [n_out] rows of row_bytes
    const int* codes;           // [rows, n_in / 32, 8]
    const float* scales;        // [rows, n_in / 32]
    const u32* sums;            // [rows, n_in / 32]
    const float* bias;          // [n_out], or null
    float* y;                   // [rows, n_out]
    unsigned long long row_bytes;
    u32 groups;
    u32 n_out;
    u32 rows;
    u32 accumulate;
    ByteLevels table;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) dots(const __grid_constant__ DotsParams p) {
    __shared__ int inputs[ROWS][STEP * PITCH];
    u32 first_out = (blockIdx.x * WARPS + threadIdx.x / 32) * FEATURES, lane = threadIdx.x % 32;
    u32 first_row = blockIdx.y * ROWS;

    float sums[FEATURES][ROWS];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[f][r] = 0.0f;
    }
    for (u32 k = 0; k < p.groups; k += STEP) {
        // 256 threads, 256 words of a row.
        u32 group = threadIdx.x / 8;
        for (u32 r = 0; r < ROWS && first_row + r < p.rows; r++) {
            if (k + group >= p.groups) break;
            size_t at = (size_t)(first_row + r) * p.groups + k;
            inputs[r][group * PITCH + threadIdx.x % 8] = p.codes[8 * at + threadIdx.x];
        }
        __syncthreads();
        u32 g = k + lane;
        if (g < p.groups) {
            Codes c[FEATURES];
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                // A feature beyond the last computes what the last does; it is not stored.
                u32 out = min(first_out + f, p.n_out - 1);
                codes_of_group(p.w + p.row_bytes * out, g, p.table, c[f]);
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (first_row + r >= p.rows) break;
                size_t at = (size_t)(first_row + r) * p.groups + g;
                float t = p.scales[at];
                u32 both = p.sums[at];
                float q_sums[2] = {(float)(short)both, (float)((int)both >> 16)};
                int first[FEATURES], second[FEATURES];
#pragma unroll
                for (int f = 0; f < FEATURES; f++) first[f] = second[f] = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int a = inputs[r][lane * PITCH + i], b = inputs[r][lane * PITCH + 4 + i];
#pragma unroll
                    for (int f = 0; f < FEATURES; f++) {
                        first[f] = __dp4a(c[f].words[i], a, first[f]);
                        second[f] = __dp4a(c[f].words[4 + i], b, second[f]);
                    }
                }
#pragma unroll
                for (int f = 0; f < FEATURES; f++) {
                    float sum = c[f].scale[0] * (float)first[f] + c[f].min[0] * q_sums[0];
                    sum += c[f].scale[1] * (float)second[f] + c[f].min[1] * q_sums[1];
                    sums[f][r] += t * sum;
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        u32 out = first_out + f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (first_row + r >= p.rows || out >= p.n_out) break;
            float sum = sums[f][r];
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == 0) {
                float* y = p.y + (size_t)(first_row + r) * p.n_out + out;
                if (p.bias) sum += p.bias[out];
                *y = p.accumulate ? *y + sum : sum;
            }
        }
    }
}
