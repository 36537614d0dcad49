// Sums over threads, in a fixed order of additions.
#pragma once

// Returns the sum over a warp to every thread.
__device__ inline float add_over_warp(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Returns the sum over a block of `threads` to every thread, through `warps` in shared memory, one
// value per warp.
template <int threads>
__device__ inline float add_over_block(float value, float* warps) {
    value = add_over_warp(value);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < threads / 32; warp++) sum += warps[warp];
    return sum;
}
