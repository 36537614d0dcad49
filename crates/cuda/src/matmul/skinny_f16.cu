// GEMM y = W x + bias for few rows, ROWS at once, with quantized weights, on tensor cores.
//
// A tile has FEATURES output features. A warp has 32 of them, all rows, and half of the groups of a
// step, and decodes its weights to f16 in registers, as the A operands of its MMAs: each weight
// once per tile, without a way back through shared memory. Weights as they are in memory and
// inputs come by a ring of STAGES steps (cp.async), as for skinny_q8.cu, whose blocks split the
// inputs further, as their rows are fewer. The K order within a group is free: a lane's operands
// are words t and 4 + t of its codes, and the inputs at the same places.
//
// Weights are rounded to f16 once, sums are f32, of a block over the inputs in order. Inputs and
// `factors` are those of gemm.cu.
//
// Counted in the machine code for compute capability 9.0 (ptxas 12.8), instructions of a warp for
// 64 inputs of its 32 features and 64 rows, of which 32 MMAs: 166 with q4_0 and q8_0, 209 with
// q4_K, 235 with q6_K; with 32 rows, 16 MMAs, 134, 177 and 195. By these and 6.5 clocks of an MMA,
// a block of 256 features takes 832 clocks of the tensor cores for 64 inputs of 64 rows, more than
// of issue slots or shared memory, and 540 of issue slots for 32 rows; gemm.cu takes 1,536 of
// shared memory for either. Up to 128 registers.

#include "fragments.cuh"

constexpr u32 STEP = 32 * STAGE_GROUPS;  // inputs

#include "stream_k.cuh"

constexpr u32 THREADS = 2 * FEATURES;
constexpr u32 WARP_FEATURES = 32, FEATURE_TILES = WARP_FEATURES / 16, ROW_TILES = ROWS / 8;
constexpr u32 GROUPS = STAGE_GROUPS / 2;  // of a warp
// Distance between rows in a stage: the lanes that load together use different banks.
constexpr u32 INPUT_PITCH = STEP + 16;
constexpr u32 EIGHTS = STEP / 8, COPIES = ROWS * EIGHTS / THREADS;
static_assert(COPIES * THREADS == ROWS * EIGHTS, "whole copies of inputs");

struct Stage {
    u8 weights[FEATURES * PITCH];
    u16 inputs[ROWS * INPUT_PITCH];
};

typedef float Sums[FEATURE_TILES * ROW_TILES * 4];
static_assert(sizeof(Sums) * FEATURES <= STAGES * sizeof(Stage), "half of the sums fit the ring");

// The loads of a thread, from a tile's first step on.
struct ThreadSlice {
    const u8* codes;  // of a feature, which two threads copy
    const u8* tail;
    const u16* inputs[COPIES];  // eight
    u32 is_row;                 // bit i: inputs[i] is that of a row
};

__device__ inline ThreadSlice thread_slice(const MatmulParams& p, const Tile& tile) {
    ThreadSlice slice;
    u32 groups = p.n_in / 32, pitch = (p.n_in + HALVES - 1) / HALVES * HALVES, odd = threadIdx.x % 2;
    // A feature beyond the last repeats it; the result is not stored.
    u32 feature = min(tile.feature + threadIdx.x / 2, tile.matrix.n_out - 1);
    const u8* row = tile.matrix.w + tile.w_offset + p.row_bytes * feature;
    slice.codes = row + COPY * odd, slice.tail = row + CODE_BYTES * groups / STAGE_GROUPS + 4 * odd;
    slice.is_row = 0;
#pragma unroll
    for (u32 i = 0; i < COPIES; i++) {
        u32 y = (threadIdx.x + i * THREADS) / EIGHTS;
        slice.is_row |= (y < tile.rows) << i;
        slice.inputs[i] = (const u16*)p.inputs + x_row(p, tile.row + min(y, tile.rows - 1)) * pitch + threadIdx.x % EIGHTS * 8;
    }
    return slice;
}

__device__ inline void copy_weights(const MatmulParams& p, const ThreadSlice& slice, u32 step, Stage& to) {
    u32 first = STAGE_GROUPS * step, n = p.n_in / 32 - first;
    u8* row = to.weights + PITCH * (threadIdx.x / 2);
    u8 *codes_to = row + COPY * (threadIdx.x % 2), *tail_to = row + CODE_BYTES + 4 * (threadIdx.x % 2);
    const u8 *codes = slice.codes + CODE_BYTES * step, *tail = slice.tail + MOVED * (first / BLOCK_GROUPS) / 4 * 4;
    if (n >= STAGE_GROUPS) copy_row<true>(codes_to, tail_to, codes, tail, n);
    else copy_row<false>(codes_to, tail_to, codes, tail, n);
}

// Copies inputs, zeros beyond the last row. Beyond the last group they are not used.
__device__ inline void copy_inputs(const MatmulParams& p, const ThreadSlice& slice, u32 step, Stage& to) {
    u32 eight = threadIdx.x % EIGHTS;
    bool is_there = STEP * step + 8 * eight < p.n_in;
#pragma unroll
    for (u32 i = 0; i < COPIES; i++) {
        u16* at = to.inputs + (threadIdx.x + i * THREADS) / EIGHTS * INPUT_PITCH + 8 * eight;
        if (is_there) copy_eight(at, slice.inputs[i] + STEP * step, (slice.is_row >> i & 1) * 16);
    }
}

// Whether the scale of a group is f16, and minimums, if any, are multiples of it.
#define HAS_HALF_SCALE (TYPE == Q8_0 || TYPE == Q4_0 || TYPE == Q5_0 || TYPE == IQ4_NL)

// What `decode_four` multiplies codes by and adds, of half a group, times 1 / unit.
#if HAS_HALF_SCALE
struct Factors {
    u32 scale;  // twice
};
#else
struct Factors {
    float scale, min;
};
// What codes without a sign have too much.
constexpr float EXCESS = HAS_MIN ? 128.0f + OFFSET : 0.0f;
#endif

// Returns the factors, the minimum where it is no multiple of the scale.
__device__ __forceinline__ Factors factors_of(const Scales& s, u32 part, float by) {
    float scale = s.scale[part] * by;
#if HAS_HALF_SCALE
    return {pack_halves(scale, scale)};
#else
    return {scale, HAS_FLOAT_MIN ? s.min[part] * by - EXCESS * scale : 0.0f};
#endif
}

// Returns the factors that lane `from` of each four lanes has.
__device__ __forceinline__ Factors factors_of_lane(const Factors& of, u32 from) {
#if HAS_HALF_SCALE
    return {__shfl_sync(~0u, of.scale, from, 4)};
#else
    float scale = __shfl_sync(~0u, of.scale, from, 4);
    return {scale, HAS_FLOAT_MIN ? __shfl_sync(~0u, of.min, from, 4) : HAS_MIN ? -EXCESS * scale : 0.0f};
#endif
}

// Decodes four weights to pairs of f16, rounded once. Code c, less than 256, is the lowest byte of
// f16 1024 + c, and one less than 128 the second byte of the float 128 + c; what is added to the
// minimum for that is within 2^-17 of the scale.
__device__ __forceinline__ void decode_four(u32 codes, const Factors& of, u32& first, u32& second) {
#if HAS_HALF_SCALE
    constexpr u32 BIAS = 0x64006400 + 0x10001 * (HAS_MIN ? OFFSET : 128);
    u32 bytes = HAS_MIN ? codes : codes ^ 0x80808080;
    first = half_mul(half_sub(__byte_perm(bytes, 0x64646464, 0x4140), BIAS), of.scale);
    second = half_mul(half_sub(__byte_perm(bytes, 0x64646464, 0x4342), BIAS), of.scale);
#else
    float w[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        float code = HAS_MIN ? __uint_as_float(__byte_perm(codes, 0x43000000, 0x7044 | k << 8)) : code_at<true>(codes, k);
        w[k] = of.scale * code + of.min;
    }
    first = pack_halves(w[0], w[1]), second = pack_halves(w[2], w[3]);
#endif
}

// Adds the products of a step, of whose groups `n` exist.
template <bool IS_WHOLE>
__device__ __forceinline__ void multiply_step(const MatmulParams& p, const Stage& stage, u32 step, u32 n, float by, Sums& sums) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4, last = IS_WHOLE ? STAGE_GROUPS - 1 : n - 1;
    u32 first = STAGE_GROUPS * step, first_own = warp / (FEATURES / WARP_FEATURES) * GROUPS;
    const u8* rows = stage.weights + PITCH * (warp % (FEATURES / WARP_FEATURES) * WARP_FEATURES + lane / 4);
    const u16* inputs = stage.inputs + INPUT_PITCH * (lane / 4) + 4 * t;
    u32 behind = CODE_BYTES + MOVED * (first / BLOCK_GROUPS) % 4;
    // Of eight features more each; the scales of a group, which four lanes need, one of them reads.
    Factors of[2 * FEATURE_TILES][SCALES];
    u32 of_lane = min(first_own + t % GROUPS, last);
#pragma unroll
    for (u32 f = 0; f < 2 * FEATURE_TILES; f++) {
        const u8* row = rows + 8 * f * PITCH;
        Scales scales = read_scales(row, row + behind, of_lane, (first + of_lane) % 8, p.book);
#pragma unroll
        for (u32 part = 0; part < SCALES; part++) of[f][part] = factors_of(scales, part, by);
    }
#pragma unroll
    for (u32 j = 0; j < GROUPS; j++) {
        u32 i = first_own + j;
        if (!IS_WHOLE && i >= n) break;
        u32 a[FEATURE_TILES][2][4];
#pragma unroll
        for (u32 f = 0; f < 2 * FEATURE_TILES; f++) {
            Codes w = read_codes(rows + 8 * f * PITCH, i, t, p.book);
            Factors factors[SCALES];
#pragma unroll
            for (u32 part = 0; part < SCALES; part++) factors[part] = factors_of_lane(of[f][part], j);
#pragma unroll
            for (u32 h = 0; h < 2; h++) decode_four(w.words[h], factors[h * (SCALES - 1)], a[f / 2][h][f % 2], a[f / 2][h][2 + f % 2]);
        }
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
#pragma unroll
            for (u32 r = 0; r < ROW_TILES; r++) {
                uint2 b = *(const uint2*)(inputs + 8 * r * INPUT_PITCH + 32 * i + 16 * h);
#pragma unroll
                for (u32 f = 0; f < FEATURE_TILES; f++) multiply(sums + 4 * (ROW_TILES * f + r), a[f][h], b.x, b.y);
            }
        }
    }
}

// Multiplies a part of a tile.
__device__ inline void multiply_span(const MatmulParams& p, const Tile& tile, const Span& span, Stage* stages, Sums& sums) {
    ThreadSlice slice = thread_slice(p, tile);
    // 1 / unit: the exponents of reciprocal powers of two are negatives of each other, and both are
    // stored with bias 127.
    float by = __uint_as_float((2 * 127u << 23) - __float_as_uint(tile.matrix.unit));
#pragma unroll
    for (u32 i = 0; i + 1 < STAGES; i++) {
        if (span.first + i < span.last) copy_weights(p, slice, span.first + i, stages[i]);
    }
    // Loads of weights are in flight while it ends.
    wait_for_kernel_before();
#pragma unroll
    for (u32 i = 0; i + 1 < STAGES; i++) {
        if (span.first + i < span.last) copy_inputs(p, slice, span.first + i, stages[i]);
        commit_copies();
    }
    u32 read = 0, fill = STAGES - 1;
#pragma unroll 1
    for (u32 step = span.first; step < span.last; step++) {
        wait_copies<STAGES - 2>();
        // The step has been copied, and all threads have read the previous one.
        __syncthreads();
        u32 next = step + STAGES - 1;
        if (next < span.last) {
            copy_weights(p, slice, next, stages[fill]);
            copy_inputs(p, slice, next, stages[fill]);
        }
        commit_copies();
        u32 n = p.n_in / 32 - STAGE_GROUPS * step;
        if (n >= STAGE_GROUPS) multiply_step<true>(p, stages[read], step, n, by, sums);
        else multiply_step<false>(p, stages[read], step, n, by, sums);
        fill = read;
        read = read == STAGES - 1 ? 0 : read + 1;
    }
    wait_copies<0>();
    __syncthreads();
}

// Adds the sums of the two halves of the groups, in the threads of the first.
__device__ inline void add_halves(float4* shared, Sums& sums) {
    float4* of_thread = shared + threadIdx.x % FEATURES;
    if (threadIdx.x >= FEATURES) {
#pragma unroll
        for (u32 i = 0; i < ROW_TILES * FEATURE_TILES; i++) {
            of_thread[i * FEATURES] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
        }
    }
    __syncthreads();
    if (threadIdx.x < FEATURES) {
#pragma unroll
        for (u32 i = 0; i < ROW_TILES * FEATURE_TILES; i++) {
            float4 other = of_thread[i * FEATURES];
            sums[4 * i] += other.x, sums[4 * i + 1] += other.y, sums[4 * i + 2] += other.z, sums[4 * i + 3] += other.w;
        }
    }
    // The next part of a tile begins where these are.
    __syncthreads();
}

// Waits for the threads that have the sums.
__device__ inline void meet() { asm volatile("bar.sync 1, %0;" ::"n"(FEATURES) : "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) skinny_f16(const __grid_constant__ MatmulParams p) {
    extern __shared__ __align__(16) u8 shared[];
    // The previous kernel selects the experts, so their weights cannot be loaded before it ends.
    if (p.expert_tiles) wait_for_kernel_before();
    Tiles<FEATURES, ROWS> tiles(p);
    Shares shares(p, tiles.count());
    u32 end = shares.begin(blockIdx.x + 1);
#pragma unroll 1
    for (u32 at = shares.begin(blockIdx.x); at < end;) {
        Span span = shares.span(at, end);
        at += span.last - span.first;
        if (tiles[span.tile].rows == 0) continue;
        Sums sums = {};
        multiply_span(p, tiles[span.tile], span, (Stage*)shared, sums);
        add_halves((float4*)shared, sums);
        if (threadIdx.x >= FEATURES || !join<FEATURES>(p, shares, span, sums, meet)) continue;
        write_sums<FEATURE_TILES, ROW_TILES>(p, tiles[anew(span.tile)], sums, threadIdx.x / 32 * WARP_FEATURES, 0);
    }
}
