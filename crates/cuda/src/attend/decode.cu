// Decode attention of four or eight queries over quantized tiles, straight from memory to the
// tensor cores. decode.rs describes the method.
//
// Macros: K_TYPE, V_TYPE (of the main tiles), K_DIM, V_DIM (stored values per token), CAPPED (soft
// cap on the scores), QUERIES (4 or 8), BLOCKS (resident per multiprocessor).

#include "scores.cuh"

// Values of a slice of a tile, tokens 4t .. 4t + 4.
template <u32 TYPE, bool CODED = (TYPE >= Q8_0)>
struct Values {
    static constexpr bool SCALED = weights_have_scales(TYPE);
    Group<TYPE> group;
    uint2 scales;  // of four tokens, unless they are in the weights

    __device__ void load(const u8* tile, u32 slice, u32 lane) {
        u32 dim = first_dim(slice, lane);
        Dims in = block_at(TYPE, V_DIM, dim);
        const u8* block = tile + block_byte(TYPE, in.index, in.first);
        group.load(block + SCALE_BYTES, in.n, (dim - in.first) / 4 + lane % 4);
        if constexpr (!SCALED) scales = __ldg((const uint2*)block + lane % 4);
    }
    // Returns the rows that the lane multiplies.
    __device__ Group<TYPE> rows(u32 slice, u32 lane) const {
        Group<TYPE> own = group;
        if constexpr (is_trellis(TYPE)) {
            u32 dim = first_dim(slice, lane);
            Dims in = block_at(TYPE, V_DIM, dim);
            own.set_predecessor_lanes((dim - in.first) / 16, in.n, (dim - 128 * slice) / 16 * 4 + lane % 4);
        }
        if constexpr (FOURS == 2) own = own.from(first_row(lane));
        return own;
    }
    // Adds bytes times the weights, exactly.
    __device__ void accumulate_bytes(ByteSums& sums, const Levels& levels, const uint4 b[QUADS], u32 slice, u32 lane) const {
        Group<TYPE> own = rows(slice, lane);
        for_fours([&](auto i) {
            u32 a[4];
            byte_fragment<i.value>(own, levels.book, a);
            for (u32 quad = 0; quad < QUADS; quad++) {
                multiply_weights(sums.high[quad][i.value], a, b[quad].x, b[quad].y);
                multiply_weights(sums.low[quad][i.value], a, b[quad].z, b[quad].w);
            }
        });
    }
    // Adds f16 times the weights to a slice of `out`.
    __device__ void accumulate(Outputs& out, const Levels& levels, const HalfOperands b[QUADS], u32 slice, u32 lane) const {
        Group<TYPE> own = rows(slice, lane);
        u32 first = 0, second = 0;
        if constexpr (!SCALED) {
            float step = levels.book.step;
            first = pack_halves(from_half((u16)scales.x) * step, from_half((u16)(scales.x >> 16)) * step);
            second = pack_halves(from_half((u16)scales.y) * step, from_half((u16)(scales.y >> 16)) * step);
        }
        for_fours([&](auto i) {
            u32 a[2][4];
            scaled_rows<i.value>(own, levels, first, second, lane, a[0]);
            scaled_rows<i.value + 4>(own, levels, first, second, lane, a[1]);
            for (u32 quad = 0; quad < QUADS; quad++) b[quad].multiply_rows(out[quad][slice][i.value], a[0], a[1]);
        });
    }
    // Returns rows I and I + 8, times their scales unless these are in the weights.
    template <u32 I>
    __device__ static void scaled_rows(const Group<TYPE>& own, const Levels& levels, u32 first, u32 second, u32 lane, u32 a[4]) {
        code_fragment<I>(own, levels, lane, a);
        if constexpr (SCALED) return;
        a[0] = half_mul(a[0], first), a[1] = half_mul(a[1], first);
        a[2] = half_mul(a[2], second), a[3] = half_mul(a[3], second);
    }
};

template <u32 TYPE>
struct Values<TYPE, false> {
    Floats group;

    __device__ void load(const u8* tile, u32 slice, u32 lane) {
        load_floats<TYPE>(group, tile, lane % 4 * 4 * V_DIM + first_dim(slice, lane), V_DIM);
        if constexpr (FOURS == 2) group = group.from(first_row(lane));
    }
    __device__ void accumulate(Outputs& out, const Levels&, const HalfOperands b[QUADS], u32 slice, u32) const {
        for_fours([&](auto i) {
            u32 a[2][4];
            fragment<i.value>(group, a[0]);
            fragment<i.value + 4>(group, a[1]);
            for (u32 quad = 0; quad < QUADS; quad++) b[quad].multiply_rows(out[quad][slice][i.value], a[0], a[1]);
        });
    }
};

// The softmax weights of a unit are in shared memory, by tile and query: 16 bits for each token,
// fixed point that bytes are multiplied by, or f16.

// The weights of values in bytes: the largest of a query and a unit is WEIGHT_STEPS.
constexpr float WEIGHT_STEPS = 65535;
constexpr bool WEIGHTS_IN_BYTES = SCALED_WEIGHTS && has_bytes(V_TYPE);
// What the largest weight with its scale becomes in f16.
constexpr float HALF_STEPS = 32768;

// Loads the four weights of a lane's column, of tokens 4t .. 4t + 4.
__device__ inline uint2 four_weights(const u8* weights, u32 quad, u32 lane) {
    return *(const uint2*)(weights + 2 * TILE * (4 * quad + lane / 8) + 8 * (lane % 4));
}

// Loads the weights of a tile as right operands: high bytes, low bytes.
__device__ inline void load_weight_bytes(uint4 b[QUADS], const u8* weights, u32 lane) {
    bool is_odd = lane / 4 % 2;
    u32 high = is_odd ? 0x3414 : 0x4341, low = is_odd ? 0x2404 : 0x4240;
    for (u32 quad = 0; quad < QUADS; quad++) {
        uint2 four = four_weights(weights, quad, lane);
        b[quad] = make_uint4(__byte_perm(four.x, 0, high), __byte_perm(four.y, 0, high), __byte_perm(four.x, 0, low), __byte_perm(four.y, 0, low));
    }
}

__device__ inline void load_weight_halves(HalfOperands b[QUADS], const u8* weights, u32 lane) {
    for (u32 quad = 0; quad < QUADS; quad++) b[quad].set(four_weights(weights, quad, lane), lane);
}

// Writes the weights of a lane's tile. With `is_scaled`, as fixed point relative to the largest
// product with a scale that the query sees in the unit, or as f16 relative to it; the factor of
// each quad turns sums with them to true ones. Called by a whole warp.
__device__ inline void write_weights(const float p[QUADS][4][4], const Scales& scales, bool is_scaled, float step, float factor[QUADS],
                                     u8* weights, u32 lane) {
    constexpr float STEPS = WEIGHTS_IN_BYTES ? WEIGHT_STEPS : HALF_STEPS;
    // Less than this does not count beside weights of 2^LIFT.
    constexpr float LEAST = 1e-30f;
#pragma unroll
    for (u32 quad = 0; quad < QUADS; quad++) {
        float x[4][4], top = 0.0f;
        for_rows([&](auto i, auto r) { x[i.value][r.value] = p[quad][i.value][r.value]; });
        factor[quad] = 0.0f;
        if constexpr (SCALED_WEIGHTS) {
            if (is_scaled) {
                for_rows([&](auto i, auto r) {
                    x[i.value][r.value] *= scales.get<i.value + row_of(r.value)>();
                    top = fmaxf(top, x[i.value][r.value]);
                });
            }
            for (u32 lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
            factor[quad] = top > LEAST ? top * (step / STEPS) : 0.0f;
        }
        float steps = top > LEAST ? STEPS * reciprocal(top) : 0.0f;
        u32 pairs[8];
#pragma unroll
        for (u32 pair = 0; pair < 8; pair++) {
            u32 i = pair % 2 * 2, r = pair / 2 % 2 * 2 + pair / 4;
            float low = x[i][r], high = x[i + 1][r];
            if (!is_scaled) {
                pairs[pair] = pack_halves(low, high);
            } else if constexpr (WEIGHTS_IN_BYTES) {
                // 2^23 and a whole number, in the lower bits.
                u32 bits = __float_as_uint(fmaf(low, steps, 8388608.0f)), next = __float_as_uint(fmaf(high, steps, 8388608.0f));
                pairs[pair] = __byte_perm(bits, next, 0x5410);
            } else {
                pairs[pair] = pack_halves(low * steps, high * steps);
            }
        }
        uint4* at = (uint4*)(weights + lane / 4 * WEIGHT_BYTES + 2 * TILE * (4 * quad + lane % 4));
        at[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        at[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
}

struct Softmax {
    float max[QUADS];  // of query t of each quad
    float sum[QUADS];  // of the tokens of this lane
};

// The tokens that a query sees.
struct VisibleRange {
    u32 oldest, end;

    __device__ bool sees(u32 token) const { return token >= oldest && token < end; }
    __device__ bool sees_tile(u32 first_token) const { return first_token >= oldest && first_token + TILE <= end; }
};

// Masks tokens, turns scores, which lack `centre_score` each, into softmax weights, up to 2^LIFT;
// returns in `rescale` the rescaling factors of the earlier sums.
__device__ inline void online_softmax(const Common& c, Softmax& w, float scores[QUADS][4][4], const float centre_score[QUADS], u32 first_token,
                                      const VisibleRange* visible_ranges, float rescale[QUADS], u32 lane) {
#pragma unroll
    for (u32 quad = 0; quad < QUADS; quad++) {
        VisibleRange range = visible_ranges[4 * quad + lane % 4];
        if (CAPPED) {
            for_rows([&](auto i, auto r) {
                float& score = scores[quad][i.value][r.value];
                score = capped(c, score + centre_score[quad]);
            });
        }
        // Only the first and the last unit of a sequence need the mask.
        if (!__all_sync(~0u, range.sees_tile(first_token))) {
            for_rows([&](auto i, auto r) {
                if (!range.sees(first_token + i.value + row_of(r.value))) scores[quad][i.value][r.value] = HIDDEN;
            });
        }
        float max_score = HIDDEN, sum = 0.0f;
        for_rows([&](auto i, auto r) { max_score = fmaxf(max_score, scores[quad][i.value][r.value]); });
        float own = CAPPED ? max_score : max_score + centre_score[quad], max = fmaxf(w.max[quad], own);
        for (u32 step = 4; step < 32; step *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        rescale[quad] = exp2f(w.max[quad] - max);
        w.max[quad] = max;
        // All scores of a tile lack the same `centre_score`: instead of adding it to each, the
        // subtracted maximum is lowered by it. It is not less than any score, however large they
        // are and whatever was rounded. A query that has seen no token yet has maximum HIDDEN:
        // subtracting 0 leaves the weights of masked tokens at 0.
        max_score = max == HIDDEN ? 0.0f : max_score - (own - max);
        max_score -= LIFT;
        for_rows([&](auto i, auto r) {
            float& score = scores[quad][i.value][r.value];
            score = power_of_two(score - max_score);
            sum += score;
        });
        w.sum[quad] = w.sum[quad] * rescale[quad] + sum;
    }
}

struct Shared {
    Sequence sequence;
    Columns columns;
    Queries queries;
    VisibleRange visible_ranges[QUERIES];
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
__device__ inline void prepare(const AttendParams& p, const Slot& slot, const Columns& columns, Queries& queries, u32 lane, u32 warp) {
    constexpr u32 SPANS = (K_DIM + SPAN - 1) / SPAN;
    const Book& book = p.books[K_TYPE];
    for (u32 column = warp; column < QUERIES; column += WARPS) {
        float4 x[SPANS];
        u32 top = 0;  // bits of the largest magnitude, in whose order NaN is above infinity
#pragma unroll
        for (u32 i = 0; i < SPANS; i++) {
            x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (column < columns.n) x[i] = prepared_values(p, slot, columns.first_query + column, i * SPAN, lane);
            u32 first = i * SPAN + 4 * lane;
            if (first < K_DIM) queries.set_halves(first, column, x[i]);
            for (float e : {x[i].x, x[i].y, x[i].z, x[i].w}) top = max(top, __float_as_uint(e) & 0x7fffffff);
        }
        if constexpr (has_bytes(K_TYPE)) {
            for (u32 step = 1; step < 32; step *= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
            float largest = __uint_as_float(top);
#pragma unroll
            for (u32 i = 0; i < SPANS; i++) {
                u32 first = i * SPAN + 4 * lane;
                if (first < K_DIM) queries.set_bytes(first, column, x[i], QUERY_STEPS / largest);
            }
            // Not finite: all scores are NaN.
            if (lane == 0) queries.unit[column] = top < 0x7f800000 ? largest * (book.step / QUERY_STEPS) : __uint_as_float(0x7fc00000);
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
// there on. Blocks may have 16 bit too.
template <u32 TYPE>
__device__ inline LaneTile lane_tile(const Sequence& sequence, const Spec& s, const Offsets& at, const StepTiles& step_tiles,
                                     const u8* block, u32 index, u32 end) {
    if (index >= end) return {nullptr, false, false};
    u32 location = location_of(s, index, sequence.window);
    if (location == IN_MAIN) return {block + at.main + index % UNIT * s.tile_bytes, TYPE != F16, TYPE == F16};
    if (location == IN_TAIL && index - step_tiles.first < step_tiles.tiles) {
        return {step_tile_at(sequence.memory, s, at, step_tiles, index), false, true};
    }
    return {tile_at(sequence.memory, s, at, index, location), false, true};
}

__device__ inline const u8* tile_of_lane(const u8* tile, u32 lane) {
    return (const u8*)__shfl_sync(~0u, (u64)tile, lane);
}

// Calls f for each slice and row of the outputs of a lane for a query.
template <typename F>
__device__ inline void for_outputs(F f) {
    for (u32 slice = 0; slice < SLICES; slice++) {
        for (u32 i = 0; i < FOURS; i++) {
            for (u32 r = 0; r < 4; r++) f(slice, i, r);
        }
    }
}

// The part of a split that a warp has processed.
struct Part {
    Softmax softmax;
    Outputs out;

    __device__ void clear() {
        for (u32 quad = 0; quad < QUADS; quad++) {
            softmax.max[quad] = HIDDEN, softmax.sum[quad] = 0.0f;
            for_outputs([&](u32 slice, u32 i, u32 r) { out[quad][slice][i][r] = 0.0f; });
        }
    }
    __device__ void rescale(const float by[QUADS]) {
        for (u32 quad = 0; quad < QUADS; quad++) {
            if (by[quad] == 1.0f) continue;
            for_outputs([&](u32 slice, u32 i, u32 r) { out[quad][slice][i][r] *= by[quad]; });
        }
    }
};

// Adds a slice of AHEAD consecutive tiles, loaded together: of codes, or one.
template <u32 TYPE, u32 AHEAD, typename S>
__device__ inline void accumulate_tiles(S& sums, const u8* tiles, const Levels& levels, const u8* weights, u32 slice, u32 lane) {
    static_assert(is_coded(TYPE) || AHEAD == 1, "tiles of floats may lie anywhere");
    Values<TYPE> values[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) values[i].load(tiles + i * tile_bytes(TYPE, V_DIM), slice, lane);
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) add_products(sums, values[i], levels, weights + i * WEIGHT_BYTES, slice, lane);
}

template <u32 TYPE>
__device__ inline void add_products(ByteSums& sums, const Values<TYPE>& values, const Levels& levels, const u8* weights, u32 slice, u32 lane) {
    uint4 b[QUADS];
    load_weight_bytes(b, weights, lane);
    values.accumulate_bytes(sums, levels, b, slice, lane);
}

template <u32 TYPE>
__device__ inline void add_products(Outputs& sums, const Values<TYPE>& values, const Levels& levels, const u8* weights, u32 slice, u32 lane) {
    HalfOperands b[QUADS];
    load_weight_halves(b, weights, lane);
    values.accumulate(sums, levels, b, slice, lane);
}

// Adds a slice of the tiles of a unit that are `mine` in their lanes, to bytes or outputs.
template <u32 TYPE, typename S>
__device__ inline void accumulate_unit(S& sums, const u8* lane_tile, bool mine, const Levels& levels, const u8* weights, u32 slice, u32 lane) {
    constexpr u32 AHEAD = is_coded(TYPE) ? groups_ahead(TYPE) : 1;
    if (AHEAD > 1 && __all_sync(~0u, mine)) {
        // All in the block.
        const u8* tiles = tile_of_lane(lane_tile, 0);
#pragma unroll 1
        for (u32 first = 0; first < UNIT; first += AHEAD) {
            accumulate_tiles<TYPE, AHEAD>(sums, tiles + first * tile_bytes(TYPE, V_DIM), levels, weights + first * WEIGHT_BYTES, slice, lane);
        }
    } else {
        u32 mask = __ballot_sync(~0u, mine);
#pragma unroll 1
        for (u32 i = 0; i < UNIT; i++) {
            const u8* tile = tile_of_lane(lane_tile, 4 * i);
            if (mask >> (4 * i) & 1) accumulate_tiles<TYPE, 1>(sums, tile, levels, weights + i * WEIGHT_BYTES, slice, lane);
        }
    }
}

// Adds a slice of the main tiles of a unit, whose weights are in shared memory.
__device__ inline void accumulate_main(Part& part, const LaneTile& value, const float factor[QUADS], const Levels& levels,
                                       const u8* weights, u32 slice, u32 lane) {
    if constexpr (WEIGHTS_IN_BYTES) {
        ByteSums sums;
        sums.clear();
        accumulate_unit<V_TYPE>(sums, value.tile, value.in_main, levels, weights, slice, lane);
        for (u32 quad = 0; quad < QUADS; quad++) {
            for (u32 i = 0; i < FOURS; i++) {
                for (u32 r = 0; r < 4; r++) part.out[quad][slice][i][r] += factor[quad] * sums.get(quad, i, r);
            }
        }
    } else if constexpr (SCALED_WEIGHTS) {
        // Of these outputs, the slice alone is in use.
        Outputs sums = {};
        accumulate_unit<V_TYPE>(sums, value.tile, value.in_main, levels, weights, slice, lane);
        for (u32 quad = 0; quad < QUADS; quad++) {
            for (u32 i = 0; i < FOURS; i++) {
                for (u32 r = 0; r < 4; r++) part.out[quad][slice][i][r] += factor[quad] * sums[quad][slice][i][r];
            }
        }
    } else {
        accumulate_unit<V_TYPE>(part.out, value.tile, value.in_main, levels, weights, slice, lane);
    }
}

// Attends to a unit, whose block is at `block`.
__device__ inline void attend_unit(const AttendParams& p, Shared& shared, const Head& head, Part& part, u32 unit, const u8* block,
                                   u8* weights, u32 lane) {
    const Sequence& sequence = shared.sequence;
    u32 index = unit * UNIT + lane / 4, end = sequence.start / TILE + 1;
    float scores[QUADS][4][4] = {}, centre_score[QUADS] = {};
    {
        LaneTile key = lane_tile<K_TYPE>(sequence, p.c.keys, head.keys, sequence.key_step_tiles, block, index, end);
        u32 in_main = __ballot_sync(~0u, key.in_main), in_f16 = __ballot_sync(~0u, key.in_f16);
        bool has_centre = is_coded(K_TYPE) && p.c.keys.centres && in_main;
        const u16* centre = (const u16*)(block + head.keys.main + UNIT * p.c.keys.tile_bytes);
        // Prefetched together with the codes, and read from the L2 cache afterwards.
        if (has_centre) asm volatile("prefetch.global.L2 [%0];" ::"l"(centre + lane % 4 * (K_DIM / 4)));
        if (K_TYPE != F16 && in_main) {
            const u8* any = tile_of_lane(key.tile, __ffs(in_main) - 1);
            if constexpr (is_coded(K_TYPE)) {
                Levels levels = {book_of(p, K_TYPE, has_bytes(K_TYPE)), shared.tables[0]};
                add_scores<K_TYPE>(scores, key.in_main ? key.tile : any, key.in_main, levels, shared.queries, lane);
            } else {
                add_float_scores<K_TYPE>(scores, key.tile, key.in_main, shared.queries, lane);
            }
        }
        if (in_f16) add_float_scores<F16>(scores, key.tile, key.in_f16, shared.queries, lane);
        if (has_centre) {
            float products[QUADS];
            centre_scores(products, centre, shared.queries, lane);
            for (u32 quad = 0; quad < QUADS; quad++) centre_score[quad] = key.in_main ? products[quad] : 0.0f;
        }
    }
    LaneTile value = lane_tile<V_TYPE>(sequence, p.c.values, head.values, sequence.value_step_tiles, block, index, end);
    bool in_main = __any_sync(~0u, value.in_main), in_f16 = __any_sync(~0u, value.in_f16);
    Scales scales = {};
    if (SCALED_WEIGHTS && value.in_main) scales.load(value.tile);
    float rescale[QUADS], factor[QUADS];
    online_softmax(p.c, part.softmax, scores, centre_score, index * TILE, shared.visible_ranges, rescale, lane);
    part.rescale(rescale);
    Levels levels = {book_of(p, V_TYPE, WEIGHTS_IN_BYTES), shared.tables[V_TABLE]};
#pragma unroll
    for (u32 slice = 0; slice < SLICES; slice++) {
        if (slice == 0 || SCALED_WEIGHTS) {
            if (slice > 0 && value.in_main) scales.load(value.tile + block_byte(V_TYPE, slice, 128 * slice));
            write_weights(scores, scales, SCALED_WEIGHTS && value.in_main, levels.book.step, factor, weights, lane);
            __syncwarp();
        }
        if (V_TYPE != F16 && in_main) accumulate_main(part, value, factor, levels, weights, slice, lane);
        if (in_f16) accumulate_unit<F16>(part.out, value.tile, value.in_f16, levels, weights, slice, lane);
        __syncwarp();
    }
}

// Copies the sequence and the columns that split `split` of the launch belongs to to shared memory,
// which leaves registers. Called by the whole block.
__device__ inline void find_columns(const DecodeParams& p, u32 split, Shared& shared) {
    u32 group = p.a.c.group;
    auto take = [&](const Sequence& sequence) {
        u32 queries = sequence.rows * group, tiles = (queries + QUERIES - 1) / QUERIES, at = split - sequence.first_partial;
        if (at >= sequence.splits * tiles * p.a.c.n_heads) return;
        u32 number = sequence.by_splits.quotient(at), head = number, first = 0;
        if (tiles > 1) head = number / tiles, first = number % tiles * QUERIES;
        shared.sequence = sequence;
        u32 first_split = sequence.first_partial + number * sequence.splits;
        shared.columns = {head, first, min(queries - first, QUERIES), first_split, first_split + sequence.splits, p.block_of(first_split)};
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

// Returns what a column sees. Those beyond the last one, which are 0 and are not stored, see the
// same.
__device__ inline VisibleRange visible_range_of(const Common& c, const Sequence& sequence, const Columns& columns, u32 column) {
    u32 row = c.by_group.quotient(columns.first_query + min(column, columns.n - 1));
    return {oldest_of(c, sequence, row), sequence.start + row + 1};
}

// Prepares the queries of the columns and what else all splits need. Called by the whole block.
__device__ inline void begin_columns(const AttendParams& p, Shared& shared, u32 lane, u32 warp) {
    const Columns& columns = shared.columns;
    prepare(p, Slot(shared.sequence, p.c.heads[columns.head], columns.head), columns, shared.queries, lane, warp);
    begin_totals(shared.totals, columns.n);
    if (threadIdx.x < QUERIES) shared.visible_ranges[threadIdx.x] = visible_range_of(p.c, shared.sequence, columns, threadIdx.x);
    __syncthreads();
}

// Attends to the splits from `split` on, before `end`, of the columns that it belongs to; returns
// the first one of the next columns. A warp takes every fourth unit of a split.
__device__ inline u32 attend_splits(const DecodeParams& p, Shared& shared, u32 split, u32 end, u32 lane, u32 warp) {
    const AttendParams& a = p.a;
    find_columns(p, split, shared);
    wait_for_kernel_before();
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
// all sequences, heads and groups of QUERIES queries; splits.rs describes which.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) decode(const __grid_constant__ DecodeParams p) {
    __shared__ __align__(16) Shared shared;
    u32 split = p.first_split(blockIdx.x), end = p.first_split(blockIdx.x + 1);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if constexpr (K_IS_TRELLIS) shared.tables[0].fill(K_TYPE, threadIdx.x, THREADS);
    if constexpr (V_IS_TRELLIS && TABLES > K_IS_TRELLIS) shared.tables[V_TABLE].fill(V_TYPE, threadIdx.x, THREADS);
    // Sequences among the parameters may be read while the kernel before still runs.
    if (p.listed) wait_for_kernel_before();
    while (split < end) split = attend_splits(p, shared, split, end, lane, warp);
}
