// Converts the inputs of matrix products to the kernels' formats.
//
// In 8 bits: groups of 32 values, code = round(value / scale), scale = max |value| / 127. Before
// that the row may be normalized (RMS, arXiv 1910.07467), and each group rotated as the tq types'
// weights are. Rows are few: several blocks share one, and each sums its squares, in the same
// order.

#include "constants.cuh"
#include "half.cuh"
#include "sum.cuh"

// In f16: a row is multiplied by the power of two that brings its largest value to 2^14 .. 2^15, so
// that inputs neither overflow nor underflow; products are multiplied by its inverse.

struct QuantizeParams {
    const float* x;       // [rows, n_in]
    const float* weight;  // [n_in], or null for no norm
    signed char* codes;   // [rows, n_in]
    float* scales;        // [rows, n_in / 32]
    // [rows, n_in / 32]: sums of the codes of either half, 16 bits each, the first half's low
    unsigned* sums;
    unsigned n_in;
    float eps;
    unsigned rotates;
    unsigned signs;       // of the rotation, before its butterfly
};

// Returns the norm's factor of a row, besides its weight.
__device__ float norm_factor(const float* x, const float* weight, unsigned n_in, float eps, float* warps) {
    if (!weight) return 1.0f;
    float squares = 0.0f;
    for (unsigned i = threadIdx.x; i < n_in; i += THREADS) squares += x[i] * x[i];
    return 1.0f / sqrtf(add_over_block<THREADS>(squares, warps) / (float)n_in + eps);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const __grid_constant__ QuantizeParams p) {
    __shared__ float warps[THREADS / 32];
    wait_for_kernel_before();
    const float* x = p.x + (size_t)blockIdx.x * p.n_in;
    float factor = norm_factor(x, p.weight, p.n_in, p.eps, warps);
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = p.n_in / 32;
    for (unsigned g = blockIdx.y * (THREADS / 32) + warp; g < groups; g += gridDim.y * (THREADS / 32)) {
        float value = x[32 * g + lane];
        if (p.weight) value = value * factor * p.weight[32 * g + lane];
        if (p.rotates) {
            if (p.signs >> lane & 1) value = -value;
            for (unsigned step = 1; step < 32; step *= 2) {
                float other = __shfl_xor_sync(~0u, value, step);
                value = lane & step ? other - value : value + other;
            }
            value *= ROTATION_32;
        }
        float largest = fabsf(value);
        for (int step = 16; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        }
        // fmaxf ignores NaN; a NaN must stay visible.
        float scale = __any_sync(~0u, value != value) ? __int_as_float(0x7fffffff) : largest / 127.0f;
        int code = scale > 0.0f ? max(-127, min(127, __float2int_rn(value / scale))) : 0;
        int sum = code;
        for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        int second = __shfl_sync(~0u, sum, 16);
        size_t at = (size_t)blockIdx.x * groups + g;
        p.codes[32 * at + lane] = (signed char)code;
        if (lane == 0) {
            p.scales[at] = scale;
            p.sums[at] = (unsigned)sum & 0xffff | (unsigned)second << 16;
        }
    }
}

struct HalvesParams {
    const float* x;          // [rows, n_in]
    const float* weight;     // [n_in], or null for no norm
    unsigned short* halves;  // [rows, pitch], zeros beyond n_in
    float* factors;          // [rows]: factors of the products
    unsigned n_in;
    unsigned pitch;
    float eps;
    unsigned unused;
};

// 2^exponent, for normal results.
__device__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// Loads four values of a row of `n` from `i` on, zeros beyond its end.
__device__ void load_four(const float* row, unsigned i, unsigned n, float v[4]) {
    if (n % 4 == 0) {
        float4 four = i < n ? *(const float4*)(row + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        return;
    }
    // Rows are not aligned then.
    for (unsigned e = 0; e < 4; e++) v[e] = i + e < n ? row[i + e] : 0.0f;
}

// Loads four values of the row of this block, times the norm's weight.
__device__ void load_weighted(const HalvesParams& p, unsigned i, float v[4], float& squares) {
    load_four(p.x + (size_t)blockIdx.x * p.n_in, i, p.n_in, v);
    if (!p.weight) return;
    float weight[4];
    load_four(p.weight, i, p.n_in, weight);
    for (unsigned e = 0; e < 4; e++) squares += v[e] * v[e], v[e] *= weight[e];
}

// Two passes over the row: for the norm's factor and the largest value, and to round it.
extern "C" __global__ void __launch_bounds__(THREADS) to_halves(const __grid_constant__ HalvesParams p) {
    __shared__ float warps[THREADS / 32];
    __shared__ unsigned largest;
    wait_for_kernel_before();
    if (threadIdx.x == 0) largest = 0;
    float squares = 0.0f, v[4];
    // Magnitudes compare as integers; NaN is above infinity.
    unsigned mine = 0;
#pragma unroll 4
    for (unsigned i = 4 * threadIdx.x; i < p.n_in; i += 4 * THREADS) {
        load_weighted(p, i, v, squares);
        for (unsigned e = 0; e < 4; e++) mine = max(mine, __float_as_uint(v[e]) & 0x7fffffff);
    }
    float factor = 1.0f;
    if (p.weight) factor = 1.0f / sqrtf(add_over_block<THREADS>(squares, warps) / (float)p.n_in + p.eps);
    for (unsigned step = 1; step < 32; step *= 2) mine = max(mine, __shfl_xor_sync(~0u, mine, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&largest, mine);
    __syncthreads();
    // Zero and NaN stay unchanged; nearly zero rows need not be raised all the way.
    unsigned max_bits = __float_as_uint(__uint_as_float(largest) * factor) & 0x7fffffff;
    int exponent = (int)(max_bits >> 23) - 127, down = 0;
    if (max_bits > 0 && exponent < 128) down = max(exponent - 14, -100);
    float by = factor * power_of_two(-down);
#pragma unroll 4
    for (unsigned i = 4 * threadIdx.x; i < p.pitch; i += 4 * THREADS) {
        load_weighted(p, i, v, squares);
        uint2 four = make_uint2(pack_halves(v[0] * by, v[1] * by), pack_halves(v[2] * by, v[3] * by));
        *(uint2*)(p.halves + (size_t)blockIdx.x * p.pitch + i) = four;
    }
    if (threadIdx.x == 0) p.factors[blockIdx.x] = power_of_two(down);
}
