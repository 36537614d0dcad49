// GEMM y = W x + bias on compute capability 9.0, with asynchronous warpgroup MMAs.
//
// Tiles have 128 output features and ROWS rows, 128 or 256, and blocks take them in turn, one block
// on a multiprocessor. Two of a block's warpgroups are consumers, each of half of the features and
// all rows; two are producers of steps of 64 inputs, of which each of their threads decodes one
// group of 32 weights. There are STAGES stages. Inputs are loaded one step before they are
// published, codes of weights one step before they are decoded, and a consumer issues the MMAs of
// the next step before those of a step are done: the tensor cores never stall as long as producing
// a step takes no longer than multiplying it. While sums are written, steps of the next tile are
// produced.
//
// Both operands have rows of 128 bytes in the swizzle that the MMAs require; eight threads that
// store together have no bank conflicts. Sums are f32, over the inputs in order: a row has the same
// bits for either ROWS; whether hardware gives them the bits of gemm.cu is not known.
//
// An H100 takes 138 us for 512 rows of [14336, 4096] with q4_0, 435 TFLOP/s (gemm.cu 222, cuBLAS
// with f16 664), 54 us for [4096, 4096] and 196 us for [4096, 14336], where 128 blocks have a tile
// each. By count, of 256 rows a step takes the tensor cores of a multiprocessor 1,024 clocks, and
// shared memory 1,152 (96 KB read, 48 KB written); of 128 rows 512 and 640.

#include "copies.cuh"
#include "warpgroup.cuh"
#include "weights.cuh"

// Producer warpgroups of a block, which come first, and consumer warpgroups.
constexpr u32 BRINGERS = 2, TAKERS = 2;
constexpr u32 BRINGER_THREADS = WARPGROUP * BRINGERS, TAKER_THREADS = WARPGROUP * TAKERS, THREADS = BRINGER_THREADS + TAKER_THREADS;
constexpr u32 FEATURES = PRODUCT_ROWS * TAKERS;
// Registers per thread, of 65,536: consumers hold half a sum for each row, producers get the rest.
constexpr u32 TAKER_REGISTERS = 160, BRINGER_REGISTERS = 96;
// Rows of one MMA, and MMAs of a warpgroup per 16 inputs.
constexpr u32 SIDE = 128, SIDES = ROWS / SIDE;
constexpr u32 EIGHTS = STEP / 8;  // groups of eight f16 that a thread copies at a time
constexpr u32 COPIED_ROWS = BRINGER_THREADS / EIGHTS, COPIES = ROWS / COPIED_ROWS;
// groups of eight rows, limited by the registers
constexpr u32 EIGHTS_AT_ONCE = ROWS == 256 ? 2 : 4;
constexpr u32 LYING = lying_in_tokens(STEP);
static_assert(STEP == 64, "a row is one swizzle period, and two groups of weights");
static_assert(BRINGER_THREADS == 2 * FEATURES, "each thread decodes a group");
static_assert(ROWS == 128 || ROWS == 256, "whole products, whose sums a thread has registers for");

// A step: its weights as f16, [feature][k], and its inputs, [row][k].
struct Stage {
    u16 weights[FEATURES * STEP];
    u16 inputs[ROWS * STEP];
};

// Returns the index of a group of eight f16 of a row.
__device__ inline u32 eight_at(u32 row, u32 eight) { return row * STEP + 8 * (eight ^ row % 8); }

using Barriers = StageBarriers<STAGES, TAKERS>;
constexpr u32 FILL_THREADS = BRINGER_THREADS + WARPGROUP;

// The features of a matrix from `feature` on, and the `rows` rows of inputs from `row` on.
struct Tile {
    const ProductPart& part;
    u32 feature, row, rows;
};

// The tiles of a launch. Concurrent blocks take few features of many rows, or else each tile of
// rows would read the same weights from memory again: tiles are counted by rows first, in bands of
// 1,024 rows.
struct Tiles {
    const ProductParams& p;
    u32 across, down;  // tiles of features, of all matrices, and of rows

    __device__ explicit Tiles(const ProductParams& p) : p(p), across(0), down((p.rows + ROWS - 1) / ROWS) {
        for (u32 i = 0; i < p.n_parts; i++) across += p.parts[i].blocks;
    }

    __device__ u32 count() const { return across * down; }

    __device__ Tile operator[](u32 number) const {
        constexpr u32 BAND = 1024 / ROWS;
        u32 band = number / (BAND * across), rest = number % (BAND * across);
        u32 height = min(BAND, down - BAND * band), block = rest / height, matrix = 0;
        u32 row = ROWS * (BAND * band + rest % height);
        while (matrix + 1 < p.n_parts && block >= p.parts[matrix].blocks) block -= p.parts[matrix++].blocks;
        return {p.parts[matrix], FEATURES * block, row, min(p.rows - row, ROWS)};
    }
};

__device__ inline u32 last_step(const ProductParams& p) { return (p.n_in - 1) / STEP * STEP; }

// The share of a thread in each step of a tile.
struct Share {
    const u16* inputs;  // a group of eight of one row in COPIED_ROWS, this the first
    u32 pitch;          // distance between rows
    u32 rows;           // from the first on, as many as the tile has
    const u8* weights;  // a row
    u32 group_bytes;    // of a group in it, of a whole row
};

__device__ inline Share share_of(const ProductParams& p, const Tile& tile) {
    u32 pitch = (p.n_in + STEP - 1) / STEP * STEP, row = threadIdx.x / EIGHTS, eight = threadIdx.x % EIGHTS;
    const u16* inputs = (const u16*)p.codes + (size_t)(tile.row + min(row, tile.rows - 1)) * pitch + 8 * eight;
    // A feature beyond the last repeats it; the result is not stored.
    u32 feature = min(tile.feature + threadIdx.x / 2, tile.part.n_out - 1);
    return {inputs, pitch, tile.rows > row ? tile.rows - row : 0, tile.part.w + p.row_bytes * feature, (u32)p.row_bytes / ((p.n_in + 31) / 32)};
}

// Issues the copies of the inputs from k on: zeros beyond the last row.
__device__ inline void copy_inputs(const Share& share, u32 k, Stage& to) {
    u16* at = to.inputs + eight_at(threadIdx.x / EIGHTS, threadIdx.x % EIGHTS);
#pragma unroll
    for (u32 i = 0; i < COPIES; i++) {
        bool is_row = COPIED_ROWS * i < share.rows;
        const u16* from = share.inputs + k + (is_row ? (size_t)(COPIED_ROWS * i) * share.pitch : 0);
        copy_eight(at + i * COPIED_ROWS * STEP, from, is_row ? 16 : 0);
    }
}

// Loads the group of weights of a thread, of the step from k on. Beyond the last group it is
// repeated, and multiplied by zeros.
__device__ inline Group fetch_weights(const ProductParams& p, const Share& share, u32 k) {
    return read_group(share.weights, min(k / 32 + threadIdx.x % 2, (p.n_in - 1) / 32), p.n_in, p.book);
}

// Prefetches the group that `fetch_weights` reads LATER steps on to the L2 cache. Where scales lie
// behind the codes of a row it is one somewhat further on.
__device__ inline void touch_weights(const ProductParams& p, const Share& share, u32 k) {
    constexpr u32 LATER = 4;
    u32 at = min((k / 32 + 2 * LATER + threadIdx.x % 2) * share.group_bytes, (u32)p.row_bytes - 1);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(share.weights + at) : "memory");
}

__device__ inline void put_weights(const ProductParams& p, const ProductPart& part, const Group& group, Stage& to) {
    u32 pairs[16];
    decode_pairs(group, p.book, part.unit, pairs);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        uint4 eight = make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
        *(uint4*)(to.weights + eight_at(threadIdx.x / 2, threadIdx.x % 2 * 4 + i)) = eight;
    }
}

// Waits until the consumers have released the stage of a step, counted over all steps of the block.
__device__ inline void wait_for_room(u32 step) {
    if (step >= STAGES) meet(Barriers::emptied(step % STAGES), THREADS);
}

// Produces a tile, whose first step is the block's `step`; returns the first step of the next tile.
__device__ inline u32 bring_tile(const ProductParams& p, const Tile& tile, Stage* stages, u32 step) {
    Share share = share_of(p, tile);
    u32 last = last_step(p);
    wait_for_room(step);
    copy_inputs(share, 0, stages[step % STAGES]);
    commit_copies();
    Group weights = fetch_weights(p, share, 0);
#pragma unroll 1
    for (u32 k = 0; k <= last; k += STEP, step++) {
        // The last one fetches its own codes once more, unused.
        u32 next = min(k + STEP, last);
        if (k < last) {
            wait_for_room(step + 1);
            copy_inputs(share, next, stages[(step + 1) % STAGES]);
        }
        commit_copies();
        Group later = fetch_weights(p, share, next);
        touch_weights(p, share, next);
        put_weights(p, tile.part, weights, stages[step % STAGES]);
        wait_copies<1>();
        show_stores();
#pragma unroll
        for (u32 taker = 0; taker < TAKERS; taker++) arrive(Barriers::filled(step % STAGES, taker), FILL_THREADS);
        weights = later;
    }
    return step;
}

using Sums = float[SIDES][SIDE / 2];

// Issues the MMAs of a step, with separate sums for each 128 rows.
__device__ inline void begin_step(Sums& sums, const Stage& stage, u32 taker) {
    u32 weights = beginning(stage.weights + taker * PRODUCT_ROWS * STEP), inputs = beginning(stage.inputs);
#pragma unroll
    for (u32 part = 0; part < STEP / 16; part++) {
#pragma unroll
        for (u32 side = 0; side < SIDES; side++) {
            u32 rows = inputs + side * (SIDE * STEP * sizeof(u16) / 16);
            multiply<LYING>(sums[side], weights + part * NEXT_SIXTEEN, rows + part * NEXT_SIXTEEN);
        }
    }
    commit_products();
}

__device__ inline void pin(Sums& sums) {
#pragma unroll
    for (u32 side = 0; side < SIDES; side++) pin(sums[side]);
}

// Consumes a tile; `step` as in `bring_tile`.
__device__ inline u32 take_tile(const ProductParams& p, const Stage* stages, u32 step, u32 taker, Sums& sums) {
    u32 end = step + last_step(p) / STEP + 1;
    pin(sums);
#pragma unroll 1
    for (u32 first = step; step < end; step++) {
        meet(Barriers::filled(step % STAGES, taker), FILL_THREADS);
        show_registers();
        begin_step(sums, stages[step % STAGES], taker);
        wait_for_products<1>();
        if (step > first) arrive(Barriers::emptied((step - 1) % STAGES), THREADS);
    }
    wait_for_products<0>();
    pin(sums);
    arrive(Barriers::emptied((end - 1) % STAGES), THREADS);
    return end;
}

// Writes a warp's sums, of features `feature` of the matrix, eight more and the seven behind each.
// EIGHTS_AT_ONCE times eight rows at a time: the loads of the values to accumulate to are in flight
// together.
__device__ inline void write_sums(const ProductParams& p, const Tile& tile, const Sums& sums, u32 feature, u32 lane) {
    const ProductPart& part = tile.part;
    // A lane has the factors of one row in 32.
    float factors[ROWS / 32], bias[2];
#pragma unroll
    for (u32 i = 0; i < ROWS / 32; i++) factors[i] = p.scales[tile.row + min(32 * i + lane, tile.rows - 1)] * part.unit;
    u32 out = feature + lane / 4;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        bias[half] = part.bias && out + 8 * half < part.n_out ? part.bias[out + 8 * half] : 0.0f;
    }
    float* y = part.y + (size_t)(tile.row + lane % 4 * 2) * part.n_out + out;
    u32 rows = tile.rows > lane % 4 * 2 ? tile.rows - lane % 4 * 2 : 0;
    bool is_feature[2] = {out < part.n_out, out + 8 < part.n_out};
#pragma unroll
    for (u32 first = 0; first < ROWS / 8; first += EIGHTS_AT_ONCE) {
        float old[2 * EIGHTS_AT_ONCE][2] = {};
        if (part.accumulate) {
#pragma unroll
            for (u32 i = 0; i < 2 * EIGHTS_AT_ONCE; i++) {
                u32 row = 8 * (first + i / 2) + i % 2;
                const float* at = y + (size_t)row * part.n_out;
                if (row < rows && is_feature[0]) old[i][0] = at[0];
                if (row < rows && is_feature[1]) old[i][1] = at[8];
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2 * EIGHTS_AT_ONCE; i++) {
            u32 eight = first + i / 2, row = 8 * eight + i % 2;
            float factor = __shfl_sync(~0u, factors[eight / 4], row % 32 + lane % 4 * 2);
            float* at = y + (size_t)row * part.n_out;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float sum = sums[eight / (SIDE / 8)][eight % (SIDE / 8) * 4 + 2 * half + i % 2] * factor;
                if (part.bias) sum += bias[half];
                if (part.accumulate) sum = old[i][half] + sum;
                if (row < rows && is_feature[half]) at[8 * half] = sum;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) product_many(const __grid_constant__ ProductParams p) {
    extern __shared__ __align__(1024) u8 shared[];
    Stage* stages = (Stage*)shared;
    u32 group = threadIdx.x / WARPGROUP, step = 0;
    Tiles tiles(p);
    if (group < BRINGERS) {
        if (ROWS == 256) release_registers<BRINGER_REGISTERS>();
#pragma unroll 1
        for (u32 i = blockIdx.x; i < tiles.count(); i += gridDim.x) step = bring_tile(p, tiles[i], stages, step);
        // Every arrival at a barrier of an empty stage needs a matching wait before the block ends.
        for (u32 i = 0; i < STAGES; i++) wait_for_room(step + i);
    } else {
        if (ROWS == 256) claim_registers<TAKER_REGISTERS>();
        u32 taker = group - BRINGERS, lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32;
#pragma unroll 1
        for (u32 i = blockIdx.x; i < tiles.count(); i += gridDim.x) {
            Sums sums = {};
            step = take_tile(p, stages, step, taker, sums);
            Tile tile = tiles[i];
            write_sums(p, tile, sums, tile.feature + PRODUCT_ROWS * taker + 16 * warp, lane);
        }
    }
}
