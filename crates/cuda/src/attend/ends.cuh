// Where attention begins and where it ends, whatever walks the tiles: queries are prepared, and the shares of the splits joined.
//
// Macros: K_DIM, V_DIM (values per token as stored, multiples of 16).

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
    u32 balance_at[3];   // where in a balance factors on queries, on outputs, and what is added to these begin
    u32 is_joint;        // values are the first part of their keys: outputs have the factors of queries, and nothing is added
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
    const float* factors = balance_of(slot, p.balance_at[1], p.is_joint ? p.k_head_dim : p.v_head_dim);
    const float* shifts = p.is_joint ? nullptr : balance_of(slot, p.balance_at[2], p.v_head_dim);
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
            if (factors) x[e] = __fmul_rn(x[e], factors[first + e]);
            if (shifts) x[e] = __fadd_rn(x[e], shifts[first + e]);
            out[first + e] = x[e];
        }
    }
}
