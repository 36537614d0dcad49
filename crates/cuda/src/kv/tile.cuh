// The KV tensors of a layer and their tiles, in the layout of kvant_codec::tile: 16 tokens of one
// head, K or V.
//
// Quantized tiles are blocks of 32 dims (q8_0, q4_0), or of as many blocks of 128 as fit, then one
// of 64 and one of 32 where they do (turbo): 16 f16 scales, then groups of 64 codes. A group has 16
// lanes of 4 codes. For keys a lane is a token and its codes are 4 dims; for values a lane is a dim
// and its codes are 4 tokens: the reduction dimension is contiguous.
//
// Rust defines the types and sizes (constants in kv/mod.rs).

#pragma once

#include "constants.cuh"
#include "half.cuh"

// Storage format of the keys or the values of a KV head.
struct Spec {
    u8 type;         // of the main tiles
    u8 centres;      // whether codes are relative to the centre of their block
    u16 dim;         // stored values per token
    u16 sink_tiles;
    u16 tail_tiles;  // 0: no tail
    u32 tile_bytes;  // of the main tiles
};

// Offsets in each allocation, in bytes.
struct Offsets {
    u32 main;  // its tiles in a block
    u32 sink;
    u32 tail;
    u32 step_tiles;  // times the number of step tiles
};

// The allocations of a sequence.
struct Memory {
    const u64* blocks;  // addresses of the blocks, 8 tiles of each KV tensor
    u8* sink;           // f16 tiles of the first tokens
    u8* tail;           // rings of f16 tiles of the latest tokens
    u8* step_tiles;           // f16 step tiles: visible to some rows, but no longer in the tail
};

// Returns the channel scales that begin at `at`, from `column` on: null without channel scales of
// that kind.
__device__ inline const float* balance_head(const float* balance, u32 at, u32 column) {
    return balance && at != UNSCALED ? balance + at + column : nullptr;
}

static_assert(F32 < Q8_0 && F16 < Q8_0 && BF16 < Q8_0 && Q8_0 < TURBO2 && Q4_0 < TURBO2, "types are in this order");
static_assert(TURBO3 == TURBO2 + 1 && TURBO4 == TURBO2 + 2, "a book has the number of its type");
static_assert(TURBO2T == TURBO4 + 1 && TURBO3T == TURBO4 + 2, "trellis types are the last");

__host__ __device__ constexpr bool is_coded(u32 type) { return type >= Q8_0; }
__host__ __device__ constexpr bool is_turbo(u32 type) { return type >= TURBO2; }
// Returns whether a type is trellis-coded: levels are looked up with the last six bits of the code
// sequence.
__host__ __device__ constexpr bool is_trellis(u32 type) { return type >= TURBO2T; }
// Returns the type with the same code layout as `type`.
__host__ __device__ constexpr u32 layout_of(u32 type) { return is_trellis(type) ? type - TURBO2T + TURBO2 : type; }
// Returns the bytes of a group: the 16 codes of one dim, times 4.
__host__ __device__ constexpr u32 group_bytes(u32 type) {
    switch (layout_of(type)) {
        case Q8_0: return Q8_0_GROUP;
        case TURBO2: return TURBO2_GROUP;
        case TURBO3: return TURBO3_GROUP;
        default: return NIBBLES_GROUP;  // Q4_0, TURBO4
    }
}

// The planes of turbo3 are those of turbo2, then the highest bits, HIGH_GROUP bytes per group.
constexpr u32 HIGH_GROUP = TURBO3_GROUP - TURBO2_GROUP;
__host__ __device__ constexpr u32 high_planes(u32 dims) { return dims / 4 * TURBO2_GROUP; }

// A block of a quantized tile.
struct Dims {
    u32 index;
    u32 first;  // its first dim
    u32 n;      // its number of dims
};

// Returns the block of dim `at` of `dim`. A width that does not fit a larger block counts as one of
// 32.
__host__ __device__ constexpr Dims block_at(u32 type, u32 dim, u32 at) {
    u32 max_dims = is_turbo(type) ? TURBO_DIMS : BLOCK32_DIMS;
    u32 index = dim / max_dims, first = index * max_dims;
    if (at < first) return {at / max_dims, at / max_dims * max_dims, max_dims};
    for (u32 n = max_dims / 2; n > MIN_DIMS; n /= 2) {
        if (!(dim & n)) continue;
        if (at < first + n) return {index, first, n};
        index++, first += n;
    }
    return {index, first, MIN_DIMS};
}

// Returns the blocks of `dim` dims, a multiple of 32.
__host__ __device__ constexpr u32 n_blocks(u32 type, u32 dim) { return block_at(type, dim, dim - 1).index + 1; }

// Returns the offset of a block.
__host__ __device__ constexpr u32 block_byte(u32 type, u32 index, u32 first) {
    return index * SCALE_BYTES + first / 4 * group_bytes(type);
}

__host__ __device__ constexpr u32 f16_bytes(u32 dim) { return dim * TILE * 2; }

// Returns the bytes of a tile of codes.
__host__ __device__ constexpr u32 tile_bytes(u32 type, u32 dim) { return block_byte(type, n_blocks(type, dim), dim); }

// The part of a KV tensor that holds tile `index`, when those before `coded` are in the sink or the
// blocks.
enum { IN_SINK, IN_MAIN, IN_TAIL };

__device__ inline u32 location_of(const Spec& s, u32 index, u32 coded) {
    if (index < s.sink_tiles) return IN_SINK;
    return index < coded || s.tail_tiles == 0 ? IN_MAIN : IN_TAIL;
}

__device__ inline u8* tile_at(const Memory& m, const Spec& s, const Offsets& at, u32 index, u32 location) {
    if (location == IN_SINK) return m.sink + at.sink + index * f16_bytes(s.dim);
    if (location == IN_TAIL) return m.tail + at.tail + index % s.tail_tiles * f16_bytes(s.dim);
    return (u8*)m.blocks[index / TILES_PER_BLOCK] + at.main + index % TILES_PER_BLOCK * s.tile_bytes;
}

// Returns the centre of the block of tile `index`, which is at `tile`, [dim] f16: it follows the
// tiles.
__device__ inline const u16* centre_of(const Spec& s, u32 index, const u8* tile) {
    return (const u16*)(tile + (TILES_PER_BLOCK - index % TILES_PER_BLOCK) * s.tile_bytes);
}

// The step tiles of a KV tensor: `tiles` of them, from `first` on.
struct StepTiles { u32 first; u32 tiles; };

__device__ inline u8* step_tile_at(const Memory& m, const Spec& s, const Offsets& at, const StepTiles& step_tiles, u32 index) {
    return m.step_tiles + (size_t)step_tiles.tiles * at.step_tiles + (size_t)(index - step_tiles.first) * f16_bytes(s.dim);
}

__device__ inline float from_bfloat(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Clamps to [-max, max]; NaN becomes 0.
__device__ inline float clamped(float x, float max) {
    return x != x ? 0.0f : fminf(fmaxf(x, -max), max);
}
