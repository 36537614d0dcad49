// y = W x + bias for 2 to 16 rows of x, up to ROWS at once, with quantized weights, on tensor
// cores. Or y = a(W x) (U x), a an activation: then a block multiplies a tile of W, and the same of
// U.
//
// A tile is 16 features, a warp has four of the 32 classes of groups (matmul/mod.rs), so that a
// tile takes eight warps. With `splits` 1 they are a block; else a block has the 32 / splits
// classes of its own of `splits` tiles at once, and the last block of those that share tiles adds
// theirs: the sum over the classes is a binary tree, which every split joins in the same order.
// Blocks keep the inputs of their classes in shared memory, about two of them are on each
// multiprocessor, and each takes an equal range of tiles: all end at about the same time.
//
// Weights stay as they are in memory: a warp copies stages of its classes, 16 features of 4 or 8
// groups, to a ring of its own in shared memory (cp.async), across the ends of tiles. There the
// rows' distance is an odd number of 16 bytes, so that eight rows' words t fall into different
// banks: a lane reads its A operands directly, and unpacks in registers. The K order within a group
// is free, as long as both operands have the same. The scales of a group of a row, which four lanes
// need, one of them reads.
//
// Counted in the machine code for compute capability 9.0 (ptxas 12.8), instructions of a warp for
// 512 weights and 8 rows, loads included: 44 with q4_0, 41 with q8_0, 47 with q4_K, 72 with q6_K
// (57, 66 and 117 of its predecessor with q4_0, q4_K and q6_K); with 16 rows 63, 61, 67 and 110
// (88, 97 and 168). Up to 116 registers with 8 rows, 128 and 12 to 20 spilled bytes with 16.
//
// Predicted for 132 multiprocessors at 1.98 GHz, q4_0, 8 rows: [14336, 4096] and [4096, 14336] take
// 4.9 us of issue slots beside 11.0 us of bytes at 3.0 TB/s, so that memory binds at any rate above
// 0.45 instructions per clock and scheduler, with four warps on each; 16 rows 7.0 us (0.64). Inputs
// add 10.8 and 9.2 MB of L2 reads. Measured of its predecessor, which read inputs from memory in
// its loop and decoded weights through shared memory: 34 us with 8 rows, of 0.14 per clock.
//
// NaN and infinities in x make the scale of their 32 values NaN, and so the row of y.

#include "copies.cuh"
#include "fragments.cuh"
#include "gate.cuh"
#include "input_tile.cuh"

constexpr u32 ROW_TILES = ROWS / 8;
constexpr u32 FEATURES = 16;
constexpr u32 CLASSES = 4;                    // of a warp
constexpr u32 WARPS = 32 / CLASSES;
constexpr u32 WINDOW = WARPS * STAGE_GROUPS;  // groups of a stage of all classes
constexpr u32 STAGE_BYTES = FEATURES * PITCH;
// Distance between rows in `Sums`: lanes' writes fall into different banks.
constexpr u32 SUMS_PITCH = FEATURES + 4;

typedef float Sums[WARPS][ROWS * SUMS_PITCH];

extern __shared__ uint4 shared[];

// The place of a warp in its block: which tile of those at once, and which four classes.
struct Place {
    u32 tile, quad;
};

__device__ __forceinline__ Place place_of(const MatmulParams& p) {
    u32 warp = threadIdx.x / 32, quads = WARPS / p.splits;
    return {warp / quads, blockIdx.x % p.splits * quads + warp % quads};
}

// Keeps a value in a register: the compiler would compute it again wherever it is used.
__device__ __forceinline__ u32 in_register(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// What depends on the lane alone, offsets in bytes: of the copies and of the first row's words in a
// stage, and of the codes and the scales in an input tile.
struct Lane {
    u32 copies, tail, words, t, codes, scales;
};

__device__ __forceinline__ Lane this_lane() {
    u32 lane = threadIdx.x % 32;
    return {in_register(PITCH * (lane / 2) + lane % 2 * COPY), in_register(PITCH * (lane / 2) + lane % 2 * 4 + CODE_BYTES),
            in_register(PITCH * (lane / 4)), in_register(lane % 4),
            in_register(sizeof(uint2) * lane), in_register(sizeof(InputTile::codes) + sizeof(InputScales) * (lane % 4))};
}

// The rounds of a block: in each it takes `splits` tiles. Neighbours, a team, share tiles.
struct Rounds {
    u32 first, last;
    u32 tiles;  // of all blocks
};

__device__ __forceinline__ Rounds rounds_of(const MatmulParams& p) {
    u32 tiles = 0;
    for (u32 i = 0; i < p.n_matrices; i++) tiles += p.matrices[i].blocks;
    u32 rounds = (tiles + p.splits - 1) / p.splits, teams = gridDim.x / p.splits, team = blockIdx.x / p.splits;
    return {(u32)((u64)rounds * team / teams), (u32)((u64)rounds * (team + 1) / teams), tiles};
}

// A tile's matrix, and the first of its features.
struct Tile {
    const MatrixParams& matrix;
    u32 first;
};

__device__ __forceinline__ Tile tile_of(const MatmulParams& p, u32 tile) {
    u32 number = 0;
    while (number + 1 < p.n_matrices && tile >= p.matrices[number].blocks) tile -= p.matrices[number++].blocks;
    return {p.matrices[number], FEATURES * tile};
}

// The next load of a warp: a stage of a tile, of W or U. Two lanes copy a feature's row.
struct LoadCursor {
    u32 round;
    bool is_up, has_tile;
    int left;         // groups of the row from the stage's window on
    const u8* codes;  // of the stage in the lane's row
    const u8* tail;

    __device__ __forceinline__ void enter_tile(const MatmulParams& p, const Rounds& rounds, const Place& place) {
        u32 number = round * p.splits + place.tile, first = STAGE_GROUPS * place.quad, groups = p.n_in / 32, lane = threadIdx.x % 32;
        left = round < rounds.last ? groups : 0;
        has_tile = left > 0 && number < rounds.tiles;
        if (!has_tile) return;
        Tile tile = tile_of(p, number);
        // A feature beyond the last repeats it; the result is not stored.
        u32 feature = min(tile.first + lane / 2, tile.matrix.n_out - 1);
        const u8* row = (is_up ? p.up : tile.matrix.w) + block_rows(p, tile.matrix, ROWS).w_offset + p.row_bytes * feature;
        codes = row + CODE_BYTES * first / STAGE_GROUPS + COPY * (lane % 2);
        tail = row + CODE_BYTES * groups / STAGE_GROUPS + MOVED * (first / BLOCK_GROUPS) / 4 * 4 + 4 * (lane % 2);
    }

    __device__ __forceinline__ void advance(const MatmulParams& p, const Rounds& rounds, const Place& place) {
        codes += WARPS * CODE_BYTES, tail += WINDOW / BLOCK_GROUPS * MOVED, left -= WINDOW;
        if (left > 0) return;
        is_up = p.up && !is_up;
        if (!is_up) round++;
        enter_tile(p, rounds, place);
    }
};

// Issues the loads of a stage, if there is one.
__device__ __forceinline__ void load_async(const MatmulParams& p, const Rounds& rounds, const Place& place, const Lane& lane,
                                           LoadCursor& cursor, u8* to) {
    if (cursor.left > 0) {
        int n = cursor.has_tile ? cursor.left - (int)(STAGE_GROUPS * place.quad) : 0;
        if (n >= (int)STAGE_GROUPS) copy_row<true>(to + lane.copies, to + lane.tail, cursor.codes, cursor.tail, n);
        else if (n > 0) copy_row<false>(to + lane.copies, to + lane.tail, cursor.codes, cursor.tail, n);
        cursor.advance(p, rounds, place);
    }
    commit_copies();
}

// Returns the tiles of inputs that a block keeps: those of its classes of each window, [rows /
// 8][windows][tiles of a window].
__device__ __forceinline__ u32 kept_tiles(const MatmulParams& p) {
    return (p.n_in / 32 + WINDOW - 1) / WINDOW * (WINDOW / p.splits);
}

// Returns the group of the `i`th tile that a block keeps.
__device__ __forceinline__ u32 kept_group(const MatmulParams& p, u32 i) {
    u32 of_window = WINDOW / p.splits;
    return i / of_window * WINDOW + blockIdx.x % p.splits * of_window + i % of_window;
}

// Copies the inputs to shared memory.
__device__ __forceinline__ void load_inputs(const MatmulParams& p, InputTile* to) {
    constexpr u32 COPIES = sizeof(InputTile) / 16;
    u32 kept = kept_tiles(p), groups = p.n_in / 32;
    for (u32 i = threadIdx.x; i < ROW_TILES * kept * COPIES; i += blockDim.x) {
        u32 number = i / COPIES, tile = number / kept, g = kept_group(p, number % kept);
        if (g >= groups) continue;
        size_t from = (size_t)(blockIdx.y * ROW_TILES + tile) * groups + g;
        copy_16((uint4*)(to + number) + i % COPIES, (const uint4*)((const InputTile*)p.inputs + from) + i % COPIES);
    }
    commit_copies();
}

// Copies the inputs of an expert's slots, each from the tile of its row. Rows beyond the last
// repeat it; their results are not stored.
__device__ __forceinline__ void gather_inputs(const MatmulParams& p, const BlockRows& rows, InputTile* to) {
    u32 kept = kept_tiles(p), groups = p.n_in / 32;
    for (u32 i = threadIdx.x; i < ROWS * kept; i += blockDim.x) {
        u32 row = i % ROWS, number = i / ROWS, g = kept_group(p, number);
        if (g >= groups) continue;
        u32 x = x_row(p, rows.first + min(row, rows.n - 1));
        const InputTile& from = ((const InputTile*)p.inputs)[(size_t)(x / 8) * groups + g];
        InputTile& tile = to[row / 8 * kept + number];
        copy_16(tile.codes[row % 8], from.codes[x % 8]);
        copy_16(tile.codes[row % 8][2], from.codes[x % 8][2]);
        copy_4(tile.scales[row % 8 / 2].scale + row % 2, from.scales[x % 8 / 2].scale + x % 2);
        copy_4(tile.scales[row % 8 / 2].sums + row % 2, from.scales[x % 8 / 2].sums + x % 2);
    }
    commit_copies();
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

// Computes the products of part `h` of a group of two rows of weights, less those of the offset, as
// floats. `sums` are those of the inputs' codes.
__device__ __forceinline__ void dots(const Codes (&w)[2], const u32 (&b)[2], const u32 (&sums)[2], u32 h, float (&of)[4]) {
#if HAS_TWO_BYTES
    int d[4] = {0, 0, 0, 0};
    multiply_half(d, w[0].words[h], w[1].words[h], b[h]);
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] *= 256;
    multiply_half(d, w[0].low[h], w[1].low[h], b[h]);
#pragma unroll
    for (int i = 0; i < 4; i++) of[i] = (float)d[i];
#else
    int start[2] = {MMA_ZERO, MMA_ZERO};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (HAS_HALVES) start[i] -= OFFSET * (h == 0 ? (int)(short)sums[i] : (int)sums[i] >> 16);
        else if (!HAS_FLOAT_MIN) start[i] = (int)sums[i];
    }
    int d[4] = {start[0], start[1], start[0], start[1]};
#if HAS_HALVES
    multiply_half(d, w[0].words[h], w[1].words[h], b[h]);
#else
    multiply_bytes(d, {w[0].words[0], w[1].words[0], w[0].words[1], w[1].words[1]}, b);
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) of[i] = __int_as_float(d[i]) - 12582912.0f;
#endif
}

// Adds the products of a group with its inputs to the sums of its class: rows lane / 4 and 8 more
// of the tile with rows 2 (lane % 4) and the next of x.
__device__ __forceinline__ void multiply_group(const Codes (&w)[2], const Scales (&scales)[2], const Lane& lane, const InputTile* x,
                                               float (&sums)[4]) {
    uint2 b = *(const uint2*)((const u8*)x + lane.codes);
    uint4 of_rows = *(const uint4*)((const u8*)x + lane.scales);
    const float x_scale[2] = {__uint_as_float(of_rows.x), __uint_as_float(of_rows.y)};
    const u32 x_sums[2] = {of_rows.z, of_rows.w};
    float of[SCALES][4];
#pragma unroll
    for (u32 h = 0; h < SCALES; h++) dots(w, {b.x, b.y}, x_sums, h, of[h]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const Scales& s = scales[i / 2];
        u32 both = x_sums[i % 2];
#if HAS_HALVES
        sums[i] = add_product(sums[i], s.scale, s.min, x_scale[i % 2], {of[0][i], of[1][i]},
                              {(float)(short)both, (float)((int)both >> 16)});
#else
        sums[i] = add_product(sums[i], s.scale, s.min, x_scale[i % 2], {of[0][i]}, {__uint_as_float(both)});
#endif
    }
}

// Returns the class, of a warp's four, of a group of a stage.
__device__ constexpr u32 class_of(u32 i) {
    return !IS_IN_EIGHTS ? i : TYPE == Q6_K ? i / 4 * 2 + i % 2 : i / 2;
}

// Adds the products of a stage, of whose groups `n` exist.
template <bool IS_WHOLE>
__device__ __forceinline__ void multiply_stage(const MatmulParams& p, const u8* stage, u32 quad, const Lane& lane, u32 n,
                                               const InputTile* x, u32 kept, float (&sums)[CLASSES][ROW_TILES][4]) {
    u32 t = lane.t, first = STAGE_GROUPS * quad, last = IS_WHOLE ? STAGE_GROUPS - 1 : n - 1;
    const u8* rows[2] = {stage + lane.words, stage + lane.words + 8 * PITCH};
    u32 behind = CODE_BYTES + (MOVED == 0 ? 0 : MOVED * (first / BLOCK_GROUPS) % 4);
    Scales of[STAGE_GROUPS / 4][2];
#pragma unroll
    for (u32 j = 0; j < STAGE_GROUPS / 4; j++) {
        u32 i = min(4 * j + t, last);
#pragma unroll
        for (u32 f = 0; f < 2; f++) of[j][f] = read_scales(rows[f], rows[f] + behind, i, (first + i) % 8, p.book);
    }
#pragma unroll
    for (u32 i = 0; i < STAGE_GROUPS; i++) {
        if (!IS_WHOLE && i >= n) break;
        Codes w[2];
        Scales scales[2];
#pragma unroll
        for (u32 f = 0; f < 2; f++) {
            w[f] = read_codes(rows[f], i, t, p.book);
            scales[f] = scales_of_lane(of[i / 4][f], i % 4);
        }
#pragma unroll
        for (u32 r = 0; r < ROW_TILES; r++) multiply_group(w, scales, lane, x + r * kept + i, sums[class_of(i)][r]);
    }
}

// Writes the sum of a warp's classes.
__device__ __forceinline__ void put_sums(const float (&of)[CLASSES][ROW_TILES][4], float* to) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 feature = lane / 4 + i / 2 * 8, row = 8 * r + lane % 4 * 2 + i % 2;
            to[SUMS_PITCH * row + feature] = (of[0][r][i] + of[1][r][i]) + (of[2][r][i] + of[3][r][i]);
        }
    }
}

// Returns the sum of `n` sums of neighbouring classes, a power of two of at most eight.
template <typename Load>
__device__ __forceinline__ float add_tree(u32 n, Load load) {
    float of[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) of[i] = i < n ? load(i) : 0.0f;
#pragma unroll
    for (u32 step = 1; step < 8; step *= 2) {
#pragma unroll
        for (u32 i = 0; i < 8; i += 2 * step) {
            if (i + step < n) of[i] += of[i + step];
        }
    }
    return of[0];
}

// Writes a result: `own` is the product of the only matrix, or of U, `other` then that of W.
__device__ __forceinline__ void write_result(const MatmulParams& p, const Tile& tile, u32 feature, u32 row, float other, float own) {
    const MatrixParams& matrix = tile.matrix;
    BlockRows rows = block_rows(p, matrix, ROWS);
    u32 out = tile.first + feature;
    if (out >= matrix.n_out || row >= rows.n) return;
    float factor = p.factors ? p.factors[x_row(p, rows.first + row)] : 1.0f;
    float* to = matrix.y + y_row(p, rows.first + row) * matrix.n_out + out;
    const float* bias = p.up ? p.up_bias : matrix.bias;
    own = __fmul_rn(factor, own) + (bias ? bias[rows.bias_offset + out] : 0.0f);
    if (p.up) {
        other = __fmul_rn(factor, other) + (matrix.bias ? matrix.bias[rows.bias_offset + out] : 0.0f);
        *to = gated(p.activation, p.limit, other, own);
    } else {
        *to = (matrix.accumulate ? *to : 0.0f) + own;
    }
}

// The sums of each split of a tile, of W and of U: [rows / ROWS][tiles][2][splits][ROWS][FEATURES].
__device__ __forceinline__ float* share_of(const MatmulParams& p, const Rounds& rounds, u32 tile, u32 is_up, u32 split) {
    size_t of_tile = (size_t)blockIdx.y * rounds.tiles + tile;
    return p.shares + ((of_tile * 2 + is_up) * p.splits + split) * (ROWS * FEATURES);
}

// Orders the writes visible to this thread before its later writes, for all blocks.
__device__ __forceinline__ void order_for_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Returns whether the other blocks that share this one's tiles have written their sums; if so, the
// threads of this block see them.
__device__ __forceinline__ bool is_last(const MatmulParams& p) {
    __shared__ u32 is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        order_for_device();
        is_last = atomicInc(p.counters + (blockIdx.y * gridDim.x + blockIdx.x) / p.splits, p.splits - 1) == p.splits - 1;
        order_for_device();
    }
    __syncthreads();
    return is_last;
}

// Adds the splits' sums of all tiles of a block.
__device__ __forceinline__ void join_splits(const MatmulParams& p, const Rounds& rounds) {
    for (u32 tile = rounds.first * p.splits; tile < min(rounds.last * p.splits, rounds.tiles); tile++) {
        for (u32 i = threadIdx.x; i < ROWS * FEATURES; i += blockDim.x) {
            float of[2] = {0.0f, 0.0f};
            for (u32 pass = 0; pass < (p.up ? 2 : 1); pass++) {
                of[0] = of[1];
                of[1] = add_tree(p.splits, [&](u32 split) { return __ldcg(share_of(p, rounds, tile, pass, split) + i); });
            }
            write_result(p, tile_of(p, tile), i % FEATURES, i / FEATURES, of[0], of[1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) skinny_q8(const __grid_constant__ MatmulParams p) {
    u32 warp = threadIdx.x / 32, quads = WARPS / p.splits, split = blockIdx.x % p.splits;
    Sums* all = (Sums*)shared;  // two, used in turn
    u8* ring = (u8*)shared + in_register(2 * sizeof(Sums) + warp * (STAGES * STAGE_BYTES));
    InputTile* inputs = (InputTile*)((u8*)(all + 2) + WARPS * STAGES * STAGE_BYTES);
    // The previous kernel selects the experts, so their weights cannot be loaded before it ends.
    if (p.expert_tiles) wait_for_kernel_before();
    BlockRows rows = block_rows(p, p.matrices[0], ROWS);
    if (rows.n == 0) return;
    Place place = place_of(p);
    Lane lane = this_lane();
    Rounds rounds = rounds_of(p);
    u32 kept = kept_tiles(p), of_window = in_register(WINDOW / p.splits);
    LoadCursor cursor = {rounds.first, false, false, 0, nullptr, nullptr};
    cursor.enter_tile(p, rounds, place);
    for (u32 i = 0; i + 1 < STAGES; i++) load_async(p, rounds, place, lane, cursor, ring + i * STAGE_BYTES);

    // Loads of weights are in flight while it ends.
    wait_for_kernel_before();
    if (p.expert_tiles) gather_inputs(p, rows, inputs);
    else load_inputs(p, inputs);
    wait_copies<0>();
    __syncthreads();

    const InputTile* x = inputs + STAGE_GROUPS * (place.quad % quads);
    u32 read = 0, fill = (STAGES - 1) * STAGE_BYTES, buffer = 0;
    for (u32 round = rounds.first; round < rounds.last; round++) {
        bool has_tile = round * p.splits + place.tile < rounds.tiles;
        float other = 0.0f, own = 0.0f;  // of W and of U
        for (u32 pass = 0; pass < (p.up ? 2 : 1); pass++) {
            float sums[CLASSES][ROW_TILES][4] = {};
            const InputTile* of_stage = x;
            for (int left = has_tile ? (int)(p.n_in / 32) : 0; left > 0; left -= WINDOW, of_stage += of_window) {
                wait_copies<STAGES - 2>();
                __syncwarp();
                load_async(p, rounds, place, lane, cursor, ring + fill);
                int n = left - (int)(STAGE_GROUPS * place.quad);
                if (n >= (int)STAGE_GROUPS) multiply_stage<true>(p, ring + read, place.quad, lane, n, of_stage, kept, sums);
                else if (n > 0) multiply_stage<false>(p, ring + read, place.quad, lane, n, of_stage, kept, sums);
                fill = read;
                read = read == (STAGES - 1) * STAGE_BYTES ? 0 : read + STAGE_BYTES;
            }
            put_sums(sums, all[buffer][warp]);
            __syncthreads();
            // A thread has one element of each tile.
            u32 row = threadIdx.x / FEATURES, feature = threadIdx.x % FEATURES;
            u32 tiles = min(p.splits, rounds.tiles - round * p.splits);
            for (u32 tile = 0; tile < tiles && row < ROWS; tile++) {
                const float* of_tile = all[buffer][tile * quads] + SUMS_PITCH * row + feature;
                float sum = add_tree(quads, [&](u32 i) { return of_tile[i * (ROWS * SUMS_PITCH)]; });
                other = own, own = sum;
                if (p.splits > 1) share_of(p, rounds, round * p.splits + tile, pass, split)[threadIdx.x] = sum;
            }
            buffer ^= 1;
        }
        if (p.splits == 1 && threadIdx.x < ROWS * FEATURES) {
            write_result(p, tile_of(p, round), threadIdx.x % FEATURES, threadIdx.x / FEATURES, other, own);
        }
    }
    if (p.splits > 1 && is_last(p)) join_splits(p, rounds);
}
