// Encodes one row: 128 values at a time, four per lane of a warp. The method is that of
// kvant-codec, with the same bits.

#pragma once

#include "rotate.cuh"
#include "tile.cuh"

// Thresholds and sums of the search for a step size, by codebook, in the units of kvant-codec's
// `step`.
constexpr u32 HALF_LEVELS = MAX_LEVELS / 2;
__constant__ u32 THRESHOLDS[N_BOOKS][STEPS][HALF_LEVELS] = STEP_THRESHOLDS;
__constant__ u32 UPPER_LEVELS[N_BOOKS][HALF_LEVELS] = STEP_LEVELS;
// Levels of turbo2t and turbo3t by the last six bits of the code sequence.
__constant__ int TRELLIS_LEVELS[2][TRELLIS_WINDOWS] = TRELLIS_TABLES;

// The values of lane l among the 128 of a warp: 4l .. 4l + 3.
struct Quad { float x[4]; };

// Returns the sum over the `lanes` (a power of two) of a block, which are contiguous. Called by a
// whole warp.
__device__ double block_sum(double v, u32 lanes) {
    for (u32 step = 16; step > 0; step /= 2) {
        int low = __double2loint(v), high = __double2hiint(v);
        double other = __hiloint2double(__shfl_xor_sync(~0u, high, step), __shfl_xor_sync(~0u, low, step));
        if (step < lanes) v += other;
    }
    return v;
}

// Scales the values of a block of `dims` to unit variance, or to zeros; returns its norm, 0 if it
// vanishes. Called by a whole warp.
__device__ double to_unit_variance(u32 dims, Quad& q) {
    double squares = 0.0;
    for (int i = 0; i < 4; i++) {
        q.x[i] = clamped(q.x[i], HALF_MAX);
        squares += (double)q.x[i] * (double)q.x[i];
    }
    double norm = sqrt(block_sum(squares, dims / 4));
    double root = dims == 128 ? SQRT_128 : dims == 64 ? SQRT_64 : SQRT_32;
    bool is_tiny = norm < 1e-10;
    float factor = is_tiny ? 0.0f : (float)(root / norm);
    for (int i = 0; i < 4; i++) q.x[i] = __fmul_rn(q.x[i], factor);
    return is_tiny ? 0.0 : norm;
}

// Returns the scale of a block of this norm whose levels have the norm `coded`.
__device__ u16 scale_of(double norm, double coded) {
    return norm == 0.0 ? 0 : to_half(clamped((float)(norm / coded), HALF_MAX));
}

// Returns the sum over the lanes of a block of `dims`, which are contiguous. Called by a whole
// warp.
__device__ u32 block_sum(u32 v, u32 dims) {
    // One block has the whole warp.
    if (dims == SPAN) return __reduce_add_sync(~0u, v);
    for (u32 lanes = 1; lanes < 32; lanes *= 2) {
        u32 more = __shfl_xor_sync(~0u, v, lanes);
        if (lanes < dims / 4) v += more;
    }
    return v;
}

// Returns the best step size, among those of kvant-codec's `step`, for the magnitudes of a block.
// The sums are integers, so that they do not depend on the order. Called by a whole warp.
template <u32 BOOK>
__device__ u32 best_step(u32 dims, const u32 magnitudes[4]) {
    // Sums are below 2^45 and 2^37. In three words each part has room for 32 lanes.
    constexpr u32 LOW_BITS = 26, LOW = (1u << LOW_BITS) - 1, ALONG_BITS = 20;
    u32 best = 0;
    double best_along = 0.0, best_square = 1.0;
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
        unsigned long long along = 0;
        u32 square = 0;
        for (int i = 0; i < 4; i++) {
            u32 level = UPPER_LEVELS[BOOK][0];
            for (u32 m = 0; m + 1 < 2u << BOOK; m++) {
                if (magnitudes[i] >= THRESHOLDS[BOOK][k][m]) level = UPPER_LEVELS[BOOK][m + 1];
            }
            along += (unsigned long long)level * magnitudes[i];
            square += level * level;
        }
        u32 along_low = block_sum((u32)along & LOW, dims), square_low = block_sum(square & LOW, dims);
        u32 high = block_sum((u32)(along >> LOW_BITS) | square >> LOW_BITS << ALONG_BITS, dims);
        double along_sum = (double)(((unsigned long long)(high & ((1u << ALONG_BITS) - 1)) << LOW_BITS) + along_low);
        double square_sum = (double)(((unsigned long long)(high >> ALONG_BITS) << LOW_BITS) + square_low);
        double product = __dmul_rn(along_sum, along_sum);
        if (__dmul_rn(product, best_square) > __dmul_rn(best_along, square_sum)) {
            best = k, best_along = product, best_square = square_sum;
        }
    }
    return best;
}

// Returns the factor on a block's values of unit variance that selects the best step size. Called
// by a whole warp.
__device__ float step_factor(u32 book, u32 dims, const float z[4]) {
    u32 magnitudes[4];
    for (int i = 0; i < 4; i++) magnitudes[i] = (u32)__fmul_rn(fabsf(z[i]), STEP_ONE);
    u32 best = book == 0 ? best_step<0>(dims, magnitudes) : book == 1 ? best_step<1>(dims, magnitudes) : best_step<2>(dims, magnitudes);
    return __fdiv_rn((float)STEP_UNIT, (float)(FIRST_STEP + best));
}

// Encodes a block of `dims` that is already rotated; returns the scale. Called by a whole warp.
__device__ u16 encode_turbo(u32 book, const float* levels, const float* mids, u32 dims, Quad q, u8* codes) {
    double norm = to_unit_variance(dims, q);
    float factor = step_factor(book, dims, q.x);
    double coded = 0.0;
    for (int i = 0; i < 4; i++) {
        float value = __fmul_rn(q.x[i], factor);
        u32 index = 0;
        for (u32 m = 0; m + 1 < 4u << book; m++) index += value >= mids[m];
        codes[i] = (u8)index;
        coded += (double)levels[index] * (double)levels[index];
    }
    return scale_of(norm, sqrt(block_sum(coded, dims / 4)));
}

// Working memory of a warp for a search through a trellis.
struct TrellisScratch {
    short values[SPAN];  // quantized inputs of the search, by dim
    // survivors of each step: bit `bits * state + b` is bit b of the code that leads to `state` at
    // minimum cost
    u32 survivors[SPAN];
    u8 codes[SPAN];
};

// The minimum-cost path through the trellis of one block (Viterbi), in the integers of kvant-codec.
// Lane l computes state l mod STATES, and two of the branches into it.
template <u32 BITS>
struct Viterbi {
    static constexpr u32 REST = TRELLIS_WINDOW - BITS, STATES = 1 << REST, FREE = TRELLIS_FREE;
    const int* levels;
    TrellisScratch& scratch;
    u32 first, dims, lane;     // of the block in its span
    u32 oldest;                // bits of the first branch; those of the other are one more
    int slope[2], square[2];

    __device__ Viterbi(TrellisScratch& scratch, u32 first, u32 dims, u32 lane)
        : levels(TRELLIS_LEVELS[BITS - 2]), scratch(scratch), first(first), dims(dims), lane(lane), oldest(lane / STATES * 2) {
        for (u32 branch = 0; branch < 2; branch++) {
            int level = levels[window(branch)];
            slope[branch] = -2 * level * TRELLIS_UNIT, square[branch] = level * level * TRELLIS_SQUARE_UNIT;
        }
    }
    __device__ u32 window(u32 branch) const { return lane % STATES | (oldest + branch) << REST; }

    // Returns the dim at position p of the code sequence.
    __device__ u32 dim_at(u32 p) const { return TRELLIS_STRIDE * (p % (dims / TRELLIS_STRIDE)) + p / (dims / TRELLIS_STRIDE); }

    // Advances by the value at position p; returns the survivors (`TrellisScratch::survivors`).
    __device__ u32 step(int& cost, u32 p) const {
        int x = scratch.values[first + dim_at(p)], min_cost = 0x7fffffff;
        for (u32 branch = 0; branch < 2; branch++) {
            int so_far = __shfl_sync(~0u, cost, window(branch) >> BITS) & ~FREE;
            min_cost = min(min_cost, (so_far | (int)(oldest + branch)) + slope[branch] * x + square[branch]);
        }
        for (u32 lanes = STATES; lanes < 32; lanes *= 2) min_cost = min(min_cost, __shfl_xor_sync(~0u, min_cost, lanes));
        cost = min_cost;
        u32 survivors = 0;
        for (u32 b = 0; b < BITS; b++) {
            survivors |= (__ballot_sync(~0u, min_cost >> b & 1) & ((1u << STATES) - 1)) << (STATES * b);
        }
        return survivors;
    }

    // Returns the code bits that led to `state`.
    __device__ u32 tag(u32 survivors, u32 state) const {
        u32 bits = 0;
        for (u32 b = 0; b < BITS; b++) bits |= (survivors >> (STATES * b + state) & 1) << b;
        return bits;
    }

    // Returns the state at which the ring of the tail-biting trellis is cut: the one at the seam on
    // the minimum-cost path across it.
    __device__ u32 seam() const {
        int cost = 0;
        u32 survivors[TRELLIS_LEAD];
        for (u32 p = dims - TRELLIS_LEAD; p < dims; p++) step(cost, p);
#pragma unroll
        for (u32 p = 0; p < TRELLIS_LEAD; p++) survivors[p] = step(cost, p);
        int min_cost = cost & ~FREE | (int)(lane % STATES);
        for (u32 lanes = 1; lanes < STATES; lanes *= 2) min_cost = min(min_cost, __shfl_xor_sync(~0u, min_cost, lanes));
        u32 state = min_cost & FREE;
#pragma unroll
        for (u32 p = TRELLIS_LEAD; p-- > 0;) state = (state | tag(survivors[p], state) << REST) >> BITS;
        return state;
    }

    // Leaves the codes of the minimum-cost ring in the trail; returns the sum of the squares of
    // their levels.
    __device__ u32 ring() const {
        u32 state = seam(), squares = 0;
        int cost = lane % STATES == state ? 0 : TRELLIS_CLOSED;
        for (u32 p = 0; p < dims; p++) {
            u32 survivors = step(cost, p);
            if (lane == 0) scratch.survivors[p] = survivors;
        }
        __syncwarp();
        for (u32 p = dims; p-- > 0;) {
            u32 window = state | tag(scratch.survivors[p], state) << REST;
            if (lane == 0) scratch.codes[first + dim_at(p)] = (u8)(state & ((1 << BITS) - 1));
            squares += (u32)(levels[window] * levels[window]);
            state = window >> BITS;
        }
        __syncwarp();
        return squares;
    }
};

// Encodes the blocks of a span that begins at dim `span` of a row of `dim`, already rotated, as a
// trellis type; returns the scale of this lane's block. Called by a whole warp.
__device__ u16 encode_trellis(u32 type, u32 dim, u32 span, const Dims& mine, Quad q, TrellisScratch& scratch, u32 lane, u8* codes) {
    double norm = to_unit_variance(mine.n, q);
    for (u32 i = 0; i < 4; i++) {
        float value = clamped(__fmul_rn(q.x[i], TRELLIS_PER_UNIT), TRELLIS_MAX);
        scratch.values[4 * lane + i] = (short)__float2int_rn(value);
    }
    __syncwarp();
    u32 squares = 0;
    for (u32 at = span; at < min(span + SPAN, dim);) {
        Dims block = block_at(type, dim, at);
        u32 first = at - span;
        u32 sum = type == TURBO3T ? Viterbi<3>(scratch, first, block.n, lane).ring() : Viterbi<2>(scratch, first, block.n, lane).ring();
        if (block.first == mine.first) squares = sum;
        at += block.n;
    }
    for (u32 i = 0; i < 4 && span + 4 * lane < dim; i++) codes[i] = scratch.codes[4 * lane + i];
    __syncwarp();
    return scale_of(norm, sqrt((double)squares) * TRELLIS_NORM);
}

// Encodes a block of 32, in eight lanes; returns the scale. Lanes beyond the last block take part.
__device__ u16 encode_block32(u32 type, Quad q, u32 lane, u8* codes) {
    float extreme = 0.0f;
    u32 at = 0;
    for (int i = 0; i < 4; i++) {
        q.x[i] = clamped(q.x[i], HALF_MAX);
        if (fabsf(q.x[i]) > fabsf(extreme)) extreme = q.x[i], at = 4 * lane + i;
    }
    for (int step = 4; step > 0; step /= 2) {
        float other = __shfl_xor_sync(~0u, extreme, step);
        u32 other_at = __shfl_xor_sync(~0u, at, step);
        bool larger = fabsf(other) > fabsf(extreme);
        bool equal = fabsf(other) == fabsf(extreme);
        // The first of equals; zeros have no index.
        if (larger || (equal && other_at < at)) extreme = other, at = other_at;
    }
    float d = type == Q8_0 ? fabsf(extreme) / (float)(Q8_0_ZERO - 1) : extreme / -(float)Q4_0_ZERO;
    u16 scale = to_half(type == Q8_0 ? fminf(d, Q8_0_MAX_SCALE) : d);
    float inverse = (scale & 0x7fff) == 0 ? 0.0f : 1.0f / d;
    for (int i = 0; i < 4; i++) {
        if (type == Q8_0) {
            codes[i] = (u8)((int)roundf(__fmul_rn(q.x[i], inverse)) + Q8_0_ZERO);
        } else {
            float code = __fadd_rn(__fadd_rn(__fmul_rn(q.x[i], inverse), (float)Q4_0_ZERO), 0.5f);
            codes[i] = (u8)min((int)fmaxf(code, 0.0f), 2 * Q4_0_ZERO - 1);
        }
    }
    return scale;
}
