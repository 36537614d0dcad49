// Prefill attention over quantized tiles, with warpgroup MMAs. hopper.rs describes the method.
//
// Macros: K_TYPE, V_TYPE, K_DIM, V_DIM (stored values per token, 64 or 128), CAPPED (soft cap on
// the scores), TAKERS, BRINGERS (consumer and producer warpgroups), STAGES (of shared memory),
// TAKER_REGISTERS, BRINGER_REGISTERS.

#define EIGHTS_TOGETHER
#include "copies.cuh"
#include "transpose.cuh"
#include "warpgroup.cuh"
#include "work.cuh"

// Tiles of a step.
constexpr u32 STEP = 4;
// f16 values of an unpacked tile of keys and of values.
constexpr u32 IMAGE = TILE * (K_DIM + V_DIM);
constexpr u32 BLOCK_THREADS = WARPGROUP * (TAKERS + BRINGERS), BLOCK_QUERIES = PRODUCT_ROWS * TAKERS;

struct Stage {
    u16 keys[STEP * TILE * K_DIM];
    u16 values[STEP * TILE * V_DIM];
};

struct Shared {
    u16 queries[BLOCK_QUERIES * K_DIM];
    Stage stages[STAGES];
    Sight sights[BLOCK_QUERIES];
};

// Returns the address of unpacked tile `i` of those that any row of a sequence sees.
__device__ u16* image_of(const Common& c, const Slot& slot, u32 i) {
    return c.images + (slot.part.first_image + (size_t)slot.index * slot.part.images + i) * IMAGE;
}

// Returns the tiles that any row of a sequence sees.
__device__ Walk walk_of_all(const Common& c, const Part& part) { return walk_of(c, part, 0, part.rows - 1); }

// The tiles of a block, `begin` to before `end` of those that its rows see, and the addresses of
// their unpacked forms.
struct Range {
    Walk walk;
    u32 begin, end;
    const u16* mains;    // unpacked tiles from `walk.main` on, as stored in the blocks
    const u16* recents;  // those from `walk.recent` on, in 16 bit

    __device__ Range(const Common& c, const Slot& slot, Walk walk, u32 begin, u32 end) : walk(walk), begin(begin), end(end) {
        Walk all = walk_of_all(c, slot.part);
        mains = image_of(c, slot, walk.main - all.main);
        recents = image_of(c, slot, all.mains + walk.recent - all.recent);
    }
    __device__ u32 steps() const { return begin < end ? (end - begin + STEP - 1) / STEP : 0; }
    __device__ const u16* image(u32 i) const { return walk.is_main(i) ? mains + i * IMAGE : recents + (i - walk.mains) * IMAGE; }
};

using Barriers = StageBarriers<STAGES, TAKERS>;
constexpr u32 FILL_THREADS = WARPGROUP * (BRINGERS + 1);
__device__ u32 empty_threads(u32 takers) { return WARPGROUP * (BRINGERS + takers); }

// Issues the copy of tile `i`, of keys or of values; zeros beyond the last.
template <bool KEYS>
__device__ void ask(const Range& range, u32 i, u16* to, u32 lane) {
    constexpr u32 DIM = KEYS ? K_DIM : V_DIM;
    if (i >= range.end) return load_nothing<DIM>(to, lane);
    const u16* from = range.image(i) + (KEYS ? 0 : TILE * K_DIM);
#pragma unroll
    for (u32 at = 8 * lane; at < TILE * DIM; at += 8 * 32) copy_16(to + at, from + at);
}

// Producer loop: copies all steps, for `takers` consumers; a warp copies some tiles of each. While
// a step arrives the next one is issued.
__device__ void bring_all(const Range& range, Stage* stages, u32 takers, u32 lane, u32 warp) {
    u32 steps = range.steps();
#pragma unroll 1
    for (u32 step = 0; step <= steps; step++) {
        if (step < steps) {
            u32 stage = step % STAGES, first = range.begin + STEP * step;
            if (step >= STAGES) meet(Barriers::emptied(stage), empty_threads(takers));
#pragma unroll
            for (u32 place = warp; place < STEP; place += 4 * BRINGERS) {
                ask<true>(range, first + place, stages[stage].keys + place * TILE * K_DIM, lane);
                ask<false>(range, first + place, stages[stage].values + place * TILE * V_DIM, lane);
            }
        }
        commit_copies();
        if (step == 0) continue;
        wait_copies<1>();
        show_stores();
#pragma unroll
        for (u32 taker = 0; taker < TAKERS; taker++) {
            if (taker < takers) arrive(Barriers::filled((step - 1) % STAGES, taker), FILL_THREADS);
        }
    }
}

using StepScores = Scores<1, STEP>;
using StepWeights = Weights<1, STEP>;

// Masks tokens of the step from tile `i` on, in which each tile may be of another part. `sights`
// are the masks of the warpgroup.
__device__ void hide_step(const Common& c, const Range& range, u32 i, StepScores& s, const Sight* sights, u32 lane, u32 warp) {
    const Walk& walk = range.walk;
    u32 last = i + STEP - 1, first_token = walk.tile(i) * TILE;
    bool is_main = walk.is_main(i), is_one = last < range.end && walk.is_main(last) == is_main;
    bool is_seen = first_token >= sights[PRODUCT_ROWS - 1].first(c, is_main) && first_token + STEP * TILE <= sights[0].last(is_main);
    if (is_one && is_seen) return;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const Sight& sight = sights[QUERIES * warp + lane / 4 + 8 * half];
#pragma unroll
        for (u32 t = 0; t < STEP; t++) {
            bool is_main = walk.is_main(i + t);
            u32 from = sight.first(c, is_main), seen = i + t < range.end ? sight.last(is_main) - from : 0;
            u32 col = walk.tile(i + t) * TILE + 2 * (lane % 4) - from;
            for (u32 e = 0; e < 4; e++) {
                if (col + 8 * (e / 2) + e % 2 >= seen) s[0][t][e / 2][2 * half + e % 2] = HIDDEN;
            }
        }
    }
}

// Issues the scores MMAs of the step whose stage begins at `stage`, in descriptor units, as does
// `queries`.
__device__ void begin_scores(StepScores& s, u32 queries, u32 stage) {
    constexpr u32 LYING = lying_in_tokens(K_DIM);
    float(&scores)[8 * STEP] = (float(&)[8 * STEP])s;
    multiply<LYING, false>(scores, queries, stage);
#pragma unroll
    for (u32 k = 1; k < K_DIM / 16; k++) {
        u32 at = k / 4 * NEXT_SIXTY_FOUR + k % 4 * NEXT_SIXTEEN;
        multiply<LYING, true>(scores, queries + at, stage + at);
    }
    commit_products();
}

// Issues the MMAs that add the weighted values of a step.
__device__ void begin_mix(Work<1>& w, const StepWeights& weights, u32 stage) {
    constexpr u32 KEYS = sizeof(Stage::keys) / 16, NEXT = TILE * V_DIM * sizeof(u16) / 16;
#pragma unroll
    for (u32 t = 0; t < STEP; t++) {
        multiply<LYING_IN_DIMS>((float(&)[V_DIM / 2])w.out, weights[0][t], stage + KEYS + t * NEXT);
    }
    commit_products();
}

// Consumer loop. During the softmax of a step the MMAs of other warpgroups run; those of its values
// are issued with the next step's scores.
__device__ void take_all(const Common& c, const Range& range, const Stage* stages, u32 queries, const Sight* sights, u32 taker, u32 takers,
                         Work<1>& w, u32 lane, u32 warp) {
    u32 steps = range.steps();
    StepScores s;
    StepWeights weights;
    float(&scores)[8 * STEP] = (float(&)[8 * STEP])s;
    u32(&operands)[4 * STEP] = (u32(&)[4 * STEP])weights;
    float(&out)[V_DIM / 2] = (float(&)[V_DIM / 2])w.out;
    if (steps == 0) return;
    meet(Barriers::filled(0, taker), FILL_THREADS);
    pin(scores);
    show_registers();
    u32 now = beginning(stages[0].keys);
    begin_scores(s, queries, now);
    wait_for_products<0>();
    pin(scores);
#pragma unroll 1
    for (u32 step = 0;; step++) {
        bound<1, STEP>(c, s);
        hide_step(c, range, range.begin + STEP * step, s, sights, lane, warp);
        online_softmax<1, STEP>(w, s, weights);
        u32 stage = step % STAGES, next = (step + 1) % STAGES;
        if (step + 1 == steps) {
            pin(operands), pin(out);
            show_registers();
            begin_mix(w, weights, now);
            wait_for_products<0>();
            pin(out);
            return;
        }
        meet(Barriers::filled(next, taker), FILL_THREADS);
        pin(operands), pin(out), pin(scores);
        show_registers();
        begin_mix(w, weights, now);
        now = beginning(stages[next].keys);
        begin_scores(s, queries, now);
        wait_for_products<1>();
        pin(out);
        if (step + STAGES < steps) arrive(Barriers::emptied(stage), empty_threads(takers));
        wait_for_products<0>();
        pin(scores);
    }
}

// Unpacks the tiles that any row sees, in the layout of the stages: a warp unpacks one tile of keys
// or of values. Grid: groups of four tiles, keys and values, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) unpack_tiles(const __grid_constant__ AttendParams p) {
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32;
    Slot slot(p.c, blockIdx.z);
    Walk walk = walk_of_all(p.c, slot.part);
    if (i >= walk.n) return;
    u32 index = walk.tile(i);
    u16* to = image_of(p.c, slot, i);
    if (blockIdx.y == 0) {
        View keys = keys_of(p.c, slot);
        Tile tile = keys.tile(index, walk.is_main(i));
        load_alike<true, K_DIM, K_TYPE>(p, tile, keys.centre(index, tile), to, lane);
    } else {
        View values = values_of(p.c, slot);
        load_alike<false, V_DIM, V_TYPE>(p, values.tile(index, walk.is_main(i)), nullptr, to + TILE * K_DIM, lane);
    }
}

// Consumer warpgroups take queries of their own and share tiles, which the producers copy. Grid:
// splits, blocks of queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) attend_many(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(1024) u8 bytes[];
    Shared& shared = *(Shared*)bytes;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, group = threadIdx.x / WARPGROUP;
    u32 split = blockIdx.x, block_query = blockIdx.y * BLOCK_QUERIES;
    Slot slot(p.c, blockIdx.z);
    u32 n_queries = slot.n_queries(p.c);
    if (split >= slot.part.splits || block_query >= n_queries) return;
    bring_queries(p.c, slot, block_query, BLOCK_QUERIES, BLOCK_THREADS, shared.queries, shared.sights);
    show_stores();
    __syncthreads();
    u32 last_query = min(block_query + BLOCK_QUERIES, n_queries) - 1;
    Walk walk = walk_of(p.c, slot.part, block_query / p.c.group, last_query / p.c.group);
    u32 begin = split * slot.part.split_tiles, end = min(walk.n, begin + slot.part.split_tiles);
    Range range(p.c, slot, walk, begin, end);
    u32 takers = (last_query - block_query) / PRODUCT_ROWS + 1;
    if (group >= TAKERS) {
        release_registers<BRINGER_REGISTERS>();
        bring_all(range, shared.stages, takers, lane, warp + 4 * (group - TAKERS));
    } else if (group < takers) {
        claim_registers<TAKER_REGISTERS>();
        u32 first = PRODUCT_ROWS * group;
        u32 queries = beginning(shared.queries + first * K_DIM);
        Work<1> w;
        take_all(p.c, range, shared.stages, queries, shared.sights + first, group, takers, w, lane, warp);
        finish_sums(w);
        write_share(p.c, slot, w, split, block_query + first + QUERIES * warp, lane);
    }
}
