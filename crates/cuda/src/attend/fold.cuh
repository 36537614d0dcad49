// Folds KV splits of four or eight queries: within a block, split after split, and where several
// blocks share a sequence. splits.rs describes the order, which gives the same bits either way.
//
// Macros: K_DIM, V_DIM, QUERIES (4 or 8).

#pragma once

#include "prologue_epilogue.cuh"

constexpr u32 SLICES = (V_DIM + 127) / 128;
// Fours of rows that a lane has of a group of values: with 64 dims or fewer, two lanes share a
// group.
constexpr u32 FOURS = V_DIM > 64 ? 4 : 2;
// Dims of an output that warps exchange at a time.
constexpr u32 OUT_DIMS = V_DIM < 128 ? V_DIM : 128;
// Queries come in fours: a thread folds four of one dim.
constexpr u32 QUADS = QUERIES / 4;

// Rows (tokens of K, dims of V) come in fours: number i has rows i + row_of(0) .. i + row_of(3), in
// the order in which an MMA leaves their results.
__host__ __device__ constexpr u32 row_of(u32 r) { return r % 2 * 8 + r / 2 * 4; }

// The share of a lane in a tile of values: of each slice of 128 dims, tokens 4t .. 4t + 4 of dims
// 16 g .. 16 g + 16. Lanes beyond the last dim repeat the last 16. With 64 dims, lanes g and g + 4
// have the same 16 dims, of which they take the rows from `first_row` on.
__device__ inline u32 first_dim(u32 slice, u32 lane) {
    return min(128 * slice + 16 * (lane / 4 % (2 * FOURS)), V_DIM - 16);
}
__device__ inline u32 first_row(u32 lane) { return lane / 4 / (2 * FOURS) * 2; }

struct DecodeParams {
    AttendParams a;
    const Sequence* listed;  // the sequences, or null if they are in `a`
    u32 n_sequences;
    // splits of each block: `share`, and one more of the first `longer` blocks
    u32 share;
    u32 longer;
    u32 block_partials;      // places of a block for partial results
    Divisor by_share;
    Divisor by_longer_share;  // by one more

    __device__ u32 first_split(u32 block) const { return block * share + min(block, longer); }
    __device__ u32 block_of(u32 split) const {
        u32 in_longer = longer * (share + 1);
        return split < in_longer ? by_longer_share.quotient(split) : longer + by_share.quotient(split - in_longer);
    }
    // Returns the place of the folded first splits of the last sequence and head that a block
    // begins.
    __device__ u32 folded_place(u32 block) const { return (block + 1) * block_partials - 1; }
    // Returns the place of a split that its block does not fold.
    __device__ u32 place(u32 split) const {
        u32 block = block_of(split);
        return block * block_partials + split - first_split(block);
    }
};

// Up to QUERIES queries of a KV head of a sequence.
struct Columns {
    u32 head;         // index, among those of the launch
    u32 first_query;  // among those of the head
    u32 n;            // of them
    u32 first_split;  // among those of the launch
    u32 end_split;
    u32 first_block;  // the one that has the first split
};

// The current fold: for each query the largest score and the sum of the weights, and the weighted
// sums of the values. A thread owns the same four queries of a dim in every fold.
struct Totals {
    float max[QUERIES];
    float sum[QUERIES];
    float4 out[QUADS][V_DIM];
};

// Factors of a fold, by query: what each warp adds, what was there, and what the split adds.
struct Factors {
    float warp[WARPS][QUERIES];
    float old[QUERIES];
    float split[QUERIES];
};

// 32 partial results in the order in which they are joined.
struct Joined {
    u32 place[32];
    float old[32][QUERIES];
    float split[32][QUERIES];
    float sum[32][QUERIES];
};

// Sums of a warp, [dim][query]; a group of 16 dims begins in banks of its own.
struct Exchange {
    float out[OUT_DIMS * QUERIES + OUT_DIMS / 16 * QUERIES];
    __device__ float* at(u32 dim, u32 query) { return out + (dim + dim / 16) * QUERIES + query; }
};

__device__ inline float4 four_of(const float* queries, u32 quad) { return *(const float4*)(queries + 4 * quad); }

__device__ inline float4 times(const float4& a, const float4& b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}

// Returns a b + c, rounded once.
__device__ inline float4 times_plus(const float4& a, const float4& b, const float4& c) {
    return make_float4(__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y), __fmaf_rn(a.z, b.z, c.z), __fmaf_rn(a.w, b.w, c.w));
}

// Calls f for the dims from `first` on and the fours of `n` queries that a thread owns.
template <typename F>
__device__ inline void for_owned(u32 n, u32 first, u32 dims, F f) {
    for (u32 i = threadIdx.x; i < (n + 3) / 4 * OUT_DIMS; i += THREADS) {
        if (i % OUT_DIMS < dims) f(i / OUT_DIMS, first + i % OUT_DIMS);
    }
}

// Calls f for all that a thread owns of `n` queries.
template <typename F>
__device__ inline void for_all_owned(u32 n, F f) {
    for (u32 slice = 0; slice < SLICES; slice++) for_owned(n, OUT_DIMS * slice, min(V_DIM - OUT_DIMS * slice, OUT_DIMS), f);
}

__device__ inline void begin_totals(Totals& totals, u32 n) {
    if (threadIdx.x < QUERIES) totals.max[threadIdx.x] = HIDDEN, totals.sum[threadIdx.x] = 0.0f;
    for_all_owned(n, [&](u32 quad, u32 dim) { totals.out[quad][dim] = make_float4(0.0f, 0.0f, 0.0f, 0.0f); });
}

// Outputs of a lane: dims first_dim + first_row + i + row_of(r) of query t of each quad, [i][r].
typedef float Outputs[QUADS][SLICES][FOURS][4];

// Leaves a slice of the sums of a warp in its exchange buffer.
__device__ inline void write_exchange(const Outputs& out, u32 slice, u32 n, u32 dims, Exchange& to, u32 lane) {
    u32 dim = 16 * (lane / 4 % (2 * FOURS)) + first_row(lane);
    for (u32 quad = 0; quad < QUADS; quad++) {
        if (dim >= dims || 4 * quad >= n) continue;
        for (u32 i = 0; i < FOURS; i++) {
            for (u32 r = 0; r < 4; r++) *to.at(dim + i + row_of(r), 4 * quad + lane % 4) = out[quad][slice][i][r];
        }
    }
}

// Maximum and sum of a query before and after a fold.
struct Folded {
    Total split;
    Total all;
};

// Weighs the results of the warps for a split, for query lane % QUERIES, and leaves the factors.
// Called by whole warps, each for itself.
__device__ inline Folded weigh(const float max[WARPS][QUERIES], const float sum[WARPS][QUERIES], const Totals& totals,
                               Factors& factors, u32 lane) {
    static_assert(WARPS * QUERIES <= 32, "a lane weighs a query of a warp");
    u32 warp = lane / QUERIES % WARPS, query = lane % QUERIES;
    Total split = {max[warp][query], 0.0f};
    for (u32 step = QUERIES; step < WARPS * QUERIES; step *= 2) split.max = fmaxf(split.max, __shfl_xor_sync(~0u, split.max, step));
    float factor = power_of_two(max[warp][query] - split.max);
    if (lane < WARPS * QUERIES) factors.warp[warp][query] = factor;
    split.sum = __fmul_rn(factor, sum[warp][query]);
    for (u32 step = QUERIES; step < WARPS * QUERIES; step *= 2) split.sum = __fadd_rn(split.sum, __shfl_xor_sync(~0u, split.sum, step));
    float top = fmaxf(totals.max[query], split.max);
    float old = power_of_two(totals.max[query] - top), added = power_of_two(split.max - top);
    if (lane < QUERIES) factors.old[query] = old, factors.split[query] = added;
    __syncwarp();
    return {split, {top, __fmaf_rn(totals.sum[query], old, __fmul_rn(split.sum, added))}};
}

// Adds a split, of which each warp has a part, to the totals; or writes it to memory, to `place`,
// where that is not ~0. Called by the whole block.
template <typename S>
__device__ inline void fold(const Common& c, S& shared, const Columns& columns, const float max[QUADS], float sum[QUADS],
                            const Outputs& out, u32 place, u32 lane, u32 warp) {
    for (u32 quad = 0; quad < QUADS; quad++) {
        for (u32 step = 4; step < 32; step *= 2) sum[quad] += __shfl_xor_sync(~0u, sum[quad], step);
        if (lane < 4) shared.max[warp][4 * quad + lane] = max[quad], shared.sum[warp][4 * quad + lane] = sum[quad];
    }
    Factors& factors = shared.factors[warp];
    Folded folded;
#pragma unroll
    for (u32 slice = 0; slice < SLICES; slice++) {
        // The buffers hold weights of the other warps until all have come here.
        __syncthreads();
        u32 first = OUT_DIMS * slice, dims = min(V_DIM - first, OUT_DIMS);
        write_exchange(out, slice, columns.n, dims, shared.exchange[warp], lane);
        if (slice == 0) folded = weigh(shared.max, shared.sum, shared.totals, factors, lane);
        __syncthreads();
        for_owned(columns.n, first, dims, [&](u32 quad, u32 dim) {
            float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (u32 other = 0; other < WARPS; other++) {
                float4 part = *(const float4*)shared.exchange[other].at(dim - first, 4 * quad);
                x = times_plus(four_of(factors.warp[other], quad), part, x);
            }
            if (place != ~0u) {
                *(float4*)(c.partial_out + ((size_t)place * QUADS + quad) * (4 * V_DIM) + 4 * dim) = x;
            } else {
                float4& all = shared.totals.out[quad][dim];
                all = times_plus(all, four_of(factors.old, quad), times(x, four_of(factors.split, quad)));
            }
        });
    }
    __syncthreads();
    if (threadIdx.x >= QUERIES) return;
    if (place != ~0u) {
        *(float2*)(c.state + 2 * ((size_t)place * QUERIES + threadIdx.x)) = make_float2(folded.split.max, folded.split.sum);
    } else {
        shared.totals.max[threadIdx.x] = folded.all.max, shared.totals.sum[threadIdx.x] = folded.all.sum;
    }
}

// Writes the totals to memory. Called by the whole block.
__device__ inline void write_totals(const Common& c, const Totals& totals, u32 n, u32 place) {
    for_all_owned(n, [&](u32 quad, u32 dim) {
        *(float4*)(c.partial_out + ((size_t)place * QUADS + quad) * (4 * V_DIM) + 4 * dim) = totals.out[quad][dim];
    });
    u32 query = threadIdx.x;
    if (query < QUERIES) *(float2*)(c.state + 2 * ((size_t)place * QUERIES + query)) = make_float2(totals.max[query], totals.sum[query]);
}

// Writes the outputs. Called by the whole block, after a barrier.
__device__ inline void write_outputs(const AttendParams& p, const Slot& slot, const Totals& totals, const Columns& columns, u32 lane,
                                     u32 warp) {
    for (u32 query = warp; query < columns.n; query += WARPS) {
        u32 i = columns.first_query + query;
        Total total = {totals.max[query], totals.sum[query]}, all = with_sink(p, slot, i, total);
        float rest = power_of_two(total.max - all.max);
        for (u32 span = 0; span < V_DIM; span += SPAN) {
            float x[4] = {};
            for (u32 e = 0; e < 4 && span + 4 * lane < V_DIM; e++) {
                x[e] = rest * ((const float*)&totals.out[query / 4][span + 4 * lane + e])[query % 4];
            }
            write_output(p, slot, i, span, x, all.sum, lane);
        }
    }
}

// Orders the writes visible to this thread before its later writes, for all blocks.
__device__ inline void order_for_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Returns whether all other blocks of some columns have written their partial results; if so, the
// threads of this block see them. The first block of some columns has a counter of theirs.
__device__ inline bool is_last(const DecodeParams& p, const Columns& columns, u32& shared) {
    u32 others = p.block_of(columns.end_split - 1) - columns.first_block;
    __syncthreads();
    if (threadIdx.x == 0) {
        order_for_device();
        shared = atomicInc(p.a.c.counters + columns.first_block, others) == others;
        order_for_device();
    }
    __syncthreads();
    return shared;
}

// Lists up to 32 partial results from `first` on and their factors, for one query, or, for those
// beyond the last query, nothing. Called by a whole warp; returns the largest score so far.
__device__ inline float list_partials(const Common& c, Joined& joined, u32 place, u32 n, u32 query, float max, u32 lane) {
    float2 state = make_float2(HIDDEN, 0.0f);
    if (lane < n) state = __ldcg((const float2*)(c.state + 2 * ((size_t)place * QUERIES + query)));
    float top = lane == 0 ? fmaxf(max, state.x) : state.x;
    for (u32 step = 1; step < 32; step *= 2) {
        float before = __shfl_up_sync(~0u, top, step);
        if (lane >= step) top = fmaxf(top, before);
    }
    float before = __shfl_up_sync(~0u, top, 1);
    joined.old[lane][query] = power_of_two((lane == 0 ? max : before) - top);
    joined.split[lane][query] = power_of_two(state.x - top);
    joined.sum[lane][query] = state.y;
    return __shfl_sync(~0u, top, 31);
}

// Joins the partial results of some columns in the order of their splits, the folded ones of the
// first block first. Called by the whole block. Reads bypass the L1 cache, which does not see the
// writes of other blocks of the launch.
__device__ inline void join(const DecodeParams& p, Totals& totals, Joined& joined, const Columns& columns, u32 lane, u32 warp) {
    constexpr u32 AT_ONCE = 16;
    const Common& c = p.a.c;
    u32 folded_end = p.first_split(columns.first_block + 1), n_partials = columns.end_split - folded_end + 1;
    begin_totals(totals, columns.n);
    for (u32 first = 0; first < n_partials; first += 32) {
        __syncthreads();
        u32 index = first + lane, n = min(n_partials - first, 32), place = p.folded_place(columns.first_block);
        if (index > 0 && index < n_partials) place = p.place(folded_end + index - 1);
        if (warp == 0) joined.place[lane] = place;
        for (u32 query = warp; query < QUERIES; query += WARPS) {
            float max = list_partials(c, joined, place, n, query, totals.max[query], lane);
            __syncwarp();
            if (lane == 0) totals.max[query] = max;
        }
        __syncthreads();
        for_all_owned(columns.n, [&](u32 quad, u32 dim) {
            float4 all = totals.out[quad][dim];
            auto part = [&](u32 k) { return __ldcg((const float4*)(c.partial_out + ((size_t)joined.place[k] * QUADS + quad) * (4 * V_DIM) + 4 * dim)); };
            // Loads in flight. Compilers move a load behind a branch that alone uses it, so that
            // none may be among the sums.
            for (u32 from = 0; from < n; from += AT_ONCE) {
                float4 parts[AT_ONCE];
#pragma unroll
                for (u32 k = 0; k < AT_ONCE; k++) parts[k] = part(min(from + k, n - 1));
#pragma unroll
                for (u32 k = 0; k < AT_ONCE; k++) {
                    float4 next = times_plus(all, four_of(joined.old[from + k], quad), times(parts[k], four_of(joined.split[from + k], quad)));
                    if (from + k < n) all = next;
                }
            }
            totals.out[quad][dim] = all;
        });
        if (threadIdx.x < QUERIES) {
            float sum = totals.sum[threadIdx.x];
            for (u32 k = 0; k < n; k++) {
                sum = __fmaf_rn(sum, joined.old[k][threadIdx.x], __fmul_rn(joined.sum[k][threadIdx.x], joined.split[k][threadIdx.x]));
            }
            totals.sum[threadIdx.x] = sum;
        }
    }
    __syncthreads();
}
