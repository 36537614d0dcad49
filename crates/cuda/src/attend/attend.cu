// Attention over compressed tiles, with tensor cores. The method is in mod.rs.
//
// A warp works on 16 queries and one tile of 16 tokens at a time. It brings the tile to shared memory as halves, in the
// tile's own order: what a product sums over lies side by side in coded tiles (keys [token][dim], values [dim][token]),
// across in float tiles (keys [dim][token], values [token][dim]), which `ldmatrix` transposes on the way.
//
// Macros: K_DIM, V_DIM (values per token as stored, multiples of 16), CAPPED (whether scores are).

#include "attend.cuh"
#include "rotate.cuh"

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 MAX_DIM = K_DIM > V_DIM ? K_DIM : V_DIM;
// Halves of a tile in shared memory: the larger of [16][dim + PAD] and [dim][16 + PAD]. Rows are 16 bytes off a multiple of
// 128, so that the eight rows of a matrix lie in different banks.
constexpr u32 STRIDE = TILE + PAD;
constexpr u32 TILE_HALVES = MAX_DIM * STRIDE;

struct AttendParams {
    Common c;
    const float* q;      // [.., n_query_heads * k_head_dim]
    const float* sinks;  // [n_query_heads], or null
    float* out;          // [.., n_query_heads * v_head_dim]
    u32 n_query_heads;
    u32 k_head_dim;
    u32 v_head_dim;
    float scale;         // of the scores, times log2 e
    u32 rotates[2];      // keys, values
    u32 balance_at[3];   // where in a balance factors on queries, on outputs, and what is added to these begin
    u32 unused;
    Book books[N_TYPES]; // by type of the stream
    u32 before[4];
    u32 after[4];
};

// Query i of a KV head: query head i % group of its group, of row i / group.
__device__ size_t query_head(const AttendParams& p, const Slot& slot, u32 i) {
    u32 row = slot.part.first_row + i / p.c.group, head = slot.head.kv_head * p.c.group + i % p.c.group;
    return (size_t)row * p.n_query_heads + head;
}

// Numbers of the balance of a KV head of a sequence, of `dim` values: null where there is none.
__device__ const float* balance_of(const Slot& slot, u32 at, u32 dim) {
    return slot.part.balance ? slot.part.balance + at + slot.head.kv_head * dim : nullptr;
}

// Balances, pads, rotates and scales the queries: one warp per query, blocks of WARPS. Grid: queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) prepare_queries(const __grid_constant__ AttendParams p) {
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32;
    Slot slot(p.c, blockIdx.y);
    if (i >= slot.part.padded) return;
    bool is_there = i < slot.n_queries(p.c);
    const float* q = p.q + query_head(p, slot, is_there ? i : 0) * p.k_head_dim;
    const float* factors = balance_of(slot, p.balance_at[0], p.k_head_dim);
    u16* to = p.c.queries + slot.query(i) * K_DIM;
    for (u32 span = 0; span < K_DIM; span += SPAN) {
        float x[4];
        u32 first = span + 4 * lane;
        for (u32 e = 0; e < 4; e++) {
            x[e] = is_there && first + e < p.k_head_dim ? q[first + e] : 0.0f;
            if (factors && first + e < p.k_head_dim) x[e] = __fmul_rn(x[e], factors[first + e]);
        }
        if (p.rotates[0]) rotate(x, block_at(TURBO2, K_DIM, first).n, p.before, p.after, lane);
        if (first < K_DIM) {
            ((u32*)(to + first))[0] = pack_halves(x[0] * p.scale, x[1] * p.scale);
            ((u32*)(to + first))[1] = pack_halves(x[2] * p.scale, x[3] * p.scale);
        }
    }
}

// Bits `at` to `at + 3` of a word, each to bit `to` of its byte; `at` counts from bit `to`.
__device__ u32 spread(u32 word, u32 at, u32 to) {
    u32 nibble = word >> at << to & 15 << to;
    return nibble * 0x00204081u & 0x01010101u << to;
}

// Indices of two or three bits, in nibbles, of rows t and t + 8 of group g of a block of `dims`.
template <u32 TYPE>
__device__ u32 indices(const u8* planes, u32 dims, u32 g, u32 t) {
    // Two low bits: the word of lanes t mod 4 + 4 i, at bits 2 i.
    u32 nibbles = __ldg((const u32*)(planes + TURBO2_GROUP * g) + t % 4) >> (2 * (t / 4)) & 0x33333333;
    if constexpr (laid_out_as(TYPE) == TURBO3) {
        uint2 high = __ldg((const uint2*)(planes + high_planes(dims) + HIGH_GROUP * g));
        nibbles |= spread(high.x, 4 * t, 2) | spread(high.y, 4 * t, 6);
    }
    return nibbles;
}

// Indices of rows t and t + 8 of a block of a type with a memory: of group `four` of a column of 16 dims. Before the first column
// comes the last one, a dim to the left: dims are side by side in groups of keys, and rows of groups of values.
template <bool KEYS, u32 TYPE>
__device__ u32 column(const u8* planes, u32 dims, int number, u32 four, u32 t) {
    if (number >= 0) return indices<TYPE>(planes, dims, 4 * number + four, t);
    u32 first = 4 * (dims / 16 + number);
    if (KEYS) {
        u32 left = indices<TYPE>(planes, dims, first + (four + 3) % 4, t);
        return indices<TYPE>(planes, dims, first + four, t) << 8 | left >> 24;
    }
    u32 rows = indices<TYPE>(planes, dims, first + four, (t + 7) % 8);
    return t > 0 ? rows : (rows & 0x0f0f0f0f) << 4 | (rows >> 4 & 0x0f0f0f0f);
}

// The codes of rows t and t + 8 of group g of a block of `dims`.
template <bool KEYS, u32 TYPE>
__device__ Codes group_codes(const Book& book, const u8* planes, u32 dims, u32 g, u32 t) {
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
    } else if constexpr (remembers(TYPE)) {
        int number = g / 4;
        u32 own = column<KEYS, TYPE>(planes, dims, number, g % 4, t);
        u32 before = column<KEYS, TYPE>(planes, dims, number - 1, g % 4, t);
        u32 earlier = TYPE == TURBO2T ? column<KEYS, TYPE>(planes, dims, number - 2, g % 4, t) : 0;
        return remembered<TYPE>(own, before, earlier);
    } else {
        u32 nibbles = indices<TYPE>(planes, dims, g, t);
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
// here, but for those of keys of turbo types, few beside their dims, which wait for the scores: such keys are whole numbers,
// 1024 + byte, from which the scores take the rest.
template <bool KEYS, u32 TYPE>
__device__ void load_coded(const Book& book, const u8* tile, u16* to, u32 lane) {
    constexpr u32 DIM = KEYS ? K_DIM : V_DIM;
    if constexpr (DIM % LEAST_DIMS == 0) {
        u32 t = lane % 8;
        u32 bias = pack_halves(1024.0f + book.bias, 1024.0f + book.bias);
#pragma unroll
        for (u32 pass = 0; pass < DIM / 16; pass++) {
            u32 g = 4 * pass + lane / 8;
            Dims block = block_at(TYPE, DIM, 16 * pass);
            const u8* start = tile + block_byte(TYPE, block.index, block.first);
            Codes codes = group_codes<KEYS, TYPE>(book, start + SCALE_BYTES, block.n, g - block.first / 4, t);
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

// One side of a KV head of a sequence.
struct View {
    const Memory& memory;
    const Spec& spec;
    const Offsets& at;
    const Band& band;

    // A tile as it lies in the blocks (or the sink), or in 16 bit where there is a tail.
    __device__ Tile tile(u32 index, bool is_main) const {
        u32 place = place_of(spec, index, is_main ? ~0u : 0);
        u32 type = place == IN_MAIN ? spec.type : F16;
        const u8* at_tile = place == IN_TAIL && index - band.first < band.tiles
            ? band_at(memory, spec, at, band, index)
            : tile_at(memory, spec, at, index, place);
        return {at_tile, type, place == IN_MAIN ? spec.tile_bytes : f16_bytes(spec.dim)};
    }

    // What the codes of tile `index` are relative to; null for nothing.
    __device__ const u16* centre(u32 index, const Tile& tile) const {
        return spec.centres && is_coded(tile.type) ? centre_of(spec, index, tile.at) : nullptr;
    }
};

__device__ View keys_of(const Common& c, const Slot& slot) {
    return {slot.part.memory, c.keys, slot.head.keys, slot.part.key_band};
}

__device__ View values_of(const Common& c, const Slot& slot) {
    return {slot.part.memory, c.values, slot.head.values, slot.part.value_band};
}

template <bool KEYS>
__device__ void load_tile(const AttendParams& p, const Tile& tile, u16* to, u32 lane) {
    switch (tile.type) {
        case Q8_0: return load_coded<KEYS, Q8_0>(p.books[Q8_0], tile.at, to, lane);
        case Q4_0: return load_coded<KEYS, Q4_0>(p.books[Q4_0], tile.at, to, lane);
        case TURBO2: return load_coded<KEYS, TURBO2>(p.books[TURBO2], tile.at, to, lane);
        case TURBO3: return load_coded<KEYS, TURBO3>(p.books[TURBO3], tile.at, to, lane);
        case TURBO4: return load_coded<KEYS, TURBO4>(p.books[TURBO4], tile.at, to, lane);
        case TURBO2T: return load_coded<KEYS, TURBO2T>(p.books[TURBO2T], tile.at, to, lane);
        case TURBO3T: return load_coded<KEYS, TURBO3T>(p.books[TURBO3T], tile.at, to, lane);
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

// Keys of turbo types have a scale for each of these blocks. (Others may be of a width that leaves 16 dims at the end.)
constexpr u32 K_BLOCKS = n_blocks(TURBO2, K_DIM);

// Sixteen queries and what they have seen. A lane has rows lane / 4 and lane / 4 + 8.
struct Work {
    u32 q[K_DIM / 16][4];
    float q_sum[K_BLOCKS][2];  // of the blocks: what 1 too much in every key adds
    const u16* centre;         // of the block of the last keys, or null
    float met[2];              // what it adds to the scores
    float out[V_DIM / 8][4];
    float max[2];
    float sum[2];
};

__device__ float half_sum(u32 pair) { return from_half(pair & 0xffff) + from_half(pair >> 16); }

__device__ void begin(Work& w, const u16* queries, u32 lane) {
    u32 row = lane / 4, col = 2 * (lane % 4);
    for (u32 block = 0; block < K_BLOCKS; block++) w.q_sum[block][0] = w.q_sum[block][1] = 0.0f;
#pragma unroll
    for (u32 k = 0; k < K_DIM / 16; k++) {
        for (u32 r = 0; r < 4; r++) {
            const u16* at = queries + (row + 8 * (r % 2)) * K_DIM + 16 * k + col + 8 * (r / 2);
            w.q[k][r] = *(const u32*)at;
            w.q_sum[block_at(TURBO2, K_DIM, 16 * k).index][r % 2] += half_sum(w.q[k][r]);
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
    w.centre = nullptr;
    w.met[0] = w.met[1] = 0.0f;
    w.max[0] = w.max[1] = HIDDEN;
    w.sum[0] = w.sum[1] = 0.0f;
}

// Meets the centre of the keys that come next, which is that of the last ones most often. As right operand it has eight equal
// columns, so that every lane gets the products of its rows.
__device__ void meet(Work& w, const u16* centre, u32 lane) {
    if (centre == w.centre) return;
    float met[4] = {};
    if (centre) {
#pragma unroll
        for (u32 k = 0; k < K_DIM / 16; k++) {
            const u32* at = (const u32*)(centre + 16 * k) + lane % 4;
            multiply(met, w.q[k], __ldg(at), __ldg(at + 4));
        }
    }
    w.centre = centre, w.met[0] = met[0], w.met[1] = met[2];
}

// Scores of the queries with the keys of a tile, whose centre they have met: s[n][..] of tokens 8 n + 2 (lane mod 4) and the next, as `mma` has them.
__device__ void scores(const Work& w, const AttendParams& p, const Tile& tile, const u16* keys, float s[2][4], u32 lane) {
    u32 row = lane % 8, matrix = lane / 8;
    for (u32 n = 0; n < 2; n++) {
        for (u32 r = 0; r < 4; r++) s[n][r] = w.met[r / 2];
    }
    float raw[2][4] = {};
#pragma unroll
    for (u32 k = 0; k < K_DIM / 16; k++) {
        Dims block = block_at(TURBO2, K_DIM, 16 * k);
        u32 m[4];
        if (is_coded(tile.type)) {
            load_matrices(m, keys + (row + 8 * (matrix / 2)) * (K_DIM + PAD) + 16 * k + 8 * (matrix % 2), false);
        } else {
            // Rows are dims: matrices (dims 0..8, tokens 0..8), (dims 8.., tokens 0..), then tokens 8..16.
            load_matrices(m, keys + (16 * k + row + 8 * (matrix % 2)) * STRIDE + 8 * (matrix / 2), true);
        }
        multiply(raw[0], w.q[k], m[0], m[1]);
        multiply(raw[1], w.q[k], m[2], m[3]);
        if (16 * (k + 1) < K_DIM && 16 * (k + 1) < block.first + block.n) continue;
        for (u32 n = 0; n < 2; n++) {
            float2 scale = make_float2(1.0f, 1.0f);
            float excess = 0.0f;
            if (is_turbo(tile.type)) {
                const Book& book = p.books[tile.type];
                const u8* start = tile.at + block_byte(tile.type, block.index, block.first);
                scale = two_scales(start, 8 * n + 2 * (lane % 4), book.step);
                excess = 1024.0f + book.bias;
            }
            for (u32 half = 0; half < 2; half++) {
                float less = excess * w.q_sum[block.index][half];
                s[n][2 * half] += (raw[n][2 * half] - less) * scale.x;
                s[n][2 * half + 1] += (raw[n][2 * half + 1] - less) * scale.y;
                raw[n][2 * half] = raw[n][2 * half + 1] = 0.0f;
            }
        }
    }
}

// What the two rows of a lane see: tokens from `oldest` to before `window` as they lie in the blocks, from there to before `end`
// in 16 bit.
struct Sight {
    u32 oldest[2], window[2], end[2];

    __device__ Sight(const Common& c, const Slot& slot, u32 first_query, u32 lane) {
        for (u32 half = 0; half < 2; half++) {
            u32 query = first_query + lane / 4 + 8 * half, row = query / c.group;
            oldest[half] = window[half] = end[half] = 0;
            if (query >= slot.n_queries(c)) continue;
            oldest[half] = oldest_of(c, slot.part, row), end[half] = slot.part.start + row + 1;
            window[half] = min(max(window_of(c, slot.part, row) * TILE, oldest[half]), end[half]);
        }
    }
    __device__ u32 first(bool is_main, u32 half) const { return is_main ? oldest[half] : window[half]; }
    __device__ u32 last(bool is_main, u32 half) const { return is_main ? window[half] : end[half]; }
    // Whether a query of the warp sees something of a tile in this form.
    __device__ bool sees(u32 token, bool is_main) const {
        bool mine = false;
        for (u32 half = 0; half < 2; half++) mine |= token + TILE > first(is_main, half) && token < last(is_main, half);
        return __any_sync(~0u, mine);
    }
};

// Turns scores into weights relative to the new maximum, and joins them to what came before.
__device__ void soften(const Common& c, Work& w, float s[2][4], u32 first_token, bool is_main, const Sight& sight,
                       u32 lane) {
    u32 col = first_token + 2 * (lane % 4);
    for (int half = 0; half < 2; half++) {
        float most = HIDDEN;
        u32 from = sight.first(is_main, half), to = sight.last(is_main, half);
        bool is_cut = first_token < from || first_token + TILE > to;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                float& x = s[n][2 * half + e];
                x = capped(c, x);
                if (is_cut && (col + 8 * n + e < from || col + 8 * n + e >= to)) x = HIDDEN;
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

// Sums over the tokens, of which each lane of four has seen a share.
__device__ void finish_sums(Work& w) {
    for (int half = 0; half < 2; half++) {
        w.sum[half] += __shfl_xor_sync(~0u, w.sum[half], 1);
        w.sum[half] += __shfl_xor_sync(~0u, w.sum[half], 2);
    }
}

__device__ void write_share(const Common& c, const Slot& slot, const Work& w, u32 split, u32 first_query, u32 lane) {
    size_t base = slot.share(split, first_query);
    for (u32 half = 0; half < 2; half++) {
        u32 row = lane / 4 + 8 * half;
        float* out = c.share + (base + row) * V_DIM + 2 * (lane % 4);
        for (u32 n = 0; n < V_DIM / 8; n++) {
            *(float2*)(out + 8 * n) = make_float2(w.out[n][2 * half], w.out[n][2 * half + 1]);
        }
        if (lane % 4 == 0) *(float2*)(c.state + 2 * (base + row)) = make_float2(w.max[half], w.sum[half]);
    }
}

// Few queries: every warp takes every fourth tile of the split for the same 16 queries; their shares are joined in the order
// of the warps. Grid: splits, blocks of 16 queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) attend_split(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, first_query = blockIdx.y * QUERIES;
    Slot slot(p.c, blockIdx.z);
    if (split >= slot.part.splits || first_query >= slot.n_queries(p.c)) return;
    View keys = keys_of(p.c, slot), values = values_of(p.c, slot);
    u16* unpacked = (u16*)shared + warp * TILE_HALVES;
    Sight sight(p.c, slot, first_query, lane);
    u32 last_query = min(first_query + QUERIES, slot.n_queries(p.c)) - 1;
    Walk walk = walk_of(p.c, slot.part, first_query / p.c.group, last_query / p.c.group);
    u32 end = min(walk.n, (split + 1) * slot.part.split_tiles);
    Work w;
    begin(w, p.c.queries + slot.query(first_query) * K_DIM, lane);
    for (u32 i = split * slot.part.split_tiles + warp; i < end; i += WARPS) {
        u32 index = walk.tile(i), next = walk.tile(i + WARPS);
        bool is_main = walk.is_main(i);
        Tile key = keys.tile(index, is_main), value = values.tile(index, is_main);
        if (i + WARPS < end) {
            fetch_tile(keys.tile(next, walk.is_main(i + WARPS)), lane);
            fetch_tile(values.tile(next, walk.is_main(i + WARPS)), lane);
        }
        float s[2][4];
        load_tile<true>(p, key, unpacked, lane);
        meet(w, keys.centre(index, key), lane);
        __syncwarp();
        scores(w, p, key, unpacked, s, lane);
        soften(p.c, w, s, index * TILE, is_main, sight, lane);
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
    if (warp == 0) write_share(p.c, slot, w, split, first_query, lane);
}

// Many queries: the warps of a block take 16 queries each and share tiles, four at a time, each brought by one warp.
// Grid: splits, blocks of 64 queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) attend_many(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, block_query = blockIdx.y * QUERIES * WARPS;
    u32 first_query = block_query + warp * QUERIES;
    Slot slot(p.c, blockIdx.z);
    if (split >= slot.part.splits || block_query >= slot.n_queries(p.c)) return;
    View keys = keys_of(p.c, slot), values = values_of(p.c, slot);
    u16* key_tiles = (u16*)shared;
    u16* value_tiles = key_tiles + WARPS * TILE_HALVES;
    Sight sight(p.c, slot, first_query, lane);
    u32 last_query = min(block_query + QUERIES * WARPS, slot.n_queries(p.c)) - 1;
    Walk walk = walk_of(p.c, slot.part, block_query / p.c.group, last_query / p.c.group);
    u32 end = min(walk.n, (split + 1) * slot.part.split_tiles);
    Work w;
    begin(w, p.c.queries + slot.query(first_query) * K_DIM, lane);
    for (u32 step = split * slot.part.split_tiles; step < end; step += WARPS) {
        u32 mine = step + warp, next = mine + WARPS;
        if (next < end) {
            fetch_tile(keys.tile(walk.tile(next), walk.is_main(next)), lane);
            fetch_tile(values.tile(walk.tile(next), walk.is_main(next)), lane);
        }
        if (mine < end) {
            load_tile<true>(p, keys.tile(walk.tile(mine), walk.is_main(mine)), key_tiles + warp * TILE_HALVES, lane);
            load_tile<false>(p, values.tile(walk.tile(mine), walk.is_main(mine)), value_tiles + warp * TILE_HALVES, lane);
        }
        __syncthreads();
        for (u32 i = 0; i < WARPS && step + i < end; i++) {
            u32 index = walk.tile(step + i);
            bool is_main = walk.is_main(step + i);
            if (!sight.sees(index * TILE, is_main)) continue;
            Tile key = keys.tile(index, is_main);
            meet(w, keys.centre(index, key), lane);
            float s[2][4];
            scores(w, p, key, key_tiles + i * TILE_HALVES, s, lane);
            soften(p.c, w, s, index * TILE, is_main, sight, lane);
            mix(w, values.tile(index, is_main), value_tiles + i * TILE_HALVES, s, lane);
        }
        __syncthreads();
    }
    finish_sums(w);
    write_share(p.c, slot, w, split, first_query, lane);
}

// Joins the splits in their order, divides, un-rotates, balances and writes: one warp per query. Grid: queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ AttendParams p) {
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32;
    Slot slot(p.c, blockIdx.y);
    if (i >= slot.n_queries(p.c)) return;
    u32 splits = slot.part.splits;
    float max = HIDDEN, sum = 0.0f;
    for (u32 split = 0; split < splits; split++) max = fmaxf(max, p.c.state[2 * slot.share(split, i)]);
    for (u32 split = 0; split < splits; split++) {
        const float* state = p.c.state + 2 * slot.share(split, i);
        sum += exp2f(state[0] - max) * state[1];
    }
    if (p.sinks) {
        // All is told from the larger of it and the scores' maximum; sums carry a factor 2^LIFT.
        float sink = p.sinks[query_head(p, slot, i) % p.n_query_heads] * LOG2_E, top = fmaxf(max, sink);
        sum = sum * exp2f(max - top) + exp2f(sink - top + LIFT);
        max = top;
    }
    float* out = p.out + query_head(p, slot, i) * p.v_head_dim;
    const float* factors = balance_of(slot, p.balance_at[1], p.v_head_dim);
    const float* shifts = balance_of(slot, p.balance_at[2], p.v_head_dim);
    for (u32 span = 0; span < V_DIM; span += SPAN) {
        float x[4] = {};
        u32 first = span + 4 * lane;
        for (u32 split = 0; split < splits && first < V_DIM; split++) {
            float weight = exp2f(p.c.state[2 * slot.share(split, i)] - max);
            float4 v = *(const float4*)(p.c.share + slot.share(split, i) * V_DIM + first);
            x[0] += weight * v.x, x[1] += weight * v.y, x[2] += weight * v.z, x[3] += weight * v.w;
        }
        for (u32 e = 0; e < 4; e++) x[e] /= sum;
        if (p.rotates[1]) rotate(x, block_at(TURBO2, V_DIM, first).n, p.after, p.before, lane);
        for (u32 e = 0; e < 4; e++) {
            if (first + e >= p.v_head_dim) continue;
            out[first + e] = factors ? __fadd_rn(__fmul_rn(x[e], factors[first + e]), shifts[first + e]) : x[e];
        }
    }
}
