// Types and functions shared by the attention kernels. mod.rs and decode.rs describe the method.

#pragma once

#include "bounded.cuh"
#include "look_up.cuh"

// A KV head of a layer.
struct Head {
    Offsets keys;
    Offsets values;
    u32 kv_head;
    u32 unused;
};

// A divisor of whole numbers below 2^31, as divisor.rs describes it.
struct Divisor {
    u32 factor, shift;
    __device__ u32 quotient(u32 n) const { return (__umulhi(n, factor) + n) >> shift; }
};

// A sequence.
struct Sequence {
    Memory memory;
    const float* balance;  // channel scales of its layer, or null
    u32 first_row;     // among the rows of queries and outputs
    u32 rows;
    u32 start;         // position of the first row
    u32 window;        // first tile that rows of the first row's tile see in 16 bit
    u32 windows;       // index in `windows` of those of the next tiles
    StepTiles key_step_tiles;
    StepTiles value_step_tiles;
    u32 first_query;   // among the prepared ones: of the first head
    u32 padded;        // queries of a KV head, rounded up
    u32 first_partial;   // of the first head
    u32 splits;        // KV splits
    u32 split_tiles;   // tiles of each split
    u32 first_unpacked_tile;  // its first unpacked tile, of the first head
    u32 n_unpacked_tiles;     // unpacked tiles of a head: those that any of its rows sees
    Divisor by_splits;
};

struct Common {
    Head heads[MAX_HEADS];
    Sequence sequences[MAX_SEQUENCES];
    Spec keys;
    Spec values;
    const u32* windows;
    u16* queries;      // f16, scaled, rotated where the keys are, [sequence][head][padded][K_DIM]
    float* partial_out; // [sequence][head][split][padded][V_DIM]
    float* state;      // [sequence][head][split][padded][2]: maximum and sum
    u16* unpacked_tiles; // [sequence][head][n_unpacked_tiles][TILE * (K_DIM + V_DIM)]: keys, then values
    // [sequence][head]: finished blocks, counted where the last one combines the splits; 0 between
    // launches
    u32* counters;
    u32 n_heads;       // of this launch
    u32 group;         // query heads per KV head
    u32 visible;       // number of latest tokens that a query sees
    float soft_cap;    // of the scores, times log2 e, if CAPPED
    float cap_rate;    // parameter of `bounded`
    u32 unused;
    Divisor by_group;
};

// KV head number `index` of the launch, of one sequence.
struct Slot {
    const Sequence& sequence;
    const Head& head;
    u32 index;         // of the head

    __device__ Slot(const Sequence& sequence, const Head& head, u32 index) : sequence(sequence), head(head), index(index) {}
    __device__ Slot(const Common& c, u32 number)
        : sequence(c.sequences[number / c.n_heads]), head(c.heads[number % c.n_heads]), index(number % c.n_heads) {}
    __device__ u32 n_queries(const Common& c) const { return sequence.rows * c.group; }
    __device__ size_t query(u32 i) const { return sequence.first_query + (size_t)index * sequence.padded + i; }
    __device__ size_t partial(u32 split, u32 i) const {
        return sequence.first_partial + ((size_t)index * sequence.splits + split) * sequence.padded + i;
    }
};

// Returns the oldest token that row `row` sees.
__device__ inline u32 oldest_of(const Common& c, const Sequence& sequence, u32 row) {
    u32 end = sequence.start + row + 1;
    return end - min(end, c.visible);
}

// Returns the first tile that row `row` sees in 16 bit.
__device__ inline u32 window_of(const Common& c, const Sequence& sequence, u32 row) {
    u32 later = (sequence.start + row) / TILE - sequence.start / TILE;
    return later == 0 ? sequence.window : c.windows[sequence.windows + later - 1];
}

// The tiles that rows from `first` to `last` see: `n_main` from `main` on as stored in the blocks,
// then those from `recent` on in 16 bit, `n` in all. A tile may occur in both forms.
struct VisibleTiles {
    u32 main, n_main, recent, n;
    __device__ bool is_main(u32 i) const { return i < n_main; }
    __device__ u32 tile(u32 i) const { return i < n_main ? main + i : recent + i - n_main; }
};

__device__ inline VisibleTiles visible_tiles(const Common& c, const Sequence& sequence, u32 first, u32 last) {
    u32 main = oldest_of(c, sequence, first) / TILE, end = (sequence.start + last) / TILE + 1;
    u32 to = min(window_of(c, sequence, last), end), recent = max(window_of(c, sequence, first), main);
    u32 n_main = to > main ? to - main : 0;
    return {main, n_main, recent, n_main + (end > recent ? end - recent : 0)};
}

// Returns the score, capped by `bounded` if CAPPED; both are times log2 e.
__device__ inline float capped(const Common& c, float score) {
#if CAPPED
    return bounded(score, c.soft_cap, c.cap_rate);
#else
    return score;
#endif
}

// Returns the sum over the four lanes that hold parts of the same rows.
__device__ inline float sum_of_four(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ inline float max_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
