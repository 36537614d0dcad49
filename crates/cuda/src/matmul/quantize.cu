// Converts the inputs of matrix products to the kernels' formats.
//
// In 8 bits (to_bytes.cuh), for skinny_q8.cu: as the B operands of its MMAs, see `InputTile`. A
// block has 1,024 inputs of a row; another block of the row computes the norm's factor.
//
// In f16: a row is multiplied by the power of two that brings its largest value to 2^14 .. 2^15, so
// that inputs neither overflow nor underflow; products are multiplied by its inverse. The inputs of
// the second product of a feed-forward layer are gated on their way.

#include "constants.cuh"
#include "gate.cuh"
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
    const float* row = p.x + (size_t)blockIdx.x * p.n_in;
    // Eight lanes have groups of the same number modulo 32. Loads of 4,096 inputs wait together.
    float sum = 0.0f;
    for (u32 first = 0; first < p.n_in; first += 4 * 1024) {
        float4 fours[4];
        for (u32 k = 0; k < 4; k++) fours[k] = four_of(row, first + 1024 * k + 4 * threadIdx.x, p.n_in);
        for (u32 k = 0; k < 4; k++) sum += sum_of_squares({fours[k].x, fours[k].y, fours[k].z, fours[k].w});
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

// 2^exponent, for normal results.
__device__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// Fours of a thread whose loads wait for memory together.
constexpr unsigned FOURS = 4;

// Loads fours of a row of `n`, the first from `i` on, the others `step` behind each other; zeros
// beyond its end. Rows are aligned where `n` is a multiple of four (ALIGNED).
template <bool ALIGNED>
__device__ void load(const float* row, unsigned i, unsigned step, unsigned n, float v[FOURS][4]) {
    for (unsigned k = 0; k < FOURS; k++, i += step) {
        if (ALIGNED) {
            float4 four = i < n ? *(const float4*)(row + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[k][0] = four.x, v[k][1] = four.y, v[k][2] = four.z, v[k][3] = four.w;
        } else {
            for (unsigned e = 0; e < 4; e++) v[k][e] = i + e < n ? row[i + e] : 0.0f;
        }
    }
}

// Returns the exponent of the power of two that divides the row of this block. `magnitude` is the
// largest that a thread has seen, before the row is multiplied by `factor`; `warps` is shared.
// Magnitudes compare as integers; NaN is above infinity.
__device__ int row_exponent(u32 magnitude, float factor, u32* warps) {
    for (unsigned step = 1; step < 32; step *= 2) magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, step));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = magnitude;
    __syncthreads();
    for (unsigned warp = 0; warp < blockDim.x / 32; warp++) magnitude = max(magnitude, warps[warp]);
    // Zero and NaN stay unchanged; nearly zero rows need not be raised all the way.
    u32 max_bits = __float_as_uint(__uint_as_float(magnitude) * factor) & 0x7fffffff;
    int exponent = (int)(max_bits >> 23) - 127;
    return max_bits > 0 && exponent < 128 ? max(exponent - 14, -100) : 0;
}

// Returns the larger one of a magnitude and those of four values.
__device__ u32 larger(u32 magnitude, const float v[4]) {
    for (unsigned e = 0; e < 4; e++) magnitude = max(magnitude, __float_as_uint(v[e]) & 0x7fffffff);
    return magnitude;
}

// Writes four values times `by`, which are aligned.
__device__ void write_halves(u16* to, const float v[4], float by) {
    *(uint2*)to = make_uint2(pack_halves(v[0] * by, v[1] * by), pack_halves(v[2] * by, v[3] * by));
}

struct HalvesParams {
    const float* x;       // [rows, n_in]
    const float* weight;  // [n_in], or null for no norm
    u16* halves;          // [rows, pitch], zeros beyond n_in
    float* factors;       // [rows]: factors of the products
    unsigned n_in;
    unsigned pitch;
    float eps;
    unsigned unused;
};

// Two passes over the row: for the norm's factor and the largest value, and to round it.
template <bool ALIGNED>
__device__ void round_row(const HalvesParams& p, float* sums, u32* magnitudes) {
    constexpr unsigned STEP = 4 * THREADS;
    const float* x = p.x + (size_t)blockIdx.x * p.n_in;
    u16* halves = p.halves + (size_t)blockIdx.x * p.pitch;
    float squares = 0.0f, v[FOURS][4], weights[FOURS][4];
    u32 magnitude = 0;
    auto load_weighted = [&](unsigned i) {
        load<ALIGNED>(x, i, STEP, p.n_in, v);
        if (!p.weight) return;
        load<ALIGNED>(p.weight, i, STEP, p.n_in, weights);
        for (unsigned k = 0; k < FOURS; k++) {
            for (unsigned e = 0; e < 4; e++) squares += v[k][e] * v[k][e], v[k][e] *= weights[k][e];
        }
    };
    for (unsigned i = 4 * threadIdx.x; i < p.n_in; i += FOURS * STEP) {
        load_weighted(i);
        for (unsigned k = 0; k < FOURS; k++) magnitude = larger(magnitude, v[k]);
    }
    float factor = 1.0f;
    if (p.weight) factor = 1.0f / sqrtf(add_over_block<THREADS>(squares, sums) / (float)p.n_in + p.eps);
    int down = row_exponent(magnitude, factor, magnitudes);
    float by = factor * power_of_two(-down);
    for (unsigned i = 4 * threadIdx.x; i < p.pitch; i += FOURS * STEP) {
        load_weighted(i);
        for (unsigned k = 0; k < FOURS; k++) {
            if (i + k * STEP < p.pitch) write_halves(halves + i + k * STEP, v[k], by);
        }
    }
    if (threadIdx.x == 0) p.factors[blockIdx.x] = power_of_two(down);
}

extern "C" __global__ void __launch_bounds__(THREADS) to_halves(const __grid_constant__ HalvesParams p) {
    __shared__ float sums[THREADS / 32];
    __shared__ u32 magnitudes[THREADS / 32];
    wait_for_kernel_before();
    if (p.n_in % 4 == 0) round_row<true>(p, sums, magnitudes);
    else round_row<false>(p, sums, magnitudes);
}

struct GatedHalvesParams {
    const float* g;  // [rows, n_in]
    const float* u;  // [rows, n_in]
    u16* halves;     // [rows, pitch], zeros beyond n_in
    float* factors;  // [rows]: factors of the products
    unsigned n_in;
    unsigned pitch;
    unsigned activation;
    float limit;     // of the activation
};

// Rounds a(g) u. Each thread keeps its part of the row in `kept` between the passes, so that g and
// u are read once and a(g) u is written as f16 alone.
template <bool ALIGNED>
__device__ void gate_row(const GatedHalvesParams& p, float4* kept, u32* magnitudes) {
    constexpr unsigned STEP = 4 * GATING_THREADS;
    size_t first = (size_t)blockIdx.x * p.n_in;
    u16* halves = p.halves + (size_t)blockIdx.x * p.pitch;
    u32 magnitude = 0;
    for (unsigned i = 4 * threadIdx.x; i < p.n_in; i += FOURS * STEP) {
        float g[FOURS][4], v[FOURS][4];
        load<ALIGNED>(p.g + first, i, STEP, p.n_in, g);
        load<ALIGNED>(p.u + first, i, STEP, p.n_in, v);
        for (unsigned k = 0; k < FOURS && i + k * STEP < p.n_in; k++) {
            for (unsigned e = 0; e < 4; e++) v[k][e] = gated(p.activation, p.limit, g[k][e], v[k][e]);
            magnitude = larger(magnitude, v[k]);
            kept[(i + k * STEP) / 4] = make_float4(v[k][0], v[k][1], v[k][2], v[k][3]);
        }
    }
    int down = row_exponent(magnitude, 1.0f, magnitudes);
    float by = power_of_two(-down);
    for (unsigned i = 4 * threadIdx.x; i < p.pitch; i += STEP) {
        float4 four = i < p.n_in ? kept[i / 4] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float v[4] = {four.x, four.y, four.z, four.w};
        write_halves(halves + i, v, by);
    }
    if (threadIdx.x == 0) p.factors[blockIdx.x] = power_of_two(down);
}

extern "C" __global__ void __launch_bounds__(GATING_THREADS) gated_to_halves(const __grid_constant__ GatedHalvesParams p) {
    extern __shared__ float4 kept[];  // [n_in / 4], rounded up
    __shared__ u32 magnitudes[GATING_THREADS / 32];
    wait_for_kernel_before();
    if (p.n_in % 4 == 0) gate_row<true>(p, kept, magnitudes);
    else gate_row<false>(p, kept, magnitudes);
}
