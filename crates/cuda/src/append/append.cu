// Writes new keys and values: norm and RoPE of the keys, channel scales, padding, rotation, and
// encoding of whole tiles. The method is that of kvant-codec, with the same bits. The queries get
// their norm and RoPE in the same launch, as they use the same angles.
//
// The host plans the work and its order: a list of tile writes for each sequence and kind of KV
// tensor, in chains. One block of four warps writes the tiles of one chain of one tensor in
// sequence; a warp takes every fourth token. A tile that leaves the tail ring and the new one that
// takes its slot belong to one chain. Blocks beyond those apply RoPE to the queries, one warp per
// head. A preceding kernel sets the centres of blocks.
//
// A decode step waits for the slowest warp of each layer, which has one row, so the loads of a row
// come before what needs them, and the grid has the work's own axes, without divisions.

#include "encode.cuh"
#include "rope.cuh"
#include "rotate.cuh"
#include "tile.cuh"

constexpr u32 THREADS = 32 * WARPS;
static_assert(THREADS == SPAN, "a thread sums one dim");

struct AppendTensor {
    Offsets at;
    Spec spec;
    float alpha;      // factor on values encoded into main tiles
    u16 plan;         // index, among the plans of each sequence, of its own
    u8 rotates;
    // whether its tiles have the layout of keys; those of shared-KV tensors have not
    u8 as_keys;
};

struct AppendSequence {
    Memory memory;
    const float* balance;  // channel scales of its layer, or null
    u32 first_row;         // among the tokens of the step
    u32 plans;            // its first plan in the list
};

// An entry of the list, which is in the parameters if it is short and in memory otherwise: the
// writes of a step to tensors of one kind,
struct Plan {
    u32 first;        // of its tiles in the list: the heads of the chains, then the others
    u32 chains;
    StepTiles step_tiles;
};
// the write of one tile,
struct Write {
    u32 tile;
    // destination; 4: also to the step tiles; from 8 on: the next write of the chain, 0 for none
    u32 flags;
    u32 slots;        // bytes: first and end slots read from the tail, and of new tokens
    u32 first_row;    // first new token, among those of the sequence
};

// and a centre to set: the mean of the rows of two tiles, from the first slot of the first on.
struct Centre {
    u32 tile;
    u32 plan;         // sequence times MAX_KINDS, plus the index of its plan
    u32 rows;
    u32 start;        // tokens before this one are in the tail
};

struct AppendParams {
    // keys of the heads, then their values where they are stored separately
    AppendTensor tensors[2 * MAX_HEADS];
    AppendSequence sequences[MAX_SEQUENCES];
    uint4 inline_entries[MAX_INLINE_ENTRIES];  // the list, when `entries` is null
    const uint4* entries;
    const AppendSequence* listed;  // the sequences, or null if they are in `sequences`
    HeadRope k_rope;
    HeadRope q_rope;
    float* q;                     // [rows, n_query_heads * k_head_dim]
    const float* k;               // [rows, n_kv_heads * k_head_dim]
    const float* v;               // [rows, n_kv_heads * v_head_dim]
    u32 rows;                     // tokens of all sequences, for the RoPE of queries in this launch
    u32 n_query_heads;            // 0 without queries
    u32 n_sequences;
    u32 n_heads;                  // of this launch
    u32 first_head;
    u32 n_kv_heads;
    u32 head_dims[2];
    // offsets in the channel scales: factors on keys, on values, and shifts of values
    u32 balance_at[3];
    u32 first_centre;             // in the list
    u32 before[4];                // signs of the rotation, bit i for value i of a slice
    u32 after[4];
    float levels[N_BOOKS][MAX_LEVELS];  // centroids of turbo2, turbo3, turbo4
    float mids[N_BOOKS][MAX_LEVELS];    // decision boundaries for unit variance
};

__device__ inline uint4 listed(const AppendParams& p, u32 index) { return p.entries ? p.entries[index] : p.inline_entries[index]; }

__device__ inline AppendSequence sequence_of(const AppendParams& p, u32 index) {
    if (p.listed) return p.listed[index];
    return p.sequences[index];
}

// Returns the group of the code of (slot, dim of the block) and its index in the group.
__device__ void code_position(bool as_keys, u32 slot, u32 dim, u32& group, u32& j) {
    group = as_keys ? dim / 4 : dim / 16 * 4 + slot / 4;
    j = as_keys ? 4 * slot + dim % 4 : 4 * (dim % 16) + slot % 4;
}

__device__ u8 stored_code(u32 type, const u8* planes, u32 dims, u32 group, u32 j) {
    switch (layout_of(type)) {
        case Q8_0: return planes[Q8_0_GROUP * group + j];
        case TURBO2: return planes[TURBO2_GROUP * group + j % 16] >> (2 * (j / 16)) & 3;
        case TURBO3:
            return (planes[TURBO2_GROUP * group + j % 16] >> (2 * (j / 16)) & 3) |
                   (planes[high_planes(dims) + HIGH_GROUP * group + j / 8] >> (j % 8) & 1) << 2;
        default: return planes[NIBBLES_GROUP * group + j % 32] >> (4 * (j / 32)) & 15;
    }
}

// Returns one byte of a block's planes, from the codes of the tile `[16][dim]`.
__device__ u8 plane_byte(u32 type, bool as_keys, const u8* codes, u32 dim, const Dims& block, u32 byte) {
    auto code = [&](u32 group, u32 j) -> u32 {
        u32 slot = as_keys ? j / 4 : group % 4 * 4 + j % 4;
        u32 at = as_keys ? 4 * group + j % 4 : group / 4 * 16 + j / 4;
        return codes[slot * dim + block.first + at];
    };
    switch (layout_of(type)) {
        case Q8_0: return (u8)code(byte / Q8_0_GROUP, byte % Q8_0_GROUP);
        case TURBO2:
        case TURBO3: {
            u32 value = 0;
            if (byte < high_planes(block.n)) {
                u32 group = byte / TURBO2_GROUP, first = byte % TURBO2_GROUP;
                for (u32 i = 0; i < 4; i++) value |= (code(group, first + 16 * i) & 3) << (2 * i);
            } else {
                u32 high = byte - high_planes(block.n), group = high / HIGH_GROUP, first = high % HIGH_GROUP * 8;
                for (u32 i = 0; i < 8; i++) value |= (code(group, first + i) >> 2) << i;
            }
            return (u8)value;
        }
        default: {
            u32 group = byte / NIBBLES_GROUP, first = byte % NIBBLES_GROUP;
            return (u8)(code(group, first) | code(group, first + 32) << 4);
        }
    }
}

// Returns the index of a float in a float tile.
__device__ u32 float_index(bool as_keys, u32 slot, u32 dim_of, u32 dim) {
    return as_keys ? dim_of * TILE + slot : slot * dim + dim_of;
}

// One KV tensor of a sequence.
struct Target {
    const AppendTensor& s;
    const AppendSequence& sequence;
    StepTiles step_tiles;
    u32 head;
    bool is_key;
};

// A new row, after norm, RoPE, channel scales, clamping and padding. One that is not new has no
// norm, whose factor takes a wait for the row.
struct Row {
    const HeadRope* rope;     // null without RoPE and norm
    const float* values;
    const float* angles;
    const float* scale;   // channel scales, or null
    const float* shift;
    float factor;
    u32 head_dim;

    __device__ Row(const AppendParams& p, const Target& t, bool is_new, u32 row, u32 lane) {
        head_dim = p.head_dims[t.is_key ? 0 : 1];
        values = (t.is_key ? p.k : p.v) + ((size_t)row * p.n_kv_heads + t.head) * head_dim;
        rope = is_new && t.is_key && p.k_rope.is_on ? &p.k_rope : nullptr;
        angles = rope ? rope->angles + (size_t)row * rope->n_rot : nullptr;
        u32 column = t.head * head_dim;
        scale = balance_head(t.sequence.balance, p.balance_at[t.is_key ? 0 : 1], column);
        shift = t.is_key ? nullptr : balance_head(t.sequence.balance, p.balance_at[2], column);
        factor = rope ? norm_factor(*rope, values, head_dim, lane) : 1.0f;
    }

    __device__ Quad four(u32 at) const {
        Quad q = loaded(values, at, 0.0f), by = loaded(scale, at, 1.0f), shifts = loaded(shift, at, 0.0f);
        if (rope) {
            Quad other, cosines, sines, gain = loaded(rope->weight, at, 1.0f), other_gain;
            bool is_first[4], is_rotated[4];
            for (u32 i = 0; i < 4; i++) {
                u32 partner, pair;
                is_rotated[i] = at + i < rope->n_rot;
                is_first[i] = pair_of(*rope, at + i, partner, pair);
                other.x[i] = is_rotated[i] ? values[partner] : 0.0f;
                cosines.x[i] = is_rotated[i] ? angles[2 * pair] : 0.0f;
                sines.x[i] = is_rotated[i] ? angles[2 * pair + 1] : 0.0f;
                other_gain.x[i] = is_rotated[i] && rope->weight ? rope->weight[partner] : 1.0f;
            }
            for (u32 i = 0; i < 4; i++) {
                float a = normed(*rope, q.x[i], factor, gain.x[i]), b = normed(*rope, other.x[i], factor, other_gain.x[i]);
                float2 both = rotated(is_first[i] ? a : b, is_first[i] ? b : a, cosines.x[i], sines.x[i]);
                q.x[i] = !is_rotated[i] ? a : is_first[i] ? both.x : both.y;
            }
        }
        for (u32 i = 0; i < 4; i++) {
            if (scale) q.x[i] = __fmul_rn(q.x[i], by.x[i]);
            if (shift) q.x[i] = __fadd_rn(q.x[i], shifts.x[i]);
            q.x[i] = clamped(q.x[i], HALF_MAX);
        }
        return q;
    }

    // Returns four values of a list `[head_dim]`, or `otherwise` where there are none.
    __device__ Quad loaded(const float* list, u32 at, float otherwise) const {
        Quad q;
        for (u32 i = 0; i < 4; i++) q.x[i] = list && at + i < head_dim ? list[at + i] : otherwise;
        return q;
    }
};

// Writes four values of a float tile.
__device__ void store_floats(u32 type, bool as_keys, u8* tile, u32 slot, u32 dim, u32 at, const Quad& q) {
    for (u32 i = 0; i < 4 && at + i < dim; i++) {
        u32 to = float_index(as_keys, slot, at + i, dim);
        if (type == F32) {
            ((float*)tile)[to] = q.x[i];
        } else if (type == F16) {
            ((u16*)tile)[to] = to_half(clamped(q.x[i], HALF_MAX));
        } else {
            u16 bits;
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(q.x[i]));
            ((u16*)tile)[to] = bits;
        }
    }
}

// Returns four values of a token from `at` on, ready to encode: from slot `slot` of the tail tile
// `tail_tile`, or of a new row if that is null. Called by a whole warp.
__device__ Quad gather(const AppendParams& p, const Target& t, const Row& row, const u16* tail_tile, u32 slot, u32 at,
                       u32 lane) {
    u32 dim = t.s.spec.dim;
    if (tail_tile) {
        Quad q;
        u16 halves[4];
        for (u32 i = 0; i < 4; i++) halves[i] = at + i < dim ? tail_tile[float_index(t.s.as_keys, slot, at + i, dim)] : 0;
        for (u32 i = 0; i < 4; i++) q.x[i] = from_half(halves[i]);
        return q;
    }
    Quad q = row.four(at);
    // Slices of the rotation are as wide as the widest blocks.
    if (t.s.rotates) rotate(q.x, block_at(TURBO2, dim, at).n, p.before, p.after, lane);
    if (t.s.spec.tail_tiles > 0) {
        // Tokens in the tail are encoded from their f16 values, so tokens that skip the tail are
        // rounded to f16 too.
        for (u32 i = 0; i < 4; i++) q.x[i] = from_half(to_half(clamped(q.x[i], HALF_MAX)));
    }
    return q;
}

// Writes one tile. Called by the whole block.
__device__ void write_tile(const AppendParams& p, const Target& t, const Write& w, u8* shared) {
    __shared__ TrellisScratch scratch[WARPS];
    const AppendTensor& s = t.s;
    const Spec& spec = s.spec;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = spec.dim, location = w.flags % 4;
    u32 old = w.slots & 255, old_end = w.slots >> 8 & 255, first_new = w.slots >> 16 & 255, end = w.slots >> 24;
    u32 from = old < old_end ? old : first_new;
    u8* tile = tile_at(t.sequence.memory, spec, s.at, w.tile, location);
    u8* step_tiles = w.flags & 4 ? step_tile_at(t.sequence.memory, spec, s.at, t.step_tiles, w.tile) : nullptr;
    const u16* tail = old < old_end ? (const u16*)tile_at(t.sequence.memory, spec, s.at, w.tile, IN_TAIL) : nullptr;
    u32 type = location == IN_MAIN ? spec.type : F16;
    u32 blocks = is_coded(type) ? n_blocks(type, dim) : 0;
    u8* codes = shared;                             // [16][dim]
    u16* scales = (u16*)(shared + TILE * dim);      // [16][blocks]
    const u16* centre = is_coded(type) && spec.centres ? centre_of(spec, w.tile, tile) : nullptr;

    if (is_coded(type) && (from > 0 || end < TILE)) {
        // Decodes the codes of the tokens that stay; they are packed again below.
        for (u32 i = threadIdx.x; i < TILE * dim; i += THREADS) {
            u32 slot = i / dim, at = i % dim, group, j;
            Dims block = block_at(type, dim, at);
            const u8* bytes = tile + block_byte(type, block.index, block.first);
            code_position(t.s.as_keys, slot, at - block.first, group, j);
            codes[i] = stored_code(type, bytes + SCALE_BYTES, block.n, group, j);
            if (at == block.first) scales[slot * blocks + block.index] = ((const u16*)bytes)[slot];
        }
        __syncthreads();
    }
    for (u32 slot = from + warp; slot < end; slot += WARPS) {
        bool is_new = slot >= first_new;
        Row row(p, t, is_new, t.sequence.first_row + w.first_row + (is_new ? slot - first_new : 0), lane);
        for (u32 span = 0; span < dim; span += SPAN) {
            u32 at = span + 4 * lane;
            Dims block = block_at(type, dim, at);
            Quad q = gather(p, t, row, is_new ? nullptr : tail, slot, at, lane);
            if (step_tiles) store_floats(F16, t.s.as_keys, step_tiles, slot, dim, at, q);
            if (!is_new && location != IN_MAIN) continue;
            if (!is_coded(type)) {
                store_floats(type, t.s.as_keys, tile, slot, dim, at, q);
                continue;
            }
            if (centre && at < dim) {
                u16 centres[4];
                for (u32 i = 0; i < 4; i++) centres[i] = centre[at + i];
                for (u32 i = 0; i < 4; i++) q.x[i] = __fsub_rn(q.x[i], from_half(centres[i]));
            }
            for (u32 i = 0; i < 4; i++) q.x[i] = __fmul_rn(q.x[i], s.alpha);
            u8 four[4];
            u16 scale;
            if (is_trellis(type)) {
                scale = encode_trellis(type, dim, span, block, q, scratch[warp], lane, four);
            } else if (is_turbo(type)) {
                u32 book = type - TURBO2;
                scale = encode_turbo(book, p.levels[book], p.mids[book], block.n, q, four);
            } else {
                scale = encode_block32(type, q, lane, four);
            }
            if (at >= dim) continue;
            for (u32 i = 0; i < 4; i++) codes[slot * dim + at + i] = four[i];
            if (at == block.first) scales[slot * blocks + block.index] = scale;
        }
    }
    if (!is_coded(type)) return;
    __syncthreads();
    for (u32 at = 0; at < dim;) {
        Dims block = block_at(type, dim, at);
        at += block.n;
        u8* bytes = tile + block_byte(type, block.index, block.first);
        if (threadIdx.x < TILE) ((u16*)bytes)[threadIdx.x] = scales[threadIdx.x * blocks + block.index];
        for (u32 byte = threadIdx.x; byte < block.n / 4 * group_bytes(type); byte += THREADS) {
            bytes[SCALE_BYTES + byte] = plane_byte(type, t.s.as_keys, codes, dim, block, byte);
        }
    }
}

// Sets centres, before any tile of their blocks is encoded and while the rows that they average are
// still in the tail. Grid: centres of the list, KV tensors.
extern "C" __global__ void __launch_bounds__(THREADS) centres(const __grid_constant__ AppendParams p) {
    __shared__ float rows[2 * TILE][SPAN];
    wait_for_kernel_before();
    uint4 listed_centre = listed(p, p.first_centre + blockIdx.x);
    Centre c = {listed_centre.x, listed_centre.y, listed_centre.z, listed_centre.w};
    AppendSequence sequence = sequence_of(p, c.plan / MAX_KINDS);
    AppendTensor s = p.tensors[blockIdx.y];
    if (!s.spec.centres || s.plan != c.plan % MAX_KINDS) return;
    Target target = {s, sequence, {}, p.first_head + blockIdx.y % p.n_heads, blockIdx.y < p.n_heads};
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = s.spec.dim;
    u16* centre = (u16*)centre_of(s.spec, c.tile, tile_at(sequence.memory, s.spec, s.at, c.tile, IN_MAIN));
    for (u32 span = 0; span < dim; span += SPAN) {
        for (u32 i = warp; i < c.rows; i += WARPS) {
            u32 tile = c.tile + i / TILE, token = c.tile * TILE + i;
            bool is_new = token >= c.start;
            Row row(p, target, is_new, sequence.first_row + (is_new ? token - c.start : 0), lane);
            const u16* tail = is_new ? nullptr : (const u16*)tile_at(sequence.memory, s.spec, s.at, tile, IN_TAIL);
            Quad q = gather(p, target, row, tail, i % TILE, span + 4 * lane, lane);
            for (u32 e = 0; e < 4; e++) rows[i][4 * lane + e] = q.x[e];
        }
        __syncthreads();
        if (span + threadIdx.x < dim) {
            float sum = 0.0f;
            for (u32 i = 0; i < c.rows; i++) sum = __fadd_rn(sum, rows[i][threadIdx.x]);
            centre[span + threadIdx.x] = to_half(clamped(__fmul_rn(sum, 1.0f / (float)c.rows), HALF_MAX));
        }
        __syncthreads();
    }
}

// Grid: sequences, then as many more as RoPE of the queries needs; KV tensors; chains.
extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ AppendParams p) {
    extern __shared__ u8 shared[];
    wait_for_kernel_before();
    u32 number = blockIdx.y, chain = blockIdx.z;
    if (blockIdx.x >= p.n_sequences) {
        u32 block = ((blockIdx.x - p.n_sequences) * gridDim.z + chain) * gridDim.y + number;
        u32 head = block * WARPS + threadIdx.x / 32, dim = p.head_dims[0];
        if (head >= p.rows * p.n_query_heads) return;
        rope_head(p.q_rope, p.q + (size_t)head * dim, dim, head / p.n_query_heads, threadIdx.x % 32);
        return;
    }
    AppendSequence sequence = sequence_of(p, blockIdx.x);
    AppendTensor s = p.tensors[number];
    uint4 listed_plan = listed(p, sequence.plans + s.plan);
    Plan plan = {listed_plan.x, listed_plan.y, {listed_plan.z, listed_plan.w}};
    if (chain >= plan.chains) return;
    bool is_key = number < p.n_heads;
    Target target = {s, sequence, plan.step_tiles, p.first_head + (is_key ? number : number - p.n_heads), is_key};
    for (u32 index = chain;;) {
        uint4 listed_write = listed(p, plan.first + index);
        Write write = {listed_write.x, listed_write.y, listed_write.z, listed_write.w};
        write_tile(p, target, write, shared);
        index = write.flags >> 3;
        if (index == 0) return;
        // The tile that moved has been read, and the shared memory is free.
        __syncthreads();
    }
}
