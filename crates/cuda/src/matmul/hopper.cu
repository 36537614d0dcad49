// GEMM y = W x + bias on compute capability 9.0, with asynchronous warpgroup MMAs.
//
// Tiles have 128 output features and ROWS rows, 32 to 256, and blocks take equal shares of their
// steps (stream_k.cuh), one block on a multiprocessor. Two of a block's warpgroups are consumers,
// each of half of the features and all rows; two are producers of steps of 64 inputs, of which each
// of their threads decodes one group of 32 weights. There are STAGES stages. Inputs are loaded one
// step before they are published, codes of weights one step before they are decoded, and a consumer
// issues the MMAs of the next step before those of a step are done: the tensor cores never stall as
// long as producing a step takes no longer than multiplying it. While sums are written, steps of
// the next tile are produced.
//
// Both operands have rows of 128 bytes in the swizzle that the MMAs require; eight threads that
// store together have no bank conflicts. Sums are f32, of a block over the inputs in order; whether
// hardware gives them the bits of gemm.cu is not known.
//
// An H100 took 138 us for 512 rows of [14336, 4096] with q4_0, 435 TFLOP/s (gemm.cu 222, cuBLAS
// with f16 664), 54 us for [4096, 4096] and 196 us for [4096, 14336], with a block for each tile.
// By count, of 256 rows a step takes the tensor cores of a multiprocessor 1,024 clocks, and shared
// memory 1,152 (96 KB read, 48 KB written); of 128 rows 512 and 640, of 64 256 and 448, of 32 128
// and 352. Decoding takes 440 issue slots.

#include "copies.cuh"
#include "stream_k.cuh"
#include "warpgroup.cuh"

// Producer warpgroups of a block, which come first, and consumer warpgroups.
constexpr u32 PRODUCERS = 2, CONSUMERS = 2;
constexpr u32 PRODUCER_THREADS = WARPGROUP * PRODUCERS, CONSUMER_THREADS = WARPGROUP * CONSUMERS, THREADS = PRODUCER_THREADS + CONSUMER_THREADS;
constexpr u32 FEATURES = MMA_ROWS * CONSUMERS;
// Registers per thread, of 65,536: consumers hold half a sum for each row, producers get the rest.
constexpr u32 CONSUMER_REGISTERS = 160, PRODUCER_REGISTERS = 96;
// Rows of one MMA, and MMAs of a warpgroup per 16 inputs.
constexpr u32 SIDE = ROWS < 128 ? ROWS : 128, SIDES = ROWS / SIDE;
constexpr u32 EIGHTS = STEP / 8;  // groups of eight f16 that a thread copies at a time
constexpr u32 COPIED_ROWS = PRODUCER_THREADS / EIGHTS, COPIES = ROWS / COPIED_ROWS;
// groups of eight rows, limited by the registers
constexpr u32 EIGHTS_AT_ONCE = ROWS == 256 ? 2 : 4;
constexpr u32 LAYOUT = token_major_layout(STEP);
static_assert(STEP == 64, "a row is one swizzle period, and two groups of weights");
static_assert(PRODUCER_THREADS == 2 * FEATURES, "each thread decodes a group");
static_assert(ROWS % 32 == 0 && ROWS <= 256, "whole copies, whose sums a thread has registers for");

// A step: its weights as f16, [feature][k], and its inputs, [row][k].
struct Stage {
    u16 weights[FEATURES * STEP];
    u16 inputs[ROWS * STEP];
};

// Returns the index of a group of eight f16 of a row.
__device__ inline u32 eight_at(u32 row, u32 eight) { return row * STEP + 8 * (eight ^ row % 8); }

using Barriers = StageBarriers<STAGES, CONSUMERS>;
constexpr u32 FILL_THREADS = PRODUCER_THREADS + WARPGROUP;
// The barrier of the consumers.
constexpr u32 JOIN_BARRIER = 1 + STAGES * (CONSUMERS + 1);

// The share of a thread in each step of a tile.
struct ThreadSlice {
    const u16* inputs;  // a group of eight of one row in COPIED_ROWS, this the first
    u32 pitch;          // distance between rows
    u32 rows;           // from the first on, as many as the tile has
    const u8* weights;  // a row
    u32 group_bytes;    // of a group in it, of a whole row
};

__device__ inline ThreadSlice thread_slice(const MatmulParams& p, const Tile& tile) {
    u32 pitch = (p.n_in + STEP - 1) / STEP * STEP, row = threadIdx.x / EIGHTS, eight = threadIdx.x % EIGHTS;
    const u16* inputs = (const u16*)p.inputs + (size_t)(tile.row + min(row, tile.rows - 1)) * pitch + 8 * eight;
    // A feature beyond the last repeats it; the result is not stored.
    u32 feature = min(tile.feature + threadIdx.x / 2, tile.matrix.n_out - 1);
    return {inputs, pitch, tile.rows > row ? tile.rows - row : 0, tile.matrix.w + p.row_bytes * feature, (u32)p.row_bytes / ((p.n_in + 31) / 32)};
}

// Issues the copies of the inputs from k on: zeros beyond the last row.
__device__ inline void copy_inputs(const ThreadSlice& slice, u32 k, Stage& to) {
    u16* at = to.inputs + eight_at(threadIdx.x / EIGHTS, threadIdx.x % EIGHTS);
#pragma unroll
    for (u32 i = 0; i < COPIES; i++) {
        bool is_row = COPIED_ROWS * i < slice.rows;
        const u16* from = slice.inputs + k + (is_row ? (size_t)(COPIED_ROWS * i) * slice.pitch : 0);
        copy_eight(at + i * COPIED_ROWS * STEP, from, is_row ? 16 : 0);
    }
}

// Loads the group of weights of a thread, of the step from k on. Beyond the last group it is
// repeated, and multiplied by zeros.
__device__ inline Group fetch_weights(const MatmulParams& p, const ThreadSlice& slice, u32 k) {
    return read_group(slice.weights, min(k / 32 + threadIdx.x % 2, (p.n_in - 1) / 32), p.n_in, p.book);
}

// Steps between a prefetch of weights and their load.
constexpr u32 LATER = 4;

// Prefetches the group that `fetch_weights` reads to the L2 cache. Where scales lie behind the
// codes of a row it is one somewhat further on.
__device__ inline void touch_weights(const MatmulParams& p, const ThreadSlice& slice, u32 k) {
    u32 at = min((k / 32 + threadIdx.x % 2) * slice.group_bytes, (u32)p.row_bytes - 1);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(slice.weights + at) : "memory");
}

__device__ inline void store_weights(const MatmulParams& p, const MatrixParams& matrix, const Group& group, Stage& to) {
    u32 pairs[16];
    decode_pairs(group, p.book, matrix.unit, pairs);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        uint4 eight = make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
        *(uint4*)(to.weights + eight_at(threadIdx.x / 2, threadIdx.x % 2 * 4 + i)) = eight;
    }
}

// Waits until the consumers have released the stage of a step, counted over all steps of the block.
__device__ inline void acquire_stage(u32 step) {
    if (step >= STAGES) barrier_sync(Barriers::emptied(step % STAGES), THREADS);
}

// Produces a part of a tile, whose first step is the block's `step`; returns the first step of the
// next part.
__device__ inline u32 produce_span(const MatmulParams& p, const Tile& tile, const Span& span, Stage* stages, u32 step) {
    ThreadSlice slice = thread_slice(p, tile);
    u32 first = STEP * span.first, last = STEP * (span.last - 1);
    acquire_stage(step);
    copy_inputs(slice, first, stages[step % STAGES]);
    commit_copies();
    Group weights = fetch_weights(p, slice, first);
#pragma unroll 1
    for (u32 k = first; k <= last; k += STEP, step++) {
        // The last one fetches its own codes once more, unused.
        u32 next = min(k + STEP, last);
        if (k < last) {
            acquire_stage(step + 1);
            copy_inputs(slice, next, stages[(step + 1) % STAGES]);
        }
        commit_copies();
        Group later = fetch_weights(p, slice, next);
        touch_weights(p, slice, next + LATER * STEP);
        store_weights(p, tile.matrix, weights, stages[step % STAGES]);
        wait_copies<1>();
        fence_stores();
#pragma unroll
        for (u32 consumer = 0; consumer < CONSUMERS; consumer++) barrier_arrive(Barriers::filled(step % STAGES, consumer), FILL_THREADS);
        weights = later;
    }
    return step;
}

using Sums = float[ROWS / 2];

// The sums of SIDE rows.
__device__ inline float (&sums_of(Sums& sums, u32 side))[SIDE / 2] { return *(float(*)[SIDE / 2])(sums + side * (SIDE / 2)); }

// Issues the MMAs of a step, with separate sums for each SIDE rows.
__device__ inline void issue_step(Sums& sums, const Stage& stage, u32 consumer) {
    u32 weights = descriptor_address(stage.weights + consumer * MMA_ROWS * STEP), inputs = descriptor_address(stage.inputs);
#pragma unroll
    for (u32 k_block = 0; k_block < STEP / 16; k_block++) {
#pragma unroll
        for (u32 side = 0; side < SIDES; side++) {
            u32 rows = inputs + side * (SIDE * STEP * sizeof(u16) / 16);
            multiply<LAYOUT>(sums_of(sums, side), weights + k_block * NEXT_SIXTEEN, rows + k_block * NEXT_SIXTEEN);
        }
    }
    commit_mmas();
}

// Consumes a part of a tile; `step` as in `produce_span`.
__device__ inline u32 consume_span(const Span& span, const Stage* stages, u32 step, u32 consumer, Sums& sums) {
    u32 end = step + span.last - span.first;
    pin(sums);
#pragma unroll 1
    for (u32 first = step; step < end; step++) {
        barrier_sync(Barriers::filled(step % STAGES, consumer), FILL_THREADS);
        fence_registers();
        issue_step(sums, stages[step % STAGES], consumer);
        wait_for_mmas<1>();
        if (step > first) barrier_arrive(Barriers::emptied((step - 1) % STAGES), THREADS);
    }
    wait_for_mmas<0>();
    pin(sums);
    barrier_arrive(Barriers::emptied((end - 1) % STAGES), THREADS);
    return end;
}

// Writes a warp's sums, of features `feature` of the matrix, eight more and the seven behind each.
// EIGHTS_AT_ONCE times eight rows at a time: the loads of the values to accumulate to are in flight
// together.
__device__ inline void write_sums(const MatmulParams& p, const Tile& tile, const Sums& sums, u32 feature, u32 lane) {
    const MatrixParams& matrix = tile.matrix;
    // A lane has the factors of one row in 32.
    float factors[ROWS / 32], bias[2];
#pragma unroll
    for (u32 i = 0; i < ROWS / 32; i++) factors[i] = p.factors[tile.row + min(32 * i + lane, tile.rows - 1)] * matrix.unit;
    u32 out = feature + lane / 4;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        bias[half] = matrix.bias && out + 8 * half < matrix.n_out ? matrix.bias[out + 8 * half] : 0.0f;
    }
    float* y = matrix.y + (size_t)(tile.row + lane % 4 * 2) * matrix.n_out + out;
    u32 rows = tile.rows > lane % 4 * 2 ? tile.rows - lane % 4 * 2 : 0;
    bool is_feature[2] = {out < matrix.n_out, out + 8 < matrix.n_out};
#pragma unroll
    for (u32 first = 0; first < ROWS / 8; first += EIGHTS_AT_ONCE) {
        float old[2 * EIGHTS_AT_ONCE][2] = {};
        if (matrix.accumulate) {
#pragma unroll
            for (u32 i = 0; i < 2 * EIGHTS_AT_ONCE; i++) {
                u32 row = 8 * (first + i / 2) + i % 2;
                const float* at = y + (size_t)row * matrix.n_out;
                if (row < rows && is_feature[0]) old[i][0] = at[0];
                if (row < rows && is_feature[1]) old[i][1] = at[8];
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2 * EIGHTS_AT_ONCE; i++) {
            u32 eight = first + i / 2, row = 8 * eight + i % 2;
            float factor = __shfl_sync(~0u, factors[eight / 4], row % 32 + lane % 4 * 2);
            float* at = y + (size_t)row * matrix.n_out;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float sum = sums[4 * eight + 2 * half + i % 2] * factor;
                if (matrix.bias) sum += bias[half];
                if (matrix.accumulate) sum = old[i][half] + sum;
                if (row < rows && is_feature[half]) at[8 * half] = sum;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm(const __grid_constant__ MatmulParams p) {
    extern __shared__ __align__(1024) u8 shared[];
    Stage* stages = (Stage*)shared;
    u32 group = threadIdx.x / WARPGROUP, step = 0;
    Tiles<FEATURES, ROWS> tiles(p);
    Shares shares(p, tiles.count());
    u32 at = shares.begin(blockIdx.x), end = shares.begin(blockIdx.x + 1);
    if (group < PRODUCERS) {
        if (ROWS == 256) release_registers<PRODUCER_REGISTERS>();
        Span span = shares.span(at, end);
        touch_weights(p, thread_slice(p, tiles[span.tile]), STEP * span.first);
        wait_for_kernel_before();
#pragma unroll 1
        for (; at < end; at += span.last - span.first) {
            span = shares.span(at, end);
            step = produce_span(p, tiles[span.tile], span, stages, step);
        }
        // Every arrival at a barrier of an empty stage needs a matching wait before the block ends.
        for (u32 i = 0; i < STAGES; i++) acquire_stage(step + i);
    } else {
        if (ROWS == 256) claim_registers<CONSUMER_REGISTERS>();
        wait_for_kernel_before();
        u32 consumer = group - PRODUCERS, lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
#pragma unroll 1
        while (at < end) {
            Span span = shares.span(at, end);
            Sums sums = {};
            step = consume_span(span, stages, step, consumer, sums);
            at += span.last - span.first;
            if (!join<CONSUMER_THREADS>(p, shares, span, sums, [] { barrier_sync(JOIN_BARRIER, CONSUMER_THREADS); })) continue;
            Tile tile = tiles[anew(span.tile)];
            write_sums(p, tile, sums, tile.feature + MMA_ROWS * consumer + 16 * warp, lane);
        }
    }
}
