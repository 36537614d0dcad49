// Equal shares of a launch's products for its blocks (stream-K, Osama et al., arXiv 2301.03598).
//
// A launch takes as many steps of STEP inputs as its tiles have together, tile after tile, and
// block b of B has steps n b / B to n (b + 1) / B: all blocks end at about the same time, however
// few tiles there are. Blocks that share a tile write their sums to memory, and the last one adds
// them in the order of the inputs. Who that is does not matter: the bits of a sum depend on the
// shapes and on the number of blocks only.

#pragma once

#include "weights.cuh"

// The features of a matrix from `feature` on, and the `rows` rows of inputs from `row` on.
struct Tile {
    const MatrixParams& matrix;
    u32 feature, row, rows;
    size_t w_offset;     // of an expert's weights, in bytes
    size_t bias_offset;  // of its biases
};

// A part of a tile: steps `first` to `last`.
struct Span {
    u32 tile, first, last;
};

// The tiles of TILE_FEATURES features and TILE_ROWS rows of a launch. Concurrent blocks take few
// features of many rows, or else each tile of rows would read the same weights from memory again:
// tiles are counted by rows first, in bands of 1,024 rows. With experts, a tile of rows is one of
// theirs.
template <u32 TILE_FEATURES, u32 TILE_ROWS>
struct Tiles {
    const MatmulParams& p;
    u32 across, down;  // tiles of features, of all matrices, and of rows

    __device__ explicit Tiles(const MatmulParams& p) : p(p), across(0) {
        for (u32 i = 0; i < p.n_matrices; i++) across += p.matrices[i].blocks;
        // With experts, each block has a tile.
        down = p.expert_tiles ? gridDim.x / across : (p.rows + TILE_ROWS - 1) / TILE_ROWS;
    }

    __device__ u32 count() const { return across * down; }

    __device__ Tile operator[](u32 number) const {
        constexpr u32 BAND = 1024 / TILE_ROWS;
        u32 band = number / (BAND * across), rest = number % (BAND * across);
        u32 height = min(BAND, down - BAND * band), block = rest / height, matrix = 0;
        u32 y = BAND * band + rest % height;
        while (matrix + 1 < p.n_matrices && block >= p.matrices[matrix].blocks) block -= p.matrices[matrix++].blocks;
        const MatrixParams& of = p.matrices[matrix];
        if (!p.expert_tiles) return {of, TILE_FEATURES * block, TILE_ROWS * y, min(p.rows - TILE_ROWS * y, TILE_ROWS), 0, 0};
        ExpertTile slots = p.expert_tiles[y];
        return {of, TILE_FEATURES * block, slots.first, slots.n, (size_t)p.expert_bytes * slots.expert, (size_t)of.n_out * slots.expert};
    }
};

// The steps of all tiles, and the blocks that take them: one for each tile, or so few that both
// numbers' product fits 32 bits.
struct Shares {
    u32 of_tile, steps, blocks;
    bool is_whole;

    __device__ Shares(const MatmulParams& p, u32 tiles)
        : of_tile((p.n_in + STEP - 1) / STEP), steps(tiles * of_tile), blocks(gridDim.x), is_whole(blocks == tiles) {}

    __device__ u32 begin(u32 block) const { return is_whole ? of_tile * block : steps * block / blocks; }

    // Returns the block that takes a step.
    __device__ u32 block_of(u32 step) const { return ((step + 1) * blocks - 1) / steps; }

    // Returns the part of a tile that begins with step `at` and ends by step `end`, both of all.
    __device__ Span span(u32 at, u32 end) const {
        u32 tile = at / of_tile, first = at % of_tile;
        return {tile, first, min(of_tile, first + end - at)};
    }
};

// Returns `value`, from which the compiler computes again what it would keep in registers.
__device__ inline u32 anew(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Orders the writes visible to this thread before its later writes, for all blocks.
__device__ inline void order_for_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Adds the sums of the blocks that share a tile, N of each of JOINING threads, which `meet` waits
// for. Returns whether this block has them: it is the last. Of a block's parts of tiles only one
// begins a tile without its end, and only one does not begin its tile.
template <u32 JOINING, u32 N, typename Meet>
__device__ inline bool join(const MatmulParams& p, const Shares& shares, const Span& span, float (&sums)[N], Meet meet) {
    if (span.last - span.first == shares.of_tile) return true;
    __shared__ u32 n_done;
    u32 start = span.tile * shares.of_tile;
    u32 first = shares.block_of(start), last = shares.block_of(start + shares.of_tile - 1);
    u32 thread = threadIdx.x % JOINING;
    auto part = [&](u32 block) { return (float4*)p.shares + (size_t)(2 * block + (block == first)) * (N / 4 * JOINING) + thread; };
    float4* own = part(blockIdx.x);
#pragma unroll
    for (u32 i = 0; i < N; i += 4) own[i / 4 * JOINING] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    meet();
    if (thread == 0) {
        order_for_device();
        n_done = atomicInc(p.counters + first, last - first);
        order_for_device();
    }
    meet();
    if (n_done < last - first) return false;
#pragma unroll
    for (u32 i = 0; i < N; i++) sums[i] = 0.0f;
#pragma unroll 1
    for (u32 block = first; block <= last; block++) {
        const float4* other = part(block);
#pragma unroll
        for (u32 i = 0; i < N; i += 4) {
            float4 four = __ldcg(other + i / 4 * JOINING);
            sums[i] += four.x, sums[i + 1] += four.y, sums[i + 2] += four.z, sums[i + 3] += four.w;
        }
    }
    return true;
}

// Writes the results of a warp: sums[f][r] are those of 16 features and eight rows as `mma` has
// them, of FEATURE_TILES and ROW_TILES of these from `feature` and `first_row` of the tile on.
template <u32 FEATURE_TILES, u32 ROW_TILES>
__device__ inline void write_sums(const MatmulParams& p, const Tile& tile, const float (&sums)[FEATURE_TILES * ROW_TILES * 4],
                                  u32 feature, u32 first_row) {
    const MatrixParams& matrix = tile.matrix;
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            u32 row = first_row + 8 * r + lane % 4 * 2 + e;
            if (row >= tile.rows) continue;
            float scale = p.factors[x_row(p, tile.row + row)] * matrix.unit;
            float* y = matrix.y + y_row(p, tile.row + row) * matrix.n_out;
#pragma unroll
            for (u32 f = 0; f < FEATURE_TILES; f++) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    u32 out = tile.feature + feature + 16 * f + lane / 4 + 8 * half;
                    if (out >= matrix.n_out) continue;
                    float sum = sums[4 * (ROW_TILES * f + r) + 2 * half + e] * scale;
                    if (matrix.bias) sum += matrix.bias[tile.bias_offset + out];
                    y[out] = matrix.accumulate ? y[out] + sum : sum;
                }
            }
        }
    }
}
