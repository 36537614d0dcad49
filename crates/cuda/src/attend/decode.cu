// Decode attention of up to eight queries over quantized tiles, straight from memory to the tensor
// cores. decode.rs describes the method.
//
// Macros: K_TYPE, V_TYPE (of the main tiles), K_DIM, V_DIM (stored values per token), CAPPED (soft
// cap on the scores), BLOCKS (resident per multiprocessor).

#include "scores.cuh"

// Of codes whose scales are in the weights there are the bytes, or levels, alone. `minus` collects
// what the bias of bytes adds to all dims.
template <u32 TYPE, bool CODED = (TYPE >= Q8_0), bool SCALED = weights_have_scales(TYPE)>
struct Values {
    Group<TYPE> group;

    __device__ void load(const u8* tile, u32 lane) { group.load(tile + SCALE_BYTES, V_DIM, first_dim(0, lane) / 4 + lane % 4); }

    __device__ void accumulate_values(float out[SLICES][MMAS][4], float minus[4], const Levels& levels, const u32 b[2], u32 lane) const {
        Group<TYPE> own = group;
        if constexpr (is_trellis(TYPE)) {
            u32 dim = first_dim(0, lane);
            own.set_predecessor_lanes(dim / 16, V_DIM, dim / 16 * 4 + lane % 4);
        }
        if constexpr (MMAS == 4) own = own.from(first_row(lane));
        for_mmas([&](auto i) {
            u32 a[4];
            if constexpr (is_trellis(TYPE)) level_fragment<i.value>(own, levels.table, lane, a);
            else byte_fragment<0, i.value>(own, levels.book, a);
            multiply(out[0][i.value], a, b[0], b[1]);
        });
        if constexpr (has_bias(TYPE)) {
            u32 bias = 0x80008000 | (u32)levels.book.bias * 0x10001, all[4] = {bias, bias, bias, bias};
            multiply(minus, all, b[0], b[1]);
        }
    }
};

template <u32 TYPE>
struct Values<TYPE, true, false> {
    Group<TYPE> groups[SLICES];
    uint2 scales[SLICES];  // of four tokens

    __device__ void load(const u8* tile, u32 lane) {
#pragma unroll
        for (u32 slice = 0; slice < SLICES; slice++) {
            u32 dim = first_dim(slice, lane);
            Dims in = block_at(TYPE, V_DIM, dim);
            const u8* block = tile + block_byte(TYPE, in.index, in.first);
            groups[slice].load(block + SCALE_BYTES, in.n, (dim - in.first) / 4 + lane % 4);
            scales[slice] = __ldg((const uint2*)block + lane % 4);
        }
    }

    // Adds to out[s][i] of lane (g, t) dims 128 s + 16 g + i (first two) and + 8, for queries 2t
    // and 2t + 1. (With 64 dims the lane's dims begin at `first_dim` and `first_row`.)
    __device__ void accumulate_values(float out[SLICES][MMAS][4], float*, const Levels& levels, const u32 b[2], u32 lane) const {
        u32 bias = pack_halves(1024.0f + levels.book.bias, 1024.0f + levels.book.bias);
#pragma unroll
        for (u32 slice = 0; slice < SLICES; slice++) {
            Group<TYPE> group = groups[slice];
            if constexpr (is_trellis(TYPE)) {
                u32 dim = first_dim(slice, lane);
                Dims in = block_at(TYPE, V_DIM, dim);
                group.set_predecessor_lanes((dim - in.first) / 16, in.n, (dim - 128 * slice) / 16 * 4 + lane % 4);
            }
            if constexpr (MMAS == 4) group = group.from(first_row(lane));
            uint2 four = scales[slice];
            u32 first = pack_halves(from_half((u16)four.x) * levels.book.step, from_half((u16)(four.x >> 16)) * levels.book.step);
            u32 second = pack_halves(from_half((u16)four.y) * levels.book.step, from_half((u16)(four.y >> 16)) * levels.book.step);
            for_mmas([&](auto i) {
                u32 a[4];
                if constexpr (is_trellis(TYPE)) {
                    level_fragment<i.value>(group, levels.table, lane, a);
                } else {
                    byte_fragment<0x64, i.value>(group, levels.book, a);
                    for (u32 r = 0; r < 4; r++) a[r] = half_sub(a[r], bias);
                }
                a[0] = half_mul(a[0], first), a[1] = half_mul(a[1], first);
                a[2] = half_mul(a[2], second), a[3] = half_mul(a[3], second);
                multiply(out[slice][i.value], a, b[0], b[1]);
            });
        }
    }
};

template <u32 TYPE>
struct Values<TYPE, false, false> {
    Floats groups[SLICES];

    __device__ void load(const u8* tile, u32 lane) {
#pragma unroll
        for (u32 slice = 0; slice < SLICES; slice++) {
            load_floats<TYPE>(groups[slice], tile, lane % 4 * 4 * V_DIM + first_dim(slice, lane), V_DIM);
            if constexpr (MMAS == 4) groups[slice] = groups[slice].from(first_row(lane));
        }
    }

    __device__ void accumulate_values(float out[SLICES][MMAS][4], float*, const Levels&, const u32 b[2], u32) const {
#pragma unroll
        for (u32 slice = 0; slice < SLICES; slice++) {
            for_mmas([&](auto i) {
                u32 a[4];
                fragment<i.value>(groups[slice], a);
                multiply(out[slice][i.value], a, b[0], b[1]);
            });
        }
    }
};

// Loads the softmax weights of a tile as right operand: token 4t + e of query g in the order of
// `Group`.
__device__ inline void load_weights(u32 b[2], const u8* weights, u32 lane) {
    u32 row = lane % 8 / 2 * 4 + lane % 2 + (lane / 8 % 2) * 2;
    u32 at = shared_address(weights + 16 * row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1]) : "r"(at) : "memory");
}

struct Softmax {
    float max[2];  // of queries 2t and 2t + 1
    float sum[2];  // of the tokens of this lane
};

// The visible tokens of the queries 2t and 2t + 1 of a lane.
struct __align__(16) VisibleRange {
    u32 oldest[2], end[2];

    __device__ bool sees(u32 q, u32 token) const { return token >= oldest[q] && token < end[q]; }
    __device__ bool sees_tile(u32 first_token) const {
        return first_token >= max(oldest[0], oldest[1]) && first_token + TILE <= min(end[0], end[1]);
    }
};

// The scales of the values of a lane's tile, which join the softmax weights, relative to a power of
// two above the largest scale that a query sees in the unit: weights stay f16 and bits do not
// depend on tokens that the query does not see. Tiles in 16 bit have scale 1 and no such power.
struct ValueScales {
    Scales scales;
    float power[2];   // of queries 2t and 2t + 1
    bool are_scales;  // or the tile is in 16 bit

    __device__ void load(const u8* tile, bool in_main) {
        are_scales = in_main;
        for (int i = 0; i < 2; i++) scales.half[i] = make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00);
        if (in_main) scales.load(tile);
    }
    // Finds the powers. Called by a whole warp; `is_visible` is the same for all of its lanes if it
    // needs no mask.
    __device__ void set_power(bool needs_mask, u32 first_token, const VisibleRange& range) {
        float top[2] = {0.0f, 0.0f};
        if (!are_scales) {
        } else if (needs_mask) {
            for_eight([&](auto i) {
                for (u32 q = 0; q < 2; q++) {
                    u32 low = first_token + i.value, high = low + 8;
                    if (range.sees(q, low)) top[q] = fmaxf(top[q], scales.template get<i.value>());
                    if (range.sees(q, high)) top[q] = fmaxf(top[q], scales.template get<i.value + 8>());
                }
            });
        } else {
            u32 four[4];
            for_four([&](auto i) { four[i.value] = half_max(word<i.value>(scales.half[0]), word<i.value>(scales.half[1])); });
            u32 two = half_max(half_max(four[0], four[1]), half_max(four[2], four[3]));
            top[0] = top[1] = fmaxf(from_half((u16)two), from_half((u16)(two >> 16)));
        }
        for (u32 q = 0; q < 2; q++) {
            for (u32 step = 4; step < 32; step *= 2) top[q] = fmaxf(top[q], __shfl_xor_sync(~0u, top[q], step));
            // The power above it; 1 without scales.
            u32 bits = __float_as_uint(top[q]) & 0x7f800000;
            power[q] = bits == 0 ? 1.0f : 2.0f * __uint_as_float(bits);
        }
    }
    // Returns the power of a query, 1 for tiles in 16 bit, and its exponent.
    __device__ float power_of(u32 q) const { return are_scales ? power[q] : 1.0f; }
    __device__ float exponent(u32 q) const { return are_scales ? (float)(int)(__float_as_uint(power[q]) >> 23) - 127.0f : 0.0f; }
};

// Masks tokens, turns scores, which lack `centre_score` each, into softmax weights and leaves them
// in shared memory, with the scales of values if these join them; returns in `rescale` the
// rescaling factors of the earlier sums.
__device__ inline void online_softmax(const Common& c, Softmax& w, float scores[8][4], const float centre_score[2], u32 first_token,
                                      const VisibleRange& visible_range, ValueScales& scales, u8* weights, float rescale[2], u32 lane) {
    if (CAPPED) {
        for (u32 i = 0; i < 8; i++) {
            for (u32 r = 0; r < 4; r++) scores[i][r] = capped(c, scores[i][r] + centre_score[r % 2]);
        }
    }
    // Only the first and the last unit of a sequence need the mask.
    bool needs_mask = !__all_sync(~0u, visible_range.sees_tile(first_token));
    if (needs_mask) {
        for (u32 i = 0; i < 8; i++) {
            for (u32 r = 0; r < 4; r++) {
                if (!visible_range.sees(r % 2, first_token + i + 8 * (r / 2))) scores[i][r] = HIDDEN;
            }
        }
    }
    if constexpr (SCALED_WEIGHTS) scales.set_power(needs_mask, first_token, visible_range);
    float max_score[2] = {HIDDEN, HIDDEN}, sum[2] = {0.0f, 0.0f};
    for (u32 i = 0; i < 8; i++) {
        for (u32 r = 0; r < 4; r++) max_score[r % 2] = fmaxf(max_score[r % 2], scores[i][r]);
    }
    for (u32 q = 0; q < 2; q++) {
        float own = CAPPED ? max_score[q] : max_score[q] + centre_score[q], max = fmaxf(w.max[q], own);
        for (u32 step = 4; step < 32; step *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        rescale[q] = exp2f(w.max[q] - max);
        w.max[q] = max;
        // All scores of a tile lack the same `centre_score`: instead of adding it to each, the
        // subtracted maximum is lowered by it. It is not less than any score, however large they
        // are and whatever was rounded. A query that has seen no token yet has maximum HIDDEN:
        // subtracting 0 leaves the weights of masked tokens at 0.
        max_score[q] = max == HIDDEN ? 0.0f : max_score[q] - (own - max);
        max_score[q] -= LIFT;
        if constexpr (SCALED_WEIGHTS) max_score[q] += scales.exponent(q);
    }
    u8* at = weights + lane / 4 * WEIGHT_BYTES + 4 * (lane % 4);
    for_eight([&](auto i) {
        float* four = scores[i.value];
        for (u32 r = 0; r < 4; r++) {
            four[r] = power_of_two(four[r] - max_score[r % 2]);
            sum[r % 2] += four[r];
        }
        if constexpr (SCALED_WEIGHTS) {
            float low = scales.scales.template get<i.value>(), high = scales.scales.template get<i.value + 8>();
            four[0] *= low, four[1] *= low, four[2] *= high, four[3] *= high;
        }
        *(u32*)(at + 16 * i.value) = pack_halves(four[0], four[1]);
        *(u32*)(at + 16 * (i.value + 8)) = pack_halves(four[2], four[3]);
    });
    for (u32 q = 0; q < 2; q++) w.sum[q] = w.sum[q] * rescale[q] + (SCALED_WEIGHTS ? scales.power_of(q) : 1.0f) * sum[q];
}

struct Shared {
    Sequence sequence;
    Columns columns;
    uint2 queries[K_DIM / 16 * 32];        // right operands, by chunk of 16 dims and lane
    float2 minus_bias[K_BLOCKS + 1][4];    // of quantized keys, by block and t
    VisibleRange visible_ranges[4];        // by t
    LevelTable tables[TABLES > 0 ? TABLES : 1];
    union __align__(16) {
        u8 weights[WARPS][UNIT * WEIGHT_BYTES];
        Exchange exchange[WARPS];
        Joined joined;
    };
    Totals totals;
    Factors factors[WARPS];
    float max[WARPS][QUERIES];
    float sum[WARPS][QUERIES];
    u32 is_last;
};

// Prepares the queries as right operands; the columns beyond the last one are zeros.
__device__ inline void prepare(const AttendParams& p, const Slot& slot, const Columns& columns, uint2* queries, u32 lane, u32 warp) {
    for (u32 column = warp; column < QUERIES; column += WARPS) {
        for (u32 span = 0; span < K_DIM; span += SPAN) {
            uint2 four = make_uint2(0, 0);
            if (column < columns.n) four = prepared(p, slot, columns.first_query + column, span, lane);
            u32 first = span + 4 * lane;
            if (first < K_DIM) queries[first / 16 * 32 + 4 * column + first % 16 / 4] = four;
        }
    }
}

// The units of a sequence: `n` of them, each the tiles of a block, from `first` on. All tokens of
// the last tile count as rows, so that the units are those of each row of the tile.
struct Units {
    u32 first, n;
    u32 first_visible;  // before it no row sees any token, and blocks may be absent

    __device__ Units(const Common& c, const Sequence& sequence) {
        u32 last_tile = sequence.start / TILE, end = last_tile * TILE + 1;
        first = (end - min(end, c.visible)) / (UNIT * TILE);
        n = last_tile / UNIT + 1 - first;
        first_visible = oldest_of(c, sequence, 0) / (UNIT * TILE);
    }
};

// Returns whether some tile of a unit is in its block.
__device__ inline bool has_main(const Spec& s, const Sequence& sequence, u32 unit) {
    u32 end = min(unit * UNIT + UNIT, s.tail_tiles == 0 ? sequence.start / TILE + 1 : sequence.window);
    return max(unit * UNIT, (u32)s.sink_tiles) < end;
}

// Returns the address of the block of a unit; null if no tile of it is there.
__device__ inline const u8* block_of_unit(const Common& c, const Sequence& sequence, u32 unit) {
    if (!has_main(c.keys, sequence, unit) && !has_main(c.values, sequence, unit)) return nullptr;
    return (const u8*)sequence.memory.blocks[unit];
}

// A lane's tile of a unit, and whether it exists.
struct LaneTile {
    const u8* tile;
    bool in_main;
    bool in_f16;
};

// Returns the tile, if it is before `end`: as stored in the block before the window, in 16 bit from
// there on.
__device__ inline LaneTile lane_tile(const Sequence& sequence, const Spec& s, const Offsets& at, const StepTiles& step_tiles,
                                     const u8* block, u32 index, u32 end) {
    if (index >= end) return {nullptr, false, false};
    u32 location = location_of(s, index, sequence.window);
    if (location == IN_MAIN) return {block + at.main + index % UNIT * s.tile_bytes, true, false};
    if (location == IN_TAIL && index - step_tiles.first < step_tiles.tiles) {
        return {step_tile_at(sequence.memory, s, at, step_tiles, index), false, true};
    }
    return {tile_at(sequence.memory, s, at, index, location), false, true};
}

__device__ inline const u8* tile_of_lane(const u8* tile, u32 lane) {
    return (const u8*)__shfl_sync(~0u, (u64)tile, lane);
}

template <u32 TYPE>
__device__ inline void accumulate_tile(float out[SLICES][MMAS][4], float minus[4], const u8* tile, const Levels& levels, const u8* weights,
                                       u32 lane) {
    Values<TYPE> values;
    values.load(tile, lane);
    u32 b[2];
    load_weights(b, weights, lane);
    values.accumulate_values(out, minus, levels, b, lane);
}

// Processes eight tiles of one type, with several loads in flight.
template <u32 TYPE>
__device__ inline void accumulate_unit(float out[SLICES][MMAS][4], float minus[4], const u8* lane_tile, const Levels& levels,
                                       const u8* weights, u32 lane) {
    constexpr u32 AHEAD = (TYPE >= Q4_0 ? 4 : TYPE == Q8_0 ? 2 : 1) / (TYPE >= Q8_0 ? SLICES : 1);
#pragma unroll 1
    for (u32 first = 0; first < UNIT; first += AHEAD) {
        Values<TYPE> values[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) values[i].load(tile_of_lane(lane_tile, 4 * (first + i)), lane);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            u32 b[2];
            load_weights(b, weights + (first + i) * WEIGHT_BYTES, lane);
            values[i].accumulate_values(out, minus, levels, b, lane);
        }
    }
}

// The part of a split that a warp has processed.
struct Part {
    Softmax softmax;
    float out[SLICES][MMAS][4];  // times `unit` if `of_codes`
    float power[2];              // of the scales, of queries 2t and 2t + 1
    bool of_codes;

    __device__ void clear() {
        for (u32 q = 0; q < 2; q++) softmax.max[q] = HIDDEN, softmax.sum[q] = 0.0f, power[q] = 1.0f;
        of_codes = false;
        for (u32 slice = 0; slice < SLICES; slice++) {
            for (u32 i = 0; i < MMAS; i++) {
                for (u32 r = 0; r < 4; r++) out[slice][i][r] = 0.0f;
            }
        }
    }
    __device__ void scale(const float by[2]) {
        if (by[0] == 1.0f && by[1] == 1.0f) return;
        for (u32 slice = 0; slice < SLICES; slice++) {
            for (u32 i = 0; i < MMAS; i++) {
                for (u32 r = 0; r < 4; r++) out[slice][i][r] *= by[r % 2];
            }
        }
    }
    __device__ void add(const float by[4]) {
        for (u32 i = 0; i < MMAS; i++) {
            for (u32 r = 0; r < 4; r++) out[0][i][r] += by[r];
        }
    }
    // Rescales the sums, to those of codes with scales relative to `next`.
    __device__ void rescale_to_codes(const float rescale[2], const float next[2], float step) {
        float by[2];
        for (u32 q = 0; q < 2; q++) {
            // The reciprocal of a power of two.
            float other = __uint_as_float(0x7f000000 - __float_as_uint(next[q]));
            by[q] = rescale[q] * (of_codes ? power[q] * other : other * (CODE_UNIT / step));
            power[q] = next[q];
        }
        of_codes = true;
        scale(by);
    }
    // Rescales the sums, to plain ones.
    __device__ void rescale_to_floats(const float rescale[2], float step) {
        float by[2];
        for (u32 q = 0; q < 2; q++) by[q] = rescale[q] * (of_codes ? power[q] * (step / CODE_UNIT) : 1.0f);
        of_codes = false;
        scale(by);
    }
};

// Adds the values of a unit, whose softmax weights are in shared memory, after the earlier sums
// have been multiplied by `rescale`.
__device__ inline void accumulate(Part& part, const LaneTile& value, const ValueScales& scales, const float rescale[2],
                                  const Levels& levels, const u8* weights, u32 lane) {
    u32 in_main = __ballot_sync(~0u, value.in_main), in_f16 = __ballot_sync(~0u, value.in_f16);
    float minus[4] = {};
    bool to_codes = SCALED_WEIGHTS && in_main;
    if (to_codes) part.rescale_to_codes(rescale, scales.power, levels.book.step);
    else part.rescale_to_floats(rescale, levels.book.step);
    if (in_main == ~0u) {
        accumulate_unit<V_TYPE>(part.out, minus, value.tile, levels, weights, lane);
    } else if (in_main) {
        for (u32 i = 0; i < UNIT; i++) {
            const u8* tile = tile_of_lane(value.tile, 4 * i);
            if (in_main >> (4 * i) & 1) accumulate_tile<V_TYPE>(part.out, minus, tile, levels, weights + i * WEIGHT_BYTES, lane);
        }
    }
    if (SCALED_WEIGHTS && has_bias(V_TYPE) && in_main) part.add(minus);
    if (!in_f16) return;
    float same[2] = {1.0f, 1.0f};
    part.rescale_to_floats(same, levels.book.step);
    for (u32 i = 0; i < UNIT; i++) {
        const u8* tile = tile_of_lane(value.tile, 4 * i);
        if (in_f16 >> (4 * i) & 1) accumulate_tile<F16>(part.out, minus, tile, levels, weights + i * WEIGHT_BYTES, lane);
    }
}

// Attends to a unit, whose block is at `block`.
__device__ inline void attend_unit(const AttendParams& p, Shared& shared, const Head& head, Part& part, u32 unit, const u8* block,
                                   u8* weights, u32 lane) {
    Levels key_levels = {p.books[K_TYPE], shared.tables[0]};
    Levels value_levels = {p.books[V_TYPE], shared.tables[V_TABLE]};
    const Sequence& sequence = shared.sequence;
    u32 index = unit * UNIT + lane / 4, end = sequence.start / TILE + 1;
    LaneTile key = lane_tile(sequence, p.c.keys, head.keys, sequence.key_step_tiles, block, index, end);
    LaneTile value = lane_tile(sequence, p.c.values, head.values, sequence.value_step_tiles, block, index, end);
    float scores[8][4] = {};
    u32 in_main = __ballot_sync(~0u, key.in_main), in_f16 = __ballot_sync(~0u, key.in_f16);
    bool has_centre = is_coded(K_TYPE) && p.c.keys.centres && in_main;
    const u16* centre = (const u16*)(block + head.keys.main + UNIT * p.c.keys.tile_bytes);
    // Prefetched together with the codes, and read from the L2 cache afterwards.
    if (has_centre) asm volatile("prefetch.global.L2 [%0];" ::"l"(centre + lane % 4 * (K_DIM / 4)));
    if (in_main) {
        const u8* any = tile_of_lane(key.tile, __ffs(in_main) - 1);
        add_scores<K_TYPE>(scores, key.in_main ? key.tile : any, key.in_main, key_levels, shared.queries, shared.minus_bias, lane);
    }
    if (in_f16) {
        const u8* any = tile_of_lane(key.tile, __ffs(in_f16) - 1);
        add_scores<F16>(scores, key.in_f16 ? key.tile : any, key.in_f16, key_levels, shared.queries, shared.minus_bias, lane);
    }
    float rescale[2], centre_score[2] = {};
    ValueScales scales;
    if constexpr (SCALED_WEIGHTS) scales.load(value.tile, value.in_main);
    if (has_centre) {
        float2 products = centre_scores(centre, shared.queries, lane);
        if (key.in_main) centre_score[0] = products.x, centre_score[1] = products.y;
    }
    online_softmax(p.c, part.softmax, scores, centre_score, index * TILE, shared.visible_ranges[lane % 4], scales, weights, rescale, lane);
    __syncwarp();
    accumulate(part, value, scales, rescale, value_levels, weights, lane);
    __syncwarp();
}

// Copies the sequence and the columns that split `split` of the launch belongs to to shared memory,
// which leaves registers. Called by the whole block.
__device__ inline void find_columns(const DecodeParams& p, u32 split, Shared& shared) {
    u32 group = p.a.c.group;
    auto take = [&](const Sequence& sequence) {
        u32 queries = sequence.rows * group, tiles = (queries + QUERIES - 1) / QUERIES, at = split - sequence.first_partial;
        if (at >= sequence.splits * tiles * p.a.c.n_heads) return;
        u32 number = at / sequence.splits, first = number % tiles * QUERIES;
        shared.sequence = sequence;
        u32 first_split = split - at % sequence.splits;
        shared.columns = {number / tiles, first, min(queries - first, QUERIES), first_split, first_split + sequence.splits, p.block_of(first_split)};
    };
    __syncthreads();
    for (u32 i = threadIdx.x; i < p.n_sequences; i += THREADS) {
        if (p.listed) take(p.listed[i]);
        else take(p.a.c.sequences[i]);
    }
    __syncthreads();
}

// Requests the first keys of a warp, which arrive while the queries are prepared.
__device__ inline void prefetch_keys(const Common& c, const Head& head, const u8* block, u32 lane) {
    if (!is_coded(K_TYPE) || !block) return;
    for (u32 at = 128 * lane; at < min(UNIT * c.keys.tile_bytes, 8192); at += 128 * 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(block + head.keys.main + at));
    }
}

// The units of a warp, in order, and the block of the next one, whose address is loaded ahead.
struct Walk {
    u32 unit;
    const u8* block;

    __device__ bool is_there(const Units& units) const { return unit < units.first + units.n && unit >= units.first_visible; }
    __device__ void load(const Common& c, const Sequence& sequence) {
        block = is_there(Units(c, sequence)) ? block_of_unit(c, sequence, unit) : nullptr;
    }
};

// Returns what queries 2t and 2t + 1 see. Columns beyond the last one, which are 0 and are not
// stored, see the same.
__device__ inline VisibleRange visible_range_of(const Common& c, const Sequence& sequence, const Columns& columns, u32 t) {
    VisibleRange range;
    for (u32 q = 0; q < 2; q++) {
        u32 row = (columns.first_query + min(2 * t + q, columns.n - 1)) / c.group;
        range.oldest[q] = oldest_of(c, sequence, row);
        range.end[q] = sequence.start + row + 1;
    }
    return range;
}

// Prepares the queries of the columns and what else all splits need. Called by the whole block.
__device__ inline void begin_columns(const AttendParams& p, Shared& shared, u32 lane, u32 warp) {
    const Columns& columns = shared.columns;
    prepare(p, Slot(shared.sequence, p.c.heads[columns.head], columns.head), columns, shared.queries, lane, warp);
    begin_totals(shared.totals, columns.n);
    if (threadIdx.x < 4) shared.visible_ranges[threadIdx.x] = visible_range_of(p.c, shared.sequence, columns, threadIdx.x);
    __syncthreads();
    for (u32 index = warp; index < K_BLOCKS; index += WARPS) {
        float2 minus = minus_bias_of(index, p.books[K_TYPE], shared.queries, lane);
        if (lane < 4) shared.minus_bias[index][lane] = minus;
    }
    __syncthreads();
}

// Attends to the splits from `split` on, before `end`, of the columns that it belongs to; returns
// the first one of the next columns. A warp takes every fourth unit of a split.
__device__ inline u32 attend_splits(const DecodeParams& p, Shared& shared, u32 split, u32 end, u32 lane, u32 warp) {
    const AttendParams& a = p.a;
    find_columns(p, split, shared);
    const Sequence& sequence = shared.sequence;
    const Columns& columns = shared.columns;
    bool is_begun = split == columns.first_split;
    end = min(end, columns.end_split);
    Walk walk;
    walk.unit = Units(a.c, sequence).first + (split - columns.first_split) * (sequence.split_tiles / UNIT) + warp;
    walk.load(a.c, sequence);
    prefetch_keys(a.c, a.c.heads[columns.head], walk.block, lane);
    begin_columns(a, shared, lane, warp);

#pragma unroll 1
    for (; split < end; split++) {
        Part part;
        part.clear();
#pragma unroll 1
        for (u32 tile = 0; tile < sequence.split_tiles; tile += UNIT * WARPS) {
            Walk now = walk;
            walk.unit += WARPS;
            walk.load(a.c, sequence);
            if (!now.is_there(Units(a.c, sequence))) continue;
            attend_unit(a, shared, a.c.heads[columns.head], part, now.unit, now.block, shared.weights[warp], lane);
        }
        float same[2] = {1.0f, 1.0f};
        part.rescale_to_floats(same, a.books[V_TYPE].step);
        fold(a.c, shared, columns, part.softmax.max, part.softmax.sum, part.out, is_begun ? ~0u : p.place(split), lane, warp);
    }
    if (!is_begun || split != columns.end_split) {
        __syncthreads();
        if (is_begun) write_totals(a.c, shared.totals, columns.n, p.folded_place(blockIdx.x));
        if (!is_last(p, columns, shared.is_last)) return split;
        join(p, shared.totals, shared.joined, columns, lane, warp);
    }
    __syncthreads();
    write_outputs(a, Slot(sequence, a.c.heads[columns.head], columns.head), shared.totals, columns, lane, warp);
    return split;
}

// Attention of rows that see all tiles in the same form. Blocks have equal shares of the splits of
// all sequences, heads and groups of eight queries; splits.rs describes which.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) decode(const __grid_constant__ DecodeParams p) {
    __shared__ __align__(16) Shared shared;
    wait_for_kernel_before();
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if constexpr (K_IS_TRELLIS) shared.tables[0].fill(K_TYPE, threadIdx.x, THREADS);
    if constexpr (V_IS_TRELLIS && TABLES > K_IS_TRELLIS) shared.tables[V_TABLE].fill(V_TYPE, threadIdx.x, THREADS);
    u32 split = p.first_split(blockIdx.x), end = p.first_split(blockIdx.x + 1);
    while (split < end) split = attend_splits(p, shared, split, end, lane, warp);
}
