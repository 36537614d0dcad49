// Prologue and epilogue of every attention kernel: prepares queries, and combines the KV splits.
//
// Macros: K_DIM, V_DIM (stored values per token, multiples of 16).

#pragma once

#include "attend.cuh"
#include "rotate.cuh"

constexpr u32 THREADS = 32 * WARPS;

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
    // offsets in the channel scales: factors on queries, on outputs, and shifts of outputs
    u32 balance_at[3];
    // values are the first dims of their keys: outputs have the factors of queries, and no shift
    u32 is_shared_kv;
    Book books[N_TYPES]; // by type of the KV tensor
    u32 before[4];
    u32 after[4];
};

// Returns the row of query i of a KV head: query head i % group of its group, of row i / group.
__device__ inline size_t query_head(const AttendParams& p, const Slot& slot, u32 i) {
    u32 row = p.c.by_group.quotient(i), head = slot.head.kv_head * p.c.group + i - row * p.c.group;
    return (size_t)(slot.sequence.first_row + row) * p.n_query_heads + head;
}

// Returns the channel scales of a KV head of a sequence, of `dim` values; null without them.
__device__ inline const float* balance_of(const Slot& slot, u32 at, u32 dim) {
    return balance_head(slot.sequence.balance, at, slot.head.kv_head * dim);
}

// Returns values span + 4 lane and the next three of query i, with channel scales, padded, rotated
// and scaled; zeros beyond the last query. Called by a whole warp.
__device__ inline float4 prepared_values(const AttendParams& p, const Slot& slot, u32 i, u32 span, u32 lane) {
    if (i >= slot.n_queries(p.c)) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float* q = p.q + query_head(p, slot, i) * p.k_head_dim;
    const float* factors = balance_of(slot, p.balance_at[0], p.k_head_dim);
    float x[4];
    u32 first = span + 4 * lane;
    for (u32 e = 0; e < 4; e++) {
        x[e] = first + e < p.k_head_dim ? q[first + e] : 0.0f;
        if (factors && first + e < p.k_head_dim) x[e] = __fmul_rn(x[e], factors[first + e]);
    }
    if (p.rotates[0]) rotate(x, block_at(TURBO2, K_DIM, first).n, p.before, p.after, lane);
    return make_float4(x[0] * p.scale, x[1] * p.scale, x[2] * p.scale, x[3] * p.scale);
}

// Returns the same values, as f16.
__device__ inline uint2 prepared(const AttendParams& p, const Slot& slot, u32 i, u32 span, u32 lane) {
    float4 x = prepared_values(p, slot, i, span, lane);
    return make_uint2(pack_halves(x.x, x.y), pack_halves(x.z, x.w));
}

// Softmax state of a query: its largest score, and the sum of the weights relative to it, which
// carry a factor 2^LIFT.
struct Total {
    float max;
    float sum;
};

// Adds the attention sink of its head: the result is relative to the larger of the sink and the
// maximum of the scores.
__device__ inline Total with_sink(const AttendParams& p, const Slot& slot, u32 i, Total total) {
    if (!p.sinks) return total;
    float sink = p.sinks[query_head(p, slot, i) % p.n_query_heads] * LOG2_E, top = fmaxf(total.max, sink);
    return {top, total.sum * exp2f(total.max - top) + exp2f(sink - top + LIFT)};
}

// Divides values span + 4 lane and the next three of an output by the sum of the weights,
// un-rotates them, applies channel scales and writes them. Called by a whole warp.
__device__ inline void write_output(const AttendParams& p, const Slot& slot, u32 i, u32 span, float x[4], float sum, u32 lane) {
    const float* factors = balance_of(slot, p.balance_at[1], p.is_shared_kv ? p.k_head_dim : p.v_head_dim);
    const float* shifts = p.is_shared_kv ? nullptr : balance_of(slot, p.balance_at[2], p.v_head_dim);
    float* out = p.out + query_head(p, slot, i) * p.v_head_dim;
    u32 first = span + 4 * lane;
    for (u32 e = 0; e < 4; e++) x[e] /= sum;
    if (p.rotates[1]) rotate(x, block_at(TURBO2, V_DIM, first).n, p.after, p.before, lane);
    for (u32 e = 0; e < 4; e++) {
        if (first + e >= p.v_head_dim) continue;
        if (factors) x[e] = __fmul_rn(x[e], factors[first + e]);
        if (shifts) x[e] = __fadd_rn(x[e], shifts[first + e]);
        out[first + e] = x[e];
    }
}

// Combines the splits of query i, always in the same order, and writes its output. Called by a
// whole warp, each lane of which weighs every 32nd split. Reads bypass the L1 cache, which does not
// see the writes of other blocks of the launch.
__device__ inline void combine_query(const AttendParams& p, const Slot& slot, u32 i, u32 lane) {
    u32 splits = slot.sequence.splits;
    auto state_of = [&](u32 split) { return __ldcg((const float2*)(p.c.state + 2 * slot.partial(split, i))); };
    Total total = {HIDDEN, 0.0f};
    for (u32 split = lane; split < splits; split += 32) total.max = fmaxf(total.max, state_of(split).x);
    for (u32 step = 1; step < 32; step *= 2) total.max = fmaxf(total.max, __shfl_xor_sync(~0u, total.max, step));
    for (u32 split = lane; split < splits; split += 32) {
        float2 state = state_of(split);
        total.sum += exp2f(state.x - total.max) * state.y;
    }
    for (u32 step = 1; step < 32; step *= 2) total.sum += __shfl_xor_sync(~0u, total.sum, step);
    total = with_sink(p, slot, i, total);
    for (u32 span = 0; span < V_DIM; span += SPAN) {
        float x[4] = {};
        u32 first = min(span + 4 * lane, V_DIM - 4);
        for (u32 from = 0; from < splits; from += 32) {
            float weight = from + lane < splits ? exp2f(state_of(from + lane).x - total.max) : 0.0f;
            u32 n = min(splits - from, 32);
#pragma unroll 4
            for (u32 k = 0; k < n; k++) {
                float w = __shfl_sync(~0u, weight, k);
                float4 v = __ldcg((const float4*)(p.c.partial_out + slot.partial(from + k, i) * V_DIM + first));
                x[0] += w * v.x, x[1] += w * v.y, x[2] += w * v.z, x[3] += w * v.w;
            }
        }
        write_output(p, slot, i, span, x, total.sum, lane);
    }
}
