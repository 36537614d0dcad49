// Sums over threads. The order of the additions is fixed.
#pragma once

// Over a warp; every thread gets it.
__device__ inline float add_over_warp(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Over a block of so many threads, by way of `warps` in shared memory, a value of each warp; every thread gets it.
template <int threads>
__device__ inline float add_over_block(float value, float* warps) {
    value = add_over_warp(value);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < threads / 32; warp++) sum += warps[warp];
    return sum;
}
