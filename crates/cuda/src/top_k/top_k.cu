// The most probable tokens of a row of logits: each block sorts a slice and keeps its best, until
// one block is left.

#include "constants.cuh"
#include "half.cuh"
#include "rank.cuh"

struct TopKParams {
    const float* logits;  // [len], or null:
    const u64* keys;      // [len]
    u64* best;            // [blocks, k], each block's in descending order
    u32 len;
    u32 k;                // at most SLICE
};

extern "C" __global__ void top_k(const __grid_constant__ TopKParams p) {
    __shared__ u64 keys[SLICE];
    wait_for_kernel_before();
    for (u32 i = threadIdx.x; i < SLICE; i += blockDim.x) {
        u32 at = blockIdx.x * SLICE + i;
        keys[i] = at >= p.len ? 0 : p.logits ? key_of(p.logits[at], at) : p.keys[at];
    }
    // A bitonic sort: runs of `size` keys, every other one ascending, become runs of twice as many.
    for (u32 size = 2; size <= SLICE; size *= 2) {
        for (u32 step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < SLICE / 2; i += blockDim.x) {
                u32 a = 2 * i - (i & (step - 1)), b = a + step;
                u64 first = keys[a], second = keys[b];
                bool descends = (a & size) == 0;
                if (descends == (first < second)) keys[a] = second, keys[b] = first;
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < p.k; i += blockDim.x) p.best[(size_t)blockIdx.x * p.k + i] = keys[i];
}
