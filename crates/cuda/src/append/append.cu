// Writes new keys and values: pad, rotate, encode whole tiles. The method is that of kvant-codec, value for value.
//
// One block of four warps makes one tile of one stream; a warp takes every fourth token. A launch writes either the
// tiles of sink and main pages, which may read the tail, or the tiles of the tail.

#include "tile.cuh"

constexpr u32 WARPS = 4;
constexpr u32 MAX_STREAMS = 32;

struct AppendParams {
    Stream streams[MAX_STREAMS];  // keys of the heads, then their values
    const float* k;               // [rows, n_kv_heads * k_head_dim]
    const float* v;               // [rows, n_kv_heads * v_head_dim]
    u32 n_heads;                  // of this launch
    u32 first_head;
    u32 n_kv_heads;
    u32 head_dims[2];
    u32 rows;
    u32 to_tail;                  // which tiles this launch writes
    u32 before[4];                // signs of the rotation, bit i for value i of a slice
    u32 after[4];
    float levels[3][16];          // centroids of turbo2, turbo3, turbo4
    float mids[3][16];            // decision points for unit variance
};

// What lane l of a warp holds of a slice of 128: values 4l .. 4l + 3.
struct Quad { float x[4]; };

__device__ float warp_sum(float v) {
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

__device__ double warp_sum(double v) {
    for (int step = 16; step > 0; step /= 2) {
        int low = __double2loint(v), high = __double2hiint(v);
        v += __hiloint2double(__shfl_xor_sync(~0u, high, step), __shfl_xor_sync(~0u, low, step));
    }
    return v;
}

__device__ void flip(Quad& q, const u32* signs, u32 lane) {
    u32 bits = signs[lane / 8] >> (4 * (lane % 8));
    for (int i = 0; i < 4; i++) {
        if (bits >> i & 1) q.x[i] = -q.x[i];
    }
}

// signs H / sqrt(128) signs x, with the codec's order of operations.
__device__ void rotate(Quad& q, const u32* first, const u32* last, u32 lane) {
    flip(q, first, lane);
    float a = q.x[0] + q.x[1], b = q.x[0] - q.x[1], c = q.x[2] + q.x[3], d = q.x[2] - q.x[3];
    q.x[0] = a + c, q.x[1] = b + d, q.x[2] = a - c, q.x[3] = b - d;
    for (int step = 1; step < 32; step *= 2) {
        for (int i = 0; i < 4; i++) {
            float other = __shfl_xor_sync(~0u, q.x[i], step);
            q.x[i] = lane & step ? other - q.x[i] : q.x[i] + other;
        }
    }
    for (int i = 0; i < 4; i++) q.x[i] = __fmul_rn(q.x[i], 0.088388347648318440f);
    flip(q, last, lane);
}

// Codes a slice that is rotated already; gives the scale.
__device__ u16 encode_turbo(const float* levels, const float* mids, u32 n_levels, Quad q, u8* codes) {
    double squares = 0.0;
    for (int i = 0; i < 4; i++) {
        q.x[i] = clamped(q.x[i], HALF_MAX);
        squares += (double)q.x[i] * (double)q.x[i];
    }
    double norm = sqrt(warp_sum(squares));
    bool is_tiny = norm < 1e-10;
    float to_unit = is_tiny ? 0.0f : (float)(11.313708498984761 / norm);
    double coded = 0.0;
    for (int i = 0; i < 4; i++) {
        float z = __fmul_rn(q.x[i], to_unit);
        u32 index = 0;
        for (u32 m = 0; m + 1 < n_levels; m++) index += z >= mids[m];
        codes[i] = (u8)index;
        coded += (double)levels[index] * (double)levels[index];
    }
    coded = sqrt(warp_sum(coded));
    return is_tiny ? 0 : to_half(clamped((float)(norm / coded), HALF_MAX));
}

// Codes a block of 32, held by eight lanes; gives the scale. Lanes of a block that is not there compute along.
__device__ u16 encode_block32(u32 type, Quad q, u32 lane, u8* codes) {
    float extreme = 0.0f;
    u32 at = 0;
    for (int i = 0; i < 4; i++) {
        q.x[i] = clamped(q.x[i], HALF_MAX);
        if (fabsf(q.x[i]) > fabsf(extreme)) extreme = q.x[i], at = 4 * lane + i;
    }
    for (int step = 4; step > 0; step /= 2) {
        float other = __shfl_xor_sync(~0u, extreme, step);
        u32 other_at = __shfl_xor_sync(~0u, at, step);
        bool larger = fabsf(other) > fabsf(extreme);
        bool equal = fabsf(other) == fabsf(extreme);
        // The first of equals; a zero has no place.
        if (larger || (equal && other_at < at)) extreme = other, at = other_at;
    }
    float d = type == Q8_0 ? fabsf(extreme) / 127.0f : extreme / -8.0f;
    u16 scale = to_half(clamped(d, HALF_MAX));
    float inverse = (scale & 0x7fff) == 0 ? 0.0f : 1.0f / d;
    for (int i = 0; i < 4; i++) {
        if (type == Q8_0) {
            codes[i] = (u8)((int)roundf(__fmul_rn(q.x[i], inverse)) + 128);
        } else {
            float code = __fadd_rn(__fadd_rn(__fmul_rn(q.x[i], inverse), 8.0f), 0.5f);
            codes[i] = (u8)min((int)fmaxf(code, 0.0f), 15);
        }
    }
    return scale;
}

// Group and place within it of the code of (slot, dim of the block).
__device__ void code_place(bool is_key, u32 slot, u32 dim, u32& group, u32& j) {
    group = is_key ? dim / 4 : dim / 16 * 4 + slot / 4;
    j = is_key ? 4 * slot + dim % 4 : 4 * (dim % 16) + slot % 4;
}

__device__ u8 stored_code(u32 type, const u8* planes, u32 group, u32 j) {
    switch (type) {
        case Q8_0: return planes[64 * group + j];
        case TURBO2: return planes[16 * group + j % 16] >> (2 * (j / 16)) & 3;
        case TURBO3:
            return (planes[16 * group + j % 16] >> (2 * (j / 16)) & 3) |
                   (planes[512 + 8 * group + j / 8] >> (j % 8) & 1) << 2;
        default: return planes[32 * group + j % 32] >> (4 * (j / 32)) & 15;
    }
}

// One byte of a block's planes, from the codes of the tile `[16][dim]`.
__device__ u8 plane_byte(u32 type, bool is_key, const u8* codes, u32 dim, u32 first_dim, u32 byte) {
    auto code = [&](u32 group, u32 j) -> u32 {
        u32 slot = is_key ? j / 4 : group % 4 * 4 + j % 4;
        u32 at = is_key ? 4 * group + j % 4 : group / 4 * 16 + j / 4;
        return codes[slot * dim + first_dim + at];
    };
    switch (type) {
        case Q8_0: return (u8)code(byte / 64, byte % 64);
        case TURBO2:
        case TURBO3: {
            u32 value = 0;
            if (byte < 512) {
                for (u32 i = 0; i < 4; i++) value |= (code(byte / 16, byte % 16 + 16 * i) & 3) << (2 * i);
            } else {
                u32 high = byte - 512;
                for (u32 i = 0; i < 8; i++) value |= (code(high / 8, high % 8 * 8 + i) >> 2) << i;
            }
            return (u8)value;
        }
        default: return (u8)(code(byte / 32, byte % 32) | code(byte / 32, byte % 32 + 32) << 4);
    }
}

// Where a float lies in a float tile.
__device__ u32 float_place(bool is_key, u32 slot, u32 dim_of, u32 dim) {
    return is_key ? dim_of * TILE + slot : slot * dim + dim_of;
}

extern "C" __global__ void __launch_bounds__(128) append_tile(const __grid_constant__ AppendParams p) {
    extern __shared__ u8 shared[];
    bool is_key = blockIdx.y < p.n_heads;
    const Stream& s = p.streams[blockIdx.y];
    u32 head = p.first_head + blockIdx.y % p.n_heads;
    u32 head_dim = p.head_dims[is_key ? 0 : 1];
    const float* x = is_key ? p.k : p.v;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // The plan, as Append of kvant-backend has it.
    u32 end = s.len + p.rows, sink_end = s.sink_tiles * TILE, new_main_end;
    if (s.tail_tiles == 0) {
        new_main_end = max(end, sink_end);
    } else {
        u32 tail = s.tail_tiles * TILE;
        u32 spilled = end > tail ? (end - tail + TILE - 1) / TILE * TILE : 0;
        new_main_end = max(spilled, s.main_end);
    }
    bool spills = s.tail_tiles > 0 && new_main_end > s.main_end && s.len > s.main_end;
    u32 index = (spills ? s.main_end : s.len) / TILE + blockIdx.x;
    u32 first = index * TILE;
    if (first >= end) return;
    u32 last = min(first + TILE, end), place = place_of(s, index, new_main_end);
    if ((place == IN_TAIL) != (p.to_tail != 0)) return;
    bool moves = place == IN_MAIN && s.tail_tiles > 0 && first >= s.main_end;
    u32 rows_from = min(max(s.len, first), last);  // tokens from here on are new
    u32 from = moves ? first : rows_from;
    if (from == last) return;

    u8* tile = tile_at(s, index, place);
    u32 type = place == IN_MAIN ? s.type : F16;
    u8* codes = shared;                               // [16][dim]
    u16* scales = (u16*)(shared + TILE * s.dim);      // [16][dim / block]
    u32 per_block = block_dims(type), blocks = s.dim / per_block;
    const u16* tail = moves ? (const u16*)tile_at(s, index, IN_TAIL) : nullptr;

    if (is_coded(type) && (from > first || last < first + TILE)) {
        // Tokens that stay: their codes are taken apart and put back.
        for (u32 i = threadIdx.x; i < TILE * s.dim; i += 128) {
            u32 slot = i / s.dim, at = i % s.dim, group, j;
            const u8* block = tile + at / per_block * block_bytes(type);
            code_place(is_key, slot, at % per_block, group, j);
            codes[i] = stored_code(type, block + 32, group, j);
            if (at % per_block == 0) scales[slot * blocks + at / per_block] = ((const u16*)block)[slot];
        }
        __syncthreads();
    }
    for (u32 token = from + warp; token < last; token += WARPS) {
        u32 slot = token % TILE;
        for (u32 slice = 0; slice < s.dim; slice += 128) {
            Quad q;
            for (int i = 0; i < 4; i++) {
                u32 at = slice + 4 * lane + i;
                if (token < rows_from) {
                    q.x[i] = at < s.dim ? from_half(tail[float_place(is_key, slot, at, s.dim)]) : 0.0f;
                } else {
                    const float* row = x + ((size_t)(token - s.len) * p.n_kv_heads + head) * head_dim;
                    q.x[i] = at < head_dim ? clamped(row[at], HALF_MAX) : 0.0f;
                }
            }
            if (s.rotates && token >= rows_from) rotate(q, p.before, p.after, lane);
            if (is_coded(type)) {
                for (int i = 0; i < 4; i++) q.x[i] = __fmul_rn(q.x[i], s.alpha);
            }
            if (is_turbo(type)) {
                u32 book = type - TURBO2;
                u16 scale = encode_turbo(p.levels[book], p.mids[book], 4u << book, q,
                                         codes + slot * s.dim + slice + 4 * lane);
                if (lane == 0) scales[slot * blocks + slice / 128] = scale;
            } else if (is_coded(type)) {
                u8 four[4];
                u16 scale = encode_block32(type, q, lane, four);
                u32 at = slice + 4 * lane;
                if (at < s.dim) {
                    for (int i = 0; i < 4; i++) codes[slot * s.dim + at + i] = four[i];
                    if (lane % 8 == 0) scales[slot * blocks + at / 32] = scale;
                }
            } else {
                for (int i = 0; i < 4; i++) {
                    u32 at = slice + 4 * lane + i, to = float_place(is_key, slot, at, s.dim);
                    if (at >= s.dim) continue;
                    if (type == F32) {
                        ((float*)tile)[to] = q.x[i];
                    } else if (type == F16) {
                        ((u16*)tile)[to] = to_half(clamped(q.x[i], HALF_MAX));
                    } else {
                        u16 bits;
                        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(q.x[i]));
                        ((u16*)tile)[to] = bits;
                    }
                }
            }
        }
    }
    if (!is_coded(type)) return;
    __syncthreads();
    u32 per_tile = TILE * blocks;
    for (u32 i = threadIdx.x; i < per_tile; i += 128) {
        u32 block = i / TILE, slot = i % TILE;
        ((u16*)(tile + block * block_bytes(type)))[slot] = scales[slot * blocks + block];
    }
    u32 plane_bytes = block_bytes(type) - 32;
    for (u32 i = threadIdx.x; i < blocks * plane_bytes; i += 128) {
        u32 block = i / plane_bytes, byte = i % plane_bytes;
        tile[block * block_bytes(type) + 32 + byte] =
            plane_byte(type, is_key, codes, s.dim, block * per_block, byte);
    }
}
