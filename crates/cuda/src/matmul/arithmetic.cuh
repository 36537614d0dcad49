// The arithmetic of products of up to 16 rows with quantized weights, of every kernel of these.
// matmul/mod.rs states it; here is each operation whose rounding it fixes, with intrinsics that no
// compiler contracts.

#pragma once

#include "to_bytes.cuh"
#include "weights.cuh"

// Returns the sum of the sums of 32 classes, one in each lane.
__device__ __forceinline__ float add_classes(float sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

// A code stands for itself minus this integer, times its scale: the group's sum of the inputs'
// codes times this number is subtracted from the integer product.
#if TYPE == Q4_0
#define OFFSET 8
#elif TYPE == Q5_0
#define OFFSET 16
#elif TYPE == Q3_K
#define OFFSET 4
#elif TYPE == Q6_K
#define OFFSET 32
#else
#define OFFSET 0
#endif
// Whether minimums are floats of their own.
#define HAS_FLOAT_MIN (HAS_MIN && OFFSET == 0)
// Parts of a group with separate scales.
#define SCALES (HAS_HALVES ? 2 : 1)

#if !IS_FLOAT
// Adds the product of a group to the sum of its class: `dots` are the integer products of the codes
// of each part, `sums` the sums of the inputs' codes, those of an undivided group times `x_scale`.
__device__ __forceinline__ float add_product(float sum, const float* scale, const float* min, float x_scale,
                                             const float (&dots)[SCALES], const float (&sums)[SCALES]) {
#if HAS_HALVES
    float product = __fmaf_rn(scale[1], dots[1], __fmul_rn(scale[0], dots[0]));
    if (HAS_FLOAT_MIN) product = __fmaf_rn(min[1], sums[1], __fmaf_rn(min[0], sums[0], product));
    return __fmaf_rn(x_scale, product, sum);
#else
    sum = __fmaf_rn(__fmul_rn(scale[0], x_scale), dots[0], sum);
    return HAS_FLOAT_MIN ? __fmaf_rn(min[0], sums[0], sum) : sum;
#endif
}
#endif
