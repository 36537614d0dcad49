// Quantizes inputs of matrix products to signed bytes: matmul/mod.rs states how. Eight neighbouring
// lanes have a group of 32 values, four each.

#pragma once

#include "constants.cuh"
#include "half.cuh"

// The sign of value i of a group in the rotation, times its factor.
__device__ __forceinline__ float rotation_sign(u32 signs, u32 i) {
    return (signs >> i & 1) ? -ROTATION_32 : ROTATION_32;
}

// Rotates a group.
__device__ __forceinline__ void rotate_group(u32 signs, float (&v)[4]) {
    u32 group_lane = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], rotation_sign(signs, 4 * group_lane + i));
    float sums[4] = {v[0] + v[1], v[0] - v[1], v[2] + v[3], v[2] - v[3]};
    v[0] = sums[0] + sums[2], v[1] = sums[1] + sums[3], v[2] = sums[0] - sums[2], v[3] = sums[1] - sums[3];
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float other = __shfl_xor_sync(~0u, v[i], step);
            v[i] = group_lane & step ? other - v[i] : v[i] + other;
        }
    }
}

// Within an ulp.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns the sum of the squares of a group.
__device__ __forceinline__ float sum_of_squares(const float (&v)[4]) {
    float sum = __fmul_rn(v[0], v[0]);
#pragma unroll
    for (int i = 1; i < 4; i++) sum = __fmaf_rn(v[i], v[i], sum);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

// Returns the norm's factor, besides its weight, of a row of `n` values; lane l has the sum of the
// squares of groups l, l + 32, .., added in this order.
__device__ __forceinline__ float norm_factor(float squares, u32 n, float eps) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)n), eps)));
}

// Four values as bytes, and the group's scale and the sums of either half of its codes.
struct Bytes {
    u32 codes;
    float scale;
    int first, second;  // in the first four lanes of the group
};

__device__ __forceinline__ Bytes to_bytes(const float (&v)[4]) {
    // As integers, absolute values keep their order, and NaN is the largest.
    u32 max_bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) max_bits = max(max_bits, __float_as_uint(v[i]) & 0x7fffffff);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) max_bits = max(max_bits, __shfl_xor_sync(~0u, max_bits, step));
    float largest = __uint_as_float(max_bits);
    // Smaller ones have no finite inverse; they count as 0. Divisions would take branches. 0 times
    // infinity is NaN.
    bool is_zero = largest < 1e-36f;
    float scale = is_zero ? 0.0f : __fmaf_rn(0.0f, largest, __fmul_rn(largest, 1.0f / 127.0f));
    float inverse = is_zero ? 0.0f : __fmul_rn(127.0f, reciprocal(largest));
    // Around 1.5 * 2^23 floats are integers, and their lowest byte is that of the integer.
    u32 bytes[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bytes[i] = __float_as_uint(__fmaf_rn(v[i], inverse, 12582912.0f));
    u32 low = __byte_perm(bytes[0], bytes[1], 0x0040), high = __byte_perm(bytes[2], bytes[3], 0x0040);
    u32 codes = __byte_perm(low, high, 0x5410);
    int sum = __dp4a((int)codes, 0x01010101, 0);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return {codes, scale, sum, __shfl_xor_sync(~0u, sum, 4)};
}
