// y = W x + bias for many rows of x on compute capability 9.0, whose products of warpgroups run beside the threads: a block has 128 output
// features and ROWS rows, 128 or 256, a warpgroup half of the features and all rows.
//
// As in many.cu inputs come in steps of 64, and each thread decodes one group of 32 weights. While a step is multiplied the next one is
// brought to the other of two stages. Both sides lie in rows of 128 bytes whose sixteens change places, as the products want them.
// Sums are f32, over the inputs in their order; whether a card gives them the bits of many.cu's is not known.
//
// Counted, not measured: of 256 rows a step takes the tensor cores of a multiprocessor 1,024 clocks, and shared memory 1,152.

#include "warpgroup.cuh"
#include "weights.cuh"

constexpr u32 GROUPS = 2, THREADS = WARPGROUP * GROUPS, FEATURES = PRODUCT_ROWS * GROUPS;
// Rows of one product, and products of a warpgroup in 16 inputs.
constexpr u32 SIDE = 128, SIDES = ROWS / SIDE;
constexpr u32 EIGHTS = STEP / 8;  // of halves that a thread brings at a time
constexpr u32 COPIES = ROWS * EIGHTS / THREADS;
constexpr u32 LYING = lying_in_tokens(STEP);
static_assert(STEP == 64, "a row is what changes places, and two groups of weights");

// A step: its weights as halves, [feature][k], and its inputs, [row][k].
struct Stage {
    u16 weights[FEATURES * STEP];
    u16 inputs[ROWS * STEP];
};

// Where an eight of halves of a row is.
__device__ inline u32 eight_at(u32 row, u32 eight) { return row * STEP + 8 * (eight ^ row % 8); }

// Asks for the inputs from k on, which `finish_copies` waits for: zeros behind the last row.
__device__ inline void copy_inputs(const ProductParams& p, const BlockRows& rows, u32 k, Stage& to) {
    u32 pitch = (p.n_in + STEP - 1) / STEP * STEP, eight = threadIdx.x % EIGHTS;
    const u16* from = (const u16*)p.codes + (size_t)rows.first * pitch + k + 8 * eight;
#pragma unroll
    for (u32 i = 0; i < COPIES; i++) {
        u32 row = threadIdx.x / EIGHTS + i * (THREADS / EIGHTS);
        copy_eight(to.inputs + eight_at(row, eight), from + (size_t)min(row, rows.n - 1) * pitch, row < rows.n ? 16 : 0);
    }
}

// The group of weights of a thread, of the step from k on. Behind the last one comes that again, which zeros are multiplied by.
__device__ inline Group fetch_weights(const ProductParams& p, const u8* row, u32 k) {
    return read_group(row, min(k / 32 + threadIdx.x % 2, (p.n_in - 1) / 32), p.n_in, p.book);
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

// Begins to add the products of a step, those of each 128 rows to sums of their own.
__device__ inline void begin_step(float (&sums)[SIDES][SIDE / 2], const Stage& stage, u32 group) {
    u32 weights = beginning(stage.weights + group * PRODUCT_ROWS * STEP), inputs = beginning(stage.inputs);
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

// `feature` is the first of the lane's two in the block.
__device__ inline void write_sums(const ProductParams& p, const BlockPart& mine, const BlockRows& rows,
                                  const float (&sums)[SIDES][SIDE / 2], u32 feature, u32 lane) {
    const ProductPart& part = mine.part;
#pragma unroll
    for (u32 eight = 0; eight < ROWS / 8; eight++) {
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            u32 row = 8 * eight + lane % 4 * 2 + e;
            if (row >= rows.n) continue;
            float scale = p.scales[rows.first + row] * part.unit;
            float* y = part.y + (size_t)(rows.first + row) * part.n_out;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 out = mine.block * FEATURES + feature + 8 * half;
                if (out >= part.n_out) continue;
                float sum = sums[eight / (SIDE / 8)][eight % (SIDE / 8) * 4 + 2 * half + e] * scale;
                if (part.bias) sum += part.bias[out];
                y[out] = part.accumulate ? y[out] + sum : sum;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 256 / ROWS) product_many(const __grid_constant__ ProductParams p) {
    extern __shared__ __align__(1024) u8 shared[];
    Stage* stages = (Stage*)shared;
    BlockPart mine = block_part(p);
    BlockRows rows = block_rows(p, mine.part, ROWS);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, group = threadIdx.x / WARPGROUP;
    // A feature beyond the last computes what the last does; it is not stored.
    const u8* row = mine.part.w + p.row_bytes * min(mine.block * FEATURES + threadIdx.x / 2, mine.part.n_out - 1);
    float sums[SIDES][SIDE / 2] = {};

    copy_inputs(p, rows, 0, stages[0]);
    put_weights(p, mine.part, fetch_weights(p, row, 0), stages[0]);
    u32 last = (p.n_in - 1) / STEP * STEP;
#pragma unroll 1
    for (u32 k = 0, turn = 0; k <= last; k += STEP, turn ^= 1) {
        // The last one asks for itself once more, as in many.cu.
        u32 next = min(k + STEP, last);
        Group weights = fetch_weights(p, row, next);
        finish_copies();
        show_stores();
        // The step is there, and the one before has been multiplied by all.
        __syncthreads();
#pragma unroll
        for (u32 side = 0; side < SIDES; side++) pin(sums[side]);
        show_registers();
        begin_step(sums, stages[turn], group);
        copy_inputs(p, rows, next, stages[turn ^ 1]);
        put_weights(p, mine.part, weights, stages[turn ^ 1]);
        wait_for_products<0>();
#pragma unroll
        for (u32 side = 0; side < SIDES; side++) pin(sums[side]);
    }
    finish_copies();
    write_sums(p, mine, rows, sums, PRODUCT_ROWS * group + 16 * warp + lane / 4, lane);
}
