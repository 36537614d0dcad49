// The most probable tokens of rows of logits, all rows in one launch: each block selects those of a
// slice of a row, and the last block of a row selects among them.
//
// A block selects k of n keys with two passes over them. First, each thread finds the largest of
// its own keys, without the ids, and the block searches, from the highest bit down, for a bound
// that k threads reach: at least k keys reach it, and all that do are keys of those threads, hardly
// more than k. Then these few are collected and ranked by comparing each with each.

#include "constants.cuh"
#include "half.cuh"
#include "rank.cuh"

struct Row {
    u32 row;
    u32 k;
    u32 first;  // index of its first candidate
};

struct Candidate {
    u32 id;
    float logit;
};

struct TopKParams {
    const float* logits;    // [_, n_vocab]
    u64* keys;              // for each row [n_slices, k], those of each slice in descending order
    Candidate* candidates;  // for each row [k]
    u32* counters;          // [rows], zero
    u32 n_vocab;
    u32 n_slices;
    Row rows[MAX_ROWS];
};

struct Shared {
    u64 keys[MAX_K];       // n of them
    u32 threads[THREADS];  // n_threads whose keys may be among them
    u32 n;
    u32 n_threads;
    u32 is_last;
};

// Returns the largest bound, or one between the same keys, that at least k of the keys that `count`
// counts reach; 1 if there are at most k.
template <class T, class Count>
__device__ inline T bound_of(u32 k, Count count) {
    if (count(1) <= k) return 1;
    T bound = 0;
#pragma unroll 1
    for (T bit = (T)1 << (8 * sizeof(T) - 1); bit > 0; bit >>= 1) {
        T higher = bound | bit;
        u32 n = count(higher);
        if (n >= k) bound = higher;
        if (n == k) break;
    }
    return bound;
}

// Collects the keys that reach `bound`, as far as there is room; counts all. No key of this thread
// has a larger upper half than `best`. The lanes of a warp read the keys of one thread together.
template <class Key>
__device__ inline void collect(Shared& shared, u64 bound, u32 best, int n, Key key) {
    __syncthreads();
    if (threadIdx.x == 0) shared.n = shared.n_threads = 0;
    __syncthreads();
    if (best >= (u32)(bound >> 32)) shared.threads[atomicAdd(&shared.n_threads, 1)] = threadIdx.x;
    __syncthreads();
    for (u32 at = threadIdx.x / 32; at < shared.n_threads; at += THREADS / 32) {
        for (int i = shared.threads[at] + threadIdx.x % 32 * THREADS; i < n; i += 32 * THREADS) {
            u64 of = key(i);
            if (of < bound) continue;
            u32 to = atomicAdd(&shared.n, 1);
            if (to < MAX_K) shared.keys[to] = of;
        }
    }
    __syncthreads();
}

// Passes the k largest of the n distinct keys `key(i)` to `write(rank, key)`; k is at most n.
template <class Key, class Write>
__device__ inline void select(Shared& shared, int n, u32 k, Key key, Write write) {
    u32 best = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < n; i += THREADS) best = max(best, (u32)(key(i) >> 32));
    u32 of_best = bound_of<u32>(k, [&](u32 bound) { return (u32)__syncthreads_count(best >= bound); });
    collect(shared, (u64)of_best << 32, best, n, key);
    if (shared.n > MAX_K) {
        // Few threads have most of the largest keys, many are equal, or k is larger than a block.
        u64 bound = bound_of<u64>(k, [&](u64 bound) {
            u32 count = 0;
            for (int first = 0; first < n; first += THREADS) {
                int i = first + threadIdx.x;
                count += __syncthreads_count(i < n && key(i) >= bound);
            }
            return count;
        });
        collect(shared, bound, best, n, key);
    }
    for (u32 i = threadIdx.x; i < shared.n; i += THREADS) {
        u64 of = shared.keys[i];
        u32 rank = 0;
        for (u32 other = 0; other < shared.n; other++) rank += shared.keys[other] > of;
        if (rank < k) write(rank, of);
    }
}

// Returns whether all other blocks of the row have written their keys; if so, the threads of this
// block see them.
__device__ inline bool is_last_of_row(Shared& shared, const TopKParams& p) {
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        shared.is_last = atomicInc(p.counters + blockIdx.y, p.n_slices - 1) == p.n_slices - 1;
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
    __syncthreads();
    return shared.is_last;
}

extern "C" __global__ void __launch_bounds__(THREADS) top_k(const __grid_constant__ TopKParams p) {
    __shared__ Shared shared;
    wait_for_kernel_before();
    u32 first = p.rows[blockIdx.y].first, k = p.rows[blockIdx.y].k;
    const float* logits = p.logits + (size_t)p.rows[blockIdx.y].row * p.n_vocab;
    u64* keys = p.keys + (size_t)first * p.n_slices;

    u32 begin = blockIdx.x * SLICE, n = min(SLICE, p.n_vocab - begin);
    const float* slice = logits + begin;
    select(
        shared, n, min(k, n), [&](int i) { return key_of(slice[i], begin + i); },
        [&](u32 rank, u64 key) { keys[blockIdx.x * k + rank] = key; });
    if (!is_last_of_row(shared, p)) return;

    // The last slice alone may have fewer than k.
    u32 n_before = p.n_slices - 1, n_keys = n_before * k + min(k, p.n_vocab - n_before * SLICE);
    select(
        shared, n_keys, k, [&](int i) { return __ldcg(keys + i); },
        [&](u32 rank, u64 key) {
            u32 id = ~(u32)key;
            p.candidates[first + rank] = {id, logits[id]};
        });
}
