// y = W x + bias for few rows of x, with weights in codes: a block has 8 warps, a warp FEATURES output features and up
// to ROWS rows. Or y = a(W x) (U x), a an activation: then the two of a warp are the same feature of W and of U.
//
// Per step of 1,024 inputs the block has them as signed bytes in shared memory, with one scale per 32 (for the rotated
// types x is rotated, rather than W); lane l reads the group of 32 weights that starts at 32 l and multiplies bytes with
// bytes, four at a time. The weights of a step are asked for a step before.
//
// Rows come rounded (quantise.cu); a single one has a kernel of its own (one.cu).
//
// NaN and infinities in x make the scale of their 32 values NaN or infinite, and so the row of y NaN.

#include "gate.cuh"
#include "weights.cuh"

#define THREADS (WARPS * 32)
#define STEP 1024
#define GROUPS (STEP / 32)

// One step of one row. Two buffers in turn: one is filled while the other may still be read.
struct Inputs {
    u32 codes[2][GROUPS][4];  // 16 bytes per half of a group: the lanes' reads fall into different banks
    float scale[GROUPS];
    float sum[2][GROUPS];  // of the half of a group, scaled
};

// Adds over the `n` neighbouring lanes of which this is one.
template <typename T>
__device__ __forceinline__ T add_over(T value, int n) {
    for (int step = n / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Brings a step of one row: each thread 4 codes, the first of each 8 a scale and two sums.
__device__ __forceinline__ void bring(const ProductParams& p, u32 k, size_t row, Inputs& to) {
    u32 group = threadIdx.x / 8, part = threadIdx.x % 8, groups = p.n_in / 32;
    bool is_there = k / 32 + group < groups;
    size_t at = row * groups + k / 32 + group;
    to.codes[part / 4][group][part % 4] = is_there ? p.codes[8 * at + part] : 0;
    if (part == 0) {
        float scale = is_there ? p.scales[at] : 0.0f;
        u32 both = is_there ? p.sums[at] : 0;
        to.scale[group] = scale;
        to.sum[0][group] = scale * (float)(short)both;
        to.sum[1][group] = scale * (float)((int)both >> 16);
    }
}

// The product of a group with 32 inputs.
__device__ __forceinline__ float multiply(const Group& w, const Inputs& x, u32 lane) {
    uint4 halves[2] = {*(const uint4*)x.codes[0][lane], *(const uint4*)x.codes[1][lane]};
    int dots[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 words[4] = {halves[h].x, halves[h].y, halves[h].z, halves[h].w};
        int dot = 0;
#if IS_ROTATED
#pragma unroll
        for (int k = 0; k < 4; k++) dot = __dp4a((int)w.codes[4 * h + k], (int)words[k], dot);
        dot *= 256;
#pragma unroll
        for (int k = 0; k < 4; k++) dot = __dp4a((int)w.low[4 * h + k], (int)words[k], dot);
#else
#pragma unroll
        for (int k = 0; k < 4; k++) dot = __dp4a((int)w.codes[4 * h + k], (int)words[k], dot);
#endif
        dots[h] = dot;
    }
#if HAS_HALVES
    float sum = x.scale[lane] * (w.scale[0] * (float)dots[0] + w.scale[1] * (float)dots[1]);
    if (HAS_MIN) sum += w.min[0] * x.sum[0][lane] + w.min[1] * x.sum[1][lane];
#else
    float sum = x.scale[lane] * w.scale[0] * (float)(dots[0] + dots[1]);
    if (HAS_MIN) sum += w.min[0] * (x.sum[0][lane] + x.sum[1][lane]);
#endif
    return sum;
}

// Asks for a lane's groups of the step from k on. Without branches, so that the compiler moves what waits for memory behind
// the step before: where no group is left in a step, the last one comes again, which zeros are multiplied by; where no step is,
// all lanes ask for the first one, a line that is never used.
__device__ __forceinline__ void read_groups(const ProductParams& p, const u8* const (&w)[FEATURES], u32 k,
                                            Group (&groups)[FEATURES]) {
    u32 g = k < p.n_in ? min(k / 32 + threadIdx.x % 32, (p.n_in - 1) / 32) : 0;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) groups[f] = read_group(w[f], g, p.n_in, p.book);
}

extern "C" __global__ void __launch_bounds__(THREADS) product_coded(const __grid_constant__ ProductParams p) {
    __shared__ Inputs inputs[2][ROWS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    BlockPart mine = block_part(p);
    const ProductPart& part = mine.part;
    BlockRows block = block_rows(p, part, ROWS);
    u32 rows = block.n;
    if (rows == 0) return;
    u32 first_out = p.up ? mine.block * WARPS + warp : (mine.block * WARPS + warp) * FEATURES;

    const u8* w[FEATURES];
    float sums[FEATURES][ROWS];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        // A feature beyond the last computes what the last does; it is not stored.
        u32 out = min(p.up ? first_out : first_out + f, part.n_out - 1);
        w[f] = (p.up && f == 1 ? p.up : part.w) + block.skipped + p.row_bytes * out;
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[f][r] = 0.0f;
    }

    Group group[FEATURES];
    read_groups(p, w, 0, group);
    u32 buffer = 0;
    for (u32 k = 0; k < p.n_in; k += STEP, buffer ^= 1) {
        Group next[FEATURES];
        read_groups(p, w, k + STEP, next);
        for (u32 r = 0; r < rows; r++) bring(p, k, x_row(p, block.first + r), inputs[buffer][r]);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r > 0 && r >= rows) break;
#pragma unroll
            for (int f = 0; f < FEATURES; f++) sums[f][r] += multiply(group[f], inputs[buffer][r], lane);
        }
#pragma unroll
        for (int f = 0; f < FEATURES; f++) group[f] = next[f];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        float y[FEATURES];
#pragma unroll
        for (int f = 0; f < FEATURES; f++) y[f] = add_over(sums[f][r], 32);
        float* to = part.y + y_row(p, block.first + r) * part.n_out + first_out;
        if (p.up) {
            if (lane != 0 || first_out >= part.n_out) continue;
            if (part.bias) y[0] += part.bias[block.bias + first_out], y[1] += p.up_bias[block.bias + first_out];
            *to = gated(p.activation, y[0], y[1]);
            continue;
        }
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            if (lane != 0 || first_out + f >= part.n_out) continue;
            if (part.bias) y[f] += part.bias[block.bias + first_out + f];
            to[f] = part.accumulate ? to[f] + y[f] : y[f];
        }
    }
}
