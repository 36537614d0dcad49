// MoE feed-forward without its matrix products: routing, assignment of slots to blocks, and the
// weighted sum. A *slot* is an expert of a row, slot s of row s / n_used. Expert numbers stay on
// the device.

#include "constants.cuh"
#include "rank.cuh"
#include "expert_tiles.cuh"
#include "sum.cuh"

struct ChooseParams {
    const float* logits;     // [rows, n_experts]
    const float* selection_bias;  // [n_experts] or null
    const float* scales;          // the same
    u32* experts;            // [slots], the highest-ranked of each row first
    float* weights;          // [slots]
    u32 n_experts;
    u32 n_used;
    u32 is_sigmoid;
    u32 normalises;
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
    float most, total;
};

// Returns the softmax over all experts; NaN if a logit is NaN. Called by a whole warp.
__device__ inline Softmax softmax_of(const ChooseParams& p, const float* logits, u32 lane) {
    float most = -__int_as_float(0x7f800000), total = 0.0f;
    for (u32 e = lane; e < p.n_experts; e += 32) most = most >= logits[e] ? most : logits[e];
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(~0u, most, step);
        most = most >= other || most != most ? most : other;
    }
    for (u32 e = lane; e < p.n_experts; e += 32) total += expf(logits[e] - most);
    return {most, add_over_warp(total)};
}

// Returns the selection score of expert e; `all` is used only with a selection bias.
__device__ inline float wish(const ChooseParams& p, Softmax all, const float* logits, u32 e) {
    if (!p.is_sigmoid) return p.selection_bias ? expf(logits[e] - all.most) / all.total + p.selection_bias[e] : logits[e];
    return p.selection_bias ? sigmoid(logits[e]) + p.selection_bias[e] : sigmoid(logits[e]);
}

// Returns the groups that a row selects, as a bit mask: by their best expert, or by the sum of
// their best two. A lane has a group.
__device__ inline u32 choose_groups(const ChooseParams& p, Softmax all, const float* logits, u32 lane) {
    if (p.groups_used == p.n_expert_groups) return ~0u;
    u64 key = 0;
    if (lane < p.n_expert_groups) {
        u64 best = 0, second = 0;
        for (u32 e = lane * p.expert_group_size; e < (lane + 1) * p.expert_group_size; e++) {
            u64 of = key_of(wish(p, all, logits, e), e);
            if (of > best) {
                second = best;
                best = of;
            } else if (of > second) {
                second = of;
            }
        }
        float sum = wish(p, all, logits, ~(u32)best);
        if (p.is_sigmoid && second) sum += wish(p, all, logits, ~(u32)second);
        key = key_of(sum, lane);
    }
    u32 before = 0;
    for (u32 group = 0; group < p.n_expert_groups; group++) {
        u32 high = __shfl_sync(~0u, (u32)(key >> 32), group), low = __shfl_sync(~0u, (u32)key, group);
        if (((u64)high << 32 | low) > key) before++;
    }
    return __ballot_sync(~0u, lane < p.n_expert_groups && before < p.groups_used);
}

// Runs the router, with a warp for each row. One expert after the other: the largest key below the
// last one.
extern "C" __global__ void choose(const __grid_constant__ ChooseParams p) {
    const float* logits = p.logits + (size_t)blockIdx.x * p.n_experts;
    u32* experts = p.experts + (size_t)blockIdx.x * p.n_used;
    u32 lane = threadIdx.x;
    bool is_biased_softmax = p.selection_bias && !p.is_sigmoid;
    Softmax all = is_biased_softmax ? softmax_of(p, logits, lane) : Softmax{};
    u32 expert_groups = choose_groups(p, all, logits, lane);
    u64 last = ~0ull;
    float most = 0.0f, total = 0.0f;
    for (u32 j = 0; j < p.n_used; j++) {
        u64 best = 0;
        for (u32 e = lane; e < p.n_experts; e += 32) {
            if (p.n_expert_groups > 1 && !(expert_groups >> (e / p.expert_group_size) & 1)) continue;
            // A sigmoid preserves their order.
            u64 key = key_of(p.selection_bias ? wish(p, all, logits, e) : logits[e], e);
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
        if (j == 0) most = is_biased_softmax ? all.most : logits[expert];
        // All lanes have the same sum. A NaN logit comes first, and makes the sum NaN.
        if (p.is_sigmoid) total += sigmoid(logits[expert]);
        else if (p.normalises) total += expf(logits[expert] - most);
    }
    if (p.is_sigmoid) {
        total = p.normalises ? total + MIN_SCORE : 1.0f;
    } else if (!p.normalises) {
        for (u32 e = lane; e < p.n_experts; e += 32) total += expf(logits[e] - most);
        total = add_over_warp(total);
    }
    __syncthreads();
    for (u32 j = lane; j < p.n_used; j += 32) {
        float logit = logits[experts[j]], score = p.is_sigmoid ? sigmoid(logit) : expf(logit - most);
        float weight = p.scale * (score / total);
        p.weights[(size_t)blockIdx.x * p.n_used + j] = p.scales ? weight * p.scales[experts[j]] : weight;
    }
}

struct GroupParams {
    const u32* experts;  // [slots]
    u32* order;          // [slots]: those of an expert side by side, ascending
    Span* spans;         // [n_experts, spans_each]
    u32 slots;
    u32 spans_each;
    u32 most;            // slots of a span
    u32 unused;
};

// A warp for each expert: a slot's position is the number of lower slots of the expert.
extern "C" __global__ void group(const __grid_constant__ GroupParams p) {
    u32 expert = blockIdx.x, lane = threadIdx.x, before = 0, mine = 0;
    for (u32 s = 0; s < p.slots; s += 32) {
        u32 of = s + lane < p.slots ? p.experts[s + lane] : ~0u;
        before += __popc(__ballot_sync(~0u, of < expert));
        mine += __popc(__ballot_sync(~0u, of == expert));
    }
    u32 at = before;
    for (u32 s = 0; s < p.slots && at < before + mine; s += 32) {
        bool is_mine = s + lane < p.slots && p.experts[s + lane] == expert;
        u32 all = __ballot_sync(~0u, is_mine);
        if (is_mine) p.order[at + __popc(all & ((1u << lane) - 1))] = s + lane;
        at += __popc(all);
    }
    for (u32 i = lane; i < p.spans_each; i += 32) {
        u32 first = i * p.most;
        u32 n = first < mine ? min(mine - first, p.most) : 0;
        p.spans[(size_t)expert * p.spans_each + i] = Span{expert, before + first, n};
    }
}

// Few slots: each is a span.
extern "C" __global__ void one_by_one(const __grid_constant__ GroupParams p) {
    u32 s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s >= p.slots) return;
    p.order[s] = s;
    p.spans[s] = Span{p.experts[s], s, 1};
}

struct EachParams {
    u32* experts;  // [slots]
    u32 slots;
    u32 n;
};

// Rows that use all experts, in order.
extern "C" __global__ void in_turn(const __grid_constant__ EachParams p) {
    u32 s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s < p.slots) p.experts[s] = s % p.n;
}

struct JoinParams {
    const float* y;        // [slots, n]
    const float* weights;  // [slots]
    float* x;              // [rows, n]
    u32 rows;
    u32 n;
    u32 n_used;
    u32 accumulate;
};

// x += sum (or x = sum) of weight y over the slots of a row, in their order; one value per thread.
extern "C" __global__ void join(const __grid_constant__ JoinParams p) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)p.rows * p.n) return;
    size_t slot = i / p.n * p.n_used;
    float sum = p.accumulate ? p.x[i] : 0.0f;
    for (u32 j = 0; j < p.n_used; j++) sum += p.weights[slot + j] * p.y[(slot + j) * p.n + i % p.n];
    p.x[i] = sum;
}
