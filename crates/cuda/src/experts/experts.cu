// MoE feed-forward without its matrix products: routing, assignment of slots to blocks, and the
// weighted sum. A *slot* is an expert of a row, slot s of row s / n_used. Expert numbers stay on
// the device.

#include "constants.cuh"
#include "expert_tiles.cuh"
#include "half.cuh"
#include "rank.cuh"
#include "sum.cuh"

struct RouteParams {
    const float* logits;     // [rows, n_experts]
    const float* selection_bias;  // [n_experts] or null
    const float* scales;          // the same
    u32* experts;            // [slots], the highest-ranked of each row first
    float* weights;          // [slots]
    u32 n_experts;
    u32 n_used;
    u32 scores;  // softmax (0), sigmoid (1) or SparseMixer (2)
    u32 normalizes;
    float scale;
    u32 n_expert_groups;  // at most the lanes of a warp
    u32 groups_used;
    u32 expert_group_size;
};

// NaN for infinity, which a working router never produces.
__device__ inline float sigmoid(float x) {
    return __float_as_uint(x) == 0x7f800000u ? __int_as_float(0x7fffffff) : 1.0f / (1.0f + expf(-x));
}

// Maximum and sum of a softmax over logits.
struct Softmax {
    float max_logit, total;
};

// Returns the softmax over all experts; NaN if a logit is NaN. Called by a whole warp.
__device__ inline Softmax softmax_of(const RouteParams& p, const float* logits, u32 lane) {
    float max_logit = -__int_as_float(0x7f800000), total = 0.0f;
    for (u32 e = lane; e < p.n_experts; e += 32) max_logit = max_logit >= logits[e] ? max_logit : logits[e];
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(~0u, max_logit, step);
        max_logit = max_logit >= other || max_logit != max_logit ? max_logit : other;
    }
    for (u32 e = lane; e < p.n_experts; e += 32) total += expf(logits[e] - max_logit);
    return {max_logit, add_over_warp(total)};
}

// Returns the selection score of expert e; `all` is used only with a selection bias.
__device__ inline float selection_score(const RouteParams& p, Softmax all, const float* logits, u32 e) {
    if (p.scores != 1) return p.selection_bias ? expf(logits[e] - all.max_logit) / all.total + p.selection_bias[e] : logits[e];
    return p.selection_bias ? sigmoid(logits[e]) + p.selection_bias[e] : sigmoid(logits[e]);
}

// Returns the groups that a row selects, as a bit mask: by their best expert, or by the sum of
// their best two. A lane has a group.
__device__ inline u32 select_groups(const RouteParams& p, Softmax all, const float* logits, u32 lane) {
    if (p.groups_used == p.n_expert_groups) return ~0u;
    u64 key = 0;
    if (lane < p.n_expert_groups) {
        u64 best = 0, second = 0;
        for (u32 e = lane * p.expert_group_size; e < (lane + 1) * p.expert_group_size; e++) {
            u64 of = key_of(selection_score(p, all, logits, e), e);
            if (of > best) {
                second = best;
                best = of;
            } else if (of > second) {
                second = of;
            }
        }
        float sum = selection_score(p, all, logits, ~(u32)best);
        if (p.scores == 1 && second) sum += selection_score(p, all, logits, ~(u32)second);
        key = key_of(sum, lane);
    }
    u32 before = 0;
    for (u32 group = 0; group < p.n_expert_groups; group++) {
        u32 high = __shfl_sync(~0u, (u32)(key >> 32), group), low = __shfl_sync(~0u, (u32)key, group);
        if (((u64)high << 32 | low) > key) before++;
    }
    return __ballot_sync(~0u, lane < p.n_expert_groups && before < p.groups_used);
}

// Returns the sum of SparseMixer for the expert that is selected after `n_before` others.
__device__ inline float near_total(const RouteParams& p, const float* logits, const u32* experts, u32 n_before) {
    float top = logits[experts[n_before]], total = 0.0f;
    for (u32 e = 0; e < p.n_experts; e++) {
        bool is_left = true;
        for (u32 j = 0; j < n_before; j++) is_left &= experts[j] != e;
        float logit = logits[e], size = fabsf(logit);
        // A quotient of zeros counts as near.
        bool is_far = (top - logit) / (size > top ? size : top) > NEARNESS;
        if (is_left && !is_far) total += expf(logit - top);
    }
    return total;
}

// Runs the router, with a warp for each row. One expert after the other: the largest key below the
// last one.
extern "C" __global__ void route(const __grid_constant__ RouteParams p) {
    wait_for_kernel_before();
    const float* logits = p.logits + (size_t)blockIdx.x * p.n_experts;
    u32* experts = p.experts + (size_t)blockIdx.x * p.n_used;
    u32 lane = threadIdx.x;
    bool is_biased_softmax = p.selection_bias && p.scores != 1;
    Softmax all = is_biased_softmax ? softmax_of(p, logits, lane) : Softmax{};
    u32 expert_groups = select_groups(p, all, logits, lane);
    u64 last = ~0ull;
    float max_logit = 0.0f, total = 0.0f;
    for (u32 j = 0; j < p.n_used; j++) {
        u64 best = 0;
        for (u32 e = lane; e < p.n_experts; e += 32) {
            if (p.n_expert_groups > 1 && !(expert_groups >> (e / p.expert_group_size) & 1)) continue;
            // A sigmoid preserves their order.
            u64 key = key_of(p.selection_bias ? selection_score(p, all, logits, e) : logits[e], e);
            if (key < last && key > best) best = key;
        }
        for (int step = 16; step > 0; step /= 2) {
            u32 high = __shfl_xor_sync(~0u, (u32)(best >> 32), step), low = __shfl_xor_sync(~0u, (u32)best, step);
            u64 other = (u64)high << 32 | low;
            if (other > best) best = other;
        }
        last = best;
        u32 expert = ~(u32)best;
        if (lane == 0) experts[j] = expert;
        if (j == 0) max_logit = is_biased_softmax ? all.max_logit : logits[expert];
        // All lanes have the same sum. A NaN logit comes first, and makes the sum NaN.
        if (p.scores == 1) total += sigmoid(logits[expert]);
        else if (p.normalizes) total += expf(logits[expert] - max_logit);
    }
    if (p.scores == 1) {
        total = p.normalizes ? total + MIN_SCORE : 1.0f;
    } else if (!p.normalizes) {
        for (u32 e = lane; e < p.n_experts; e += 32) total += expf(logits[e] - max_logit);
        total = add_over_warp(total);
    }
    __syncthreads();
    for (u32 j = lane; j < p.n_used; j += 32) {
        float logit = logits[experts[j]], score = p.scores == 1 ? sigmoid(logit) : expf(logit - max_logit);
        float weight = p.scale * (p.scores == 2 ? 1.0f / near_total(p, logits, experts, j) : score / total);
        p.weights[(size_t)blockIdx.x * p.n_used + j] = p.scales ? weight * p.scales[experts[j]] : weight;
    }
}

struct GroupParams {
    const u32* experts;  // [slots]
    u32* order;          // [slots]: those of an expert side by side, ascending
    ExpertTile* expert_tiles;  // [n_experts, tiles_per_expert]
    u32 slots;
    u32 tiles_per_expert;
    u32 max_slots;       // of a tile
    u32 n_tiles;
};

// A warp for each expert: a slot's position is the number of lower slots of the expert.
extern "C" __global__ void group_slots(const __grid_constant__ GroupParams p) {
    wait_for_kernel_before();
    u32 expert = blockIdx.x, lane = threadIdx.x, before = 0, n_own = 0;
    for (u32 s = 0; s < p.slots; s += 32) {
        u32 of = s + lane < p.slots ? p.experts[s + lane] : ~0u;
        before += __popc(__ballot_sync(~0u, of < expert));
        n_own += __popc(__ballot_sync(~0u, of == expert));
    }
    u32 at = before;
    for (u32 s = 0; s < p.slots && at < before + n_own; s += 32) {
        bool is_own = s + lane < p.slots && p.experts[s + lane] == expert;
        u32 all = __ballot_sync(~0u, is_own);
        if (is_own) p.order[at + __popc(all & ((1u << lane) - 1))] = s + lane;
        at += __popc(all);
    }
    for (u32 i = lane; i < p.tiles_per_expert; i += 32) {
        u32 first = i * p.max_slots;
        u32 n = first < n_own ? min(n_own - first, p.max_slots) : 0;
        p.expert_tiles[(size_t)expert * p.tiles_per_expert + i] = ExpertTile{expert, before + first, n};
    }
}

// Slots of few rows: a tile has all of an expert, the experts without a slot come last. A block
// with a thread for each slot.
extern "C" __global__ void __launch_bounds__(MAX_FEW_SLOTS) group_few_slots(const __grid_constant__ GroupParams p) {
    __shared__ u32 experts[MAX_FEW_SLOTS];
    __shared__ u8 is_first[MAX_FEW_SLOTS];  // of its expert
    wait_for_kernel_before();
    u32 s = threadIdx.x, expert = ~0u;
    if (s < p.slots) experts[s] = expert = p.experts[s];
    __syncthreads();
    u32 below = 0, own = 0, own_before = 0;
    for (u32 i = 0; i < p.slots; i++) {
        below += experts[i] < expert, own += experts[i] == expert;
        own_before += experts[i] == expert && i < s;
    }
    if (s < p.slots) is_first[s] = own_before == 0;
    __syncthreads();
    u32 tile = 0, n_used = 0;
    for (u32 i = 0; i < p.slots; i++) tile += is_first[i] && experts[i] < expert, n_used += is_first[i];
    if (s >= n_used && s < p.n_tiles) p.expert_tiles[s] = ExpertTile{0, 0, 0};
    if (s >= p.slots) return;
    p.order[below + own_before] = s;
    if (own_before == 0) p.expert_tiles[tile] = ExpertTile{expert, below, own};
}

// Slots of one row: each is a tile.
extern "C" __global__ void single_slots(const __grid_constant__ GroupParams p) {
    wait_for_kernel_before();
    u32 s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s >= p.slots) return;
    p.order[s] = s;
    p.expert_tiles[s] = ExpertTile{p.experts[s], s, 1};
}

struct AllExpertsParams {
    u32* experts;  // [slots]
    u32 slots;
    u32 n;
};

// Rows that use all experts, in order.
extern "C" __global__ void all_experts(const __grid_constant__ AllExpertsParams p) {
    wait_for_kernel_before();
    u32 s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s < p.slots) p.experts[s] = s % p.n;
}

struct AllSlotsParams {
    u32* order;                // [slots]
    ExpertTile* expert_tiles;  // [n]
    u32 rows;
    u32 n;
};

// Groups the slots of few rows that use all experts: a tile has all of an expert.
extern "C" __global__ void all_slots(const __grid_constant__ AllSlotsParams p) {
    wait_for_kernel_before();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, expert = i / p.rows, row = i % p.rows;
    if (expert >= p.n) return;
    p.order[i] = row * p.n + expert;
    if (row == 0) p.expert_tiles[expert] = ExpertTile{expert, i, p.rows};
}

struct CombineParams {
    const float* y;        // [slots, n]
    const float* weights;  // [slots]
    float* x;              // [rows, n]
    u32 rows;
    u32 n;
    u32 n_used;
    u32 accumulate;
};

// x += sum (or x = sum) of weight y over the slots of a row, in their order; one value per thread.
extern "C" __global__ void combine(const __grid_constant__ CombineParams p) {
    wait_for_kernel_before();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)p.rows * p.n) return;
    size_t slot = i / p.n * p.n_used;
    float sum = p.accumulate ? p.x[i] : 0.0f;
    for (u32 j = 0; j < p.n_used; j++) sum += p.weights[slot + j] * p.y[(slot + j) * p.n + i % p.n];
    p.x[i] = sum;
}
