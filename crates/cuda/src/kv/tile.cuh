// The streams of a layer and their tiles, as kvant_codec::tile lays them out: 16 tokens of one head, K or V.
//
// Coded tiles are blocks of 128 dims (turbo) or 32 (q8_0, q4_0): 16 f16 scales, then groups of 64 codes. A group has
// 16 lanes of 4 codes. For keys a lane is a token and its codes are 4 dims; for values a lane is a dim and its codes
// are 4 tokens: what a product sums over lies side by side.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 TILE = 16;
constexpr u32 TILES_PER_PAGE = 8;

// Types of a stream, as the host numbers them.
enum { F32, F16, BF16, Q8_0, Q4_0, TURBO2, TURBO3, TURBO4 };

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

__host__ __device__ constexpr bool is_coded(u32 type) { return type >= Q8_0; }
__host__ __device__ constexpr bool is_turbo(u32 type) { return type >= TURBO2; }
__host__ __device__ constexpr u32 block_dims(u32 type) { return is_turbo(type) ? 128 : 32; }

// Bytes of the 16 codes of one dim, times 4: of a group.
__host__ __device__ constexpr u32 group_bytes(u32 type) {
    switch (type) {
        case Q8_0: return 64;
        case TURBO2: return 16;
        case TURBO3: return 24;
        default: return 32;  // Q4_0, TURBO4
    }
}

// Bytes of a block of 16 tokens, scales included.
__host__ __device__ constexpr u32 block_bytes(u32 type) { return 32 + block_dims(type) / 4 * group_bytes(type); }

__host__ __device__ constexpr u32 tile_bytes(u32 type, u32 dim) {
    if (is_coded(type)) return dim / block_dims(type) * block_bytes(type);
    return dim * TILE * (type == F32 ? 4 : 2);
}

// A KV head of a sequence in an attention launch.
struct Slot {
    u32 first_row;  // of the sequence, among the queries and the outputs
    u32 kv_head;
    u32 start;      // position of its first row
    u32 unused;
};

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

__device__ inline float from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// To the nearest f16, ties to even.
__device__ inline u16 to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// A pair of halves, `low` in the lower bits.
__device__ inline u32 pack_halves(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float from_bfloat(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Brought into [-max, max]; NaN becomes 0.
__device__ inline float clamped(float x, float max) {
    return x != x ? 0.0f : fminf(fmaxf(x, -max), max);
}
constexpr float HALF_MAX = 65504.0f;
