// Prefill attention over quantized tiles, with tensor cores. prompt.rs describes the method.
//
// Macros: K_TYPE, V_TYPE, K_DIM, V_DIM (stored values per token, multiples of 16), CAPPED (soft cap
// on the scores), BLOCK_WARPS, QUERY_TILES (16-query tiles of a warp), STEP (tiles that a block
// processes at a time).

#include "work.cuh"

constexpr u32 BLOCK_THREADS = 32 * BLOCK_WARPS;
constexpr u32 WARP_QUERIES = QUERIES * QUERY_TILES, BLOCK_QUERIES = WARP_QUERIES * BLOCK_WARPS;

struct Tiles {
    u16 keys[STEP][TILE * K_DIM];
    u16 values[STEP][TILE * V_DIM];
};

struct Shared {
    Tiles tiles[2];  // of this step, and of the next
    u16 queries[BLOCK_QUERIES * K_DIM];
    VisibleRange visible_ranges[BLOCK_QUERIES];
};

// The tiles of a block, those before `end`.
struct Range {
    View keys, values;
    VisibleTiles visible;
    u32 end;

    // Returns whether the tiles of the step from tile `i` on are contiguous and of one form.
    __device__ bool is_alike(u32 i) const {
        u32 last = i + STEP - 1;
        bool is_main = visible.is_main(i);
        if (last >= end || visible.is_main(last) != is_main) return false;
        u32 from = visible.tile(i), to = visible.tile(last);
        return keys.type(from, is_main) == keys.type(to, is_main) && values.type(from, is_main) == values.type(to, is_main);
    }
};

// Loads tile `i`, of keys or of values.
template <bool KEYS>
__device__ void load(const AttendParams& p, const Range& range, u32 i, u16* to, u32 lane) {
    const View& view = KEYS ? range.keys : range.values;
    u32 later = i + STEP, index = range.visible.tile(i);
    if (later < range.end) prefetch_tile(view.tile(range.visible.tile(later), range.visible.is_main(later)), lane);
    Tile tile = view.tile(index, range.visible.is_main(i));
    load_stored<KEYS, KEYS ? K_DIM : V_DIM, KEYS ? K_TYPE : V_TYPE>(p, tile, KEYS ? view.centre(index, tile) : nullptr, to, lane);
}

// Loads the warp's share of the tiles of a step.
__device__ void load_step(const AttendParams& p, const Range& range, u32 step, Tiles& to, u32 lane, u32 warp) {
#pragma unroll 1
    for (u32 i = warp; i < 2 * STEP; i += BLOCK_WARPS) {
        u32 tile = i % STEP;
        if (step + tile >= range.end) continue;
        if (i < STEP) {
            load<true>(p, range, step + tile, to.keys[tile], lane);
        } else {
            load<false>(p, range, step + tile, to.values[tile], lane);
        }
    }
}

// Processes TILES uniform tiles from `i` on, which lie in shared memory, if any of the warp's
// queries sees a token of them.
template <u32 TILES>
__device__ void process(const Common& c, const Range& range, u32 i, const u16* keys, const u16* values, const u16* queries,
                        const VisibleRange* visible_ranges, Work<QUERY_TILES>& w, u32 lane) {
    u32 index = range.visible.tile(i), first_token = index * TILE;
    bool is_main = range.visible.is_main(i);
    if (first_token + TILE * TILES <= visible_ranges[0].first(c, is_main)) return;
    if (first_token >= visible_ranges[WARP_QUERIES - 1].last(is_main)) return;
    Scores<QUERY_TILES, TILES> s;
    if (is_coded(K_TYPE) && is_coded(range.keys.type(index, is_main))) {
        scores<QUERY_TILES, TILES, true>(queries, keys, s, lane);
    } else {
        scores<QUERY_TILES, TILES, false>(queries, keys, s, lane);
    }
    apply_soft_cap<QUERY_TILES, TILES>(c, s);
    mask_tokens<QUERY_TILES, TILES>(c, s, visible_ranges, first_token, is_main, lane);
    Weights<QUERY_TILES, TILES> weights;
    online_softmax<QUERY_TILES, TILES>(w, s, weights);
    if (is_coded(V_TYPE) && is_coded(range.values.type(index, is_main))) {
        accumulate_values<QUERY_TILES, TILES, false>(w, values, weights, lane);
    } else {
        accumulate_values<QUERY_TILES, TILES, true>(w, values, weights, lane);
    }
}

// Processes a step: as a whole if its tiles are uniform, or else tile by tile.
__device__ void process_step(const Common& c, const Range& range, u32 step, const Tiles& tiles, const u16* queries, const VisibleRange* visible_ranges,
                             Work<QUERY_TILES>& w, u32 lane) {
    if (range.is_alike(step)) {
        process<STEP>(c, range, step, tiles.keys[0], tiles.values[0], queries, visible_ranges, w, lane);
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < STEP && step + i < range.end; i++) {
        process<1>(c, range, step + i, tiles.keys[i], tiles.values[i], queries, visible_ranges, w, lane);
    }
}

// Warps take queries of their own and share tiles. Grid: splits, blocks of queries, KV heads of all
// sequences.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) attend_prefill(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 bytes[];
    wait_for_kernel_before();
    Shared& shared = *(Shared*)bytes;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, block_query = blockIdx.y * BLOCK_QUERIES, warp_query = WARP_QUERIES * warp;
    Slot slot(p.c, blockIdx.z);
    u32 n_queries = slot.n_queries(p.c);
    if (split >= slot.sequence.splits || block_query >= n_queries) return;
    load_queries(p.c, slot, block_query, BLOCK_QUERIES, BLOCK_THREADS, shared.queries, shared.visible_ranges);
    u32 last_query = min(block_query + BLOCK_QUERIES, n_queries) - 1;
    VisibleTiles visible = visible_tiles(p.c, slot.sequence, p.c.by_group.quotient(block_query), p.c.by_group.quotient(last_query));
    u32 begin = split * slot.sequence.split_tiles, end = min(visible.n, begin + slot.sequence.split_tiles);
    Range range = {keys_of(p.c, slot), values_of(p.c, slot), visible, end};
    const u16* queries = shared.queries + warp_query * K_DIM;
    const VisibleRange* visible_ranges = shared.visible_ranges + warp_query;
    bool is_there = block_query + warp_query < n_queries;
    // In each round the warps load one step, and process the one loaded before. Of two that share a
    // scheduler one unpacks while the other multiplies, and then they change; floats need no
    // unpacking and are loaded first.
    bool is_late = warp >= BLOCK_WARPS / 2 && (warp % (2 * STEP) < STEP ? is_coded(K_TYPE) : is_coded(V_TYPE));
    u32 rounds = begin < end ? (end - begin + STEP - 1) / STEP + 1 : 0;
    Work<QUERY_TILES> w;
#pragma unroll 1
    for (u32 phase = 0; phase < 2 * rounds; phase++) {
        u32 round = phase / 2, step = begin + STEP * round;
        if (phase % 2 == is_late) {
            load_step(p, range, step, shared.tiles[round % 2], lane, warp);
        } else if (round > 0 && is_there) {
            process_step(p.c, range, step - STEP, shared.tiles[(round + 1) % 2], queries, visible_ranges, w, lane);
        }
        if (phase % 2 == 0) continue;
        finish_copies();
        __syncthreads();
    }
    if (!is_there) return;
    finish_sums(w);
    write_partial(p.c, slot, w, split, block_query + warp_query, lane);
}
