// Transposes float tiles in shared memory to the order of quantized ones, with a contiguous
// reduction dimension.

#pragma once

#include "unpack.cuh"

// Returns four rows of eight f16 as eight rows of four, pair `q` of them: row 2 q is in x and y,
// row 2 q + 1 in z and w.
__device__ inline uint4 transposed(const u32 (&rows)[4][4], u32 q) {
    return make_uint4(__byte_perm(rows[0][q], rows[1][q], 0x5410), __byte_perm(rows[2][q], rows[3][q], 0x5410),
                      __byte_perm(rows[0][q], rows[1][q], 0x7632), __byte_perm(rows[2][q], rows[3][q], 0x7632));
}

// Transposes a tile that is stored in rows of dims (keys) or of tokens (values). A lane transposes
// four rows of eight at a time: of keys eight tokens in sixteen lanes, so that these write whole
// rows; of values four tokens in each four lanes.
template <bool KEYS, u32 DIM>
__device__ void load_transposed(u32 type, const u8* tile, u16* to, u32 lane) {
    constexpr u32 COLS = KEYS ? TILE : DIM;
#pragma unroll 2
    for (u32 pass = 0; pass < DIM / 64; pass++) {
        u32 row = 4 * (KEYS ? 16 * pass + lane % 16 : lane % 4), col = 8 * (KEYS ? lane / 16 : 8 * pass + lane / 4);
        u32 rows[4][4];
#pragma unroll
        for (u32 r = 0; r < 4; r++) *(uint4*)rows[r] = eight_halves(type, tile, (row + r) * COLS + col);
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            uint4 pair = transposed(rows, q);
            u32 first = col + 2 * q;
            *(uint2*)(to + (KEYS ? token_major(DIM, first, row) : dim_major(first, row))) = make_uint2(pair.x, pair.y);
            *(uint2*)(to + (KEYS ? token_major(DIM, first + 1, row) : dim_major(first + 1, row))) = make_uint2(pair.z, pair.w);
        }
    }
}

// Loads a tile of a KV tensor that stores TYPE, or f16.
template <bool KEYS, u32 DIM, u32 TYPE>
__device__ void load_stored_transposed(const AttendParams& p, const Tile& tile, const u16* centre, u16* to, u32 lane) {
    if constexpr (is_coded(TYPE)) {
        if (tile.type == TYPE) {
            load_coded<KEYS, DIM, TYPE>(p.books[TYPE], tile.at, centre, to, lane);
            return;
        }
    }
    load_transposed<KEYS, DIM>(is_coded(TYPE) || TYPE == F16 ? F16 : tile.type, tile.at, to, lane);
}

// Writes zeros in place of a tile of DIM dims.
template <u32 DIM>
__device__ void store_zeros(u16* to, u32 lane) {
    for (u32 i = 8 * lane; i < TILE * DIM; i += 8 * 32) *(uint4*)(to + i) = make_uint4(0, 0, 0, 0);
}
