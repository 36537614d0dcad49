// Split-KV attention of few queries over quantized tiles, with tensor cores. mod.rs describes the
// method.
//
// Macros: K_DIM, V_DIM (stored values per token, multiples of 16), CAPPED (soft cap on the scores).

#include "work.cuh"

struct Shared {
    u16 tiles[WARPS][TILE * (K_DIM > V_DIM ? K_DIM : V_DIM)];
    u16 queries[QUERIES * K_DIM];
    VisibleRange visible_ranges[QUERIES];
};

// Combines the partial results of the warps of a block by halving: warps 2 and 3 pass theirs to 0
// and 1, then 1 to 0. Called by the whole block.
__device__ void combine_warps(Work<1>& w, float* exchange, u32 lane, u32 warp) {
    constexpr u32 PARTIAL = V_DIM / 2 + PARTIAL_STATE;  // floats of a lane
#pragma unroll 1
    for (u32 step = WARPS / 2; step > 0; step /= 2) {
        __syncthreads();
        if (warp >= step && warp < 2 * step) {
            float* to = exchange + (warp - step) * 32 * PARTIAL + lane;
#pragma unroll
            for (u32 i = 0; i < V_DIM / 2; i++) to[32 * i] = w.out[0][i / 4][i % 4];
            for (u32 half = 0; half < 2; half++) {
                to[32 * (V_DIM / 2 + half)] = w.max[0][half];
                to[32 * (V_DIM / 2 + 2 + half)] = w.sum[0][half];
            }
        }
        __syncthreads();
        if (warp >= step) continue;
        const float* from = exchange + warp * 32 * PARTIAL + lane;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float other = from[32 * (V_DIM / 2 + half)], max = fmaxf(w.max[0][half], other);
            float mine = exp2f(w.max[0][half] - max), theirs = exp2f(other - max);
            w.max[0][half] = max;
            w.sum[0][half] = w.sum[0][half] * mine + from[32 * (V_DIM / 2 + 2 + half)] * theirs;
#pragma unroll
            for (u32 i = 0; i < V_DIM / 4; i++) {
                u32 n = i / 2, r = 2 * half + i % 2;
                w.out[0][n][r] = w.out[0][n][r] * mine + from[32 * (4 * n + r)] * theirs;
            }
        }
    }
}

// Every warp takes every fourth tile of the split for the same 16 queries; their partial results
// are combined in the order of the warps. Grid: splits, blocks of 16 queries, KV heads of all
// sequences.
extern "C" __global__ void __launch_bounds__(THREADS) attend_split(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 bytes[];
    wait_for_kernel_before();
    Shared& shared = *(Shared*)bytes;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, first_query = blockIdx.y * QUERIES;
    Slot slot(p.c, blockIdx.z);
    if (split >= slot.sequence.splits || first_query >= slot.n_queries(p.c)) return;
    load_queries(p.c, slot, first_query, QUERIES, THREADS, shared.queries, shared.visible_ranges);
    finish_copies();
    __syncthreads();

    View keys = keys_of(p.c, slot), values = values_of(p.c, slot);
    u16* tile = shared.tiles[warp];
    u32 last_query = min(first_query + QUERIES, slot.n_queries(p.c)) - 1;
    VisibleTiles visible = visible_tiles(p.c, slot.sequence, p.c.by_group.quotient(first_query), p.c.by_group.quotient(last_query));
    u32 end = min(visible.n, (split + 1) * slot.sequence.split_tiles);
    Work<1> w;
    for (u32 i = split * slot.sequence.split_tiles + warp; i < end; i += WARPS) {
        u32 index = visible.tile(i), next = visible.tile(i + WARPS);
        bool is_main = visible.is_main(i);
        Tile key = keys.tile(index, is_main), value = values.tile(index, is_main);
        if (i + WARPS < end) {
            prefetch_tile(keys.tile(next, visible.is_main(i + WARPS)), lane);
            prefetch_tile(values.tile(next, visible.is_main(i + WARPS)), lane);
        }
        Scores<1, 1> s;
        load_tile<true, K_DIM>(p, key, keys.centre(index, key), tile, lane);
        finish_copies();
        __syncwarp();
        if (is_coded(key.type)) {
            scores<1, 1, true>(shared.queries, tile, s, lane);
        } else {
            scores<1, 1, false>(shared.queries, tile, s, lane);
        }
        __syncwarp();
        load_tile<false, V_DIM>(p, value, nullptr, tile, lane);
        apply_soft_cap<1, 1>(p.c, s);
        mask_tokens<1, 1>(p.c, s, shared.visible_ranges, index * TILE, is_main, lane);
        Weights<1, 1> weights;
        online_softmax<1, 1>(w, s, weights);
        finish_copies();
        __syncwarp();
        if (is_coded(value.type)) {
            accumulate_values<1, 1, false>(w, tile, weights, lane);
        } else {
            accumulate_values<1, 1, true>(w, tile, weights, lane);
        }
        __syncwarp();
    }
    finish_sums(w);
    combine_warps(w, (float*)bytes, lane, warp);
    if (warp == 0) write_partial(p.c, slot, w, split, first_query, lane);
}
