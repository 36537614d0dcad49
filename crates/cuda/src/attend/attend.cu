// Attention over compressed tiles, with tensor cores. The method is in mod.rs.
//
// A warp works on 16 queries and one tile of 16 tokens at a time. It brings the tile to shared memory as halves, in the
// tile's own order: what a product sums over lies side by side in coded tiles (keys [token][dim], values [dim][token]),
// across in float tiles (keys [dim][token], values [token][dim]), which `ldmatrix` transposes on the way.
//
// Macros: K_DIM, V_DIM (values per token as stored, multiples of 16).

#include "tile.cuh"

constexpr u32 WARPS = 4;
constexpr u32 QUERIES = 16;
constexpr u32 MAX_HEADS = 16;
constexpr float HIDDEN = -1e30f;
// Weights are powers of two up to 2^15, not to 1, so that as halves they keep their precision down to 2^-29. Their sum
// carries the same factor.
constexpr float LIFT = 15.0f;
constexpr u32 MAX_DIM = K_DIM > V_DIM ? K_DIM : V_DIM;
// Halves of a tile in shared memory: the larger of [16][dim + 8] and [dim][24]. Rows are 16 bytes off a multiple of
// 128, so that the eight rows of a matrix lie in different banks.
constexpr u32 STRIDE = TILE + 8;
constexpr u32 TILE_HALVES = MAX_DIM * STRIDE;

struct Book {
    u32 bytes[4];  // bytes of the levels, ascending
    float step;    // value = (byte - bias) * step * scale
    float bias;
};

struct AttendParams {
    Stream keys[MAX_HEADS];
    Stream values[MAX_HEADS];
    const float* q;      // [rows, n_heads * k_head_dim]
    u16* queries;        // [n_heads of this launch / group][rows * group, padded to 64][K_DIM], halves
    float* part;         // [kv head][split][padded queries][V_DIM]
    float* state;        // [kv head][split][padded queries][2]: maximum and sum
    float* out;          // [rows, n_heads * v_head_dim]
    u32 n_kv_heads;      // of this launch
    u32 first_kv_head;
    u32 n_heads;         // query heads of the model
    u32 group;           // query heads per KV head
    u32 k_head_dim;
    u32 v_head_dim;
    u32 rows;
    u32 start;           // position of the first row
    u32 padded;          // queries of a KV head, rounded up
    u32 splits;
    u32 split_tiles;
    float scale;         // of the scores, times log2 e
    Book books[8];       // by type of the stream
    u32 before[4];
    u32 after[4];
};

__device__ void flip(float* x, const u32* signs, u32 lane) {
    u32 bits = signs[lane / 8] >> (4 * (lane % 8));
    for (int i = 0; i < 4; i++) {
        if (bits >> i & 1) x[i] = -x[i];
    }
}

// Rotates a slice of 128 held by a warp, lane l with values 4l .. 4l + 3.
__device__ void rotate(float* x, const u32* first, const u32* last, u32 lane) {
    flip(x, first, lane);
    float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
    x[0] = a + c, x[1] = b + d, x[2] = a - c, x[3] = b - d;
    for (int step = 1; step < 32; step *= 2) {
        for (int i = 0; i < 4; i++) {
            float other = __shfl_xor_sync(~0u, x[i], step);
            x[i] = lane & step ? other - x[i] : x[i] + other;
        }
    }
    for (int i = 0; i < 4; i++) x[i] *= 0.088388347648318440f;
    flip(x, last, lane);
}

// Pads, rotates and scales the queries: one warp per query, blocks of WARPS. Query i of a KV head is query head
// i % group of its group, of row i / group.
extern "C" __global__ void __launch_bounds__(128) prepare_queries(const __grid_constant__ AttendParams p) {
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32, kv = blockIdx.y;
    if (i >= p.padded) return;
    bool is_there = i < p.rows * p.group;
    u32 row = i / p.group, head = (p.first_kv_head + kv) * p.group + i % p.group;
    const float* q = p.q + ((size_t)row * p.n_heads + head) * p.k_head_dim;
    u16* to = p.queries + ((size_t)kv * p.padded + i) * K_DIM;
    for (u32 slice = 0; slice < K_DIM; slice += 128) {
        float x[4];
        for (int e = 0; e < 4; e++) {
            u32 at = slice + 4 * lane + e;
            x[e] = is_there && at < p.k_head_dim ? q[at] : 0.0f;
        }
        if (p.keys[kv].rotates) rotate(x, p.before, p.after, lane);
        u32 at = slice + 4 * lane;
        if (at < K_DIM) {
            ((u32*)(to + at))[0] = pack_halves(x[0] * p.scale, x[1] * p.scale);
            ((u32*)(to + at))[1] = pack_halves(x[2] * p.scale, x[3] * p.scale);
        }
    }
}

__device__ u32 half_mul(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ u32 half_sub(u32 a, u32 b) {
    u32 c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Bytes of the codes of lanes t and t + 8 of a group, interleaved: [0] has codes 0 and 1 of both (t, t + 8, t, t + 8),
// [1] codes 2 and 3.
struct Codes { u32 pair[2]; };

// Bits 0..3 of a nibble, each to bit 0 of its byte.
__device__ u32 spread(u32 nibble) { return nibble * 0x00204081u & 0x01010101u; }

template <u32 TYPE>
__device__ Codes group_codes(const Book& book, const u8* planes, u32 g, u32 t) {
    if constexpr (TYPE == Q8_0) {
        const u32* words = (const u32*)(planes + 64 * g);
        u32 a = words[t], b = words[t + 8];
        return {{__byte_perm(a, b, 0x5140), __byte_perm(a, b, 0x7362)}};
    } else if constexpr (TYPE == Q4_0) {
        u32 word = ((const u32*)(planes + 32 * g))[t];
        u32 even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
        return {{__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)}};
    } else if constexpr (TYPE == TURBO4) {
        u32 word = ((const u32*)(planes + 32 * g))[t];
        Codes codes;
        for (int i = 0; i < 2; i++) {
            // Nibbles are (t, t + 8) pairs already. Eight levels in two registers: two look-ups, and bit 3 decides.
            u32 nibbles = word >> (16 * i), index = nibbles & 0x7777;
            u32 low = __byte_perm(book.bytes[0], book.bytes[1], index);
            u32 high = __byte_perm(book.bytes[2], book.bytes[3], index);
            u32 mask = __byte_perm(0x0000ff00, 0, nibbles >> 3 & 0x1111);
            codes.pair[i] = (low & ~mask) | (high & mask);
        }
        return codes;
    } else {
        // Two low bits: the word of lanes t mod 4 + 4 i, at bits 2 i.
        u32 nibbles = ((const u32*)(planes + 16 * g))[t % 4] >> (2 * (t / 4)) & 0x33333333;
        if constexpr (TYPE == TURBO3) {
            uint2 high = *(const uint2*)(planes + 512 + 8 * g);
            nibbles |= spread(high.x >> (4 * t) & 15) << 2 | spread(high.y >> (4 * t) & 15) << 6;
        }
        return {{__byte_perm(book.bytes[0], book.bytes[1], nibbles & 0xffff),
                 __byte_perm(book.bytes[0], book.bytes[1], nibbles >> 16)}};
    }
}

// Brings a coded tile to shared memory as halves: keys [16][K_DIM + 8], values [V_DIM][STRIDE].
template <bool KEYS, u32 TYPE>
__device__ void load_coded(const Book& book, const u8* tile, u16* to, u32 lane) {
    constexpr u32 DIM = KEYS ? K_DIM : V_DIM;
    constexpr u32 DIMS = TYPE >= TURBO2 ? 128 : 32;
    if constexpr (DIM % DIMS == 0) {
        u32 t = lane % 8, bytes = block_bytes(TYPE);
        u32 bias = pack_halves(1024.0f + book.bias, 1024.0f + book.bias);
#pragma unroll
        for (u32 pass = 0; pass < DIM / 16; pass++) {
            u32 g = 4 * pass + lane / 8;
            const u8* start = tile + 4 * g / DIMS * bytes;
            Codes codes = group_codes<TYPE>(book, start + 32, g % (DIMS / 4), t);
            const u16* scales = (const u16*)start;
#pragma unroll
            for (u32 upper = 0; upper < 2; upper++) {
                u32 l = t + 8 * upper;
                u32 select = upper ? 0x4341 : 0x4240;
                // A byte below the bits of 1024 is that half plus the byte.
                u32 a = half_sub(__byte_perm(codes.pair[0], 0x64646464, select), bias);
                u32 b = half_sub(__byte_perm(codes.pair[1], 0x64646464, select), bias);
                if (KEYS) {
                    float s = from_half(scales[l]) * book.step;
                    u32 scale = pack_halves(s, s);
                    *(uint2*)(to + l * (DIM + 8) + 4 * g) = make_uint2(half_mul(a, scale), half_mul(b, scale));
                } else {
                    // The four tokens of a group are the same in every pass.
                    u32 token = 4 * (lane / 8);
                    uint2 four = *(const uint2*)(scales + token);
                    u32 first = pack_halves(from_half(four.x & 0xffff) * book.step, from_half(four.x >> 16) * book.step);
                    u32 second = pack_halves(from_half(four.y & 0xffff) * book.step, from_half(four.y >> 16) * book.step);
                    *(uint2*)(to + (16 * pass + l) * STRIDE + token) =
                        make_uint2(half_mul(a, first), half_mul(b, second));
                }
            }
        }
    }
}

// A float tile: keys [K_DIM][STRIDE], values [16][V_DIM + 8]. f32 and bf16 beyond f16 saturate.
template <bool KEYS>
__device__ void load_floats(u32 type, const u8* tile, u16* to, u32 lane) {
    constexpr u32 DIM = KEYS ? K_DIM : V_DIM;
    constexpr u32 COLS = KEYS ? TILE : DIM, TO_STRIDE = KEYS ? STRIDE : DIM + 8;
    for (u32 i = 8 * lane; i < TILE * DIM; i += 256) {
        uint4 eight;
        if (type == F16) {
            eight = *(const uint4*)(tile + 2 * i);
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

template <bool KEYS>
__device__ void load_tile(const AttendParams& p, const Stream& s, u32 index, u16* to, u32 lane) {
    u32 place = place_of(s, index, s.main_end);
    u32 type = place == IN_MAIN ? s.type : F16;
    const u8* tile = tile_at(s, index, place);
    switch (type) {
        case Q8_0: return load_coded<KEYS, Q8_0>(p.books[Q8_0], tile, to, lane);
        case Q4_0: return load_coded<KEYS, Q4_0>(p.books[Q4_0], tile, to, lane);
        case TURBO2: return load_coded<KEYS, TURBO2>(p.books[TURBO2], tile, to, lane);
        case TURBO3: return load_coded<KEYS, TURBO3>(p.books[TURBO3], tile, to, lane);
        case TURBO4: return load_coded<KEYS, TURBO4>(p.books[TURBO4], tile, to, lane);
        default: return load_floats<KEYS>(type, tile, to, lane);
    }
}

// Asks for a tile to be brought to the second-level cache: the time its first use would wait for.
__device__ void fetch_tile(const Stream& s, u32 index, u32 lane) {
    u32 place = place_of(s, index, s.main_end);
    u32 bytes = tile_bytes(place == IN_MAIN ? s.type : F16, s.dim);
    const u8* tile = tile_at(s, index, place);
    for (u32 at = 128 * lane; at < bytes; at += 128 * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(tile + at));
}

__device__ bool lies_across(const Stream& s, u32 index) {
    return place_of(s, index, s.main_end) != IN_MAIN || !is_coded(s.type);
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

__device__ void multiply(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sixteen queries and what they have seen. A lane has rows lane / 4 and lane / 4 + 8.
struct Work {
    u32 q[K_DIM / 16][4];
    float out[V_DIM / 8][4];
    float max[2];
    float sum[2];
};

__device__ void begin(Work& w, const u16* queries, u32 lane) {
    u32 row = lane / 4, col = 2 * (lane % 4);
    for (u32 k = 0; k < K_DIM / 16; k++) {
        for (u32 r = 0; r < 4; r++) {
            const u16* at = queries + (row + 8 * (r % 2)) * K_DIM + 16 * k + col + 8 * (r / 2);
            w.q[k][r] = *(const u32*)at;
        }
    }
    for (u32 n = 0; n < V_DIM / 8; n++) {
        for (u32 r = 0; r < 4; r++) w.out[n][r] = 0.0f;
    }
    w.max[0] = w.max[1] = HIDDEN;
    w.sum[0] = w.sum[1] = 0.0f;
}

// Scores of the queries with the keys of a tile, masked, and weights relative to the new maximum: the left operand of
// the product with the values.
__device__ void score(Work& w, const u16* keys, bool across, u32 first_token, const u32 visible[2], u32 weights[4],
                      u32 lane) {
    float s[2][4] = {};
    u32 row = lane % 8, matrix = lane / 8;
    for (u32 k = 0; k < K_DIM / 16; k++) {
        u32 m[4];
        if (across) {
            // Rows are dims: matrices (dims 0..8, tokens 0..8), (dims 8.., tokens 0..), then tokens 8..16.
            load_matrices(m, keys + (16 * k + row + 8 * (matrix % 2)) * STRIDE + 8 * (matrix / 2), true);
        } else {
            load_matrices(m, keys + (row + 8 * (matrix / 2)) * (K_DIM + 8) + 16 * k + 8 * (matrix % 2), false);
        }
        multiply(s[0], w.q[k], m[0], m[1]);
        multiply(s[1], w.q[k], m[2], m[3]);
    }
    u32 col = first_token + 2 * (lane % 4);
    for (int half = 0; half < 2; half++) {
        float most = HIDDEN;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                float& x = s[n][2 * half + e];
                if (col + 8 * n + e >= visible[half]) x = HIDDEN;
                most = fmaxf(most, x);
            }
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        float max = fmaxf(w.max[half], most), keep = exp2f(w.max[half] - max);
        w.max[half] = max;
        float sum = 0.0f;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                float& x = s[n][2 * half + e];
                // A hidden token counts nothing even where no other is visible yet.
                x = x == HIDDEN ? 0.0f : exp2f(x - max + LIFT);
                sum += x;
            }
        }
        w.sum[half] = w.sum[half] * keep + sum;
        if (keep != 1.0f) {
            for (u32 n = 0; n < V_DIM / 8; n++) w.out[n][2 * half] *= keep, w.out[n][2 * half + 1] *= keep;
        }
    }
    weights[0] = pack_halves(s[0][0], s[0][1]), weights[1] = pack_halves(s[0][2], s[0][3]);
    weights[2] = pack_halves(s[1][0], s[1][1]), weights[3] = pack_halves(s[1][2], s[1][3]);
}

__device__ void mix(Work& w, const u16* values, bool across, const u32 weights[4], u32 lane) {
    u32 row = lane % 8, matrix = lane / 8;
    for (u32 n = 0; n < V_DIM / 16; n++) {
        u32 m[4];
        if (across) {
            load_matrices(m, values + (row + 8 * (matrix % 2)) * (V_DIM + 8) + 16 * n + 8 * (matrix / 2), true);
        } else {
            load_matrices(m, values + (16 * n + row + 8 * (matrix / 2)) * STRIDE + 8 * (matrix % 2), false);
        }
        multiply(w.out[2 * n], weights, m[0], m[1]);
        multiply(w.out[2 * n + 1], weights, m[2], m[3]);
    }
}

// Tokens that the two rows of a lane may see, of the queries from `first_query`.
__device__ void visible_tokens(const AttendParams& p, u32 first_query, u32 visible[2], u32 lane) {
    for (u32 half = 0; half < 2; half++) {
        u32 query = first_query + lane / 4 + 8 * half;
        visible[half] = query < p.rows * p.group ? p.start + query / p.group + 1 : 0;
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
extern "C" __global__ void __launch_bounds__(128) attend_split(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, first_query = blockIdx.y * QUERIES, kv = blockIdx.z;
    const Stream& keys = p.keys[kv];
    const Stream& values = p.values[kv];
    u16* tile = (u16*)shared + warp * TILE_HALVES;
    u32 visible[2], weights[4];
    visible_tokens(p, first_query, visible, lane);
    u32 last_row = (min(first_query + QUERIES, p.rows * p.group) - 1) / p.group;
    u32 n_tiles = (p.start + last_row + TILE) / TILE;
    u32 end = min(n_tiles, (split + 1) * p.split_tiles);
    Work w;
    begin(w, p.queries + ((size_t)kv * p.padded + first_query) * K_DIM, lane);
    for (u32 index = split * p.split_tiles + warp; index < end; index += WARPS) {
        if (index + WARPS < end) {
            fetch_tile(keys, index + WARPS, lane);
            fetch_tile(values, index + WARPS, lane);
        }
        load_tile<true>(p, keys, index, tile, lane);
        __syncwarp();
        score(w, tile, lies_across(keys, index), index * TILE, visible, weights, lane);
        __syncwarp();
        load_tile<false>(p, values, index, tile, lane);
        __syncwarp();
        mix(w, tile, lies_across(values, index), weights, lane);
        __syncwarp();
    }
    finish_sums(w);
    // Joined by halves: warps 2 and 3 hand over to 0 and 1, then 1 to 0.
    float* hand = (float*)shared;
    constexpr u32 SHARE = V_DIM / 2 + 4;  // floats of a lane
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
extern "C" __global__ void __launch_bounds__(128) attend_many(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, block_query = blockIdx.y * QUERIES * WARPS, kv = blockIdx.z;
    u32 first_query = block_query + warp * QUERIES;
    const Stream& keys = p.keys[kv];
    const Stream& values = p.values[kv];
    u16* key_tiles = (u16*)shared;
    u16* value_tiles = key_tiles + WARPS * TILE_HALVES;
    u32 visible[2], weights[4];
    visible_tokens(p, first_query, visible, lane);
    u32 last_row = (min(block_query + QUERIES * WARPS, p.rows * p.group) - 1) / p.group;
    u32 n_tiles = (p.start + last_row + TILE) / TILE;
    u32 end = min(n_tiles, (split + 1) * p.split_tiles);
    // The last token any query of this warp may see.
    u32 my_row = (min(first_query + QUERIES, p.rows * p.group) - 1) / p.group;
    u32 my_end = first_query < p.rows * p.group ? p.start + my_row + 1 : 0;
    Work w;
    begin(w, p.queries + ((size_t)kv * p.padded + first_query) * K_DIM, lane);
    for (u32 step = split * p.split_tiles; step < end; step += WARPS) {
        if (step + WARPS + warp < end) {
            fetch_tile(keys, step + WARPS + warp, lane);
            fetch_tile(values, step + WARPS + warp, lane);
        }
        if (step + warp < end) {
            load_tile<true>(p, keys, step + warp, key_tiles + warp * TILE_HALVES, lane);
            load_tile<false>(p, values, step + warp, value_tiles + warp * TILE_HALVES, lane);
        }
        __syncthreads();
        for (u32 i = 0; i < WARPS && step + i < end; i++) {
            u32 index = step + i;
            if (index * TILE >= my_end) break;
            score(w, key_tiles + i * TILE_HALVES, lies_across(keys, index), index * TILE, visible, weights, lane);
            mix(w, value_tiles + i * TILE_HALVES, lies_across(values, index), weights, lane);
        }
        __syncthreads();
    }
    finish_sums(w);
    write_part(p, w, kv, split, first_query, lane);
}

// Joins the splits in their order, divides, un-rotates and writes: one warp per query.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ AttendParams p) {
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32, kv = blockIdx.y;
    if (i >= p.rows * p.group) return;
    size_t stride = p.padded, base = (size_t)kv * p.splits * stride + i;
    float max = HIDDEN, sum = 0.0f;
    for (u32 split = 0; split < p.splits; split++) max = fmaxf(max, p.state[2 * (base + split * stride)]);
    for (u32 split = 0; split < p.splits; split++) {
        const float* state = p.state + 2 * (base + split * stride);
        sum += exp2f(state[0] - max) * state[1];
    }
    u32 row = i / p.group, head = (p.first_kv_head + kv) * p.group + i % p.group;
    float* out = p.out + ((size_t)row * p.n_heads + head) * p.v_head_dim;
    for (u32 slice = 0; slice < V_DIM; slice += 128) {
        float x[4] = {};
        u32 at = slice + 4 * lane;
        for (u32 split = 0; split < p.splits && at < V_DIM; split++) {
            float weight = exp2f(p.state[2 * (base + split * stride)] - max);
            float4 v = *(const float4*)(p.part + (base + split * stride) * V_DIM + at);
            x[0] += weight * v.x, x[1] += weight * v.y, x[2] += weight * v.z, x[3] += weight * v.w;
        }
        for (int e = 0; e < 4; e++) x[e] /= sum;
        if (p.values[kv].rotates) rotate(x, p.after, p.before, lane);
        for (int e = 0; e < 4; e++) {
            if (at + e < p.v_head_dim) out[at + e] = x[e];
        }
    }
}
