// Inputs of products in 8 bits: groups of 32 values, code = round(value / scale), scale = max |value| / 127. Before that
// the row may be normalised (RMS, arXiv 1910.07467), and each group rotated as the tq types' weights are. A block per row.

#define THREADS 256

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

__device__ float block_sum(float value) {
    __shared__ float warps[THREADS / 32];
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < THREADS / 32; warp++) sum += warps[warp];
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) quantise(const __grid_constant__ QuantiseParams p) {
    const float* x = p.x + (size_t)blockIdx.x * p.n_in;
    float factor = 1.0f;
    if (p.weight) {
        float squares = 0.0f;
        for (unsigned i = threadIdx.x; i < p.n_in; i += THREADS) squares += x[i] * x[i];
        factor = 1.0f / sqrtf(block_sum(squares) / (float)p.n_in + p.eps);
    }
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = p.n_in / 32;
    for (unsigned g = warp; g < groups; g += THREADS / 32) {
        float value = x[32 * g + lane];
        if (p.weight) value = value * factor * p.weight[32 * g + lane];
        if (p.rotates) {
            if (p.signs >> lane & 1) value = -value;
            for (unsigned step = 1; step < 32; step *= 2) {
                float other = __shfl_xor_sync(~0u, value, step);
                value = lane & step ? other - value : value + other;
            }
            value *= 0.17677669529663687f;
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
