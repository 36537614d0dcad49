// Converts the inputs of matrix products to the kernels' formats.
//
// In 8 bits (to_bytes.cuh), for skinny_q8.cu: as the B operands of its MMAs, see `InputTile`. A
// block has 1,024 inputs of a row; another block of the row computes the norm's factor.
//
// In f16: a row is multiplied by the power of two that brings its largest value to 2^14 .. 2^15, so
// that inputs neither overflow nor underflow; products are multiplied by its inverse.

#include "constants.cuh"
#include "half.cuh"
#include "input_tile.cuh"
#include "sum.cuh"
#include "to_bytes.cuh"

struct QuantizeParams {
    const float* x;       // [rows, n_in]
    const float* weight;  // [n_in], or null for no norm
    InputTile* tiles;     // [rows / 8, n_in / 32], rows beyond the last zero
    float* factors;       // [rows] of the norm
    u32 n_in;
    u32 rows;
    float eps;
    u32 rotates;
    u32 signs;            // of the rotation, before its butterfly
    u32 sums;             // their form
    int offset;
    u32 unused;
};

// Returns four values of a row from `i` on, zeros beyond its end.
__device__ __forceinline__ float4 four_of(const float* row, u32 i, u32 n) {
    return i < n ? *(const float4*)(row + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Writes the norm's factor of the row of this block.
__device__ __forceinline__ void write_factor(const QuantizeParams& p) {
    __shared__ float squares[32];
    // Eight lanes have groups of the same number modulo 32.
    float sum = 0.0f;
    for (u32 i = 4 * threadIdx.x; i / 1024 * 1024 < p.n_in; i += 1024) {
        float4 four = four_of(p.x + (size_t)blockIdx.x * p.n_in, i, p.n_in);
        sum += sum_of_squares({four.x, four.y, four.z, four.w});
    }
    if (threadIdx.x % 8 == 0) squares[threadIdx.x / 8] = sum;
    __syncthreads();
    float factor = norm_factor(squares[threadIdx.x % 32], p.n_in, p.eps);
    if (threadIdx.x == 0) p.factors[blockIdx.x] = factor;
}

// Returns the sums of the codes of a group in the form that the weights need.
__device__ __forceinline__ u32 sums_of(const QuantizeParams& p, const Bytes& x) {
    if (p.sums == SUMS_OF_HALVES) return x.first & 0xffff | x.second << 16;
    int sum = x.first + x.second;
    if (p.sums == SUMS_AS_FLOATS) return __float_as_uint(__fmul_rn(x.scale, (float)sum));
    return MMA_ZERO - p.offset * sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const __grid_constant__ QuantizeParams p) {
    wait_for_kernel_before();
    u32 row = blockIdx.x, at = 1024 * blockIdx.y + 4 * threadIdx.x;
    if (1024 * blockIdx.y >= p.n_in) {
        if (row < p.rows) write_factor(p);
        return;
    }
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (row < p.rows && at < p.n_in) {
        float4 x = *(const float4*)(p.x + (size_t)row * p.n_in + at);
        float4 by = p.weight ? *(const float4*)(p.weight + at) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        v[0] = __fmul_rn(x.x, by.x), v[1] = __fmul_rn(x.y, by.y), v[2] = __fmul_rn(x.z, by.z), v[3] = __fmul_rn(x.w, by.w);
    }
    if (p.rotates) rotate_group(p.signs, v);
    Bytes bytes = to_bytes(v);
    if (at >= p.n_in) return;
    InputTile& tile = p.tiles[(size_t)(row / 8) * (p.n_in / 32) + at / 32];
    u32 word = threadIdx.x % 8;
    tile.codes[row % 8][word % 4][word / 4] = bytes.codes;
    if (word == 0) {
        InputScales& scales = tile.scales[row % 8 / 2];
        scales.scale[row % 2] = bytes.scale;
        scales.sums[row % 2] = sums_of(p, bytes);
    }
}

struct HalvesParams {
    const float* x;          // [rows, n_in]
    const float* weight;     // [n_in], or null for no norm
    u16* halves;  // [rows, pitch], zeros beyond n_in
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
    u32 mine = 0;
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
