// y = W x + bias for few rows of x, up to ROWS at once, with quantized weights, on tensor cores. Or
// y = a(W x) (U x), a an activation.
//
// A block has 32 features (with a gate 16 of W and the same 16 of U); its warps share the inputs,
// each every WARPS-th slice of 256 from its own on, and their sums are added in the order of warps
// at the end. A warp double-buffers two slices of its weights in shared memory: one is in flight
// (cp.async) while the other is multiplied.
//
// Groups of 32 inputs come in pairs. Each lane decodes those of one feature and stores the codes
// for `ldmatrix`; then 16 features and 8 rows are multiplied at a time, bytes by bytes
// (mma.m16n8k32), and the integer results by the scales of weights and inputs. Where the halves of
// a group have separate scales they are multiplied separately (m16n8k16).
//
// quantize.cu quantizes the rows; gemv.cu is the kernel for a single row. The kernel is batch
// invariant: the result of a row does not depend on the others.
//
// Counted in the machine code for compute capability 9.0 (ptxas 13.0), a warp, 32 features and 64
// inputs of up to 8 rows: 190 instructions with q4_0, 230 with q4_K, 400 with q6_K, of up to 16
// rows 100 to 150 more, and some 40 to 100 to load weights. At half of the instructions that an
// H100 can issue q4_0 would take 14 us for [14336, 4096], its bytes 11 us. It takes 34 us there
// with 8 rows, 29 with 4 and 48 with 16, q4_K as long. Its predecessor, without tensor cores, took
// 68 us with 8 rows, and 84 with q4_K.
//
// NaN and infinities in x make the scale of their 32 values NaN or infinite, and so the row of y
// NaN.

#include "copies.cuh"
#include "gate.cuh"
#include "weights.cuh"

constexpr u32 SLICE = 256;
constexpr u32 SLICE_GROUPS = SLICE / 32;
constexpr u32 ROW_TILES = ROWS / 8;
constexpr u32 FEATURES = 32;
// Of a slice: codes, and the bytes moved behind the row. Of some types that is two bytes, which are
// copied with their neighbours.
constexpr u32 TAIL_COPY = TAIL_BYTES == 2 ? 4 : TAIL_BYTES;
constexpr u32 COPY = CODE_BYTES % 16 == 0 ? 16 : 4;
// Distance between features in a stage: an odd number of copies, so that the lanes' reads fall into
// different banks.
constexpr u32 PITCH = ((CODE_BYTES + TAIL_COPY + COPY - 1) / COPY | 1) * COPY;

// Scales and minimums of a group, of either half where they differ.
struct Scales {
    float scale[HAS_HALVES ? 2 : 1];
    float min[HAS_HALVES ? 2 : 1];
};

// Shared memory of a warp.
struct Warp {
    u8 stages[2][FEATURES * PITCH];
    uint4 codes[HAS_TWO_BYTES ? 2 : 1][2][2][2][16];  // [high, low][features / 16][group][half]
    Scales scales[2][2][16];
};

extern __shared__ uint4 shared[];

// The rows of weights of a block.
struct Rows {
    const u8* w[2];  // of either half of the features
    u32 first[2];    // features
    u32 last;        // the last feature there is
};

__device__ __forceinline__ const u8* row_of(const MatmulParams& p, const Rows& rows, u32 feature) {
    // A feature beyond the last repeats it; the result is not stored.
    bool second = feature >= 16;
    return (second ? rows.w[1] : rows.w[0]) + p.row_bytes * min((second ? rows.first[1] : rows.first[0]) + feature % 16, rows.last);
}

// Issues the loads of a slice, if it exists.
__device__ __forceinline__ void load_async(const MatmulParams& p, const Rows& rows, u32 slice, u8* to) {
    u32 lane = threadIdx.x % 32, groups = p.n_in / 32;
    if (slice * SLICE_GROUPS < groups) {
        u32 bytes = CODE_BYTES * min(groups - slice * SLICE_GROUPS, SLICE_GROUPS) / SLICE_GROUPS;
        // Rows are a multiple of 16 bytes long: the last copy may exceed the codes, but not the
        // row.
        constexpr u32 COPIES = CODE_BYTES / COPY;
#pragma unroll
        for (u32 i = 0; i < COPIES; i++) {
            u32 number = 32 * i + lane, feature = number / COPIES, at = number % COPIES * COPY;
            if (at >= bytes) continue;
            const u8* from = row_of(p, rows, feature) + CODE_BYTES * slice + at;
            if (COPY == 16) copy_16(to + PITCH * feature + at, from);
            else copy_4(to + PITCH * feature + at, from);
        }
#if TAIL_BYTES > 0
        u32 behind = CODE_BYTES * groups / SLICE_GROUPS + TAIL_BYTES * slice / 4 * 4, words = TAIL_COPY / 4;
#pragma unroll
        for (u32 i = 0; i < words; i++) {
            u32 number = 32 * i + lane, feature = number / words, at = number % words * 4;
            if (at * CODE_BYTES >= TAIL_COPY * bytes) continue;
            copy_4(to + PITCH * feature + CODE_BYTES + at, row_of(p, rows, feature) + behind + at);
        }
#endif
    }
    commit_copies();
}

// Returns group `g` of a slice of a feature.
__device__ __forceinline__ Group read_slice(const MatmulParams& p, const u8* row, u32 slice, u32 g) {
#if TAIL_BYTES == 2
    // The bytes behind the row of two slices share one word, which is copied whole. An odd slice is
    // read as the second of two blocks, whose bytes are in the upper half of that word.
    u32 odd = slice % 2;
    return read_group(row - CODE_BYTES * odd, g + SLICE_GROUPS * odd, SLICE * (1 + odd), p.book);
#else
    return read_group(row, g, SLICE, p.book);
#endif
}

// Decodes groups g and g + 1 of a slice of a lane's feature to shared memory.
__device__ __forceinline__ void decode_pair(const MatmulParams& p, Warp& warp, const u8* stage, u32 slice, u32 g, u32 n) {
    u32 lane = threadIdx.x % 32, tile = lane / 16, row = lane % 16;
    // Beyond the last group it is repeated, with inputs of zero.
    Group groups[2] = {
        read_slice(p, stage + PITCH * lane, slice, g),
        read_slice(p, stage + PITCH * lane, slice, IS_IN_EIGHTS ? g | 1 : min(g + 1, n - 1)),
    };
#pragma unroll
    for (u32 second = 0; second < 2; second++) {
        const Group& group = groups[second];
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            warp.codes[0][tile][second][h][row] =
                make_uint4(group.codes[4 * h], group.codes[4 * h + 1], group.codes[4 * h + 2], group.codes[4 * h + 3]);
#if HAS_TWO_BYTES
            warp.codes[1][tile][second][h][row] =
                make_uint4(group.low[4 * h], group.low[4 * h + 1], group.low[4 * h + 2], group.low[4 * h + 3]);
#endif
        }
        Scales& scales = warp.scales[tile][second][row];
#pragma unroll
        for (u32 h = 0; h < (HAS_HALVES ? 2 : 1); h++) scales.scale[h] = group.scale[h], scales.min[h] = group.min[h];
    }
}

// Offsets of a lane's inputs, in groups: of row lane / 4 its codes, of rows 2 (lane % 4) and the
// next the scales.
struct Origin {
    u32 codes[ROW_TILES];
    u32 scales[ROW_TILES][2];
};

__device__ __forceinline__ Origin origin_of(const MatmulParams& p, const BlockRows& rows) {
    u32 lane = threadIdx.x % 32, groups = p.n_in / 32;
    // Rows beyond the last repeat it; their products are not stored.
    auto begin = [&](u32 row) { return (u32)x_row(p, rows.first + min(row, rows.n - 1)) * groups; };
    Origin origin;
#pragma unroll
    for (u32 tile = 0; tile < ROW_TILES; tile++) {
        origin.codes[tile] = begin(8 * tile + lane / 4);
        for (u32 i = 0; i < 2; i++) origin.scales[tile][i] = begin(8 * tile + lane % 4 * 2 + i);
    }
    return origin;
}

// The inputs of a group in a lane: a word of either half, scales, and sums of the codes of either
// half, 16 bits each.
struct Inputs {
    u32 codes[ROW_TILES][2];
    float scale[ROW_TILES][2];
    u32 sums[ROW_TILES][2];
};

// Loads groups `g` and `g + 1`; zeros beyond the last group.
__device__ __forceinline__ void inputs_at(const MatmulParams& p, const Origin& origin, u32 g, Inputs (&x)[2]) {
    bool has_second = g + 1 < p.n_in / 32;
#pragma unroll
    for (u32 tile = 0; tile < ROW_TILES; tile++) {
        const u32* codes = p.codes + 8 * (size_t)(origin.codes[tile] + g) + threadIdx.x % 4;
#pragma unroll
        for (u32 second = 0; second < 2; second++) {
            bool is_there = second == 0 || has_second;
            x[second].codes[tile][0] = is_there ? codes[8 * second] : 0;
            x[second].codes[tile][1] = is_there ? codes[8 * second + 4] : 0;
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float* scales = p.scales + (origin.scales[tile][i] + g);
            const u32* sums = p.sums + (origin.scales[tile][i] + g);
#pragma unroll
            for (u32 second = 0; second < 2; second++) {
                bool is_there = second == 0 || has_second;
                x[second].scale[tile][i] = is_there ? scales[second] : 0.0f;
                x[second].sums[tile][i] = is_there ? sums[second] : 0;
            }
        }
    }
}

// Returns the factor of the minimum of half `h` of a group, or of all of it.
__device__ __forceinline__ float sum_of(u32 both, float scale, u32 h) {
    int first = (short)both, second = (int)both >> 16;
    return scale * (float)(HAS_HALVES ? h == 0 ? first : second : first + second);
}

// Adds int8 products, [16][32] by [32][8], to `d`, or of halves of groups, [16][16] by [16][8].
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_half(int (&d)[4], u32 upper, u32 lower, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(upper), "r"(lower), "r"(b));
}

// Computes the products of half `h` of a group, or of all of it, as floats.
__device__ __forceinline__ void dots(const u32 (&high)[4], const u32 (&low)[4], const u32 (&b)[2], u32 h, float (&of)[4]) {
#if HAS_TWO_BYTES
    int d[4] = {0, 0, 0, 0};
    multiply_half(d, high[2 * h], high[2 * h + 1], b[h]);
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] *= 256;
    multiply_half(d, low[2 * h], low[2 * h + 1], b[h]);
#pragma unroll
    for (int i = 0; i < 4; i++) of[i] = (float)d[i];
#else
    // They are less than 2^22: added to the bits of 1.5 * 2^23 they form the float 1.5 * 2^23 plus
    // the integer.
    constexpr int START = 0x4b400000;
    int d[4] = {START, START, START, START};
#if HAS_HALVES
    multiply_half(d, high[2 * h], high[2 * h + 1], b[h]);
#else
    multiply_bytes(d, high, b);
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) of[i] = __int_as_float(d[i]) - 12582912.0f;
#endif
}

// Adds the products of a group, number `second` of a pair, with its inputs to `sums`, [features /
// 16][rows / 8].
__device__ __forceinline__ void multiply_group(const Warp& warp, u32 second, const Inputs& x, float (&sums)[2][ROW_TILES][4]) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 tile = 0; tile < 2; tile++) {
        u32 high[4], low[4] = {0, 0, 0, 0};
        load_matrices(high, (const u16*)(&warp.codes[0][tile][second][0][0] + lane), false);
#if HAS_TWO_BYTES
        load_matrices(low, (const u16*)(&warp.codes[1][tile][second][0][0] + lane), false);
#endif
        Scales w[2] = {warp.scales[tile][second][lane / 4], warp.scales[tile][second][lane / 4 + 8]};
#pragma unroll
        for (u32 rows = 0; rows < ROW_TILES; rows++) {
#pragma unroll
            for (u32 h = 0; h < (HAS_HALVES ? 2 : 1); h++) {
                float of[4];
                dots(high, low, x.codes[rows], h, of);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float scale = x.scale[rows][i % 2], &sum = sums[tile][rows][i];
                    sum += w[i / 2].scale[h] * scale * of[i];
                    if (HAS_MIN) sum += w[i / 2].min[h] * sum_of(x.sums[rows][i % 2], scale, h);
                }
            }
        }
    }
}

// Returns the sum over the warps, for one feature of 32 and one row.
__device__ __forceinline__ float add_warps(const float* sums, u32 feature, u32 row) {
    float sum = 0.0f;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) sum += sums[(warp * FEATURES + feature) * ROWS + row];
    return sum;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) skinny_q8(const __grid_constant__ MatmulParams p) {
    u32 number = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    BlockMatrix mine = block_matrix(p);
    const MatrixParams& matrix = mine.matrix;
    // The previous kernel selects the experts, so their weights cannot be loaded before it ends.
    if (p.expert_tiles) wait_for_kernel_before();
    BlockRows rows = block_rows(p, matrix, ROWS);
    if (rows.n == 0) return;
    u32 outs = p.up ? FEATURES / 2 : FEATURES, first_out = mine.block * outs;
    const u8* w = matrix.w + rows.w_offset;
    Rows of = {{w, p.up ? p.up + rows.w_offset : w}, {first_out, p.up ? first_out : first_out + 16}, matrix.n_out - 1};

    Warp& warp = ((Warp*)shared)[number];
    float sums[2][ROW_TILES][4] = {};
    u32 groups = p.n_in / 32, stage = 0;
    Origin origin = origin_of(p, rows);
    load_async(p, of, number, warp.stages[0]);
    // Loads of weights are in flight while it ends.
    wait_for_kernel_before();
    for (u32 slice = number; slice * SLICE_GROUPS < groups; slice += warps, stage ^= 1) {
        load_async(p, of, slice + warps, warp.stages[stage ^ 1]);
        wait_copies<1>();
        __syncwarp();
        u32 n = min(groups - slice * SLICE_GROUPS, SLICE_GROUPS);
#pragma unroll 1
        for (u32 g = 0; g < n; g += 2) {
            Inputs x[2];
            inputs_at(p, origin, slice * SLICE_GROUPS + g, x);
            decode_pair(p, warp, warp.stages[stage], slice, g, n);
            __syncwarp();
            multiply_group(warp, 0, x[0], sums);
            multiply_group(warp, 1, x[1], sums);
            __syncwarp();
        }
    }
    wait_copies<0>();
    __syncthreads();

    float* all = (float*)shared;
#pragma unroll
    for (u32 tile = 0; tile < 2; tile++) {
#pragma unroll
        for (u32 r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 feature = 16 * tile + lane / 4 + i / 2 * 8, row = 8 * r + lane % 4 * 2 + i % 2;
                all[(number * FEATURES + feature) * ROWS + row] = sums[tile][r][i];
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < outs * rows.n; i += blockDim.x) {
        u32 feature = i % outs, row = i / outs, out = first_out + feature;
        if (out >= matrix.n_out) continue;
        float y = add_warps(all, feature, row);
        float* to = matrix.y + y_row(p, rows.first + row) * matrix.n_out + out;
        if (matrix.bias) y += matrix.bias[rows.bias_offset + out];
        if (p.up) {
            float u = add_warps(all, 16 + feature, row);
            if (matrix.bias) u += p.up_bias[rows.bias_offset + out];
            *to = gated(p.activation, p.limit, y, u);
        } else {
            *to = matrix.accumulate ? *to + y : y;
        }
    }
}
