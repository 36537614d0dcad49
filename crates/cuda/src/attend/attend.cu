// Attention over compressed tiles, with tensor cores. The method is in mod.rs.
//
// A warp works on 16 queries and one tile of 16 tokens at a time. It brings the tile to shared memory as halves, in the
// tile's own order: what a product sums over lies side by side in coded tiles (keys [token][dim], values [dim][token]),
// across in float tiles (keys [dim][token], values [token][dim]), which `ldmatrix` transposes on the way.
//
// Macros: K_DIM, V_DIM (values per token as stored, multiples of 16).

#include "attend.cuh"
#include "rotate.cuh"

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 MAX_DIM = K_DIM > V_DIM ? K_DIM : V_DIM;
// Halves of a tile in shared memory: the larger of [16][dim + PAD] and [dim][16 + PAD]. Rows are 16 bytes off a multiple of
// 128, so that the eight rows of a matrix lie in different banks.
constexpr u32 STRIDE = TILE + PAD;
constexpr u32 TILE_HALVES = MAX_DIM * STRIDE;

struct AttendParams {
    Stream keys[MAX_HEADS];
    Stream values[MAX_HEADS];
    Slot slots[MAX_HEADS];
    const float* q;      // [.., n_heads * k_head_dim]
    u16* queries;        // [slot][rows * group, padded to 64][K_DIM], halves
    float* part;         // [slot][split][padded queries][V_DIM]
    float* state;        // [slot][split][padded queries][2]: maximum and sum
    float* out;          // [.., n_heads * v_head_dim]
    u32 n_slots;
    u32 n_heads;         // query heads of the model
    u32 group;           // query heads per KV head
    u32 k_head_dim;
    u32 v_head_dim;
    u32 rows;            // of each sequence
    u32 padded;          // queries of a slot, rounded up
    u32 splits;
    u32 split_tiles;
    float scale;         // of the scores, times log2 e
    Book books[N_TYPES]; // by type of the stream
    u32 before[4];
    u32 after[4];
};

// Pads, rotates and scales the queries: one warp per query, blocks of WARPS. Query i of a KV head is query head
// i % group of its group, of row i / group.
extern "C" __global__ void __launch_bounds__(THREADS) prepare_queries(const __grid_constant__ AttendParams p) {
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32, kv = blockIdx.y;
    if (i >= p.padded) return;
    bool is_there = i < p.rows * p.group;
    u32 row = p.slots[kv].first_row + i / p.group, head = p.slots[kv].kv_head * p.group + i % p.group;
    const float* q = p.q + ((size_t)row * p.n_heads + head) * p.k_head_dim;
    u16* to = p.queries + ((size_t)kv * p.padded + i) * K_DIM;
    for (u32 slice = 0; slice < K_DIM; slice += SPAN) {
        float x[4];
        for (int e = 0; e < 4; e++) {
            u32 at = slice + 4 * lane + e;
            x[e] = is_there && at < p.k_head_dim ? q[at] : 0.0f;
        }
        if (p.keys[kv].rotates) rotate(x, ROTATION, p.before, p.after, lane);
        u32 at = slice + 4 * lane;
        if (at < K_DIM) {
            ((u32*)(to + at))[0] = pack_halves(x[0] * p.scale, x[1] * p.scale);
            ((u32*)(to + at))[1] = pack_halves(x[2] * p.scale, x[3] * p.scale);
        }
    }
}

// Bits `at` to `at + 3` of a word, each to bit `to` of its byte; `at` counts from bit `to`.
__device__ u32 spread(u32 word, u32 at, u32 to) {
    u32 nibble = word >> at << to & 15 << to;
    return nibble * 0x00204081u & 0x01010101u << to;
}

template <u32 TYPE>
__device__ Codes group_codes(const Book& book, const u8* planes, u32 g, u32 t) {
    if constexpr (TYPE == Q8_0) {
        const u32* words = (const u32*)(planes + Q8_0_GROUP * g);
        u32 a = __ldg(words + t), b = __ldg(words + t + 8);
        return {{__byte_perm(a, b, 0x5140), __byte_perm(a, b, 0x7362)}};
    } else if constexpr (TYPE == Q4_0) {
        u32 word = __ldg((const u32*)(planes + NIBBLES_GROUP * g) + t);
        u32 even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
        return {{__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)}};
    } else if constexpr (TYPE == TURBO4) {
        u32 word = __ldg((const u32*)(planes + NIBBLES_GROUP * g) + t);
        u32 index = word & 0x77777777, upper = word >> 3 & 0x11111111;
        Codes codes;
        for (int i = 0; i < 2; i++) {
            // Nibbles are (t, t + 8) pairs already. Eight levels in two registers: two look-ups, and bit 3 decides. (A
            // permutation reads the low 16 bits of its selectors.)
            u32 low = __byte_perm(book.bytes[0], book.bytes[1], index >> (16 * i));
            u32 high = __byte_perm(book.bytes[2], book.bytes[3], index >> (16 * i));
            u32 mask = __byte_perm(0x0000ff00, 0, upper >> (16 * i));
            codes.pair[i] = (low & ~mask) | (high & mask);
        }
        return codes;
    } else {
        // Two low bits: the word of lanes t mod 4 + 4 i, at bits 2 i.
        u32 nibbles = __ldg((const u32*)(planes + TURBO2_GROUP * g) + t % 4) >> (2 * (t / 4)) & 0x33333333;
        if constexpr (TYPE == TURBO3) {
            uint2 high = __ldg((const uint2*)(planes + HIGH_PLANES + HIGH_GROUP * g));
            nibbles |= spread(high.x, 4 * t, 2) | spread(high.y, 4 * t, 6);
        }
        return {{__byte_perm(book.bytes[0], book.bytes[1], nibbles),
                 __byte_perm(book.bytes[0], book.bytes[1], nibbles >> 16)}};
    }
}

// Two adjacent scales of a block, times the step.
__device__ float2 two_scales(const u8* block, u32 token, float step) {
    u32 pair = __ldg((const u32*)block + token / 2);
    return make_float2(from_half(pair & 0xffff) * step, from_half(pair >> 16) * step);
}

// Two scales as halves, times the step.
__device__ u32 stepped(u32 scales, float step) {
    return pack_halves(from_half(scales & 0xffff) * step, from_half(scales >> 16) * step);
}

// Brings a coded tile to shared memory as halves: keys [16][K_DIM + PAD], values [V_DIM][STRIDE]. Scales are brought in
// here, but for those of keys of turbo types, one for 128 dims, which wait for the scores: such keys are whole numbers,
// 1024 + byte, from which the scores take the rest.
template <bool KEYS, u32 TYPE>
__device__ void load_coded(const Book& book, const u8* tile, u16* to, u32 lane) {
    constexpr u32 DIM = KEYS ? K_DIM : V_DIM;
    constexpr u32 DIMS = block_dims(TYPE);
    if constexpr (DIM % DIMS == 0) {
        u32 t = lane % 8, bytes = block_bytes(TYPE);
        u32 bias = pack_halves(1024.0f + book.bias, 1024.0f + book.bias);
#pragma unroll
        for (u32 pass = 0; pass < DIM / 16; pass++) {
            u32 g = 4 * pass + lane / 8;
            const u8* start = tile + 16 * pass / DIMS * bytes;
            Codes codes = group_codes<TYPE>(book, start + SCALE_BYTES, g % (DIMS / 4), t);
#pragma unroll
            for (u32 upper = 0; upper < 2; upper++) {
                u32 l = t + 8 * upper, select = upper ? 0x4341 : 0x4240;
                // A byte below the bits of 1024 is that half plus the byte.
                u32 a = __byte_perm(codes.pair[0], 0x64646464, select);
                u32 b = __byte_perm(codes.pair[1], 0x64646464, select);
                if (!KEYS || TYPE < TURBO2) a = half_sub(a, bias), b = half_sub(b, bias);
                if (TYPE < TURBO2 && KEYS) {
                    float s = from_half(__ldg((const u16*)start + l));
                    a = half_mul(a, pack_halves(s, s)), b = half_mul(b, pack_halves(s, s));
                } else if (!KEYS) {
                    // The four tokens of a group are the same in every pass.
                    uint2 four = __ldg((const uint2*)start + lane / 8);
                    if (TYPE >= TURBO2) four = make_uint2(stepped(four.x, book.step), stepped(four.y, book.step));
                    a = half_mul(a, four.x), b = half_mul(b, four.y);
                }
                u16* at = KEYS ? to + l * (DIM + PAD) + 4 * g : to + (16 * pass + l) * STRIDE + lane / 8 * 4;
                *(uint2*)at = make_uint2(a, b);
            }
        }
    }
}

// A float tile: keys [K_DIM][STRIDE], values [16][V_DIM + PAD]. f32 and bf16 beyond f16 saturate.
template <bool KEYS>
__device__ void load_floats(u32 type, const u8* tile, u16* to, u32 lane) {
    constexpr u32 DIM = KEYS ? K_DIM : V_DIM;
    constexpr u32 COLS = KEYS ? TILE : DIM, TO_STRIDE = KEYS ? STRIDE : DIM + PAD;
#pragma unroll
    for (u32 pass = 0; pass < TILE * DIM / 256; pass++) {
        u32 i = 256 * pass + 8 * lane;
        uint4 eight;
        if (type == F16) {
            eight = __ldg((const uint4*)(tile + 2 * i));
        } else {
            float x[8];
            for (int e = 0; e < 8; e++) {
                float v = type == F32 ? ((const float*)tile)[i + e] : from_bfloat(((const u16*)tile)[i + e]);
                x[e] = fminf(fmaxf(v, -HALF_MAX), HALF_MAX);
            }
            eight = make_uint4(pack_halves(x[0], x[1]), pack_halves(x[2], x[3]), pack_halves(x[4], x[5]),
                               pack_halves(x[6], x[7]));
        }
        *(uint4*)(to + i / COLS * TO_STRIDE + i % COLS) = eight;
    }
}

// Where a tile is and how to read it.
struct Tile {
    const u8* at;
    u32 type;
    u32 bytes;
};

// A stream, with what its tiles have in common.
struct View {
    const Stream& s;
    u32 dim;
    u32 main_bytes;
    __device__ View(const Stream& s, u32 dim) : s(s), dim(dim), main_bytes(tile_bytes(s.type, dim)) {}
    __device__ Tile tile(u32 index) const {
        u32 f16_bytes = dim * TILE * 2;
        if (index < s.sink_tiles) return {s.sink + index * f16_bytes, F16, f16_bytes};
        if (index * TILE < s.main_end || s.tail_tiles == 0) {
            u32 tile = index - s.sink_tiles;
            const u8* page = (const u8*)__ldg(s.pages + tile / TILES_PER_PAGE);
            return {page + tile % TILES_PER_PAGE * main_bytes, s.type, main_bytes};
        }
        return {s.tail + index % s.tail_tiles * f16_bytes, F16, f16_bytes};
    }
};

template <bool KEYS>
__device__ void load_tile(const AttendParams& p, const Tile& tile, u16* to, u32 lane) {
    switch (tile.type) {
        case Q8_0: return load_coded<KEYS, Q8_0>(p.books[Q8_0], tile.at, to, lane);
        case Q4_0: return load_coded<KEYS, Q4_0>(p.books[Q4_0], tile.at, to, lane);
        case TURBO2: return load_coded<KEYS, TURBO2>(p.books[TURBO2], tile.at, to, lane);
        case TURBO3: return load_coded<KEYS, TURBO3>(p.books[TURBO3], tile.at, to, lane);
        case TURBO4: return load_coded<KEYS, TURBO4>(p.books[TURBO4], tile.at, to, lane);
        default: return load_floats<KEYS>(tile.type, tile.at, to, lane);
    }
}

// Asks for a tile to be brought to the second-level cache: the time its first use would wait for.
__device__ void fetch_tile(const Tile& tile, u32 lane) {
    for (u32 at = 128 * lane; at < tile.bytes; at += 128 * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(tile.at + at));
    }
}

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8 x 8 matrices of halves, whose rows the lanes name in eights.
__device__ void load_matrices(u32 m[4], const u16* row, bool transposed) {
    if (transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
    }
}

constexpr u32 K_BLOCKS = (K_DIM + TURBO_DIMS - 1) / TURBO_DIMS;

// Sixteen queries and what they have seen. A lane has rows lane / 4 and lane / 4 + 8.
struct Work {
    u32 q[K_DIM / 16][4];
    float q_sum[K_BLOCKS][2];  // of 128 dims: what 1 too much in every key adds
    float out[V_DIM / 8][4];
    float max[2];
    float sum[2];
};

__device__ float half_sum(u32 pair) { return from_half(pair & 0xffff) + from_half(pair >> 16); }

__device__ void begin(Work& w, const u16* queries, u32 lane) {
    u32 row = lane / 4, col = 2 * (lane % 4);
    for (u32 block = 0; block < K_BLOCKS; block++) w.q_sum[block][0] = w.q_sum[block][1] = 0.0f;
    for (u32 k = 0; k < K_DIM / 16; k++) {
        for (u32 r = 0; r < 4; r++) {
            const u16* at = queries + (row + 8 * (r % 2)) * K_DIM + 16 * k + col + 8 * (r / 2);
            w.q[k][r] = *(const u32*)at;
            w.q_sum[k / 8][r % 2] += half_sum(w.q[k][r]);
        }
    }
    for (u32 block = 0; block < K_BLOCKS; block++) {
        for (int half = 0; half < 2; half++) {
            float& sum = w.q_sum[block][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
    }
    for (u32 n = 0; n < V_DIM / 8; n++) {
        for (u32 r = 0; r < 4; r++) w.out[n][r] = 0.0f;
    }
    w.max[0] = w.max[1] = HIDDEN;
    w.sum[0] = w.sum[1] = 0.0f;
}

// Scores of the queries with the keys of a tile: s[n][..] of tokens 8 n + 2 (lane mod 4) and the next, as `mma` has them.
__device__ void scores(const Work& w, const AttendParams& p, const Tile& tile, const u16* keys, float s[2][4], u32 lane) {
    u32 row = lane % 8, matrix = lane / 8;
    for (u32 n = 0; n < 2; n++) {
        for (u32 r = 0; r < 4; r++) s[n][r] = 0.0f;
    }
#pragma unroll
    for (u32 block = 0; block < K_BLOCKS; block++) {
        float raw[2][4] = {};
#pragma unroll
        for (u32 k = 8 * block; k < K_DIM / 16 && k < 8 * block + 8; k++) {
            u32 m[4];
            if (is_coded(tile.type)) {
                load_matrices(m, keys + (row + 8 * (matrix / 2)) * (K_DIM + PAD) + 16 * k + 8 * (matrix % 2), false);
            } else {
                // Rows are dims: matrices (dims 0..8, tokens 0..8), (dims 8.., tokens 0..), then tokens 8..16.
                load_matrices(m, keys + (16 * k + row + 8 * (matrix % 2)) * STRIDE + 8 * (matrix / 2), true);
            }
            multiply(raw[0], w.q[k], m[0], m[1]);
            multiply(raw[1], w.q[k], m[2], m[3]);
        }
        for (u32 n = 0; n < 2; n++) {
            float2 scale = make_float2(1.0f, 1.0f);
            float excess = 0.0f;
            if (is_turbo(tile.type)) {
                const Book& book = p.books[tile.type];
                scale = two_scales(tile.at + block * block_bytes(tile.type), 8 * n + 2 * (lane % 4), book.step);
                excess = 1024.0f + book.bias;
            }
            for (u32 half = 0; half < 2; half++) {
                float less = excess * w.q_sum[block][half];
                s[n][2 * half] += (raw[n][2 * half] - less) * scale.x;
                s[n][2 * half + 1] += (raw[n][2 * half + 1] - less) * scale.y;
            }
        }
    }
}

// Turns scores into weights relative to the new maximum, and joins them to what came before.
__device__ void soften(Work& w, float s[2][4], u32 first_token, const u32 visible[2], u32 lane) {
    u32 col = first_token + 2 * (lane % 4);
    bool is_cut = first_token + TILE > visible[0] || first_token + TILE > visible[1];
    for (int half = 0; half < 2; half++) {
        float most = HIDDEN;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                float& x = s[n][2 * half + e];
                if (is_cut && col + 8 * n + e >= visible[half]) x = HIDDEN;
                most = fmaxf(most, x);
            }
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        float before = w.max[half], max = fmaxf(before, most);
        float sum = 0.0f;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                float& x = s[n][2 * half + e];
                // A hidden token counts nothing even where no other is visible yet.
                x = x == HIDDEN ? 0.0f : power_of_two(x - max + LIFT);
                sum += x;
            }
        }
        if (max != before) {
            float keep = power_of_two(before - max);
            w.max[half] = max;
            w.sum[half] *= keep;
            for (u32 n = 0; n < V_DIM / 8; n++) w.out[n][2 * half] *= keep, w.out[n][2 * half + 1] *= keep;
        }
        w.sum[half] += sum;
    }
}

// Adds the values of a tile, weighted.
__device__ void mix(Work& w, const Tile& tile, const u16* values, const float s[2][4], u32 lane) {
    u32 row = lane % 8, matrix = lane / 8, weights[4];
    for (u32 r = 0; r < 4; r++) weights[r] = pack_halves(s[r / 2][2 * (r % 2)], s[r / 2][2 * (r % 2) + 1]);
#pragma unroll
    for (u32 n = 0; n < V_DIM / 16; n++) {
        u32 m[4];
        if (is_coded(tile.type)) {
            load_matrices(m, values + (16 * n + row + 8 * (matrix / 2)) * STRIDE + 8 * (matrix % 2), false);
        } else {
            load_matrices(m, values + (row + 8 * (matrix % 2)) * (V_DIM + PAD) + 16 * n + 8 * (matrix / 2), true);
        }
        multiply(w.out[2 * n], weights, m[0], m[1]);
        multiply(w.out[2 * n + 1], weights, m[2], m[3]);
    }
}

// Tokens that the two rows of a lane may see, of the queries from `first_query`.
__device__ void visible_tokens(const AttendParams& p, u32 start, u32 first_query, u32 visible[2], u32 lane) {
    for (u32 half = 0; half < 2; half++) {
        u32 query = first_query + lane / 4 + 8 * half;
        visible[half] = query < p.rows * p.group ? start + query / p.group + 1 : 0;
    }
}

// Sums over the tokens, of which each lane of four has seen a share.
__device__ void finish_sums(Work& w) {
    for (int half = 0; half < 2; half++) {
        w.sum[half] += __shfl_xor_sync(~0u, w.sum[half], 1);
        w.sum[half] += __shfl_xor_sync(~0u, w.sum[half], 2);
    }
}

__device__ void write_part(const AttendParams& p, const Work& w, u32 kv, u32 split, u32 first_query, u32 lane) {
    size_t base = ((size_t)kv * p.splits + split) * p.padded + first_query;
    for (u32 half = 0; half < 2; half++) {
        u32 row = lane / 4 + 8 * half;
        float* out = p.part + (base + row) * V_DIM + 2 * (lane % 4);
        for (u32 n = 0; n < V_DIM / 8; n++) {
            *(float2*)(out + 8 * n) = make_float2(w.out[n][2 * half], w.out[n][2 * half + 1]);
        }
        if (lane % 4 == 0) *(float2*)(p.state + 2 * (base + row)) = make_float2(w.max[half], w.sum[half]);
    }
}

// Few queries: every warp takes every fourth tile of the split for the same 16 queries; their shares are joined in the
// order of the warps. Grid: splits, blocks of 16 queries, KV heads.
extern "C" __global__ void __launch_bounds__(THREADS) attend_split(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, first_query = blockIdx.y * QUERIES, kv = blockIdx.z;
    u32 start = p.slots[kv].start;
    View keys(p.keys[kv], K_DIM), values(p.values[kv], V_DIM);
    u16* unpacked = (u16*)shared + warp * TILE_HALVES;
    u32 visible[2];
    visible_tokens(p, start, first_query, visible, lane);
    u32 last_row = (min(first_query + QUERIES, p.rows * p.group) - 1) / p.group;
    u32 n_tiles = (start + last_row + TILE) / TILE;
    u32 end = min(n_tiles, (split + 1) * p.split_tiles);
    Work w;
    begin(w, p.queries + ((size_t)kv * p.padded + first_query) * K_DIM, lane);
    for (u32 index = split * p.split_tiles + warp; index < end; index += WARPS) {
        Tile key = keys.tile(index), value = values.tile(index);
        if (index + WARPS < end) {
            fetch_tile(keys.tile(index + WARPS), lane);
            fetch_tile(values.tile(index + WARPS), lane);
        }
        float s[2][4];
        load_tile<true>(p, key, unpacked, lane);
        __syncwarp();
        scores(w, p, key, unpacked, s, lane);
        soften(w, s, index * TILE, visible, lane);
        __syncwarp();
        load_tile<false>(p, value, unpacked, lane);
        __syncwarp();
        mix(w, value, unpacked, s, lane);
        __syncwarp();
    }
    finish_sums(w);
    // Joined by halves: warps 2 and 3 hand over to 0 and 1, then 1 to 0.
    float* hand = (float*)shared;
    constexpr u32 SHARE = V_DIM / 2 + HAND_STATE;  // floats of a lane
    __syncthreads();
    for (u32 step = WARPS / 2; step > 0; step /= 2) {
        if (warp >= step && warp < 2 * step) {
            float* to = hand + (warp - step) * 32 * SHARE + lane;
            for (u32 n = 0; n < V_DIM / 8; n++) {
                for (u32 r = 0; r < 4; r++) to[32 * (4 * n + r)] = w.out[n][r];
            }
            for (u32 half = 0; half < 2; half++) {
                to[32 * (V_DIM / 2 + half)] = w.max[half];
                to[32 * (V_DIM / 2 + 2 + half)] = w.sum[half];
            }
        }
        __syncthreads();
        if (warp < step) {
            const float* from = hand + warp * 32 * SHARE + lane;
            for (u32 half = 0; half < 2; half++) {
                float other = from[32 * (V_DIM / 2 + half)], max = fmaxf(w.max[half], other);
                float mine = exp2f(w.max[half] - max), theirs = exp2f(other - max);
                w.max[half] = max;
                w.sum[half] = w.sum[half] * mine + from[32 * (V_DIM / 2 + 2 + half)] * theirs;
                for (u32 n = 0; n < V_DIM / 8; n++) {
                    for (u32 e = 2 * half; e < 2 * half + 2; e++) {
                        w.out[n][e] = w.out[n][e] * mine + from[32 * (4 * n + e)] * theirs;
                    }
                }
            }
        }
        __syncthreads();
    }
    if (warp == 0) write_part(p, w, kv, split, first_query, lane);
}

// Many queries: the warps of a block take 16 queries each and share tiles, four at a time, each brought by one warp.
// Grid: splits, blocks of 64 queries, KV heads.
extern "C" __global__ void __launch_bounds__(THREADS) attend_many(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, block_query = blockIdx.y * QUERIES * WARPS, kv = blockIdx.z;
    u32 first_query = block_query + warp * QUERIES;
    u32 start = p.slots[kv].start;
    View keys(p.keys[kv], K_DIM), values(p.values[kv], V_DIM);
    u16* key_tiles = (u16*)shared;
    u16* value_tiles = key_tiles + WARPS * TILE_HALVES;
    u32 visible[2];
    visible_tokens(p, start, first_query, visible, lane);
    u32 last_row = (min(block_query + QUERIES * WARPS, p.rows * p.group) - 1) / p.group;
    u32 n_tiles = (start + last_row + TILE) / TILE;
    u32 end = min(n_tiles, (split + 1) * p.split_tiles);
    // The last token any query of this warp may see.
    u32 my_row = (min(first_query + QUERIES, p.rows * p.group) - 1) / p.group;
    u32 my_end = first_query < p.rows * p.group ? start + my_row + 1 : 0;
    Work w;
    begin(w, p.queries + ((size_t)kv * p.padded + first_query) * K_DIM, lane);
    for (u32 step = split * p.split_tiles; step < end; step += WARPS) {
        if (step + WARPS + warp < end) {
            fetch_tile(keys.tile(step + WARPS + warp), lane);
            fetch_tile(values.tile(step + WARPS + warp), lane);
        }
        if (step + warp < end) {
            load_tile<true>(p, keys.tile(step + warp), key_tiles + warp * TILE_HALVES, lane);
            load_tile<false>(p, values.tile(step + warp), value_tiles + warp * TILE_HALVES, lane);
        }
        __syncthreads();
        for (u32 i = 0; i < WARPS && step + i < end; i++) {
            u32 index = step + i;
            if (index * TILE >= my_end) break;
            float s[2][4];
            scores(w, p, keys.tile(index), key_tiles + i * TILE_HALVES, s, lane);
            soften(w, s, index * TILE, visible, lane);
            mix(w, values.tile(index), value_tiles + i * TILE_HALVES, s, lane);
        }
        __syncthreads();
    }
    finish_sums(w);
    write_part(p, w, kv, split, first_query, lane);
}

// Joins the splits in their order, divides, un-rotates and writes: one warp per query.
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ AttendParams p) {
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32, kv = blockIdx.y;
    if (i >= p.rows * p.group) return;
    size_t stride = p.padded, base = (size_t)kv * p.splits * stride + i;
    float max = HIDDEN, sum = 0.0f;
    for (u32 split = 0; split < p.splits; split++) max = fmaxf(max, p.state[2 * (base + split * stride)]);
    for (u32 split = 0; split < p.splits; split++) {
        const float* state = p.state + 2 * (base + split * stride);
        sum += exp2f(state[0] - max) * state[1];
    }
    u32 row = p.slots[kv].first_row + i / p.group, head = p.slots[kv].kv_head * p.group + i % p.group;
    float* out = p.out + ((size_t)row * p.n_heads + head) * p.v_head_dim;
    for (u32 slice = 0; slice < V_DIM; slice += SPAN) {
        float x[4] = {};
        u32 at = slice + 4 * lane;
        for (u32 split = 0; split < p.splits && at < V_DIM; split++) {
            float weight = exp2f(p.state[2 * (base + split * stride)] - max);
            float4 v = *(const float4*)(p.part + (base + split * stride) * V_DIM + at);
            x[0] += weight * v.x, x[1] += weight * v.y, x[2] += weight * v.z, x[3] += weight * v.w;
        }
        for (int e = 0; e < 4; e++) x[e] /= sum;
        if (p.values[kv].rotates) rotate(x, ROTATION, p.after, p.before, lane);
        for (int e = 0; e < 4; e++) {
            if (at + e < p.v_head_dim) out[at + e] = x[e];
        }
    }
}
