// Writes new keys and values: norm and turn the keys (RoPE), pad, rotate, encode whole tiles. The method is that of
// kvant-codec, value for value. The queries are normed and turned on the way, as they meet the same angles.
//
// One block of four warps makes one tile of one stream; a warp takes every fourth token. A tile that moves from the tail to
// a main page and the new tile that takes its place in the tail are made by the same block, one after the other. Blocks
// beyond those turn queries, a head to a warp.

#include "rope.cuh"
#include "rotate.cuh"
#include "tile.cuh"

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 NO_TILE = ~0u;

struct AppendParams {
    Stream streams[2 * MAX_HEADS];  // keys of the heads, then their values
    Turn k_turn;
    Turn q_turn;
    float* q;                     // [rows, n_query_heads * k_head_dim]
    const float* k;               // [rows, n_kv_heads * k_head_dim]
    const float* v;               // [rows, n_kv_heads * v_head_dim]
    u32 n_query_heads;            // to be turned by this launch
    u32 n_heads;                  // of this launch
    u32 first_head;
    u32 n_kv_heads;
    u32 head_dims[2];
    u32 rows;
    u32 tiles;                    // blocks for each stream
    u32 before[4];                // signs of the rotation, bit i for value i of a slice
    u32 after[4];
    float levels[N_BOOKS][MAX_LEVELS];  // centroids of turbo2, turbo3, turbo4
    float mids[N_BOOKS][MAX_LEVELS];    // decision points for unit variance
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

// Codes a slice that is rotated already; gives the scale.
__device__ u16 encode_turbo(const float* levels, const float* mids, u32 n_levels, Quad q, u8* codes) {
    double squares = 0.0;
    for (int i = 0; i < 4; i++) {
        q.x[i] = clamped(q.x[i], HALF_MAX);
        squares += (double)q.x[i] * (double)q.x[i];
    }
    double norm = sqrt(warp_sum(squares));
    bool is_tiny = norm < 1e-10;
    float to_unit = is_tiny ? 0.0f : (float)(SQRT_TURBO_DIMS / norm);
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
    float d = type == Q8_0 ? fabsf(extreme) / (float)(Q8_0_ZERO - 1) : extreme / -(float)Q4_0_ZERO;
    u16 scale = to_half(clamped(d, HALF_MAX));
    float inverse = (scale & 0x7fff) == 0 ? 0.0f : 1.0f / d;
    for (int i = 0; i < 4; i++) {
        if (type == Q8_0) {
            codes[i] = (u8)((int)roundf(__fmul_rn(q.x[i], inverse)) + Q8_0_ZERO);
        } else {
            float code = __fadd_rn(__fadd_rn(__fmul_rn(q.x[i], inverse), (float)Q4_0_ZERO), 0.5f);
            codes[i] = (u8)min((int)fmaxf(code, 0.0f), 2 * Q4_0_ZERO - 1);
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
        case Q8_0: return planes[Q8_0_GROUP * group + j];
        case TURBO2: return planes[TURBO2_GROUP * group + j % 16] >> (2 * (j / 16)) & 3;
        case TURBO3:
            return (planes[TURBO2_GROUP * group + j % 16] >> (2 * (j / 16)) & 3) |
                   (planes[HIGH_PLANES + HIGH_GROUP * group + j / 8] >> (j % 8) & 1) << 2;
        default: return planes[NIBBLES_GROUP * group + j % 32] >> (4 * (j / 32)) & 15;
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
        case Q8_0: return (u8)code(byte / Q8_0_GROUP, byte % Q8_0_GROUP);
        case TURBO2:
        case TURBO3: {
            u32 value = 0;
            if (byte < HIGH_PLANES) {
                u32 group = byte / TURBO2_GROUP, first = byte % TURBO2_GROUP;
                for (u32 i = 0; i < 4; i++) value |= (code(group, first + 16 * i) & 3) << (2 * i);
            } else {
                u32 group = (byte - HIGH_PLANES) / HIGH_GROUP, first = (byte - HIGH_PLANES) % HIGH_GROUP * 8;
                for (u32 i = 0; i < 8; i++) value |= (code(group, first + i) >> 2) << i;
            }
            return (u8)value;
        }
        default: {
            u32 group = byte / NIBBLES_GROUP, first = byte % NIBBLES_GROUP;
            return (u8)(code(group, first) | code(group, first + 32) << 4);
        }
    }
}

// Where a float lies in a float tile.
__device__ u32 float_place(bool is_key, u32 slot, u32 dim_of, u32 dim) {
    return is_key ? dim_of * TILE + slot : slot * dim + dim_of;
}

// What an append does to a stream: Append of kvant-backend.
struct Plan {
    u32 end;           // tokens there will be
    u32 new_main_end;
    u32 first;         // first tile that is written
    u32 moved_from;    // tiles of the tail that move to main pages
    u32 moved_to;
};

__device__ Plan plan_of(const Stream& s, u32 rows) {
    Plan plan;
    plan.end = s.len + rows;
    if (s.tail_tiles == 0) {
        plan.new_main_end = max(plan.end, s.sink_tiles * TILE);
    } else {
        u32 tail = s.tail_tiles * TILE;
        u32 spilled = plan.end > tail ? (plan.end - tail + TILE - 1) / TILE * TILE : 0;
        plan.new_main_end = max(spilled, s.main_end);
    }
    bool moves = s.tail_tiles > 0 && plan.new_main_end > s.main_end && s.len > s.main_end;
    plan.first = (moves ? s.main_end : s.len) / TILE;
    plan.moved_from = s.main_end / TILE;
    plan.moved_to = moves ? min((s.len + TILE - 1) / TILE, plan.new_main_end / TILE) : plan.moved_from;
    return plan;
}

// The tile that will lie in the tail where tile `index` has lain, or NO_TILE.
__device__ u32 successor(const Stream& s, const Plan& plan, u32 index) {
    u32 first = plan.new_main_end / TILE, distance = (index + s.tail_tiles - first % s.tail_tiles) % s.tail_tiles;
    u32 next = first + distance;
    return next * TILE < plan.end ? next : NO_TILE;
}

// Whether a moving tile lies where tile `index` is to lie: the block of that one makes both.
__device__ bool has_predecessor(const Stream& s, const Plan& plan, u32 index) {
    u32 from = plan.moved_from;
    return from + (index + s.tail_tiles - from % s.tail_tiles) % s.tail_tiles < plan.moved_to;
}

// Makes one tile; the whole block.
__device__ void write_tile(const AppendParams& p, const Stream& s, const Plan& plan, u32 index, u32 head, bool is_key,
                           u8* shared) {
    u32 head_dim = p.head_dims[is_key ? 0 : 1];
    const float* x = is_key ? p.k : p.v;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 first = index * TILE, last = min(first + TILE, plan.end), place = place_of(s, index, plan.new_main_end);
    bool moves = index >= plan.moved_from && index < plan.moved_to;
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
        for (u32 i = threadIdx.x; i < TILE * s.dim; i += THREADS) {
            u32 slot = i / s.dim, at = i % s.dim, group, j;
            const u8* block = tile + at / per_block * block_bytes(type);
            code_place(is_key, slot, at % per_block, group, j);
            codes[i] = stored_code(type, block + SCALE_BYTES, group, j);
            if (at % per_block == 0) scales[slot * blocks + at / per_block] = ((const u16*)block)[slot];
        }
        __syncthreads();
    }
    for (u32 token = from + warp; token < last; token += WARPS) {
        u32 slot = token % TILE, row = token - s.len;
        bool is_new = token >= rows_from, turns = is_new && is_key && p.k_turn.is_on;
        const float* values = is_new ? x + ((size_t)row * p.n_kv_heads + head) * head_dim : nullptr;
        const float* angles = p.k_turn.angles + (turns ? (size_t)row * p.k_turn.n_rot : 0);
        float factor = turns ? norm_factor(p.k_turn, values, head_dim, lane) : 1.0f;
        for (u32 slice = 0; slice < s.dim; slice += SPAN) {
            Quad q;
            for (int i = 0; i < 4; i++) {
                u32 at = slice + 4 * lane + i;
                if (!is_new) {
                    q.x[i] = at < s.dim ? from_half(tail[float_place(is_key, slot, at, s.dim)]) : 0.0f;
                } else if (at < head_dim) {
                    float value = turns ? turned(p.k_turn, values, at, factor, angles) : values[at];
                    q.x[i] = clamped(value, HALF_MAX);
                } else {
                    q.x[i] = 0.0f;
                }
            }
            if (s.rotates && is_new) rotate(q.x, ROTATION, p.before, p.after, lane);
            if (is_coded(type)) {
                for (int i = 0; i < 4; i++) q.x[i] = __fmul_rn(q.x[i], s.alpha);
            }
            if (is_turbo(type)) {
                u32 book = type - TURBO2;
                u16 scale = encode_turbo(p.levels[book], p.mids[book], 4u << book, q,
                                         codes + slot * s.dim + slice + 4 * lane);
                if (lane == 0) scales[slot * blocks + slice / TURBO_DIMS] = scale;
            } else if (is_coded(type)) {
                u8 four[4];
                u16 scale = encode_block32(type, q, lane, four);
                u32 at = slice + 4 * lane;
                if (at < s.dim) {
                    for (int i = 0; i < 4; i++) codes[slot * s.dim + at + i] = four[i];
                    if (lane % 8 == 0) scales[slot * blocks + at / BLOCK32_DIMS] = scale;
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
    for (u32 i = threadIdx.x; i < per_tile; i += THREADS) {
        u32 block = i / TILE, slot = i % TILE;
        ((u16*)(tile + block * block_bytes(type)))[slot] = scales[slot * blocks + block];
    }
    u32 plane_bytes = block_bytes(type) - SCALE_BYTES;
    for (u32 i = threadIdx.x; i < blocks * plane_bytes; i += THREADS) {
        u32 block = i / plane_bytes, byte = i % plane_bytes;
        tile[block * block_bytes(type) + SCALE_BYTES + byte] =
            plane_byte(type, is_key, codes, s.dim, block * per_block, byte);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ AppendParams p) {
    extern __shared__ u8 shared[];
    u32 tile_blocks = 2 * p.n_heads * p.tiles;
    if (blockIdx.x >= tile_blocks) {
        u32 head = (blockIdx.x - tile_blocks) * WARPS + threadIdx.x / 32, dim = p.head_dims[0];
        if (head >= p.rows * p.n_query_heads) return;
        turn_head(p.q_turn, p.q + (size_t)head * dim, dim, head / p.n_query_heads, threadIdx.x % 32);
        return;
    }
    u32 number = blockIdx.x / p.tiles;
    bool is_key = number < p.n_heads;
    const Stream& s = p.streams[number];
    u32 head = p.first_head + number % p.n_heads;
    Plan plan = plan_of(s, p.rows);
    u32 index = plan.first + blockIdx.x % p.tiles;
    if (index * TILE >= plan.end) return;
    bool is_tail = place_of(s, index, plan.new_main_end) == IN_TAIL;
    if (is_tail && has_predecessor(s, plan, index)) return;
    while (index != NO_TILE) {
        write_tile(p, s, plan, index, head, is_key, shared);
        bool moved = index >= plan.moved_from && index < plan.moved_to;
        index = moved ? successor(s, plan, index) : NO_TILE;
        // The tile that moved has been read, and the shared memory too.
        __syncthreads();
    }
}
