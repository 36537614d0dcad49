// Attention for heads whose queries and outputs exceed the registers of a warp, and over shared-KV
// tensors (MLA). large_head.rs describes the method.
//
// Macros: K_DIM, V_DIM (stored values per token, multiples of 16), CAPPED (soft cap on the scores),
// SHARED_KV (whether values are the first V_DIM of their keys), QUERY_TILES (16-query tiles of a
// block).

#include "unpack.cuh"

constexpr u32 BLOCK_QUERIES = QUERIES * QUERY_TILES;
constexpr u32 STEP = TILE * WARPS;  // tokens that a block processes at a time
constexpr u32 TILE_HALVES = TILE * (K_DIM > V_DIM ? K_DIM : V_DIM);
// Groups of 16 dims that a warp sums: every fourth.
constexpr u32 UNITS = (V_DIM / 16 + WARPS - 1) / WARPS;

struct Shared {
    u16 tiles[WARPS][TILE_HALVES];
    u16 queries[BLOCK_QUERIES * K_DIM];
    u16 weights[BLOCK_QUERIES * STEP];
    float of_warps[WARPS][BLOCK_QUERIES];  // maxima of a step, and the final sums
};

// Softmax state of the queries of a block: a lane has rows lane / 4 and lane / 4 + 8 of each
// 16-query tile, and of its warp's dims two of each eight. Maxima are those of the block, sums
// those of the warp's own tokens.
struct Work {
    float out[QUERY_TILES][UNITS][2][4];
    float max[QUERY_TILES][2];
    float sum[QUERY_TILES][2];
};

// Computes the scores of the queries with the keys of a tile: s[g][n][..] of tokens 8 n + 2 (lane
// mod 4) and the next, in the layout of `mma`.
__device__ void scores(const u16* queries, const u16* keys, bool by_token, float s[QUERY_TILES][2][4], u32 lane) {
#pragma unroll 4
    for (u32 k = 0; k < K_DIM / 16; k++) {
        u32 m[4];
        load_keys(m, keys, K_DIM, 16 * k, by_token, lane);
#pragma unroll
        for (u32 g = 0; g < QUERY_TILES; g++) {
            u32 a[4];
            load_rows(a, queries, K_DIM, QUERIES * g, 16 * k, lane);
            multiply(s[g][0], a, m[0], m[1]);
            multiply(s[g][1], a, m[2], m[3]);
        }
    }
}

// Masks tokens of a tile; leaves the largest score of each query for the other warps.
__device__ void mask_tokens(const Common& c, float s[QUERY_TILES][2][4], u32 first_token, bool is_main, const VisibleRange visible_ranges[QUERY_TILES][2],
                            float* maxima, u32 lane) {
    u32 col = first_token + 2 * (lane % 4);
#pragma unroll
    for (u32 g = 0; g < QUERY_TILES; g++) {
        for (u32 half = 0; half < 2; half++) {
            float max_score = HIDDEN;
            u32 from = visible_ranges[g][half].first(c, is_main), to = visible_ranges[g][half].last(is_main);
            for (u32 n = 0; n < 2; n++) {
                for (u32 e = 0; e < 2; e++) {
                    float& x = s[g][n][2 * half + e];
                    x = capped(c, x);
                    if (col + 8 * n + e < from || col + 8 * n + e >= to) x = HIDDEN;
                    max_score = fmaxf(max_score, x);
                }
            }
            max_score = max_of_four(max_score);
            if (lane % 4 == 0) maxima[QUERIES * g + lane / 4 + 8 * half] = max_score;
        }
    }
}

// Turns the scores of a warp's tile into softmax weights relative to the new maximum of all warps,
// leaves them for these, and rescales the earlier sums to that maximum.
__device__ void online_softmax(Work& w, const float s[QUERY_TILES][2][4], Shared& shared, u32 lane, u32 warp) {
#pragma unroll
    for (u32 g = 0; g < QUERY_TILES; g++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 query = QUERIES * g + lane / 4 + 8 * half;
            float before = w.max[g][half], max = before, sum = 0.0f;
            for (u32 other = 0; other < WARPS; other++) max = fmaxf(max, shared.of_warps[other][query]);
            for (u32 n = 0; n < 2; n++) {
                float weights[2];
                for (u32 e = 0; e < 2; e++) {
                    float x = s[g][n][2 * half + e];
                    // A masked token has weight 0 even if no other is visible yet.
                    weights[e] = x == HIDDEN ? 0.0f : power_of_two(x - max + LIFT);
                    sum += weights[e];
                }
                u32 at = token_major(STEP, query, TILE * warp + 8 * n + 2 * (lane % 4));
                *(u32*)(shared.weights + at) = pack_halves(weights[0], weights[1]);
            }
            if (max != before) {
                float rescale = power_of_two(before - max);
                w.max[g][half] = max;
                w.sum[g][half] *= rescale;
#pragma unroll
                for (u32 u = 0; u < UNITS; u++) {
                    for (u32 n = 0; n < 2; n++) w.out[g][u][n][2 * half] *= rescale, w.out[g][u][n][2 * half + 1] *= rescale;
                }
            }
            w.sum[g][half] += sum;
        }
    }
}

// Adds the weighted values of tile `i` of a step, for the warp's dims.
__device__ void accumulate_values(Work& w, const Shared& shared, u32 i, bool by_token, u32 lane, u32 warp) {
    constexpr u32 DIM = SHARED_KV ? K_DIM : V_DIM;
    u32 a[QUERY_TILES][4];
    const u16* values = shared.tiles[i];
#pragma unroll
    for (u32 g = 0; g < QUERY_TILES; g++) load_rows(a[g], shared.weights, STEP, QUERIES * g, TILE * i, lane);
#pragma unroll
    for (u32 u = 0; u < UNITS; u++) {
        u32 dim = 16 * (WARPS * u + warp), m[4];
        if (dim >= V_DIM) continue;
        load_values(m, values, DIM, dim, by_token, lane);
#pragma unroll
        for (u32 g = 0; g < QUERY_TILES; g++) {
            multiply(w.out[g][u][0], a[g], m[0], m[1]);
            multiply(w.out[g][u][1], a[g], m[2], m[3]);
        }
    }
}

// Sums over the tokens, of which each lane of four and each warp holds a part, and writes sums and
// outputs to memory. Called by the whole block.
__device__ void write_partial(const Common& c, size_t base, Work& w, Shared& shared, u32 lane, u32 warp) {
#pragma unroll
    for (u32 g = 0; g < QUERY_TILES; g++) {
        for (u32 half = 0; half < 2; half++) {
            u32 query = QUERIES * g + lane / 4 + 8 * half;
            float sum = sum_of_four(w.sum[g][half]);
            if (lane % 4 == 0) shared.of_warps[warp][query] = sum;
            float* out = c.partial_out + (base + query) * V_DIM + 2 * (lane % 4);
#pragma unroll
            for (u32 u = 0; u < UNITS; u++) {
                u32 dim = 16 * (WARPS * u + warp);
                if (dim >= V_DIM) continue;
                for (u32 n = 0; n < 2; n++) {
                    const float* sums = w.out[g][u][n] + 2 * half;
                    *(float2*)(out + dim + 8 * n) = make_float2(sums[0], sums[1]);
                }
            }
        }
    }
    __syncthreads();
    if (warp > 0 || lane % 4 > 0) return;
    for (u32 g = 0; g < QUERY_TILES; g++) {
        for (u32 half = 0; half < 2; half++) {
            u32 query = QUERIES * g + lane / 4 + 8 * half;
            float sum = 0.0f;
            for (u32 other = 0; other < WARPS; other++) sum += shared.of_warps[other][query];
            *(float2*)(c.state + 2 * (base + query)) = make_float2(w.max[g][half], sum);
        }
    }
}

// Each warp of a block scores one tile for all its queries, and sums its share of the dims. Grid:
// splits, blocks of queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) attend_large_head(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 bytes[];
    wait_for_kernel_before();
    Shared& shared = *(Shared*)bytes;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, first_query = blockIdx.y * BLOCK_QUERIES;
    Slot slot(p.c, blockIdx.z);
    if (split >= slot.sequence.splits || first_query >= slot.n_queries(p.c)) return;
    copy_queries(p.c, slot, first_query, BLOCK_QUERIES, THREADS, shared.queries);
    finish_copies();
    __syncthreads();

    View keys = keys_of(p.c, slot), values = SHARED_KV ? keys_of(p.c, slot) : values_of(p.c, slot);
    VisibleRange visible_ranges[QUERY_TILES][2];
#pragma unroll
    for (u32 g = 0; g < QUERY_TILES; g++) {
        for (u32 half = 0; half < 2; half++) {
            visible_ranges[g][half] = VisibleRange(p.c, slot, first_query + QUERIES * g + lane / 4 + 8 * half);
        }
    }
    u32 last_query = min(first_query + BLOCK_QUERIES, slot.n_queries(p.c)) - 1;
    VisibleTiles visible = visible_tiles(p.c, slot.sequence, p.c.by_group.quotient(first_query), p.c.by_group.quotient(last_query));
    u32 end = min(visible.n, (split + 1) * slot.sequence.split_tiles);
    u16* tile = shared.tiles[warp];
    Work w = {};
    for (u32 g = 0; g < QUERY_TILES; g++) w.max[g][0] = w.max[g][1] = HIDDEN;
    for (u32 step = split * slot.sequence.split_tiles; step < end; step += WARPS) {
        u32 mine = step + warp, next = mine + WARPS;
        if (next < end) {
            prefetch_tile(keys.tile(visible.tile(next), visible.is_main(next)), lane);
            if (!SHARED_KV) prefetch_tile(values.tile(visible.tile(next), visible.is_main(next)), lane);
        }
        float s[QUERY_TILES][2][4] = {};
        // A warp beyond the last tile has no visible token.
        u32 first_token = ~0u - TILE;
        bool is_main = mine < end && visible.is_main(mine);
        if (mine < end) {
            u32 index = visible.tile(mine);
            first_token = index * TILE;
            Tile key = keys.tile(index, is_main);
            load_tile<!SHARED_KV, K_DIM>(p, key, keys.centre(index, key), tile, lane);
            finish_copies();
            __syncwarp();
            scores(shared.queries, tile, is_coded(key.type) != SHARED_KV, s, lane);
            if (!SHARED_KV) {
                __syncwarp();
                load_tile<false, V_DIM>(p, values.tile(index, is_main), nullptr, tile, lane);
            }
        }
        mask_tokens(p.c, s, first_token, is_main, visible_ranges, shared.of_warps[warp], lane);
        finish_copies();
        __syncthreads();
        online_softmax(w, s, shared, lane, warp);
        __syncthreads();
        for (u32 i = 0; i < WARPS && step + i < end; i++) {
            Tile value = values.tile(visible.tile(step + i), visible.is_main(step + i));
            accumulate_values(w, shared, i, !is_coded(value.type), lane, warp);
        }
        __syncthreads();
    }
    write_partial(p.c, slot.partial(split, first_query), w, shared, lane, warp);
}
