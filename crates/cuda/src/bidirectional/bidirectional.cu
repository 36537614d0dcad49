// Bidirectional attention with tensor cores. mod.rs describes the method.
//
// Macros: DIM (values of a head in shared memory, a multiple of 16), KEYS (keys of a step: 16, 32
// or 64).

#include "bounded.cuh"
#include "constants.cuh"
#include "copies.cuh"

constexpr u32 THREADS = 32 * WARPS, WARP_QUERIES = TILE / WARPS;
// f16 from row to row: eight rows begin in different banks.
constexpr u32 STRIDE = DIM + 8;
static_assert(WARP_QUERIES == 16 && TILE % KEYS == 0, "a warp multiplies sixteen queries");

// Below every score, and small enough to be subtracted from one.
constexpr float HIDDEN = -1e30f;
// Weights are 2^LIFT times as large, so that small ones stay normal in f16.
constexpr float LIFT = 14.0f;

// The window of a tile. Its tiles are consecutive, and only the last one has fewer rows.
struct Window {
    u32 first_row;
    u32 first_tile;
    u32 rows;
    u32 unused;
};

// Tiles of f16 rows [TILE, STRIDE], with zeros beyond the rows of a window and the values of a
// head: those of a head are consecutive, first those of queries, then of keys, then of values.
struct Tiles {
    u16* rows;             // [n_heads + 2 n_kv_heads, n, TILE, STRIDE]
    float* units;          // [n_heads + 2 n_kv_heads, n]: the value of 1 in a tile
    const Window* windows; // [n]
    u32 n;
    u32 n_heads;
    u32 n_kv_heads;
    u32 dim;               // values of a head

    // Returns the first row of a tile of a head.
    __device__ u16* tile(u32 head, u32 tile) const { return rows + ((size_t)head * n + tile) * TILE * STRIDE; }
};

struct PrepareParams {
    Tiles tiles;
    const float* q;  // [rows, n_heads * dim]
    const float* k;  // [rows, n_kv_heads * dim]
    const float* v;  // [rows, n_kv_heads * dim]
    float scale;     // of queries
    u32 unused;
};

// Returns the power of two that brings the largest magnitude, given by its bits, to 2^14 .. 2^15,
// or 2^100 if that is less: its exponent. 0 for an infinity and for NaN.
__device__ inline int scaling_exponent(u32 magnitude) {
    int exponent = (int)(magnitude >> 23);
    return exponent == 255 ? 0 : min(141 - exponent, 100);
}

__device__ inline float two_to(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

// Rounds a tile of a head to f16. Grid: tiles, heads of queries, of keys and of values.
extern "C" __global__ void __launch_bounds__(THREADS) prepare(const __grid_constant__ PrepareParams p) {
    wait_for_kernel_before();
    __shared__ u32 largest[WARPS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.tiles.dim;
    u32 n_heads = p.tiles.n_heads, n_kv_heads = p.tiles.n_kv_heads;
    bool is_query = blockIdx.y < n_heads, is_key = blockIdx.y < n_heads + n_kv_heads;
    u32 head = is_query ? blockIdx.y : (blockIdx.y - n_heads) % n_kv_heads;
    size_t width = (size_t)(is_query ? n_heads : n_kv_heads) * dim;
    float scale = is_query ? p.scale : 1.0f;
    Window window = p.tiles.windows[blockIdx.x];
    u32 first = (blockIdx.x - window.first_tile) * TILE, rows = min(TILE, window.rows - first);
    const float* x = is_query ? p.q : is_key ? p.k : p.v;
    x += (window.first_row + first) * width + (size_t)head * dim;
    u32 magnitude = 0;
    for (u32 row = warp; row < rows; row += WARPS) {
        // NaN has the largest bits.
        for (u32 i = lane; i < dim; i += 32) magnitude = max(magnitude, __float_as_uint(fabsf(x[row * width + i] * scale)));
    }
    for (u32 step = 16; step > 0; step /= 2) magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, step));
    if (lane == 0) largest[warp] = magnitude;
    __syncthreads();
    for (u32 i = 0; i < WARPS; i++) magnitude = max(magnitude, largest[i]);
    int exponent = scaling_exponent(magnitude);
    float power = two_to(exponent);
    if (threadIdx.x == 0) p.tiles.units[(size_t)blockIdx.y * p.tiles.n + blockIdx.x] = two_to(-exponent);
    u16* tile = p.tiles.tile(blockIdx.y, blockIdx.x);
    for (u32 row = warp; row < TILE; row += WARPS) {
        for (u32 i = 2 * lane; i < STRIDE; i += 64) {
            float low = row < rows && i < dim ? x[row * width + i] * scale * power : 0.0f;
            float high = row < rows && i + 1 < dim ? x[row * width + i + 1] * scale * power : 0.0f;
            *(u32*)(tile + row * STRIDE + i) = pack_halves(low, high);
        }
    }
}

struct AttendParams {
    Tiles tiles;
    const float* bias;  // [n_heads, 2 longest - 1], or null
    float* out;         // [rows, n_heads * dim]
    u32 longest;        // rows of the longest window
    u32 reach;
};

struct Shared {
    u16 queries[TILE * STRIDE];
    u16 keys[2][KEYS * STRIDE];  // of this step, and of the next
    u16 values[2][KEYS * STRIDE];
};

__device__ inline void load_rows(u16* to, const u16* from, u32 rows) {
    for (u32 i = 8 * threadIdx.x; i < rows * STRIDE; i += 8 * THREADS) copy_16(to + i, from + i);
}

// The softmax and the sums of one warp; a lane has two queries, 8 rows apart.
struct Work {
    float out[DIM / 8][4] = {};  // in units of `unit`
    float max[2] = {HIDDEN, HIDDEN};
    float sum[2] = {};           // of the lane's own keys
    float unit = 0.0f;
};

// Multiplies the queries of a warp and the keys of a step.
__device__ inline void multiply_keys(const u16* queries, const u16* keys, float scores[KEYS / 8][4], u32 lane) {
#pragma unroll
    for (u32 d = 0; d < DIM; d += 16) {
        u32 q[4];
        load_matrices(q, queries + lane % 16 * STRIDE + d + lane / 16 * 8, false);
#pragma unroll
        for (u32 key = 0; key < KEYS; key += 16) {
            u32 k[4];
            load_matrices(k, keys + (key + lane / 16 * 8 + lane % 8) * STRIDE + d + lane / 8 % 2 * 8, false);
            multiply(scores[key / 8], q, k[0], k[1]);
            multiply(scores[key / 8 + 1], q, k[2], k[3]);
        }
    }
}

// Adds biases, and hides keys beyond the window and out of reach. `row` and `first_key` count from
// the first row of the window.
__device__ inline void bias_and_hide(const AttendParams& p, const Window& window, float scores[KEYS / 8][4], u32 row, u32 first_key, u32 lane) {
    const float* bias = p.bias ? p.bias + (size_t)blockIdx.y * (2 * p.longest - 1) + p.longest - 1 : nullptr;
#pragma unroll
    for (u32 i = 0; i < KEYS / 2; i++) {
        u32 query = row + i % 4 / 2 * 8, key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
        int distance = (int)key - (int)query;
        float& score = scores[i / 4][i % 4];
        if (key >= window.rows || abs(distance) > (int)p.reach) {
            score = HIDDEN;
        } else if (bias && query < window.rows) {
            score += bias[distance] * LOG2_E;
        }
    }
}

// Weighs the scores of a step, whose values are in units of `unit` (online softmax, arXiv
// 1805.02867), and rescales the sums so far. Returns the weights as left operand of a product.
__device__ inline void weigh(Work& w, float scores[KEYS / 8][4], float unit, u32 weights[KEYS / 16][4]) {
    float common = fmaxf(w.unit, unit), of_step = unit / common, of_past = w.unit / common, keep[2];
    w.unit = common;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float max = w.max[half];
#pragma unroll
        for (u32 j = 0; j < KEYS / 8; j++) max = fmaxf(max, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
        for (u32 step = 1; step < 4; step *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
        keep[half] = power_of_two(w.max[half] - max);
        w.sum[half] *= keep[half], w.max[half] = max;
#pragma unroll
        for (u32 j = 0; j < KEYS / 8; j++) {
            float x = power_of_two(scores[j][2 * half] - max + LIFT), y = power_of_two(scores[j][2 * half + 1] - max + LIFT);
            w.sum[half] += x + y;
            weights[j / 2][j % 2 * 2 + half] = pack_halves(x * of_step, y * of_step);
        }
    }
#pragma unroll
    for (u32 i = 0; i < DIM / 2; i++) w.out[i / 4][i % 4] *= keep[i % 4 / 2] * of_past;
}

__device__ inline void add_values(Work& w, const u16* values, const u32 weights[KEYS / 16][4], u32 lane) {
#pragma unroll
    for (u32 key = 0; key < KEYS; key += 16) {
#pragma unroll
        for (u32 d = 0; d < DIM; d += 16) {
            u32 v[4];
            load_matrices(v, values + (key + lane % 16) * STRIDE + d + lane / 16 * 8, true);
            multiply(w.out[d / 8], weights[key / 16], v[0], v[1]);
            multiply(w.out[d / 8 + 1], weights[key / 16], v[2], v[3]);
        }
    }
}

__device__ inline void write_rows(const AttendParams& p, const Window& window, Work& w, u32 row, u32 lane) {
    for (u32 half = 0; half < 2; half++) {
        float sum = w.sum[half];
        for (u32 step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        u32 query = row + 8 * half;
        if (query >= window.rows) continue;
        float* out = p.out + ((size_t)(window.first_row + query) * p.tiles.n_heads + blockIdx.y) * p.tiles.dim;
#pragma unroll
        for (u32 i = 0; i < DIM / 4; i++) {
            u32 d = i / 2 * 8 + lane % 4 * 2 + i % 2;
            if (d < p.tiles.dim) out[d] = w.out[i / 2][2 * half + i % 2] / sum * w.unit;
        }
    }
}

// Attends from one tile of queries, sixteen of a warp, to the keys that they see. Grid: tiles,
// heads.
extern "C" __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ AttendParams p) {
    wait_for_kernel_before();
    extern __shared__ __align__(16) u8 bytes[];
    Shared& shared = *(Shared*)bytes;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Window window = p.tiles.windows[blockIdx.x];
    u32 first = (blockIdx.x - window.first_tile) * TILE, row = first + WARP_QUERIES * warp + lane / 4;
    u32 begin = first > p.reach ? (first - p.reach) / KEYS * KEYS : 0;
    u32 end = min(window.rows, first + TILE + p.reach);
    u32 key_head = p.tiles.n_heads + blockIdx.y / (p.tiles.n_heads / p.tiles.n_kv_heads), value_head = key_head + p.tiles.n_kv_heads;
    const u16* keys = p.tiles.tile(key_head, window.first_tile);
    const u16* values = p.tiles.tile(value_head, window.first_tile);
    const float* units = p.tiles.units + window.first_tile;
    float query_unit = p.tiles.units[(size_t)blockIdx.y * p.tiles.n + blockIdx.x];
    auto load = [&](u32 key, u32 buffer) {
        load_rows(shared.keys[buffer], keys + (size_t)key * STRIDE, KEYS);
        load_rows(shared.values[buffer], values + (size_t)key * STRIDE, KEYS);
    };
    load_rows(shared.queries, p.tiles.tile(blockIdx.y, blockIdx.x), TILE);
    load(begin, 0);
    commit_copies();
    Work w;
#pragma unroll 1
    for (u32 key = begin, buffer = 0; key < end; key += KEYS, buffer ^= 1) {
        if (key + KEYS < end) load(key + KEYS, buffer ^ 1);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        float scores[KEYS / 8][4] = {};
        multiply_keys(shared.queries + WARP_QUERIES * warp * STRIDE, shared.keys[buffer], scores, lane);
        float key_unit = units[(size_t)key_head * p.tiles.n + key / TILE];
#pragma unroll
        for (u32 i = 0; i < KEYS / 2; i++) scores[i / 4][i % 4] *= query_unit, scores[i / 4][i % 4] *= key_unit;
        bool sees_all = key + KEYS <= window.rows && first + TILE <= key + p.reach + 1 && key + KEYS <= first + p.reach + 1;
        if (p.bias || !sees_all) bias_and_hide(p, window, scores, row, key, lane);
        u32 weights[KEYS / 16][4];
        weigh(w, scores, units[(size_t)value_head * p.tiles.n + key / TILE], weights);
        add_values(w, shared.values[buffer], weights, lane);
        __syncthreads();
    }
    write_rows(p, window, w, row, lane);
}
