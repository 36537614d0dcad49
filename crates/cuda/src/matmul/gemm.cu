// GEMM y = W x + bias, on tensor cores: a block has SIDE output features and SIDE rows, a warp 32
// rows and half of the features.
//
// Inputs come in steps of 64. Each thread decodes one group of 32 weights to f16 (SIDE features, 2
// groups), and all copy SIDE x 64 f16 of x; while these, and the codes of the weights, are in
// flight, the previous step is multiplied. Sums are f32, each of one lane, over the inputs in
// order: where no blocks share a tile (stream_k.cuh) a row has the same bits for any SIDE. The rows
// of x, here in `inputs`, are f16 in whole steps, and `factors` are the factors of their products,
// besides the unit of the weights.
//
// Counted in the machine code for compute capability 9.0 (ptxas 12.8), a warp and a step of SIDE
// 128: 64 MMAs (m16n8k16) in 309 instructions with q4_0 and q8_0, 105 of them in the integer pipe,
// 342 with q4_K, 380 with q6_K. A block takes 1,024 clocks of shared memory (96 KB read, 32 KB
// written) beside 819 of MMAs, a block of SIDE 64 384 beside 205. Up to 128 registers. An H100 took
// 270 us for 512 rows of [14336, 4096], 222 TFLOP/s, with a block for each tile.

#include "stream_k.cuh"

// f16 from row to row: 36 words, so that the 8 rows of a matrix lie in different banks
constexpr u32 PITCH = STEP + PAD;
constexpr u32 THREADS = 2 * SIDE;        // two groups of each feature
constexpr u32 WARP_ROWS = 32, WARP_FEATURES = SIDE / 2;
constexpr u32 FEATURE_TILES = WARP_FEATURES / 16, ROW_TILES = WARP_ROWS / 8;
constexpr u32 EIGHTS = STEP / 8;         // groups of eight f16 that a thread copies at a time
constexpr u32 COPIES = SIDE * EIGHTS / THREADS;

// A step: its weights as f16, [feature][k], and its inputs, [row][k].
struct Stage {
    u16 weights[SIDE * PITCH];
    u16 inputs[SIDE * PITCH];
};

// The share of a thread in each step, at the same positions of a stage.
struct ThreadSlice {
    const u16* from[COPIES];
    u32 bytes[COPIES];  // 16, or none: zeros
    const u8* row;      // of weights
};

__device__ inline ThreadSlice thread_slice(const MatmulParams& p, const Tile& tile) {
    ThreadSlice slice;
    u32 pitch = (p.n_in + STEP - 1) / STEP * STEP;
#pragma unroll
    for (u32 i = 0; i < COPIES; i++) {
        u32 row = (threadIdx.x + i * THREADS) / EIGHTS, eight = threadIdx.x % EIGHTS;
        slice.bytes[i] = row < tile.rows ? 16 : 0;
        slice.from[i] = (const u16*)p.inputs + x_row(p, tile.row + min(row, tile.rows - 1)) * pitch + 8 * eight;
    }
    // A feature beyond the last repeats it; the result is not stored.
    u32 feature = min(tile.feature + threadIdx.x / 2, tile.matrix.n_out - 1);
    slice.row = tile.matrix.w + tile.w_offset + p.row_bytes * feature;
    return slice;
}

// Issues the copies of the inputs from k on; `finish_copies` waits for them.
__device__ inline void copy_inputs(const ThreadSlice& slice, u32 k, Stage& to) {
#pragma unroll
    for (u32 i = 0; i < COPIES; i++) {
        u32 row = (threadIdx.x + i * THREADS) / EIGHTS, eight = threadIdx.x % EIGHTS;
        copy_eight(to.inputs + row * PITCH + 8 * eight, slice.from[i] + k, slice.bytes[i]);
    }
}

// Loads the group of weights of a thread, of the step from k on. Beyond the last group it is
// repeated, and multiplied by zeros.
__device__ inline Group fetch_weights(const MatmulParams& p, const ThreadSlice& slice, u32 k) {
    return read_group(slice.row, min(k / 32 + threadIdx.x % 2, (p.n_in - 1) / 32), p.n_in, p.book);
}

__device__ inline void store_weights(const MatmulParams& p, const MatrixParams& matrix, const Group& group, Stage& to) {
    u32 pairs[16];
    decode_pairs(group, p.book, matrix.unit, pairs);
    uint4* at = (uint4*)(to.weights + threadIdx.x / 2 * PITCH + threadIdx.x % 2 * 32);
#pragma unroll
    for (u32 i = 0; i < 4; i++) at[i] = make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
}

// The sums of a lane: [f][r], of the features and rows that `mma` assigns to it of tile f and r of
// its warp.
typedef float Sums[FEATURE_TILES * ROW_TILES * 4];

__device__ inline float* sums_of(Sums& sums, u32 f, u32 r) { return sums + 4 * (ROW_TILES * f + r); }

// Adds the products of a step.
__device__ inline void multiply_step(Sums& sums, const Stage& stage, u32 feature, u32 row, u32 lane) {
    const u16* weights = stage.weights + (feature + lane % 16) * PITCH + lane / 16 * 8;
    const u16* inputs = stage.inputs + (row + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
    for (u32 k_block = 0; k_block < STEP / 16; k_block++) {
        u32 a[FEATURE_TILES][4], b[ROW_TILES / 2][4];
#pragma unroll
        for (u32 f = 0; f < FEATURE_TILES; f++) load_matrices(a[f], weights + 16 * f * PITCH + 16 * k_block, false);
#pragma unroll
        for (u32 r = 0; r < ROW_TILES / 2; r++) load_matrices(b[r], inputs + 16 * r * PITCH + 16 * k_block, false);
#pragma unroll
        for (u32 f = 0; f < FEATURE_TILES; f++) {
#pragma unroll
            for (u32 r = 0; r < ROW_TILES; r++) multiply(sums_of(sums, f, r), a[f], b[r / 2][r % 2 * 2], b[r / 2][r % 2 * 2 + 1]);
        }
    }
}

// Multiplies a part of a tile, of features and rows of a warp from `feature` and `row` on.
__device__ inline void multiply_span(const MatmulParams& p, const Tile& tile, const Span& span, Stage* stages, Sums& sums,
                                     u32 feature, u32 row, u32 lane) {
    ThreadSlice slice = thread_slice(p, tile);
    u32 k = STEP * span.first, last = STEP * (span.last - 1);
    Group weights = fetch_weights(p, slice, k);
    // Loads of weights are in flight while it ends.
    wait_for_kernel_before();
    copy_inputs(slice, k, stages[0]);
    store_weights(p, tile.matrix, weights, stages[0]);
    for (u32 buffer = 0; k <= last; k += STEP, buffer ^= 1) {
        finish_copies();
        // The step has been copied, and all threads have read the previous one.
        __syncthreads();
        // The last step loads itself once more: without branches the compiler moves the waits for
        // memory behind the MMAs.
        u32 next = min(k + STEP, last);
        copy_inputs(slice, next, stages[buffer ^ 1]);
        Group group = fetch_weights(p, slice, next);
        multiply_step(sums, stages[buffer], feature, row, lane);
        store_weights(p, tile.matrix, group, stages[buffer ^ 1]);
    }
    finish_copies();
    // The next part begins with a stage that others may still read.
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) gemm(const __grid_constant__ MatmulParams p) {
    extern __shared__ __align__(16) u8 shared[];
    // The previous kernel selects the experts, so their weights cannot be loaded before it ends.
    if (p.expert_tiles) wait_for_kernel_before();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 feature = warp % 2 * WARP_FEATURES, row = warp / 2 * WARP_ROWS;
    Tiles<SIDE, SIDE> tiles(p);
    Shares shares(p, tiles.count());
    u32 end = shares.begin(blockIdx.x + 1);
#pragma unroll 1
    for (u32 at = shares.begin(blockIdx.x); at < end;) {
        Span span = shares.span(at, end);
        at += span.last - span.first;
        if (tiles[span.tile].rows == 0) continue;
        Sums sums = {};
        multiply_span(p, tiles[span.tile], span, (Stage*)shared, sums, feature, row, lane);
        if (!join<THREADS>(p, shares, span, sums, [] { __syncthreads(); })) continue;
        write_sums<FEATURE_TILES, ROW_TILES>(p, tiles[anew(span.tile)], sums, feature, row);
    }
}
