// Prefill attention over quantized tiles, with warpgroup MMAs. hopper.rs describes the method.
//
// Macros: K_TYPE, V_TYPE, K_DIM, V_DIM (stored values per token, 64 to 256), CAPPED (soft cap on
// the scores), CONSUMERS, PRODUCERS (warpgroups), STAGES (of shared memory), CONSUMER_REGISTERS,
// PRODUCER_REGISTERS.

#define EIGHTS_TOGETHER
#include "copies.cuh"
#include "transpose.cuh"
#include "warpgroup.cuh"
#include "work.cuh"

// Tiles of a step.
constexpr u32 STEP = 4;
// f16 values of an unpacked tile of keys and of values.
constexpr u32 UNPACKED_HALVES = TILE * (K_DIM + V_DIM);
constexpr u32 BLOCK_THREADS = WARPGROUP * (CONSUMERS + PRODUCERS), BLOCK_QUERIES = MMA_ROWS * CONSUMERS;

struct Stage {
    u16 keys[STEP * TILE * K_DIM];
    u16 values[STEP * TILE * V_DIM];
};

struct Shared {
    u16 queries[BLOCK_QUERIES * K_DIM];
    Stage stages[STAGES];
    VisibleRange visible_ranges[BLOCK_QUERIES];
};

// Returns the address of unpacked tile `i` of those that any row of a sequence sees.
__device__ u16* unpacked_tile(const Common& c, const Slot& slot, u32 i) {
    return c.unpacked_tiles + (slot.sequence.first_unpacked_tile + (size_t)slot.index * slot.sequence.n_unpacked_tiles + i) * UNPACKED_HALVES;
}

// Returns the tiles that any row of a sequence sees.
__device__ VisibleTiles visible_to_any(const Common& c, const Sequence& sequence) { return visible_tiles(c, sequence, 0, sequence.rows - 1); }

// The tiles of a block, `begin` to before `end` of those that its rows see, and the addresses of
// their unpacked forms.
struct Range {
    VisibleTiles visible;
    u32 begin, end;
    const u16* main_tiles;    // unpacked tiles from `visible.main` on, as stored in the blocks
    const u16* recent_tiles;  // those from `visible.recent` on, in 16 bit

    __device__ Range(const Common& c, const Slot& slot, VisibleTiles visible, u32 begin, u32 end) : visible(visible), begin(begin), end(end) {
        VisibleTiles all = visible_to_any(c, slot.sequence);
        main_tiles = unpacked_tile(c, slot, visible.main - all.main);
        recent_tiles = unpacked_tile(c, slot, all.n_main + visible.recent - all.recent);
    }
    __device__ u32 steps() const { return begin < end ? (end - begin + STEP - 1) / STEP : 0; }
    __device__ const u16* unpacked(u32 i) const { return visible.is_main(i) ? main_tiles + i * UNPACKED_HALVES : recent_tiles + (i - visible.n_main) * UNPACKED_HALVES; }
};

// Parts of a stage that are filled and emptied together: both sides, or keys and values apart where
// two stages are all that fit. The next keys then arrive while values of a step are added.
constexpr u32 PARTS = STAGES > 2 ? 1 : 2;
using Barriers = StageBarriers<STAGES * PARTS, CONSUMERS>;
// Returns the part with the keys of a step, and that with its values.
__device__ u32 keys_part(u32 step) { return step % STAGES * PARTS; }
__device__ u32 values_part(u32 step) { return keys_part(step) + PARTS - 1; }
constexpr u32 FILL_THREADS = WARPGROUP * (PRODUCERS + 1);
__device__ u32 empty_threads(u32 n_consumers) { return WARPGROUP * (PRODUCERS + n_consumers); }

// Issues the copy of tile `i`, of keys or of values; zeros beyond the last.
template <bool KEYS>
__device__ void load_async(const Range& range, u32 i, u16* to, u32 lane) {
    constexpr u32 DIM = KEYS ? K_DIM : V_DIM;
    if (i >= range.end) return store_zeros<DIM>(to, lane);
    const u16* from = range.unpacked(i) + (KEYS ? 0 : TILE * K_DIM);
#pragma unroll
    for (u32 at = 8 * lane; at < TILE * DIM; at += 8 * 32) copy_16(to + at, from + at);
}

// Producer loop: copies all steps, part by part, for `n_consumers` consumers; a warp copies some
// tiles of each. While a part is in flight the next one is issued.
__device__ void produce(const Range& range, Stage* stages, u32 n_consumers, u32 lane, u32 warp) {
    u32 parts = range.steps() * PARTS;
#pragma unroll 1
    for (u32 part = 0; part <= parts; part++) {
        if (part < parts) {
            u32 step = part / PARTS, first = range.begin + STEP * step;
            Stage& stage = stages[step % STAGES];
            if (step >= STAGES) barrier_sync(Barriers::emptied(part % (STAGES * PARTS)), empty_threads(n_consumers));
#pragma unroll
            for (u32 tile = warp; tile < STEP; tile += 4 * PRODUCERS) {
                if (part % PARTS == 0) load_async<true>(range, first + tile, stage.keys + tile * TILE * K_DIM, lane);
                if (part % PARTS == PARTS - 1) load_async<false>(range, first + tile, stage.values + tile * TILE * V_DIM, lane);
            }
        }
        commit_copies();
        if (part == 0) continue;
        wait_copies<1>();
        fence_stores();
#pragma unroll
        for (u32 consumer = 0; consumer < CONSUMERS; consumer++) {
            if (consumer < n_consumers) barrier_arrive(Barriers::filled((part - 1) % (STAGES * PARTS), consumer), FILL_THREADS);
        }
    }
}

using StepScores = Scores<1, STEP>;
using StepWeights = Weights<1, STEP>;

// Masks tokens of the step from tile `i` on, in which each tile may be of another form.
// `visible_ranges` are the masks of the warpgroup.
__device__ void mask_step(const Common& c, const Range& range, u32 i, StepScores& s, const VisibleRange* visible_ranges, u32 lane, u32 warp) {
    const VisibleTiles& visible = range.visible;
    u32 last = i + STEP - 1, first_token = visible.tile(i) * TILE;
    bool is_main = visible.is_main(i), is_uniform = last < range.end && visible.is_main(last) == is_main;
    bool is_seen = first_token >= visible_ranges[MMA_ROWS - 1].first(c, is_main) && first_token + STEP * TILE <= visible_ranges[0].last(is_main);
    if (is_uniform && is_seen) return;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const VisibleRange& visible_range = visible_ranges[QUERIES * warp + lane / 4 + 8 * half];
#pragma unroll
        for (u32 t = 0; t < STEP; t++) {
            bool is_main = visible.is_main(i + t);
            u32 from = visible_range.first(c, is_main), seen = i + t < range.end ? visible_range.last(is_main) - from : 0;
            u32 col = visible.tile(i + t) * TILE + 2 * (lane % 4) - from;
            for (u32 e = 0; e < 4; e++) {
                if (col + 8 * (e / 2) + e % 2 >= seen) s[0][t][e / 2][2 * half + e % 2] = HIDDEN;
            }
        }
    }
}

// Issues the scores MMAs of the step whose stage begins at `stage`, in descriptor units, as does
// `queries`.
__device__ void issue_scores(StepScores& s, u32 queries, u32 stage) {
    constexpr u32 LAYOUT = token_major_layout(K_DIM);
    float(&scores)[8 * STEP] = (float(&)[8 * STEP])s;
    multiply<LAYOUT, false>(scores, queries, stage);
#pragma unroll
    for (u32 k = 1; k < K_DIM / 16; k++) {
        u32 at = k / 4 * NEXT_SIXTY_FOUR + k % 4 * NEXT_SIXTEEN;
        multiply<LAYOUT, true>(scores, queries + at, stage + at);
    }
    commit_mmas();
}

// Issues the MMAs that add the weighted values of a step, of up to 128 dims each.
__device__ void issue_values(Work<1>& w, const StepWeights& weights, u32 stage) {
    constexpr u32 DIMS = V_DIM < 128 ? V_DIM : 128, KEYS = sizeof(Stage::keys) / 16, NEXT = TILE * sizeof(u16) / 16;
#pragma unroll
    for (u32 t = 0; t < STEP; t++) {
#pragma unroll
        for (u32 dim = 0; dim < V_DIM; dim += DIMS) {
            multiply<DIM_MAJOR_LAYOUT>((float(&)[DIMS / 2])w.out[0][dim / 8], weights[0][t], stage + KEYS + (t * V_DIM + dim) * NEXT);
        }
    }
    commit_mmas();
}

// Consumer loop. During the softmax of a step the MMAs of other warpgroups run; those of its values
// are issued with the next step's scores.
__device__ void consume(const Common& c, const Range& range, const Stage* stages, u32 queries, const VisibleRange* visible_ranges, u32 consumer, u32 n_consumers,
                        Work<1>& w, u32 lane, u32 warp) {
    u32 steps = range.steps();
    StepScores s;
    StepWeights weights;
    float(&scores)[8 * STEP] = (float(&)[8 * STEP])s;
    u32(&operands)[4 * STEP] = (u32(&)[4 * STEP])weights;
    float(&out)[V_DIM / 2] = (float(&)[V_DIM / 2])w.out;
    // Tells that the part that a step has read may be filled again, for the one that needs it.
    auto empty = [&](u32 part, u32 step) {
        if (step + STAGES < steps) barrier_arrive(Barriers::emptied(part), empty_threads(n_consumers));
    };
    if (steps == 0) return;
    barrier_sync(Barriers::filled(keys_part(0), consumer), FILL_THREADS);
    pin(scores);
    fence_registers();
    u32 now = descriptor_address(stages[0].keys);
    issue_scores(s, queries, now);
    wait_for_mmas<0>();
    pin(scores);
    if (PARTS > 1) empty(keys_part(0), 0);
#pragma unroll 1
    for (u32 step = 0;; step++) {
        apply_soft_cap<1, STEP>(c, s);
        mask_step(c, range, range.begin + STEP * step, s, visible_ranges, lane, warp);
        online_softmax<1, STEP>(w, s, weights);
        if (PARTS > 1) barrier_sync(Barriers::filled(values_part(step), consumer), FILL_THREADS);
        if (step + 1 == steps) {
            pin(operands), pin(out);
            fence_registers();
            issue_values(w, weights, now);
            wait_for_mmas<0>();
            pin(out);
            return;
        }
        barrier_sync(Barriers::filled(keys_part(step + 1), consumer), FILL_THREADS);
        pin(operands), pin(out), pin(scores);
        fence_registers();
        issue_values(w, weights, now);
        now = descriptor_address(stages[(step + 1) % STAGES].keys);
        issue_scores(s, queries, now);
        wait_for_mmas<1>();
        pin(out);
        empty(values_part(step), step);
        wait_for_mmas<0>();
        pin(scores);
        if (PARTS > 1) empty(keys_part(step + 1), step + 1);
    }
}

// Unpacks the tiles that any row sees, in the layout of the stages: a warp unpacks one tile of keys
// or of values. Grid: groups of four tiles, keys and values, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) unpack_tiles(const __grid_constant__ AttendParams p) {
    wait_for_kernel_before();
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32;
    Slot slot(p.c, blockIdx.z);
    VisibleTiles visible = visible_to_any(p.c, slot.sequence);
    if (i >= visible.n) return;
    u32 index = visible.tile(i);
    u16* to = unpacked_tile(p.c, slot, i);
    if (blockIdx.y == 0) {
        View keys = keys_of(p.c, slot);
        Tile tile = keys.tile(index, visible.is_main(i));
        load_stored_transposed<true, K_DIM, K_TYPE>(p, tile, keys.centre(index, tile), to, lane);
    } else {
        View values = values_of(p.c, slot);
        load_stored_transposed<false, V_DIM, V_TYPE>(p, values.tile(index, visible.is_main(i)), nullptr, to + TILE * K_DIM, lane);
    }
}

// Consumer warpgroups take queries of their own and share tiles, which the producers copy. Grid:
// splits, blocks of queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) attend_prefill(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(1024) u8 bytes[];
    wait_for_kernel_before();
    Shared& shared = *(Shared*)bytes;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, group = threadIdx.x / WARPGROUP;
    u32 split = blockIdx.x, block_query = blockIdx.y * BLOCK_QUERIES;
    Slot slot(p.c, blockIdx.z);
    u32 n_queries = slot.n_queries(p.c);
    if (split >= slot.sequence.splits || block_query >= n_queries) return;
    load_queries(p.c, slot, block_query, BLOCK_QUERIES, BLOCK_THREADS, shared.queries, shared.visible_ranges);
    finish_copies();
    fence_stores();
    __syncthreads();
    u32 last_query = min(block_query + BLOCK_QUERIES, n_queries) - 1;
    VisibleTiles visible = visible_tiles(p.c, slot.sequence, p.c.by_group.quotient(block_query), p.c.by_group.quotient(last_query));
    u32 begin = split * slot.sequence.split_tiles, end = min(visible.n, begin + slot.sequence.split_tiles);
    Range range(p.c, slot, visible, begin, end);
    u32 n_consumers = (last_query - block_query) / MMA_ROWS + 1;
    if (group >= CONSUMERS) {
        release_registers<PRODUCER_REGISTERS>();
        produce(range, shared.stages, n_consumers, lane, warp + 4 * (group - CONSUMERS));
    } else if (group < n_consumers) {
        claim_registers<CONSUMER_REGISTERS>();
        u32 first = MMA_ROWS * group;
        u32 queries = descriptor_address(shared.queries + first * K_DIM);
        Work<1> w;
        consume(p.c, range, shared.stages, queries, shared.visible_ranges + first, group, n_consumers, w, lane, warp);
        finish_sums(w);
        write_partial(p.c, slot, w, split, block_query + first + QUERIES * warp, lane);
    }
}
