// Attention over compressed tiles, with tensor cores. The method is in mod.rs.
//
// A warp works on 16 queries and one tile of 16 tokens at a time, which it brings to shared memory.
//
// Macros: K_DIM, V_DIM (values per token as stored, multiples of 16), CAPPED (whether scores are).

#include "unpack.cuh"

constexpr u32 MAX_DIM = K_DIM > V_DIM ? K_DIM : V_DIM;
// Halves of a tile in shared memory: the larger of [16][dim + PAD] and [dim][16 + PAD]. Rows are 16 bytes off a multiple of
// 128, so that the eight rows of a matrix lie in different banks.
constexpr u32 STRIDE = TILE + PAD;
constexpr u32 TILE_HALVES = MAX_DIM * STRIDE;

// Scales of keys of turbo types, few beside their dims, wait for the scores: such keys are whole numbers, 1024 + byte, from which the
// scores take the rest. What centres add to scores is met once for each of them.
struct Room {
    static constexpr bool FINISHED = false;
    static __device__ u32 in_tokens(u32 dims, u32 token, u32 dim) { return token * (dims + PAD) + dim; }
    static __device__ u32 in_dims(u32 dim, u32 token) { return dim * STRIDE + token; }
};

// Keys of turbo types have a scale for each of these blocks. (Others may be of a width that leaves 16 dims at the end.)
constexpr u32 K_BLOCKS = n_blocks(TURBO2, K_DIM);

// Sixteen queries and what they have seen. A lane has rows lane / 4 and lane / 4 + 8.
struct Work {
    u32 q[K_DIM / 16][4];
    float q_sum[K_BLOCKS][2];  // of the blocks: what 1 too much in every key adds
    const u16* centre;         // of the block of the last keys, or null
    float met[2];              // what it adds to the scores
    float out[V_DIM / 8][4];
    float max[2];
    float sum[2];
};

__device__ float half_sum(u32 pair) { return from_half(pair & 0xffff) + from_half(pair >> 16); }

__device__ void begin(Work& w, const u16* queries, u32 lane) {
    u32 row = lane / 4, col = 2 * (lane % 4);
    for (u32 block = 0; block < K_BLOCKS; block++) w.q_sum[block][0] = w.q_sum[block][1] = 0.0f;
#pragma unroll
    for (u32 k = 0; k < K_DIM / 16; k++) {
        for (u32 r = 0; r < 4; r++) {
            const u16* at = queries + (row + 8 * (r % 2)) * K_DIM + 16 * k + col + 8 * (r / 2);
            w.q[k][r] = *(const u32*)at;
            w.q_sum[block_at(TURBO2, K_DIM, 16 * k).index][r % 2] += half_sum(w.q[k][r]);
        }
    }
    for (u32 block = 0; block < K_BLOCKS; block++) {
        for (int half = 0; half < 2; half++) {
            float& sum = w.q_sum[block][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
    }
    for (u32 n = 0; n < V_DIM / 8; n++) {
        for (u32 r = 0; r < 4; r++) w.out[n][r] = 0.0f;
    }
    w.centre = nullptr;
    w.met[0] = w.met[1] = 0.0f;
    w.max[0] = w.max[1] = HIDDEN;
    w.sum[0] = w.sum[1] = 0.0f;
}

// Meets the centre of the keys that come next, which is that of the last ones most often. As right operand it has eight equal
// columns, so that every lane gets the products of its rows.
__device__ void meet(Work& w, const u16* centre, u32 lane) {
    if (centre == w.centre) return;
    float met[4] = {};
    if (centre) {
#pragma unroll
        for (u32 k = 0; k < K_DIM / 16; k++) {
            const u32* at = (const u32*)(centre + 16 * k) + lane % 4;
            multiply(met, w.q[k], __ldg(at), __ldg(at + 4));
        }
    }
    w.centre = centre, w.met[0] = met[0], w.met[1] = met[2];
}

// Scores of the queries with the keys of a tile, whose centre they have met: s[n][..] of tokens 8 n + 2 (lane mod 4) and the next, as `mma` has them.
__device__ void scores(const Work& w, const AttendParams& p, const Tile& tile, const u16* keys, float s[2][4], u32 lane) {
    u32 row = lane % 8, matrix = lane / 8;
    for (u32 n = 0; n < 2; n++) {
        for (u32 r = 0; r < 4; r++) s[n][r] = w.met[r / 2];
    }
    float raw[2][4] = {};
#pragma unroll
    for (u32 k = 0; k < K_DIM / 16; k++) {
        Dims block = block_at(TURBO2, K_DIM, 16 * k);
        u32 m[4];
        if (is_coded(tile.type)) {
            load_matrices(m, keys + (row + 8 * (matrix / 2)) * (K_DIM + PAD) + 16 * k + 8 * (matrix % 2), false);
        } else {
            // Rows are dims: matrices (dims 0..8, tokens 0..8), (dims 8.., tokens 0..), then tokens 8..16.
            load_matrices(m, keys + (16 * k + row + 8 * (matrix % 2)) * STRIDE + 8 * (matrix / 2), true);
        }
        multiply(raw[0], w.q[k], m[0], m[1]);
        multiply(raw[1], w.q[k], m[2], m[3]);
        if (16 * (k + 1) < K_DIM && 16 * (k + 1) < block.first + block.n) continue;
        for (u32 n = 0; n < 2; n++) {
            float2 scale = make_float2(1.0f, 1.0f);
            float excess = 0.0f;
            if (is_turbo(tile.type)) {
                const Book& book = p.books[tile.type];
                const u8* start = tile.at + block_byte(tile.type, block.index, block.first);
                scale = two_scales(start, 8 * n + 2 * (lane % 4), book.step);
                excess = 1024.0f + book.bias;
            }
            for (u32 half = 0; half < 2; half++) {
                float less = excess * w.q_sum[block.index][half];
                s[n][2 * half] += (raw[n][2 * half] - less) * scale.x;
                s[n][2 * half + 1] += (raw[n][2 * half + 1] - less) * scale.y;
                raw[n][2 * half] = raw[n][2 * half + 1] = 0.0f;
            }
        }
    }
}
// Turns scores into weights relative to the new maximum, and joins them to what came before.
__device__ void soften(const Common& c, Work& w, float s[2][4], u32 first_token, bool is_main, const Sight& sight,
                       u32 lane) {
    u32 col = first_token + 2 * (lane % 4);
    for (int half = 0; half < 2; half++) {
        float most = HIDDEN;
        u32 from = sight.first(is_main, half), to = sight.last(is_main, half);
        bool is_cut = first_token < from || first_token + TILE > to;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                float& x = s[n][2 * half + e];
                x = capped(c, x);
                if (is_cut && (col + 8 * n + e < from || col + 8 * n + e >= to)) x = HIDDEN;
                most = fmaxf(most, x);
            }
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        float before = w.max[half], max = fmaxf(before, most);
        float sum = 0.0f;
        for (int n = 0; n < 2; n++) {
            for (int e = 0; e < 2; e++) {
                float& x = s[n][2 * half + e];
                // A hidden token counts nothing even where no other is visible yet.
                x = x == HIDDEN ? 0.0f : power_of_two(x - max + LIFT);
                sum += x;
            }
        }
        if (max != before) {
            float keep = power_of_two(before - max);
            w.max[half] = max;
            w.sum[half] *= keep;
            for (u32 n = 0; n < V_DIM / 8; n++) w.out[n][2 * half] *= keep, w.out[n][2 * half + 1] *= keep;
        }
        w.sum[half] += sum;
    }
}

// Adds the values of a tile, weighted.
__device__ void mix(Work& w, const Tile& tile, const u16* values, const float s[2][4], u32 lane) {
    u32 row = lane % 8, matrix = lane / 8, weights[4];
    for (u32 r = 0; r < 4; r++) weights[r] = pack_halves(s[r / 2][2 * (r % 2)], s[r / 2][2 * (r % 2) + 1]);
#pragma unroll
    for (u32 n = 0; n < V_DIM / 16; n++) {
        u32 m[4];
        if (is_coded(tile.type)) {
            load_matrices(m, values + (16 * n + row + 8 * (matrix / 2)) * STRIDE + 8 * (matrix % 2), false);
        } else {
            load_matrices(m, values + (row + 8 * (matrix % 2)) * (V_DIM + PAD) + 16 * n + 8 * (matrix / 2), true);
        }
        multiply(w.out[2 * n], weights, m[0], m[1]);
        multiply(w.out[2 * n + 1], weights, m[2], m[3]);
    }
}

// Sums over the tokens, of which each lane of four has seen a share.
__device__ void finish_sums(Work& w) {
    for (int half = 0; half < 2; half++) {
        w.sum[half] += __shfl_xor_sync(~0u, w.sum[half], 1);
        w.sum[half] += __shfl_xor_sync(~0u, w.sum[half], 2);
    }
}

__device__ void write_share(const Common& c, const Slot& slot, const Work& w, u32 split, u32 first_query, u32 lane) {
    size_t base = slot.share(split, first_query);
    for (u32 half = 0; half < 2; half++) {
        u32 row = lane / 4 + 8 * half;
        float* out = c.share + (base + row) * V_DIM + 2 * (lane % 4);
        for (u32 n = 0; n < V_DIM / 8; n++) {
            *(float2*)(out + 8 * n) = make_float2(w.out[n][2 * half], w.out[n][2 * half + 1]);
        }
        if (lane % 4 == 0) *(float2*)(c.state + 2 * (base + row)) = make_float2(w.max[half], w.sum[half]);
    }
}

// Few queries: every warp takes every fourth tile of the split for the same 16 queries; their shares are joined in the order
// of the warps. Grid: splits, blocks of 16 queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) attend_split(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, first_query = blockIdx.y * QUERIES;
    Slot slot(p.c, blockIdx.z);
    if (split >= slot.part.splits || first_query >= slot.n_queries(p.c)) return;
    View keys = keys_of(p.c, slot), values = values_of(p.c, slot);
    u16* unpacked = (u16*)shared + warp * TILE_HALVES;
    Sight sight(p.c, slot, first_query, lane);
    u32 last_query = min(first_query + QUERIES, slot.n_queries(p.c)) - 1;
    Walk walk = walk_of(p.c, slot.part, first_query / p.c.group, last_query / p.c.group);
    u32 end = min(walk.n, (split + 1) * slot.part.split_tiles);
    Work w;
    begin(w, p.c.queries + slot.query(first_query) * K_DIM, lane);
    for (u32 i = split * slot.part.split_tiles + warp; i < end; i += WARPS) {
        u32 index = walk.tile(i), next = walk.tile(i + WARPS);
        bool is_main = walk.is_main(i);
        Tile key = keys.tile(index, is_main), value = values.tile(index, is_main);
        if (i + WARPS < end) {
            fetch_tile(keys.tile(next, walk.is_main(i + WARPS)), lane);
            fetch_tile(values.tile(next, walk.is_main(i + WARPS)), lane);
        }
        float s[2][4];
        load_tile<Room, true, K_DIM>(p, key, nullptr, unpacked, lane);
        meet(w, keys.centre(index, key), lane);
        __syncwarp();
        scores(w, p, key, unpacked, s, lane);
        soften(p.c, w, s, index * TILE, is_main, sight, lane);
        __syncwarp();
        load_tile<Room, false, V_DIM>(p, value, nullptr, unpacked, lane);
        __syncwarp();
        mix(w, value, unpacked, s, lane);
        __syncwarp();
    }
    finish_sums(w);
    // Joined by halves: warps 2 and 3 hand over to 0 and 1, then 1 to 0.
    float* hand = (float*)shared;
    constexpr u32 SHARE = V_DIM / 2 + HAND_STATE;  // floats of a lane
    __syncthreads();
    for (u32 step = WARPS / 2; step > 0; step /= 2) {
        if (warp >= step && warp < 2 * step) {
            float* to = hand + (warp - step) * 32 * SHARE + lane;
            for (u32 n = 0; n < V_DIM / 8; n++) {
                for (u32 r = 0; r < 4; r++) to[32 * (4 * n + r)] = w.out[n][r];
            }
            for (u32 half = 0; half < 2; half++) {
                to[32 * (V_DIM / 2 + half)] = w.max[half];
                to[32 * (V_DIM / 2 + 2 + half)] = w.sum[half];
            }
        }
        __syncthreads();
        if (warp < step) {
            const float* from = hand + warp * 32 * SHARE + lane;
            for (u32 half = 0; half < 2; half++) {
                float other = from[32 * (V_DIM / 2 + half)], max = fmaxf(w.max[half], other);
                float mine = exp2f(w.max[half] - max), theirs = exp2f(other - max);
                w.max[half] = max;
                w.sum[half] = w.sum[half] * mine + from[32 * (V_DIM / 2 + 2 + half)] * theirs;
                for (u32 n = 0; n < V_DIM / 8; n++) {
                    for (u32 e = 2 * half; e < 2 * half + 2; e++) {
                        w.out[n][e] = w.out[n][e] * mine + from[32 * (4 * n + e)] * theirs;
                    }
                }
            }
        }
        __syncthreads();
    }
    if (warp == 0) write_share(p.c, slot, w, split, first_query, lane);
}

// Many queries: the warps of a block take 16 queries each and share tiles, four at a time, each brought by one warp.
// Grid: splits, blocks of 64 queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) attend_many(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(16) u8 shared[];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 split = blockIdx.x, block_query = blockIdx.y * QUERIES * WARPS;
    u32 first_query = block_query + warp * QUERIES;
    Slot slot(p.c, blockIdx.z);
    if (split >= slot.part.splits || block_query >= slot.n_queries(p.c)) return;
    View keys = keys_of(p.c, slot), values = values_of(p.c, slot);
    u16* key_tiles = (u16*)shared;
    u16* value_tiles = key_tiles + WARPS * TILE_HALVES;
    Sight sight(p.c, slot, first_query, lane);
    u32 last_query = min(block_query + QUERIES * WARPS, slot.n_queries(p.c)) - 1;
    Walk walk = walk_of(p.c, slot.part, block_query / p.c.group, last_query / p.c.group);
    u32 end = min(walk.n, (split + 1) * slot.part.split_tiles);
    Work w;
    begin(w, p.c.queries + slot.query(first_query) * K_DIM, lane);
    for (u32 step = split * slot.part.split_tiles; step < end; step += WARPS) {
        u32 mine = step + warp, next = mine + WARPS;
        if (next < end) {
            fetch_tile(keys.tile(walk.tile(next), walk.is_main(next)), lane);
            fetch_tile(values.tile(walk.tile(next), walk.is_main(next)), lane);
        }
        if (mine < end) {
            Tile key = keys.tile(walk.tile(mine), walk.is_main(mine)), value = values.tile(walk.tile(mine), walk.is_main(mine));
            load_tile<Room, true, K_DIM>(p, key, nullptr, key_tiles + warp * TILE_HALVES, lane);
            load_tile<Room, false, V_DIM>(p, value, nullptr, value_tiles + warp * TILE_HALVES, lane);
        }
        __syncthreads();
        for (u32 i = 0; i < WARPS && step + i < end; i++) {
            u32 index = walk.tile(step + i);
            bool is_main = walk.is_main(step + i);
            if (!sight.sees(index * TILE, is_main)) continue;
            Tile key = keys.tile(index, is_main);
            meet(w, keys.centre(index, key), lane);
            float s[2][4];
            scores(w, p, key, key_tiles + i * TILE_HALVES, s, lane);
            soften(p.c, w, s, index * TILE, is_main, sight, lane);
            mix(w, values.tile(index, is_main), value_tiles + i * TILE_HALVES, s, lane);
        }
        __syncthreads();
    }
    finish_sums(w);
    write_share(p.c, slot, w, split, first_query, lane);
}
