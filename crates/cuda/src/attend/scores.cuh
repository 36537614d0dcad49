// Scores of a unit: the products of keys with eight queries, and of their centre. decode.rs
// describes the method.
//
// Macros: K_TYPE, V_TYPE, K_DIM, V_DIM.

#pragma once

#include "fold.cuh"
#include "groups.cuh"

// Bytes of the softmax weights of a tile, [QUERIES][16 tokens] in 16 bit; 16 more, so that tiles
// lie in different banks.
constexpr u32 WEIGHT_BYTES = TILE * QUERIES * 2 + 16;

// The levels of codes: the byte codebook of their type, and a level table for trellis types.
struct Levels {
    Book book;
    const LevelTable& table;
};

// Level tables of the trellis types.
constexpr bool K_IS_TRELLIS = is_trellis(K_TYPE), V_IS_TRELLIS = is_trellis(V_TYPE);
constexpr u32 V_TABLE = K_IS_TRELLIS && V_TYPE != K_TYPE ? 1 : 0;
constexpr u32 TABLES = V_IS_TRELLIS ? V_TABLE + 1 : K_IS_TRELLIS;

// Calls f with the constants 0 .. 4, or 0 .. FOURS.
template <u32 I>
struct Const { static constexpr u32 value = I; };
template <typename F>
__device__ inline void for_four(F f) {
    f(Const<0>()), f(Const<1>()), f(Const<2>()), f(Const<3>());
}
template <typename F>
__device__ inline void for_fours(F f) {
    f(Const<0>()), f(Const<1>());
    if constexpr (FOURS == 4) f(Const<2>()), f(Const<3>());
}

// Calls f with the constants of each four and each of its rows.
template <typename F>
__device__ inline void for_rows(F f) {
    for_four([&](auto i) { for_four([&](auto r) { f(i, r); }); });
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

// Returns whether codes are multiplied as bytes: levels of trellis types are looked up as f16, and
// codes of blocks of 32 dims need no look-up that bytes would shorten.
__host__ __device__ constexpr bool has_bytes(u32 type) { return is_turbo(type) && !is_trellis(type); }

// Returns the book of a type; with `is_signed` the bytes less their bias.
__device__ inline Book book_of(const AttendParams& p, u32 type, bool is_signed) {
    Book book = p.books[type];
    for (u32 i = 0; i < 4 && is_signed; i++) book.bytes[i] ^= 0x80808080;
    return book;
}

// Returns whether the scales of values join the softmax weights: the tokens of a slice have one
// scale, that of their only block.
__host__ __device__ constexpr bool weights_have_scales(u32 type) { return is_turbo(type) && n_blocks(type, V_DIM) == SLICES; }
constexpr bool SCALED_WEIGHTS = weights_have_scales(V_TYPE);

// Queries as right operands. Bytes are those of 16-bit fixed point, whose unit is the largest
// magnitude of a query by QUERY_STEPS.
constexpr float QUERY_STEPS = 127 * 256 + 127;
struct Queries {
    uint2 halves[K_DIM / 16][QUERIES][4];                     // by chunk of 16 dims, query and t
    uint4 bytes[has_bytes(K_TYPE) ? K_DIM / 16 : 1][QUADS][32];  // by chunk, quad and lane: high bytes, low bytes
    float unit[QUERIES];                                      // of the bytes, times the step of keys

    __device__ void load_halves(HalfOperands b[QUADS], u32 chunk, u32 lane) const {
        for (u32 quad = 0; quad < QUADS; quad++) b[quad].set(halves[chunk][4 * quad + lane / 8][lane % 4], lane);
    }
    // Leaves four dims of a query, `first` and the next three.
    __device__ void set_halves(u32 first, u32 query, const float4& x) {
        halves[first / 16][query][first % 16 / 4] = make_uint2(pack_halves(x.x, x.y), pack_halves(x.z, x.w));
    }
    // Leaves them in fixed point: `number * unit`.
    __device__ void set_bytes(u32 first, u32 query, const float4& x, float steps) {
        u32 high = 0, low = 0;
        float four[4] = {x.x, x.y, x.z, x.w};
        for (u32 e = 0; e < 4; e++) {
            int number = __float2int_rn(four[e] * steps);
            high |= ((u32)(number + 128) >> 8 & 255) << (8 * e);
            low |= ((u32)number & 255) << (8 * e);
        }
        for (u32 odd = 0; odd < 2; odd++) {
            uint2 upper = byte_operand(high, odd), lower = byte_operand(low, odd);
            bytes[first / 16][query / 4][8 * (query % 4) + 4 * odd + first % 16 / 4] = make_uint4(upper.x, upper.y, lower.x, lower.y);
        }
    }
};

// The sums of a unit in bytes, exact: 256 high + low.
struct ByteSums {
    int high[QUADS][4][4], low[QUADS][4][4];

    __device__ void clear() {
        for (u32 quad = 0; quad < QUADS; quad++) {
            for (u32 i = 0; i < 4; i++) {
                for (u32 r = 0; r < 4; r++) high[quad][i][r] = low[quad][i][r] = 0;
            }
        }
    }
    __device__ float get(u32 quad, u32 i, u32 r) const { return (float)(256 * high[quad][i][r] + low[quad][i][r]); }
};

// Returns rows I and I + 8 of codes without their scales, as f16 in the order of `level_fragment`.
template <u32 I, u32 TYPE>
__device__ inline void code_fragment(const Group<TYPE>& group, const Levels& levels, u32 lane, u32 a[4]) {
    if constexpr (is_trellis(TYPE)) {
        level_fragment<I>(group, levels.table, lane, a);
    } else {
        u32 bias = pack_halves(1024.0f + levels.book.bias, 1024.0f + levels.book.bias);
        half_fragment<I>(group, levels.book, a);
        for (u32 r = 0; r < 4; r++) a[r] = half_sub(a[r], bias);
    }
}

constexpr u32 min_of(u32 a, u32 b) { return a < b ? a : b; }

// Whether eight queries share the registers of three blocks.
constexpr bool HAS_FEW_REGISTERS = QUADS > 1 && V_DIM <= 128;

// Groups of codes that are loaded together, at most: as many as leave the sums in registers.
__host__ __device__ constexpr u32 groups_ahead(u32 type) {
    return type == Q8_0 || (HAS_FEW_REGISTERS && is_trellis(type)) ? 2 : 4;
}

// The sums of a block of other codes, as f16.
struct HalfSums {
    float sums[QUADS][4][4];

    __device__ void clear() {
        for (u32 quad = 0; quad < QUADS; quad++) {
            for_rows([&](auto i, auto r) { sums[quad][i.value][r.value] = 0.0f; });
        }
    }
    __device__ float get(u32 quad, u32 i, u32 r) const { return sums[quad][i][r]; }
};

template <bool HAS_BYTES>
struct KeySums : ByteSums {};
template <>
struct KeySums<false> : HalfSums {};

// Groups of keys that are loaded together, at most.
__host__ __device__ constexpr u32 keys_ahead(u32 type) {
    if (has_bytes(type)) return groups_ahead(type);
    return is_trellis(type) ? 4 : groups_ahead(type) / (HAS_FEW_REGISTERS ? 2 : 1);
}

// Adds the products of a group of keys.
template <u32 TYPE>
__device__ inline void add_products(ByteSums& sums, const Group<TYPE>& group, const Levels& levels, const Queries& queries, u32 chunk, u32 lane) {
    uint4 b[QUADS];
    for (u32 quad = 0; quad < QUADS; quad++) b[quad] = queries.bytes[chunk][quad][lane];
    for_four([&](auto i) {
        u32 a[4];
        byte_fragment<i.value>(group, levels.book, a);
        for (u32 quad = 0; quad < QUADS; quad++) {
            multiply_queries(sums.high[quad][i.value], a, b[quad].x, b[quad].y);
            multiply_queries(sums.low[quad][i.value], a, b[quad].z, b[quad].w);
        }
    });
}

template <u32 TYPE>
__device__ inline void add_products(HalfSums& sums, const Group<TYPE>& group, const Levels& levels, const Queries& queries, u32 chunk, u32 lane) {
    HalfOperands b[QUADS];
    queries.load_halves(b, chunk, lane);
    for_four([&](auto i) {
        u32 rows[4], later[4];
        code_fragment<i.value>(group, levels, lane, rows);
        code_fragment<i.value + 4>(group, levels, lane, later);
        for (u32 quad = 0; quad < QUADS; quad++) b[quad].multiply_rows(sums.sums[quad][i.value], rows, later);
    });
}

// Adds the scores of the `DIMS` dims of one block, which begin with chunk `first_chunk`, as
// `add_scores` does.
template <u32 TYPE, u32 DIMS>
__device__ inline void add_block_scores(float scores[QUADS][4][4], const u8* block, bool mine, const Levels& levels,
                                        const Queries& queries, u32 first_chunk, u32 lane) {
    constexpr u32 CHUNKS = DIMS / 16, AHEAD = min_of(CHUNKS, keys_ahead(TYPE));
    KeySums<has_bytes(TYPE)> sums;
    sums.clear();
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
            add_products(sums, groups[c], levels, queries, first_chunk + first + c, lane);
        }
    }
#pragma unroll
    for (u32 quad = 0; quad < QUADS; quad++) {
        float unit = 0.0f;
        if (mine) unit = has_bytes(TYPE) ? queries.unit[4 * quad + lane % 4] : levels.book.step;
        for_rows([&](auto i, auto r) {
            scores[quad][i.value][r.value] += scales.get<i.value + row_of(r.value)>() * unit * sums.get(quad, i.value, r.value);
        });
    }
}

// Adds the scores of the 128 tokens of a unit: scores[quad][i][r] of lane (g, t) is that of token i
// + row_of(r) of tile g with query t of the quad. Lanes whose tile is not `mine` read another one
// and add zero.
template <u32 TYPE>
__device__ inline void add_scores(float scores[QUADS][4][4], const u8* tile, bool mine, const Levels& levels, const Queries& queries, u32 lane) {
    constexpr u32 MAX_DIMS = is_turbo(TYPE) ? TURBO_DIMS : BLOCK32_DIMS, WHOLE_DIMS = K_DIM / MAX_DIMS * MAX_DIMS;
#pragma unroll 1
    for (u32 first = 0; first < WHOLE_DIMS; first += MAX_DIMS) {
        const u8* block = tile + block_byte(TYPE, first / MAX_DIMS, first);
        add_block_scores<TYPE, MAX_DIMS>(scores, block, mine, levels, queries, first / 16, lane);
    }
    if constexpr (K_DIM - WHOLE_DIMS >= 64) {
        const u8* block = tile + block_byte(TYPE, WHOLE_DIMS / MAX_DIMS, WHOLE_DIMS);
        add_block_scores<TYPE, 64>(scores, block, mine, levels, queries, WHOLE_DIMS / 16, lane);
    }
    if constexpr ((K_DIM - WHOLE_DIMS) % 64 > 0) {
        constexpr Dims LAST = block_at(TYPE, K_DIM, K_DIM - 1);
        const u8* block = tile + block_byte(TYPE, LAST.index, LAST.first);
        add_block_scores<TYPE, 32>(scores, block, mine, levels, queries, LAST.first / 16, lane);
    }
}

// Adds the scores of float tiles likewise. Lanes whose tile is not `mine` multiply zeros.
template <u32 TYPE>
__device__ inline void add_float_scores(float scores[QUADS][4][4], const u8* tile, bool mine, const Queries& queries, u32 lane) {
    Floats group = {};
#pragma unroll 1
    for (u32 chunk = 0; chunk < K_DIM / 16; chunk++) {
        if (mine) load_floats<TYPE>(group, tile, (16 * chunk + 4 * (lane % 4)) * TILE, TILE);
        HalfOperands b[QUADS];
        queries.load_halves(b, chunk, lane);
        for_four([&](auto i) {
            u32 rows[4], later[4];
            fragment<i.value>(group, rows);
            fragment<i.value + 4>(group, later);
            for (u32 quad = 0; quad < QUADS; quad++) b[quad].multiply_rows(scores[quad][i.value], rows, later);
        });
    }
}

// Returns the contribution of the centre of a unit to its scores with query t of each quad. Two
// columns have the same query, and all rows the centre: rows 0 .. 8 dims 8t .. 8t + 2 and 8t + 4 ..
// 8t + 6 of each 32, rows 8 .. 16 the others, in the order of memory, which moves no registers. An
// MMA with the queries of either leaves its sum in these rows.
__device__ inline void centre_scores(float products[QUADS], const u16* centre, const Queries& queries, u32 lane) {
    float first[QUADS][4] = {}, second[QUADS][4] = {};
#pragma unroll
    for (u32 chunk = 0; chunk < K_DIM / 16; chunk += 2) {
        uint4 eight = __ldg((const uint4*)(centre + 16 * chunk) + lane % 4);
        u32 a[4] = {eight.x, eight.y, eight.z, eight.w};
        for (u32 quad = 0; quad < QUADS; quad++) {
            const uint2* b = &queries.halves[chunk + lane % 4 / 2][4 * quad + lane / 8][lane % 2 * 2];
            multiply(first[quad], a, b[0].x, b[1].x);
            multiply(second[quad], a, b[0].y, b[1].y);
        }
    }
    for (u32 quad = 0; quad < QUADS; quad++) products[quad] = first[quad][0] + second[quad][2];
}
