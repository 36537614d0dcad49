// Inputs of products, as the kernels take them.
//
// In 8 bits: groups of 32 values, code = round(value / scale), scale = max |value| / 127. Before that
// the row may be normalised (RMS, arXiv 1910.07467), and each group rotated as the tq types' weights are. Rows are few: several
// blocks share one, and each adds up its squares, in the same order.

#include "constants.cuh"
#include "half.cuh"
#include "sum.cuh"

// In halves: a row is multiplied by the power of two that brings its largest value to 2^14 .. 2^15, so that no size of
// inputs is too large or too small for them; products are multiplied back.

struct QuantiseParams {
    const float* x;       // [rows, n_in]
    const float* weight;  // [n_in], or null for no norm
    signed char* codes;   // [rows, n_in]
    float* scales;        // [rows, n_in / 32]
    unsigned* sums;       // [rows, n_in / 32]: sums of the codes of either half, 16 bits each, the first half's low
    unsigned n_in;
    float eps;
    unsigned rotates;
    unsigned signs;       // of the rotation, before its butterfly
};

// What the norm multiplies a row by, besides its weight.
__device__ float norm_factor(const float* x, const float* weight, unsigned n_in, float eps, float* warps) {
    if (!weight) return 1.0f;
    float squares = 0.0f;
    for (unsigned i = threadIdx.x; i < n_in; i += THREADS) squares += x[i] * x[i];
    return 1.0f / sqrtf(add_over_block<THREADS>(squares, warps) / (float)n_in + eps);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise(const __grid_constant__ QuantiseParams p) {
    __shared__ float warps[THREADS / 32];
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
        // fmaxf passes over a NaN; a bad number is to stay visible.
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
    float* factors;          // [rows]: what the products are multiplied by
    unsigned n_in;
    unsigned pitch;
    float eps;
    unsigned unused;
};

// 2^exponent, of a normal number.
__device__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

extern "C" __global__ void __launch_bounds__(THREADS) to_halves(const __grid_constant__ HalvesParams p) {
    __shared__ float warps[THREADS / 32];
    __shared__ unsigned largest;
    if (threadIdx.x == 0) largest = 0;
    const float* x = p.x + (size_t)blockIdx.x * p.n_in;
    float factor = norm_factor(x, p.weight, p.n_in, p.eps, warps);
    auto value = [&](unsigned i) { return p.weight ? x[i] * factor * p.weight[i] : x[i]; };
    // Magnitudes compare as integers; NaN is above infinity.
    unsigned mine = 0;
    for (unsigned i = threadIdx.x; i < p.n_in; i += THREADS) {
        mine = max(mine, __float_as_uint(value(i)) & 0x7fffffff);
    }
    __syncthreads();
    atomicMax(&largest, mine);
    __syncthreads();
    // What is zero, or no number, stays as it is; what is nearly zero need not be brought up all the way.
    int exponent = (int)(largest >> 23) - 127, down = 0;
    if (largest > 0 && exponent < 128) down = max(exponent - 14, -100);
    float by = power_of_two(-down);
    for (unsigned i = threadIdx.x; i < p.pitch; i += THREADS) {
        float scaled = i < p.n_in ? value(i) * by : 0.0f;
        p.halves[(size_t)blockIdx.x * p.pitch + i] = to_half(scaled);
    }
    if (threadIdx.x == 0) p.factors[blockIdx.x] = power_of_two(down);
}
