// GEMV y = W x + bias, with quantized weights. Or y = a(W x) (U x), a an activation: then a warp
// has a feature of W and the same one of U, in sequence.
//
// A block has a multiprocessor for itself, and a share of all features; its warps take them in
// turn, one each, so that all end at about the same time. Memory latency requires early loads: each
// warp has a ring of STAGES steps of 2,048 weights in shared memory, which it alone fills
// (cp.async) and reads, across the ends of features. While the first are in flight the block copies
// all of x to shared memory, as signed bytes with one scale per 32 (for the rotated types x is
// rotated, rather than W). After one barrier the warps are independent.
//
// In a step each lane reads two groups of 32 weights, a pair that shares bytes if the type has such
// pairs, and multiplies bytes with bytes, four at a time. A stage has the layout of a row of 2,048
// weights.
//
// Every block normalizes and quantizes the row again: in a separate launch the whole device would
// wait for one block. The order of all sums is that of skinny_q8.cu (matmul/mod.rs): each lane has
// a class of groups.
//
// Counted in the machine code for compute capability 9.0 (ptxas 13.0), a warp and a step: 140
// instructions with q4_0 and q8_0, 174 with q4_K, 223 with q5_K, 240 with q6_K, and some 95 of a
// feature. At the speed of an H100's copies, 13 bytes per clock and multiprocessor, q4_0 and q4_K
// in rows of 4,096 leave a third to a half of all issue slots free, the others more. Measured there
// with [14336, 4096]: 78 % of that speed with q4_0 and q8_0, 81 % with q4_K, 79 % with q6_K. Its
// predecessor, blocks of 256 threads with a step of x and a barrier in turn, reached 62, 80, 57 and
// 54 %; it waited for x half of the time. The arithmetic that it shares with skinny_q8.cu, later,
// takes 5 (q8_0) to 10 (q4_0, q6_K) instructions of a step less (ptxas 12.8).
//
// NaN and infinities in x make the scale of their 32 values NaN, and so the row of y.

#include "arithmetic.cuh"
#include "copies.cuh"
#include "gate.cuh"

constexpr u32 STEP = 2048;
constexpr u32 GROUPS = STEP / 32;
constexpr u32 STAGE_BYTES = (CODE_BYTES + TAIL_BYTES + 15) / 16 * 16;

extern __shared__ uint4 shared[];

// Returns the first, or the second, group of a step of a lane: two that share bytes, where groups
// do.
__device__ __forceinline__ u32 group_of(u32 lane, u32 second) {
#if TYPE == Q6_K
    return 4 * (lane / 2) | 2 * second | lane % 2;
#else
    return IS_IN_EIGHTS ? 2 * lane | second : lane + 32 * second;
#endif
}

// Returns the slot of the inputs of a group: those of all lanes' first groups of a step, then those
// of their second.
__device__ __forceinline__ u32 slot_of(u32 g) {
    u32 step = g / GROUPS * GROUPS, r = g % GROUPS;
#if TYPE == Q6_K
    return step + (r / 4 * 2 + r % 2) + 32 * (r / 2 % 2);
#else
    return IS_IN_EIGHTS ? step + r / 2 + 32 * (r % 2) : g;
#endif
}

// The row, in slots, and behind it the rings.
struct Row {
    // the first halves' codes: 16 bytes each, so that the lanes' reads fall into different banks
    uint4* first;
    uint4* second;
    float2* scales;  // and `sums_of` the codes
    float* squares;  // sums of those of each group, in the order of groups
    u8* rings;
};

__device__ __forceinline__ Row row_in_shared(u32 n_in) {
    u32 slots = (n_in + STEP - 1) / STEP * GROUPS;
    float2* scales = (float2*)(shared + 2 * slots);
    float* squares = (float*)(scales + slots);
    return {shared, shared + slots, scales, squares, (u8*)(squares + slots)};
}

// Returns what a product needs of the sums of the codes: where parts have separate scales, two sums
// of 16 bits; the integer that products begin with; or the scaled sum.
__device__ __forceinline__ float sums_of(const Bytes& x) {
    if (HAS_HALVES) return __int_as_float(x.first & 0xffff | x.second << 16);
    int sum = x.first + x.second;
    return HAS_FLOAT_MIN ? __fmul_rn(x.scale, (float)sum) : __int_as_float(-OFFSET * sum);
}

// Quantizes 4 values of each thread to bytes; 8 neighbouring lanes have a group.
__device__ __forceinline__ void round_to_bytes(const Row& to, u32 group, bool is_there, const float (&v)[4]) {
    u32 group_lane = threadIdx.x % 8;
    Bytes bytes = to_bytes(v);
    if (!is_there) return;
    u32 slot = slot_of(group);
    ((u32*)&(group_lane < 4 ? to.first : to.second)[slot])[group_lane % 4] = bytes.codes;
    if (group_lane == 0) to.scales[slot] = make_float2(bytes.scale, sums_of(bytes));
}

// 4 inputs, and the norm's factor of each.
struct Four {
    float4 x, by;
};

__device__ __forceinline__ Four four_at(const MatmulParams& p, const float* x, u32 at) {
    Four four = {make_float4(0, 0, 0, 0), make_float4(1, 1, 1, 1)};
    if (at < p.n_in) {
        four.x = *(const float4*)(x + at);
        if (p.norm) four.by = *(const float4*)(p.norm + at);
    }
    return four;
}

// Copies the row to shared memory.
__device__ __forceinline__ void load_row(const MatmulParams& p, const float* x, const Row& to) {
    Four next = four_at(p, x, 4 * threadIdx.x);
    for (u32 from = 0; from < p.n_in; from += 4 * blockDim.x) {
        u32 at = from + 4 * threadIdx.x;
        bool is_there = at < p.n_in;
        Four four = next;
        next = four_at(p, x, at + 4 * blockDim.x);
        float v[4] = {four.x.x, four.x.y, four.x.z, four.x.w};
        if (p.norm) {
            float squares = sum_of_squares(v);
            if (is_there && threadIdx.x % 8 == 0) to.squares[at / 32] = squares;
        }
        v[0] = __fmul_rn(v[0], four.by.x), v[1] = __fmul_rn(v[1], four.by.y);
        v[2] = __fmul_rn(v[2], four.by.z), v[3] = __fmul_rn(v[3], four.by.w);
        if (IS_ROTATED) rotate_group(p.book.signs, v);
        round_to_bytes(to, at / 32, is_there, v);
    }
}

// A feature among those of all matrices.
struct MatrixFeature {
    const MatrixParams& matrix;
    u32 out;
};

__device__ __forceinline__ MatrixFeature matrix_feature(const MatmulParams& p, u32 feature) {
    u32 number = 0;
    while (number + 1 < p.n_matrices && feature >= p.matrices[number].n_out) feature -= p.matrices[number++].n_out;
    return {p.matrices[number], feature};
}

// The next load of a warp: a step of a row of weights, first its codes and then the bytes moved
// behind them.
struct LoadCursor {
    u32 feature;
    bool is_up;
    int left;         // bytes of codes left in the row; none after the last row
    const u8* codes;  // the first ones of this lane
    const u8* tail;

    __device__ __forceinline__ void enter_row(const MatmulParams& p, u32 last, size_t w_offset) {
        left = 0;
        if (feature >= last) return;
        MatrixFeature target = matrix_feature(p, feature);
        const u8* row = (is_up ? p.up : target.matrix.w) + w_offset + p.row_bytes * target.out;
        left = CODE_BYTES * (p.n_in / 32) / GROUPS;
        codes = row + 16 * (threadIdx.x % 32);
        tail = row + left + 4 * (threadIdx.x % 32);
    }
};

// Issues the loads of a step, if one is left. Rows are a multiple of 16 bytes long: the last copies
// may exceed a step, but not the row.
__device__ __forceinline__ void load_async(const MatmulParams& p, LoadCursor& cursor, u32 last, size_t w_offset, u8* to) {
    if (cursor.left > 0) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int first = 0; first < CODE_BYTES; first += 32 * 16) {
            int at = first + 16 * lane;
            if (at < CODE_BYTES && at < cursor.left) copy_16(to + at, cursor.codes + first);
        }
#if TAIL_BYTES > 0
#pragma unroll
        for (int first = 0; first < TAIL_BYTES; first += 32 * 4) {
            int at = first + 4 * lane;
            if (at < TAIL_BYTES && at * CODE_BYTES / TAIL_BYTES < cursor.left) {
                copy_4(to + CODE_BYTES + at, cursor.tail + first);
            }
        }
#endif
        cursor.codes += CODE_BYTES, cursor.tail += TAIL_BYTES, cursor.left -= CODE_BYTES;
        if (cursor.left <= 0) {
            cursor.is_up = p.up && !cursor.is_up;
            if (!cursor.is_up) cursor.feature += blockDim.x / 32;
            cursor.enter_row(p, last, w_offset);
        }
    }
    commit_copies();
}

// Adds the product of a group with the inputs of a slot to `sum`.
__device__ __forceinline__ float multiply(const Group& w, const Row& x, u32 slot, float sum) {
    float2 scale = x.scales[slot];
    int both = __float_as_int(scale.y), sums[2] = {(int)(short)both, both >> 16}, dots[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint4 half = (h == 0 ? x.first : x.second)[slot];
        u32 words[4] = {half.x, half.y, half.z, half.w};
        int dot = OFFSET == 0 ? 0 : HAS_HALVES ? -OFFSET * sums[h] : h == 0 ? both : 0;
#pragma unroll
        for (int k = 0; k < 4; k++) dot = __dp4a((int)w.codes[4 * h + k], (int)words[k], dot);
#if HAS_TWO_BYTES
        dot *= 256;
#pragma unroll
        for (int k = 0; k < 4; k++) dot = __dp4a((int)w.low[4 * h + k], (int)words[k], dot);
#endif
        dots[h] = dot;
    }
#if HAS_HALVES
    return add_product(sum, w.scale, w.min, scale.x, {(float)dots[0], (float)dots[1]}, {(float)sums[0], (float)sums[1]});
#else
    return add_product(sum, w.scale, w.min, scale.x, {(float)(dots[0] + dots[1])}, {scale.y});
#endif
}

// Adds the products of a lane's groups of a step, of which the first `n` exist, to `sum`. Without
// branches, so that the groups share work: a lane without groups left repeats others, for nothing.
__device__ __forceinline__ float multiply_step(const MatmulParams& p, const u8* stage, const Row& x, u32 step, u32 n, float sum) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 second = 0; second < 2; second++) {
        bool is_there = group_of(lane, second) < n;
        u32 known = IS_IN_EIGHTS ? min(lane, n / 2 - 1) : is_there ? lane : 0, of = is_there || IS_IN_EIGHTS ? second : 0;
        float more = multiply(read_group(stage, group_of(known, of), STEP, p.book), x, step + known + 32 * of, sum);
        sum = is_there ? more : sum;
    }
    return sum;
}

// Returns the norm's factor of the row.
__device__ __forceinline__ float factor_of(const MatmulParams& p, const Row& row) {
    float squares = 0.0f;
    for (u32 g = threadIdx.x % 32; g < p.n_in / 32; g += 32) squares += row.squares[g];
    return norm_factor(squares, p.n_in, p.eps);
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32, 1) gemv(const __grid_constant__ MatmulParams p) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    // The previous kernel selects the experts, so their weights cannot be loaded before it ends.
    if (p.expert_tiles) wait_for_kernel_before();
    BlockRows rows = block_rows(p, p.matrices[0], 1);
    if (rows.n == 0) return;
    Row row = row_in_shared(p.n_in);
    u32 total = 0;
    for (u32 i = 0; i < p.n_matrices; i++) total += p.matrices[i].n_out;
    u32 first = (u64)total * blockIdx.x / gridDim.x + warp, last = (u64)total * (blockIdx.x + 1) / gridDim.x;
    u8* ring = row.rings + warp * (STAGES * STAGE_BYTES);
    LoadCursor cursor = {first, false, 0, nullptr, nullptr};
    cursor.enter_row(p, last, rows.w_offset);
    for (u32 i = 0; i + 1 < STAGES; i++) load_async(p, cursor, last, rows.w_offset, ring + i * STAGE_BYTES);

    // Loads of weights are in flight while it ends.
    wait_for_kernel_before();
    const float* x = p.x + x_row(p, rows.first) * p.n_in;
    load_row(p, x, row);
    __syncthreads();
    float factor = p.norm ? factor_of(p, row) : 1.0f;

    size_t y = y_row(p, rows.first);
    u32 groups = p.n_in / 32, read = 0, fill = (STAGES - 1) * STAGE_BYTES;
    for (u32 feature = first; feature < last; feature += warps) {
        MatrixFeature target = matrix_feature(p, feature);
        const MatrixParams& matrix = target.matrix;
        float* to = matrix.y + y * matrix.n_out + target.out;
        // Loaded here, and used only at the end.
        const float* bias = p.up ? p.up_bias : matrix.bias;
        float gate_bias = p.up && matrix.bias ? matrix.bias[rows.bias_offset + target.out] : 0.0f;
        float own_bias = bias ? bias[rows.bias_offset + target.out] : 0.0f, before = matrix.accumulate ? *to : 0.0f;
        float other = 0.0f, own = 0.0f;  // of the gate, and of the gated product
        for (u32 pass = 0; pass < (p.up ? 2 : 1); pass++) {
            float sum = 0.0f;
            for (u32 step = 0; step < groups; step += GROUPS) {
                wait_copies<STAGES - 2>();
                __syncwarp();
                load_async(p, cursor, last, rows.w_offset, ring + fill);
                sum = multiply_step(p, ring + read, row, step, groups - step, sum);
                fill = read;
                read = read == (STAGES - 1) * STAGE_BYTES ? 0 : read + STAGE_BYTES;
            }
            other = own;
            own = __fmul_rn(factor, add_classes(sum));
        }
        own += own_bias;
        if (lane == 0) *to = p.up ? gated(p.activation, p.limit, other + gate_bias, own) : before + own;
    }
}
