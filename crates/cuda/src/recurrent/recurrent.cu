// Ops with a recurrent state. mod.rs describes the method.
//
// Macros: K_DIM (values of a key, a multiple of 16).

#include "constants.cuh"
#include "half.cuh"
#include "sum.cuh"

struct ConvParams {
    const float* x;       // [rows, channels], or [rows, 3, channels] where gated
    const float* kernel;  // [taps + 1, channels]: weights, and then biases
    float* state;         // [taps - 1, channels]
    float* y;             // [rows, channels]
    unsigned first_row;
    unsigned rows;
    unsigned channels;
    unsigned taps;
    unsigned is_gated;
    unsigned unused;
};

// Rows whose loads wait for memory together.
constexpr unsigned ROWS_AT_ONCE = 8;

// One thread per channel. Past inputs are in registers, the latest last.
extern "C" __global__ void __launch_bounds__(THREADS) short_conv(const __grid_constant__ ConvParams p) {
    wait_for_kernel_before();
    unsigned c = blockIdx.x * THREADS + threadIdx.x, n = p.channels;
    if (c >= n) return;
    unsigned before = MAX_TAPS - p.taps;  // missing taps
    float entered[MAX_TAPS], weights[MAX_TAPS], bias = p.kernel[(size_t)p.taps * n + c];
#pragma unroll
    for (unsigned j = 0; j < MAX_TAPS; j++) {
        weights[j] = j < before ? 0.0f : p.kernel[(size_t)(j - before) * n + c];
        entered[j] = j <= before ? 0.0f : p.state[(size_t)(j - before - 1) * n + c];
    }
    for (unsigned first = 0; first < p.rows; first += ROWS_AT_ONCE) {
        float inputs[ROWS_AT_ONCE], gates[ROWS_AT_ONCE];
#pragma unroll
        for (unsigned k = 0; k < ROWS_AT_ONCE; k++) {
            bool is_here = first + k < p.rows, is_gated = is_here && p.is_gated;
            const float* x = p.x + (size_t)(p.first_row + first + k) * n * (p.is_gated ? 3 : 1) + c;
            float factor = is_gated ? x[2 * n] : 1.0f;
            inputs[k] = is_here ? x[0] : 0.0f, gates[k] = is_gated ? x[n] : 1.0f;
            if (is_gated) inputs[k] *= factor;
        }
#pragma unroll
        for (unsigned k = 0; k < ROWS_AT_ONCE; k++) {
            if (first + k >= p.rows) break;
#pragma unroll
            for (unsigned j = 1; j < MAX_TAPS; j++) entered[j - 1] = j <= before ? 0.0f : entered[j];
            entered[MAX_TAPS - 1] = inputs[k];
            float sum = bias;
#pragma unroll
            for (unsigned j = 0; j < MAX_TAPS; j++) sum += weights[j] * entered[j];
            p.y[(size_t)(p.first_row + first + k) * n + c] = p.is_gated ? sum * gates[k] : sum / (1.0f + expf(-sum));
        }
    }
#pragma unroll
    for (unsigned j = 1; j < MAX_TAPS; j++) {
        if (j > before) p.state[(size_t)(j - before - 1) * n + c] = entered[j];
    }
}

struct LinearAttentionParams {
    const float* qkv;      // [rows, 2 n_k_heads K_DIM + n_v_heads v_dim]
    const float* step;     // [rows, n_v_heads], for Kimi's rule [rows, n_v_heads, K_DIM]
    const float* bias;     // a row of them
    const float* rate;     // [n_v_heads]
    // delta: write strength (beta), [rows, n_v_heads]; space: skip weight, [n_v_heads]
    const float* of_rule;
    float* state;          // [n_v_heads, v_dim / COLUMNS, K_DIM, COLUMNS]
    float* y;              // [rows, n_v_heads, v_dim]
    unsigned first_row;
    unsigned rows;
    unsigned n_k_heads;
    unsigned n_v_heads;
    unsigned v_dim;
    unsigned is_tiled;
    float eps;
    float bound;           // of decays by Kimi's rule; 0 if there is none
};

// Threads of a column.
constexpr unsigned EACH = THREADS / COLUMNS;

// Over the threads of a column.
__device__ inline float add_over_column(float value) {
    for (unsigned step = EACH / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

enum class Rule { GatedDeltaNet, KimiDelta, Mamba2 };

__device__ inline float softplus(float x) { return (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))); }

// What a thread reads of a row, one row ahead: a row takes less time than a load from memory.
template <bool DECAYS_PER_DIM>
struct RowInputs {
    // dims of a thread
    static constexpr unsigned OWN = (K_DIM + THREADS - 1) / THREADS;
    float query_key[2][OWN], steps[DECAYS_PER_DIM ? OWN : 1];
    float step, of_rule, value;
};

// A block has COLUMNS columns of a value head, a thread every EACH-th value of one of them.
template <Rule RULE>
__device__ inline void linear_attention(const LinearAttentionParams& p) {
    constexpr bool IS_DELTA = RULE != Rule::Mamba2, DECAYS_PER_DIM = RULE == Rule::KimiDelta;
    __shared__ float query_key[2][K_DIM];  // query and key
    __shared__ float decays[DECAYS_PER_DIM ? K_DIM : 1];
    __shared__ float warps[2][THREADS / 32];
    wait_for_kernel_before();
    unsigned per_head = p.v_dim / COLUMNS, head = blockIdx.x / per_head;
    unsigned column = threadIdx.x / EACH, column_lane = threadIdx.x % EACH;
    unsigned k_head = p.is_tiled ? head % p.n_k_heads : head / (p.n_v_heads / p.n_k_heads);
    size_t n_qk = (size_t)2 * p.n_k_heads * K_DIM, n_out = (size_t)p.n_v_heads * p.v_dim;
    float* state = p.state + (size_t)blockIdx.x * K_DIM * COLUMNS + column;
    size_t at = (size_t)blockIdx.x * COLUMNS + column;
    using Inputs = RowInputs<DECAYS_PER_DIM>;
    auto load = [&](unsigned row) {
        Inputs inputs = {};
        const float* qkv = p.qkv + row * (n_qk + n_out);
        for (unsigned n = 0; n < Inputs::OWN; n++) {
            unsigned i = threadIdx.x + THREADS * n;
            if (i >= K_DIM) break;
            for (unsigned side = 0; side < 2; side++) inputs.query_key[side][n] = qkv[(size_t)(side * p.n_k_heads + k_head) * K_DIM + i];
            if (DECAYS_PER_DIM) inputs.steps[n] = p.step[((size_t)row * p.n_v_heads + head) * K_DIM + i];
        }
        if (!DECAYS_PER_DIM) inputs.step = p.step[(size_t)row * p.n_v_heads + head];
        if (IS_DELTA) inputs.of_rule = p.of_rule[(size_t)row * p.n_v_heads + head];
        inputs.value = qkv[n_qk + at];
        return inputs;
    };
    Inputs next = load(p.first_row);
    float biases[Inputs::OWN];
    for (unsigned n = 0; n < Inputs::OWN && DECAYS_PER_DIM; n++) {
        unsigned i = threadIdx.x + THREADS * n;
        biases[n] = i < K_DIM ? p.bias[(size_t)head * K_DIM + i] : 0.0f;
    }
    float rate = p.rate[head], bias = DECAYS_PER_DIM ? 0.0f : p.bias[head], skip = IS_DELTA ? 0.0f : p.of_rule[head];
    float s[K_DIM / EACH];
#pragma unroll
    for (unsigned m = 0; m < K_DIM / EACH; m++) s[m] = state[(column_lane + EACH * m) * COLUMNS];
    for (unsigned row = p.first_row; row < p.first_row + p.rows; row++) {
        Inputs inputs = next;
        if (row + 1 < p.first_row + p.rows) next = load(row + 1);
        float squares[2] = {0.0f, 0.0f};
        // Other threads may still read the last row's query and key.
        __syncthreads();
        for (unsigned n = 0; n < Inputs::OWN; n++) {
            unsigned i = threadIdx.x + THREADS * n;
            if (i >= K_DIM) break;
            for (unsigned side = 0; side < 2; side++) {
                float x = inputs.query_key[side][n];
                query_key[side][i] = x;
                squares[side] += x * x;
            }
            if (DECAYS_PER_DIM) {
                float step = inputs.steps[n] + biases[n];
                decays[i] = expf(p.bound == 0.0f ? rate * softplus(step) : p.bound / (1.0f + expf(-rate * step)));
            }
        }
        float q_factor = 1.0f, k_factor = 1.0f;
        if (IS_DELTA) {
            q_factor = 1.0f / sqrtf(add_over_block<THREADS>(squares[0], warps[0]) + p.eps) / sqrtf((float)K_DIM);
            k_factor = 1.0f / sqrtf(add_over_block<THREADS>(squares[1], warps[1]) + p.eps);
        } else {
            __syncthreads();
        }
        float step = 0.0f, decay = 1.0f;
        if (!DECAYS_PER_DIM) {
            step = softplus(inputs.step + bias);
            decay = expf(rate * step);
        }
        float value = inputs.value, change = value * step, past = 0.0f;
        if (IS_DELTA) {
            float write = 1.0f / (1.0f + expf(-inputs.of_rule));
            float predicted = 0.0f;
#pragma unroll
            for (unsigned m = 0; m < K_DIM / EACH; m++) {
                unsigned dim = column_lane + EACH * m;
                if (DECAYS_PER_DIM) s[m] *= decays[dim];
                predicted += s[m] * (query_key[1][dim] * k_factor);
            }
            change = (value - decay * add_over_column(predicted)) * write;
        } else {
            past = skip * value;
        }
        float sum = 0.0f;
#pragma unroll
        for (unsigned m = 0; m < K_DIM / EACH; m++) {
            s[m] = decay * s[m] + query_key[1][column_lane + EACH * m] * k_factor * change;
            sum += s[m] * query_key[0][column_lane + EACH * m];
        }
        sum = add_over_column(sum) * q_factor + past;
        if (column_lane == 0) p.y[row * n_out + at] = sum;
    }
#pragma unroll
    for (unsigned m = 0; m < K_DIM / EACH; m++) state[(column_lane + EACH * m) * COLUMNS] = s[m];
}

// The gated delta rule, Kimi's, and state-space models.
extern "C" __global__ void __launch_bounds__(THREADS) gated_delta_net(const __grid_constant__ LinearAttentionParams p) { linear_attention<Rule::GatedDeltaNet>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) kimi_delta(const __grid_constant__ LinearAttentionParams p) { linear_attention<Rule::KimiDelta>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) mamba2(const __grid_constant__ LinearAttentionParams p) { linear_attention<Rule::Mamba2>(p); }
