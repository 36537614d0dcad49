// The streams of a layer and their tiles, as kvant_codec::tile lays them out: 16 tokens of one head, K or V.
//
// Coded tiles are blocks of 128 dims (turbo) or 32 (q8_0, q4_0): 16 f16 scales, then groups of 64 codes. A group has
// 16 lanes of 4 codes. For keys a lane is a token and its codes are 4 dims; for values a lane is a dim and its codes
// are 4 tokens: what a product sums over lies side by side.
//
// Types and sizes are those of Rust (constants in kv/mod.rs).

#pragma once

#include "constants.cuh"
#include "half.cuh"

// One side of one KV head of a layer.
struct Stream {
    const u64* pages;  // addresses of the main pages
    u8* sink;          // f16 tiles of the first tokens
    u8* tail;          // ring of f16 tiles of the youngest tokens
    u32 type;          // of the main tiles
    u32 dim;           // values per token as stored
    u32 sink_tiles;
    u32 tail_tiles;    // 0: no tail
    u32 main_end;      // tokens from the sink to here are in main tiles
    u32 len;
    u32 rotates;
    float alpha;       // factor on values encoded into main tiles
};

static_assert(F32 < Q8_0 && F16 < Q8_0 && BF16 < Q8_0 && Q8_0 < TURBO2 && Q4_0 < TURBO2, "types are in this order");
static_assert(TURBO3 == TURBO2 + 1 && TURBO4 == TURBO2 + 2, "a book has the number of its type");

__host__ __device__ constexpr bool is_coded(u32 type) { return type >= Q8_0; }
__host__ __device__ constexpr bool is_turbo(u32 type) { return type >= TURBO2; }
__host__ __device__ constexpr u32 block_dims(u32 type) { return is_turbo(type) ? TURBO_DIMS : BLOCK32_DIMS; }

// Bytes of the 16 codes of one dim, times 4: of a group.
__host__ __device__ constexpr u32 group_bytes(u32 type) {
    switch (type) {
        case Q8_0: return Q8_0_GROUP;
        case TURBO2: return TURBO2_GROUP;
        case TURBO3: return TURBO3_GROUP;
        default: return NIBBLES_GROUP;  // Q4_0, TURBO4
    }
}

// The planes of turbo3 are those of turbo2, then the highest bits, so many bytes of a group.
constexpr u32 HIGH_GROUP = TURBO3_GROUP - TURBO2_GROUP;
constexpr u32 HIGH_PLANES = TURBO_DIMS / 4 * TURBO2_GROUP;

// Bytes of a block of 16 tokens, scales included.
__host__ __device__ constexpr u32 block_bytes(u32 type) {
    return SCALE_BYTES + block_dims(type) / 4 * group_bytes(type);
}

__host__ __device__ constexpr u32 tile_bytes(u32 type, u32 dim) {
    if (is_coded(type)) return dim / block_dims(type) * block_bytes(type);
    return dim * TILE * (type == F32 ? 4 : 2);
}

// Which part of the stream tile `index` lies in, once the main tiles end at token `main_end`.
enum { IN_SINK, IN_MAIN, IN_TAIL };

__device__ inline u32 place_of(const Stream& s, u32 index, u32 main_end) {
    if (index < s.sink_tiles) return IN_SINK;
    return index * TILE < main_end || s.tail_tiles == 0 ? IN_MAIN : IN_TAIL;
}

__device__ inline u8* tile_at(const Stream& s, u32 index, u32 place) {
    u32 f16_bytes = s.dim * TILE * 2;
    if (place == IN_SINK) return s.sink + index * f16_bytes;
    if (place == IN_TAIL) return s.tail + index % s.tail_tiles * f16_bytes;
    u32 tile = index - s.sink_tiles;
    return (u8*)s.pages[tile / TILES_PER_PAGE] + tile % TILES_PER_PAGE * tile_bytes(s.type, s.dim);
}

__device__ inline float from_bfloat(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Brought into [-max, max]; NaN becomes 0.
__device__ inline float clamped(float x, float max) {
    return x != x ? 0.0f : fminf(fmaxf(x, -max), max);
}
