// Scores of a unit: the products of keys with eight queries, and of their centre. decode.rs
// describes the method.
//
// Macros: K_TYPE, V_TYPE, K_DIM, V_DIM.

#pragma once

#include "fold.cuh"
#include "groups.cuh"

// Bytes of the softmax weights of a tile, [16 tokens][8 queries] f16; 16 more, so that tiles lie in
// different banks.
constexpr u32 WEIGHT_BYTES = TILE * QUERIES * 2 + 16;

// The levels of codes: the byte codebook of their type, and a level table for trellis types.
struct Levels {
    const Book& book;
    const LevelTable& table;
};

// Level tables of the trellis types.
constexpr bool K_IS_TRELLIS = is_trellis(K_TYPE), V_IS_TRELLIS = is_trellis(V_TYPE);
constexpr u32 V_TABLE = K_IS_TRELLIS && V_TYPE != K_TYPE ? 1 : 0;
constexpr u32 TABLES = V_IS_TRELLIS ? V_TABLE + 1 : K_IS_TRELLIS;

// Calls f with the constants 0 .. 4 or 0 .. 8.
template <u32 I>
struct Const { static constexpr u32 value = I; };
template <typename F>
__device__ inline void for_four(F f) {
    f(Const<0>()), f(Const<1>()), f(Const<2>()), f(Const<3>());
}
template <typename F>
__device__ inline void for_eight(F f) {
    for_four(f), f(Const<4>()), f(Const<5>()), f(Const<6>()), f(Const<7>());
}
template <typename F>
__device__ inline void for_mmas(F f) {
    if constexpr (MMAS == 8) for_eight(f);
    else for_four(f);
}

// Sixteen f16 scales.
struct Scales {
    uint4 half[2];
    __device__ void load(const u8* block) {
        for (int i = 0; i < 2; i++) half[i] = __ldg((const uint4*)block + i);
    }
    template <u32 I>
    __device__ float get() const {
        return from_half((u16)(word<I % 8 / 2>(half[I / 8]) >> (16 * (I % 2))));
    }
};

// Codes of keys are multiplied unchanged, as bytes above their bias, which saves an instruction per
// code: the accumulator of a block starts with the negative contribution of the bias, `minus_bias`.
// As f16 these bytes are subnormal, which tensor cores support exactly (doi 10.7717/peerj-cs.330
// for compute capabilities up to 8.0), so that only the bias is added to a code. Intermediate sums
// are two to four times as large as without it, by root mean square, and f32 rounds each by 2^-23
// at most; queries have been rounded by 2^-12. (With bytes above 1024 the sums would be more than
// twenty times as large.)
constexpr float BYTE_UNIT = 1.0f / (1 << 24);

// Returns whether codes are multiplied as bytes: levels of trellis types are looked up as f16.
__host__ __device__ constexpr bool has_bias(u32 type) { return is_coded(type) && !is_trellis(type); }

// Returns whether the scales of values join the softmax weights: a token has one scale, that of its
// only block.
__host__ __device__ constexpr bool weights_have_scales(u32 type) {
    return is_turbo(type) && SLICES == 1 && block_at(type, V_DIM, 0).n == V_DIM;
}
constexpr bool SCALED_WEIGHTS = weights_have_scales(V_TYPE);
// Outputs of codes without their scales: of bytes, which are subnormal as f16, or of levels.
constexpr float CODE_UNIT = has_bias(V_TYPE) ? BYTE_UNIT : 1.0f;

// Blocks of the keys whose accumulators start with the negative bias.
constexpr u32 K_BLOCKS = has_bias(K_TYPE) ? n_blocks(K_TYPE, K_DIM) : 0;

// Returns the contribution of the bias of block `block` with queries 2t and 2t + 1, negative.
__device__ inline float2 minus_bias_of(u32 block, const Book& book, const uint2* queries, u32 lane) {
    u32 minus = 0x80008000 | (u32)book.bias * 0x10001, all[4] = {minus, minus, minus, minus};
    float products[4] = {};
    for (u32 chunk = 0; chunk < K_DIM / 16; chunk++) {
        if (block_at(K_TYPE, K_DIM, 16 * chunk).index != block) continue;
        uint2 b = queries[32 * chunk + lane];
        multiply(products, all, b.x, b.y);
    }
    return make_float2(products[0], products[1]);
}

// Returns the initial accumulator of block `block`.
template <u32 TYPE>
__device__ inline float2 initial_sum(const float2 (*minus_bias)[4], u32 block, u32 lane) {
    if constexpr (has_bias(TYPE)) return minus_bias[block][lane % 4];
    return make_float2(0.0f, 0.0f);
}

// Adds the scores of the `DIMS` dims of one block, as `add_scores` does; `queries` begin with those
// dims.
template <u32 TYPE, u32 DIMS>
__device__ inline void add_block_scores(float scores[8][4], const u8* block, bool mine, const Levels& levels,
                                        const uint2* queries, float2 first_sum, u32 lane) {
    constexpr u32 CHUNKS = DIMS / 16, AHEAD = CHUNKS < 4 ? CHUNKS : 4;
    float block_scores[8][4];
    for (u32 i = 0; i < 8; i++) block_scores[i][0] = block_scores[i][2] = first_sum.x, block_scores[i][1] = block_scores[i][3] = first_sum.y;
    Scales scales;
    scales.load(block);
    Group<TYPE> last;
    if constexpr (is_trellis(TYPE)) last.load_predecessor(block + SCALE_BYTES, DIMS, lane);
#pragma unroll 1
    for (u32 first = 0; first < CHUNKS; first += AHEAD) {
        Group<TYPE> groups[AHEAD];
#pragma unroll
        for (u32 c = 0; c < AHEAD; c++) groups[c].load(block + SCALE_BYTES, DIMS, 4 * (first + c) + lane % 4);
#pragma unroll
        for (u32 c = 0; c < AHEAD; c++) {
            if constexpr (is_trellis(TYPE)) groups[c].set_predecessor(last), last = groups[c];
            uint2 b = queries[32 * (first + c) + lane];
            for_eight([&](auto i) {
                u32 a[4];
                if constexpr (is_trellis(TYPE)) level_fragment<i.value>(groups[c], levels.table, lane, a);
                else byte_fragment<0, i.value>(groups[c], levels.book, a);
                multiply(block_scores[i.value], a, b.x, b.y);
            });
        }
    }
    float step = mine ? levels.book.step / (has_bias(TYPE) ? BYTE_UNIT : 1.0f) : 0.0f;
    for_eight([&](auto i) {
        float low = scales.get<i.value>() * step, high = scales.get<i.value + 8>() * step;
        scores[i.value][0] += low * block_scores[i.value][0], scores[i.value][1] += low * block_scores[i.value][1];
        scores[i.value][2] += high * block_scores[i.value][2], scores[i.value][3] += high * block_scores[i.value][3];
    });
}

// Adds the scores of the 128 tokens of a unit: scores[i] of lane (g, t) are those of tokens i
// (first two) and i + 8 of tile g, with queries 2t and 2t + 1. Lanes whose tile is not `mine` read
// another one and add zero.
template <u32 TYPE>
__device__ inline void add_scores(float scores[8][4], const u8* tile, bool mine, const Levels& levels,
                                  const uint2* queries, const float2 (*minus_bias)[4], u32 lane) {
    if constexpr (TYPE < Q8_0) {
        float block_scores[8][4] = {};
#pragma unroll 1
        for (u32 chunk = 0; chunk < K_DIM / 16; chunk++) {
            Floats group;
            load_floats<TYPE>(group, tile, (16 * chunk + 4 * (lane % 4)) * TILE, TILE);
            uint2 b = queries[32 * chunk + lane];
            for_eight([&](auto i) {
                u32 a[4];
                fragment<i.value>(group, a);
                multiply(block_scores[i.value], a, b.x, b.y);
            });
        }
        for_eight([&](auto i) {
            for (int r = 0; r < 4; r++) scores[i.value][r] += mine ? block_scores[i.value][r] : 0.0f;
        });
    } else {
        constexpr u32 MAX_DIMS = is_turbo(TYPE) ? TURBO_DIMS : BLOCK32_DIMS, WHOLE_DIMS = K_DIM / MAX_DIMS * MAX_DIMS;
#pragma unroll 1
        for (u32 first = 0; first < WHOLE_DIMS; first += MAX_DIMS) {
            const u8* block = tile + block_byte(TYPE, first / MAX_DIMS, first);
            float2 initial = initial_sum<TYPE>(minus_bias, first / MAX_DIMS, lane);
            add_block_scores<TYPE, MAX_DIMS>(scores, block, mine, levels, queries + 2 * first, initial, lane);
        }
        if constexpr (K_DIM - WHOLE_DIMS >= 64) {
            const u8* block = tile + block_byte(TYPE, WHOLE_DIMS / MAX_DIMS, WHOLE_DIMS);
            float2 initial = initial_sum<TYPE>(minus_bias, WHOLE_DIMS / MAX_DIMS, lane);
            add_block_scores<TYPE, 64>(scores, block, mine, levels, queries + 2 * WHOLE_DIMS, initial, lane);
        }
        if constexpr ((K_DIM - WHOLE_DIMS) % 64 > 0) {
            constexpr Dims LAST = block_at(TYPE, K_DIM, K_DIM - 1);
            const u8* block = tile + block_byte(TYPE, LAST.index, LAST.first);
            float2 initial = initial_sum<TYPE>(minus_bias, LAST.index, lane);
            add_block_scores<TYPE, 32>(scores, block, mine, levels, queries + 2 * LAST.first, initial, lane);
        }
    }
}

// Returns the contribution of the centre of a unit to its scores with queries 2t and 2t + 1: all
// rows of the MMA are the centre, so that the result has the layout of the scores.
__device__ inline float2 centre_scores(const u16* centre, const uint2* queries, u32 lane) {
    float products[4] = {};
#pragma unroll
    for (u32 chunk = 0; chunk < K_DIM / 16; chunk++) {
        uint2 four = __ldg((const uint2*)(centre + 16 * chunk) + lane % 4), b = queries[32 * chunk + lane];
        u32 a[4] = {four.x, four.x, four.y, four.y};
        multiply(products, a, b.x, b.y);
    }
    return make_float2(products[0], products[1]);
}
