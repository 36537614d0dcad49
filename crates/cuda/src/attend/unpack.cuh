// Unpacks tiles to f16 in shared memory, in the tile's stored order: the reduction dimension is
// contiguous in quantized tiles (keys [token][dim], values [dim][token]) and strided in float tiles
// (keys [dim][token], values [token][dim]), which `ldmatrix` transposes on the way.
//
// The f16 values are final: they include scales and centres.
//
// Rows have no padding. Groups of eight f16 are swizzled, so that those of eight rows that are read
// together lie in different banks: rows of tokens within every 64 dims, rows of dims, which are two
// groups, in pairs. Warpgroup MMAs support these orders, as swizzles of 128 and of 32 bytes; for
// them, rows of tokens are stored as eight rows of 64 dims, 64 dims after 64 dims.
//
// Macros: EIGHTS_TOGETHER (whether they are).

#pragma once

#include "split_epilogue.cuh"

// Returns the index of the f16 of a token and a dim, in rows of `dims`, which are tokens.
__device__ inline u32 token_major(u32 dims, u32 token, u32 dim) {
    u32 eight = dim / 8;
#ifdef EIGHTS_TOGETHER
    return token / 8 * 8 * dims + dim / 64 * 512 + token % 8 * 64 + 8 * (eight % 8 ^ token % 8) + dim % 8;
#else
    return token * dims + 8 * (eight < dims / 64 * 8 ? eight ^ token % 8 : eight) + dim % 8;
#endif
}

// The same in rows that are dims.
__device__ inline u32 dim_major(u32 dim, u32 token) { return dim * TILE + 8 * (token / 8 ^ dim / 4 % 2) + token % 8; }

// Loads sixteen rows of queries or softmax weights, of `dims` f16 each, as left operand: from row
// `first` and column `at` on.
__device__ inline void load_rows(u32 a[4], const u16* rows, u32 dims, u32 first, u32 at, u32 lane) {
    u32 row = first + lane % 8 + 8 * (lane / 8 % 2);
    load_matrices(a, rows + token_major(dims, row, at + 8 * (lane / 16)), false);
}

// Loads sixteen dims of a tile of keys, from `dim` on, as right operands: of tokens 0 to 8, then of
// 8 to 16.
__device__ inline void load_keys(u32 m[4], const u16* keys, u32 dims, u32 dim, bool by_token, u32 lane) {
    u32 from = dim + 8 * (lane / 8 % 2), token = 8 * (lane / 16), row = lane % 8;
    load_matrices(m, keys + (by_token ? token_major(dims, token + row, from) : dim_major(from + row, token)), !by_token);
}

// Loads sixteen dims of a tile of values, from `dim` on, as right operands: of dims 0 to 8, then of
// 8 to 16.
__device__ inline void load_values(u32 m[4], const u16* values, u32 dims, u32 dim, bool by_token, u32 lane) {
    u32 from = dim + 8 * (lane / 16), token = 8 * (lane / 8 % 2), row = lane % 8;
    load_matrices(m, values + (by_token ? token_major(dims, token + row, from) : dim_major(from + row, token)), by_token);
}

// Moves bits `at` to `at + 3` of a word each to bit `to` of its byte; `at` counts from bit `to`.
__device__ u32 spread(u32 word, u32 at, u32 to) {
    u32 nibble = word >> at << to & 15 << to;
    return nibble * 0x00204081u & 0x01010101u << to;
}

// Returns indices of two or three bits, in nibbles, of rows t and t + 8 of group g of a block of
// `dims`.
template <u32 TYPE>
__device__ u32 indices(const u8* planes, u32 dims, u32 g, u32 t) {
    // Two low bits: the word of lanes t mod 4 + 4 i, at bits 2 i.
    u32 nibbles = __ldg((const u32*)(planes + TURBO2_GROUP * g) + t % 4) >> (2 * (t / 4)) & 0x33333333;
    if constexpr (layout_of(TYPE) == TURBO3) {
        uint2 high = __ldg((const uint2*)(planes + high_planes(dims) + HIGH_GROUP * g));
        nibbles |= spread(high.x, 4 * t, 2) | spread(high.y, 4 * t, 6);
    }
    return nibbles;
}

// Returns the indices of rows t and t + 8 of a block of a trellis type: of group `four` of a column
// of 16 dims. The predecessor of the first column is the last one, one dim to the left: dims are
// contiguous in groups of keys, and rows of groups of values.
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

// Returns the codes of rows t and t + 8 of group g of a block of `dims`.
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
        return sixteen_levels(book, __ldg((const u32*)(planes + NIBBLES_GROUP * g) + t));
    } else if constexpr (is_trellis(TYPE)) {
        int number = g / 4;
        u32 own = column<KEYS, TYPE>(planes, dims, number, g % 4, t);
        u32 before = column<KEYS, TYPE>(planes, dims, number - 1, g % 4, t);
        u32 earlier = TYPE == TURBO2T ? column<KEYS, TYPE>(planes, dims, number - 2, g % 4, t) : 0;
        return trellis_codes<TYPE>(own, before, earlier);
    } else {
        u32 nibbles = indices<TYPE>(planes, dims, g, t);
        return TYPE == TURBO2 ? four_levels(book, nibbles) : eight_levels(book, nibbles);
    }
}

// Returns two scales as f16, times the step.
__device__ u32 stepped(u32 scales, float step) {
    return pack_halves(from_half(scales & 0xffff) * step, from_half(scales >> 16) * step);
}
// Unpacks N dims of a quantized tile, which begin at `span`, to the positions of those of the tile
// from `first` on: N is a multiple of 128, or the remainder. `centre` is that of the whole tile, or
// null.
template <bool KEYS, u32 DIM, u32 TYPE, u32 N>
__device__ void load_span(const Book& book, const u8* span, u32 first, const u16* centre, u16* to, u32 lane) {
    u32 t = lane % 8;
    u32 bias = pack_halves(1024.0f + book.bias, 1024.0f + book.bias);
    // Everything is in flight at once where that does not take too much code.
    constexpr u32 AHEAD = DIM > 2 * SPAN ? 4 : N / 16;
#pragma unroll AHEAD
    for (u32 pass = 0; pass < N / 16; pass++) {
        u32 g = 4 * pass + lane / 8;
        Dims block = block_at(TYPE, N, 16 * pass);
        const u8* start = span + block_byte(TYPE, block.index, block.first);
        Codes codes = group_codes<KEYS, TYPE>(book, start + SCALE_BYTES, block.n, g - block.first / 4, t);
#pragma unroll
        for (u32 upper = 0; upper < 2; upper++) {
            // Token l and four dims, or dim l of sixteen and four tokens.
            u32 l = t + 8 * upper, select = upper ? 0x4341 : 0x4240;
            // A byte in the low bits of 1024 is the f16 1024 plus the byte.
            u32 a = __byte_perm(codes.pair[0], 0x64646464, select);
            u32 b = __byte_perm(codes.pair[1], 0x64646464, select);
            uint2 scale, shift = {0, 0};
            if constexpr (KEYS) {
                float s = from_half(__ldg((const u16*)start + l)) * (is_turbo(TYPE) ? book.step : 1.0f);
                scale.x = scale.y = pack_halves(s, s);
                if (centre) shift = __ldg((const uint2*)(centre + first + 4 * g));
            } else {
                // The four tokens of a group are the same in every pass.
                scale = __ldg((const uint2*)start + lane / 8);
                if (is_turbo(TYPE)) scale = make_uint2(stepped(scale.x, book.step), stepped(scale.y, book.step));
                if (centre) shift.x = shift.y = __ldg(centre + first + 16 * pass + l) * 0x10001;
            }
            a = half_sub(a, bias), b = half_sub(b, bias);
            if (centre) {
                // Codes and centres are finite f16, but their sums may not be.
                a = half_bounded(half_fma(a, scale.x, shift.x)), b = half_bounded(half_fma(b, scale.y, shift.y));
            } else {
                a = half_mul(a, scale.x), b = half_mul(b, scale.y);
            }
            u32 at = KEYS ? token_major(DIM, l, first + 4 * g) : dim_major(first + 16 * pass + l, lane / 8 * 4);
            *(uint2*)(to + at) = make_uint2(a, b);
        }
    }
}

// Unpacks a quantized tile. In heads of many spans they share one copy of the code.
template <bool KEYS, u32 DIM, u32 TYPE>
__device__ void load_coded(const Book& book, const u8* tile, const u16* centre, u16* to, u32 lane) {
    if constexpr (DIM % MIN_DIMS == 0) {
        constexpr u32 MAX_DIMS = is_turbo(TYPE) ? TURBO_DIMS : BLOCK32_DIMS, SPAN_DIMS = DIM > 2 * SPAN ? DIM / SPAN * SPAN : 0;
#pragma unroll 1
        for (u32 first = 0; first < SPAN_DIMS; first += SPAN) {
            const u8* span = tile + block_byte(TYPE, first / MAX_DIMS, first);
            load_span<KEYS, DIM, TYPE, SPAN>(book, span, first, centre, to, lane);
        }
        if constexpr (DIM > SPAN_DIMS) {
            const u8* span = tile + block_byte(TYPE, SPAN_DIMS / MAX_DIMS, SPAN_DIMS);
            load_span<KEYS, DIM, TYPE, DIM - SPAN_DIMS>(book, span, SPAN_DIMS, centre, to, lane);
        }
    }
}

// Returns eight values of a float tile from value `i` on, as f16. f32 and bf16 beyond f16 saturate.
__device__ inline uint4 eight_halves(u32 type, const u8* tile, u32 i) {
    if (type == F16) return *(const uint4*)(tile + 2 * i);
    float x[8];
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
        float v = type == F32 ? ((const float*)tile)[i + e] : from_bfloat(((const u16*)tile)[i + e]);
        x[e] = fminf(fmaxf(v, -HALF_MAX), HALF_MAX);
    }
    return make_uint4(pack_halves(x[0], x[1]), pack_halves(x[2], x[3]), pack_halves(x[4], x[5]), pack_halves(x[6], x[7]));
}

// Loads a float tile, in rows of dims (keys) or of tokens. f32 and bf16 beyond f16 saturate; f16
// tiles are available after `finish_copies`.
template <bool KEYS, u32 DIM>
__device__ void load_floats(u32 type, const u8* tile, u16* to, u32 lane) {
    constexpr u32 COLS = KEYS ? TILE : DIM, AHEAD = DIM > 2 * SPAN ? 4 : DIM / 16;
#pragma unroll AHEAD
    for (u32 pass = 0; pass < TILE * DIM / 256; pass++) {
        u32 i = 256 * pass + 8 * lane, row = i / COLS, col = i % COLS;
        u16* at = to + (KEYS ? dim_major(row, col) : token_major(DIM, row, col));
        if (type == F16) {
            copy_eight(at, tile + 2 * i);
        } else {
            *(uint4*)at = eight_halves(type, tile, i);
        }
    }
}

// Address and storage form of a tile.
struct Tile {
    const u8* at;
    u32 type;
    u32 bytes;
};

// Keys or values of a KV head of a sequence.
struct View {
    const Memory& memory;
    const Spec& spec;
    const Offsets& at;
    const StepTiles& step_tiles;

    // Returns a tile as stored in the blocks (or the sink), or in 16 bit where there is a tail.
    __device__ Tile tile(u32 index, bool is_main) const {
        u32 location = location_of(spec, index, is_main ? ~0u : 0);
        u32 type = location == IN_MAIN ? spec.type : F16;
        const u8* at_tile = location == IN_TAIL && index - step_tiles.first < step_tiles.tiles
            ? step_tile_at(memory, spec, at, step_tiles, index)
            : tile_at(memory, spec, at, index, location);
        return {at_tile, type, location == IN_MAIN ? spec.tile_bytes : f16_bytes(spec.dim)};
    }

    // Returns its storage type.
    __device__ u32 type(u32 index, bool is_main) const {
        return location_of(spec, index, is_main ? ~0u : 0) == IN_MAIN ? spec.type : F16;
    }

    // Returns the centre that the codes of tile `index` are relative to; null without one.
    __device__ const u16* centre(u32 index, const Tile& tile) const {
        return spec.centres && is_coded(tile.type) ? centre_of(spec, index, tile.at) : nullptr;
    }
};

__device__ View keys_of(const Common& c, const Slot& slot) {
    return {slot.sequence.memory, c.keys, slot.head.keys, slot.sequence.key_step_tiles};
}

__device__ View values_of(const Common& c, const Slot& slot) {
    return {slot.sequence.memory, c.values, slot.head.values, slot.sequence.value_step_tiles};
}

// Loads a tile of DIM dims in the layout of keys, or of values, with its centre, or null. It is
// available after `finish_copies`.
template <bool KEYS, u32 DIM>
__device__ void load_tile(const AttendParams& p, const Tile& tile, const u16* centre, u16* to, u32 lane) {
    switch (tile.type) {
        case Q8_0: return load_coded<KEYS, DIM, Q8_0>(p.books[Q8_0], tile.at, centre, to, lane);
        case Q4_0: return load_coded<KEYS, DIM, Q4_0>(p.books[Q4_0], tile.at, centre, to, lane);
        case TURBO2: return load_coded<KEYS, DIM, TURBO2>(p.books[TURBO2], tile.at, centre, to, lane);
        case TURBO3: return load_coded<KEYS, DIM, TURBO3>(p.books[TURBO3], tile.at, centre, to, lane);
        case TURBO4: return load_coded<KEYS, DIM, TURBO4>(p.books[TURBO4], tile.at, centre, to, lane);
        case TURBO2T: return load_coded<KEYS, DIM, TURBO2T>(p.books[TURBO2T], tile.at, centre, to, lane);
        case TURBO3T: return load_coded<KEYS, DIM, TURBO3T>(p.books[TURBO3T], tile.at, centre, to, lane);
        default: return load_floats<KEYS, DIM>(tile.type, tile.at, to, lane);
    }
}

// The same, for a KV tensor that stores TYPE, or f16.
template <bool KEYS, u32 DIM, u32 TYPE>
__device__ void load_stored(const AttendParams& p, const Tile& tile, const u16* centre, u16* to, u32 lane) {
    if constexpr (is_coded(TYPE)) {
        if (tile.type == TYPE) {
            load_coded<KEYS, DIM, TYPE>(p.books[TYPE], tile.at, centre, to, lane);
        } else {
            load_floats<KEYS, DIM>(F16, tile.at, to, lane);
        }
    } else {
        load_floats<KEYS, DIM>(TYPE == F16 ? F16 : tile.type, tile.at, to, lane);
    }
}

// Prefetches a tile to the L2 cache, to hide the latency of its first use.
__device__ void prefetch_tile(const Tile& tile, u32 lane) {
    for (u32 at = 128 * lane; at < tile.bytes; at += 128 * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(tile.at + at));
    }
}

// Copies `n` prepared queries to shared memory, with `threads` threads. They are available after
// `finish_copies`.
__device__ void copy_queries(const Common& c, const Slot& slot, u32 first, u32 n, u32 threads, u16* to) {
    const u16* from = c.queries + slot.query(first) * K_DIM;
    for (u32 i = threadIdx.x; i < n * (K_DIM / 8); i += threads) {
        u32 query = i / (K_DIM / 8), dim = i % (K_DIM / 8) * 8;
        copy_eight(to + token_major(K_DIM, query, dim), from + query * K_DIM + dim);
    }
}

// The visible tokens of a query: from the oldest to before `window` as stored in the blocks, from
// there to before `end` in 16 bit. Later queries see no older tokens and no fewer recent tokens in
// each form. Those beyond the last have its mask.
struct VisibleRange {
    u32 window, end;

    __device__ VisibleRange() {}
    __device__ VisibleRange(const Common& c, const Slot& slot, u32 query) {
        u32 row = c.by_group.quotient(min(query, slot.n_queries(c) - 1));
        end = slot.sequence.start + row + 1;
        window = min(max(window_of(c, slot.sequence, row) * TILE, oldest(c)), end);
    }
    __device__ u32 oldest(const Common& c) const { return end - min(end, c.visible); }
    __device__ u32 first(const Common& c, bool is_main) const { return is_main ? oldest(c) : window; }
    __device__ u32 last(bool is_main) const { return is_main ? window : end; }
};
