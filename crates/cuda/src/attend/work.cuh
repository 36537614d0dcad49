// Attention of a warp, for 16-query tiles over tiles in shared memory: scores, their softmax, and
// sums of values, all in registers except the queries. mod.rs describes the method.
//
// Macros: K_DIM, V_DIM (stored values per token, multiples of 16), CAPPED (soft cap on the scores).

#pragma once

#include "unpack.cuh"

// Softmax state and outputs of SIXTEENS 16-query tiles: of each a lane has rows lane / 4 and lane /
// 4 + 8.
template <u32 SIXTEENS>
struct Work {
    float out[SIXTEENS][V_DIM / 8][4];
    float max[SIXTEENS][2];
    float sum[SIXTEENS][2];  // of the lane's own tokens, until `finish_sums`

    __device__ Work() {
#pragma unroll
        for (u32 g = 0; g < SIXTEENS; g++) {
            for (u32 half = 0; half < 2; half++) max[g][half] = HIDDEN, sum[g][half] = 0.0f;
#pragma unroll
            for (u32 n = 0; n < V_DIM / 8; n++) {
                for (u32 r = 0; r < 4; r++) out[g][n][r] = 0.0f;
            }
        }
    }
};

// Scores of queries with tokens 16 t + 8 n + 2 (lane mod 4) and the next: at [g][t][n], in the
// layout of `mma`.
template <u32 SIXTEENS, u32 TILES>
using Scores = float[SIXTEENS][TILES][2][4];

// Copies `n` prepared queries and their masks to shared memory, with `threads` threads. They are
// available after `finish_copies`.
__device__ void load_queries(const Common& c, const Slot& slot, u32 first, u32 n, u32 threads, u16* queries, VisibleRange* visible_ranges) {
    copy_queries(c, slot, first, n, threads, queries);
    for (u32 i = threadIdx.x; i < n; i += threads) visible_ranges[i] = VisibleRange(c, slot, first + i);
}

// Computes scores with the keys of contiguous tiles, all in rows of tokens or all in rows of dims.
template <u32 SIXTEENS, u32 TILES, bool TOKEN_MAJOR>
__device__ void scores(const u16* queries, const u16* keys, Scores<SIXTEENS, TILES>& s, u32 lane) {
    constexpr u32 AHEAD = K_DIM % 64 == 0 ? 4 : K_DIM / 16;
#pragma unroll
    for (u32 i = 0; i < SIXTEENS * TILES * 8; i++) s[i / (TILES * 8)][i / 8 % TILES][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll AHEAD
    for (u32 k = 0; k < K_DIM / 16; k++) {
        u32 a[SIXTEENS][4];
#pragma unroll
        for (u32 g = 0; g < SIXTEENS; g++) load_rows(a[g], queries, K_DIM, QUERIES * g, 16 * k, lane);
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
            u32 m[4];
            load_keys(m, keys + t * TILE * K_DIM, K_DIM, 16 * k, TOKEN_MAJOR, lane);
#pragma unroll
            for (u32 g = 0; g < SIXTEENS; g++) {
                multiply(s[g][t][0], a[g], m[0], m[1]);
                multiply(s[g][t][1], a[g], m[2], m[3]);
            }
        }
    }
}

// Applies the soft cap to scores, if CAPPED.
template <u32 SIXTEENS, u32 TILES>
__device__ void apply_soft_cap(const Common& c, Scores<SIXTEENS, TILES>& s) {
    if (!CAPPED) return;
#pragma unroll
    for (u32 i = 0; i < SIXTEENS * TILES * 8; i++) {
        float& x = s[i / (TILES * 8)][i / 8 % TILES][i / 4 % 2][i % 4];
        x = capped(c, x);
    }
}

// Masks tokens from `first_token` on that a query does not see.
template <u32 SIXTEENS, u32 TILES>
__device__ void mask_tokens(const Common& c, Scores<SIXTEENS, TILES>& s, const VisibleRange* visible_ranges, u32 first_token, bool is_main, u32 lane) {
    bool is_partial = first_token < visible_ranges[QUERIES * SIXTEENS - 1].first(c, is_main) || first_token + TILE * TILES > visible_ranges[0].last(is_main);
    if (!is_partial) return;
#pragma unroll
    for (u32 g = 0; g < SIXTEENS; g++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const VisibleRange& visible_range = visible_ranges[QUERIES * g + lane / 4 + 8 * half];
            u32 from = visible_range.first(c, is_main), seen = visible_range.last(is_main) - from, col = first_token + 2 * (lane % 4) - from;
#pragma unroll
            for (u32 t = 0; t < TILES; t++) {
                for (u32 i = 0; i < 4; i++) {
                    float& x = s[g][t][i / 2][2 * half + i % 2];
                    if (col + 16 * t + 8 * (i / 2) + i % 2 >= seen) x = HIDDEN;
                }
            }
        }
    }
}

// Softmax weights of tokens as left operands, at [g][t].
template <u32 SIXTEENS, u32 TILES>
using Weights = u32[SIXTEENS][TILES][4];

// Turns scores into softmax weights relative to the new maxima, and rescales the earlier sums to
// these.
template <u32 SIXTEENS, u32 TILES>
__device__ void online_softmax(Work<SIXTEENS>& w, const Scores<SIXTEENS, TILES>& s, Weights<SIXTEENS, TILES>& weights) {
    float rise[SIXTEENS][2];
    bool is_raised = false;
#pragma unroll
    for (u32 g = 0; g < SIXTEENS; g++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float max_score = HIDDEN;
#pragma unroll
            for (u32 i = 0; i < 4 * TILES; i++) max_score = fmaxf(max_score, s[g][i / 4][i / 2 % 2][2 * half + i % 2]);
            float before = w.max[g][half], max = fmaxf(before, max_of_four(max_score));
            rise[g][half] = before - max, w.max[g][half] = max;
            is_raised |= max != before;
        }
    }
    if (__any_sync(~0u, is_raised)) {
#pragma unroll
        for (u32 g = 0; g < SIXTEENS; g++) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float rescale = power_of_two(rise[g][half]);
                w.sum[g][half] *= rescale;
#pragma unroll
                for (u32 n = 0; n < V_DIM / 8; n++) w.out[g][n][2 * half] *= rescale, w.out[g][n][2 * half + 1] *= rescale;
            }
        }
    }
#pragma unroll
    for (u32 g = 0; g < SIXTEENS; g++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            // A masked token has weight 0 even if no other is visible yet.
            float lift = w.max[g][half] > HIDDEN ? LIFT - w.max[g][half] : 0.0f;
#pragma unroll
            for (u32 i = 0; i < 2 * TILES; i++) {
                const float* pair = s[g][i / 2][i % 2] + 2 * half;
                float x = power_of_two(pair[0] + lift), y = power_of_two(pair[1] + lift);
                w.sum[g][half] += x, w.sum[g][half] += y;
                weights[g][i / 2][2 * (i % 2) + half] = pack_halves(x, y);
            }
        }
    }
}

// Adds the weighted values of contiguous tiles, all in rows of tokens or all in rows of dims.
template <u32 SIXTEENS, u32 TILES, bool TOKEN_MAJOR>
__device__ void accumulate_values(Work<SIXTEENS>& w, const u16* values, const Weights<SIXTEENS, TILES>& weights, u32 lane) {
#pragma unroll
    for (u32 t = 0; t < TILES; t++) {
#pragma unroll
        for (u32 n = 0; n < V_DIM / 16; n++) {
            u32 m[4];
            load_values(m, values + t * TILE * V_DIM, V_DIM, 16 * n, TOKEN_MAJOR, lane);
#pragma unroll
            for (u32 g = 0; g < SIXTEENS; g++) {
                multiply(w.out[g][2 * n], weights[g][t], m[0], m[1]);
                multiply(w.out[g][2 * n + 1], weights[g][t], m[2], m[3]);
            }
        }
    }
}

// Sums over the tokens, of which each lane of four holds a part.
template <u32 SIXTEENS>
__device__ void finish_sums(Work<SIXTEENS>& w) {
#pragma unroll
    for (u32 i = 0; i < 2 * SIXTEENS; i++) w.sum[i / 2][i % 2] = sum_of_four(w.sum[i / 2][i % 2]);
}

template <u32 SIXTEENS>
__device__ void write_partial(const Common& c, const Slot& slot, const Work<SIXTEENS>& w, u32 split, u32 first_query, u32 lane) {
    size_t base = slot.partial(split, first_query);
#pragma unroll
    for (u32 i = 0; i < 2 * SIXTEENS; i++) {
        u32 half = i % 2, row = QUERIES * (i / 2) + lane / 4 + 8 * half;
        float* out = c.partial_out + (base + row) * V_DIM + 2 * (lane % 4);
#pragma unroll
        for (u32 n = 0; n < V_DIM / 8; n++) {
            const float* sums = w.out[i / 2][n] + 2 * half;
            *(float2*)(out + 8 * n) = make_float2(sums[0], sums[1]);
        }
        if (lane % 4 == 0) *(float2*)(c.state + 2 * (base + row)) = make_float2(w.max[i / 2][half], w.sum[i / 2][half]);
    }
}
