// The signed Hadamard rotation, with the codec's order of operations (kvant_codec::rotation), so
// that it has the codec's bits. Products and sums are explicit, so that none is fused with
// preceding operations.

#pragma once

#include "constants.cuh"
#include "half.cuh"

// Values of a warp, lane l those from 4l to 4l + 3: a slice of 128, or two of 64, or four of 32.
constexpr u32 SPAN = 128;

// Changes the sign of value i of a slice of `n` where bit i of `signs` is set.
__device__ inline void flip(float* x, u32 n, const u32* signs, u32 lane) {
    u32 first = 4 * (lane % (n / 4)), bits = signs[first / 32] >> first % 32;
    for (int i = 0; i < 4; i++) {
        if (bits >> i & 1) x[i] = -x[i];
    }
}

// Computes D(last) H / sqrt(n) D(first) x for each slice of `n` values: 128, 64 or 32. Lanes of
// other slices may have another `n`. Of the masks, 128 bits each, the lowest `n` count. Called by a
// whole warp.
__device__ inline void rotate(float* x, u32 n, const u32* first, const u32* last, u32 lane) {
    flip(x, n, first, lane);
    float a = __fadd_rn(x[0], x[1]), b = __fsub_rn(x[0], x[1]), c = __fadd_rn(x[2], x[3]), d = __fsub_rn(x[2], x[3]);
    x[0] = __fadd_rn(a, c), x[1] = __fadd_rn(b, d), x[2] = __fsub_rn(a, c), x[3] = __fsub_rn(b, d);
    for (u32 step = 1; step < SPAN / 4; step *= 2) {
        for (int i = 0; i < 4; i++) {
            float other = __shfl_xor_sync(~0u, x[i], step);
            if (step < n / 4) x[i] = __fadd_rn(other, lane & step ? -x[i] : x[i]);
        }
    }
    float factor = n == 128 ? ROTATION_128 : n == 64 ? ROTATION_64 : ROTATION_32;
    for (int i = 0; i < 4; i++) x[i] = __fmul_rn(x[i], factor);
    flip(x, n, last, lane);
}
