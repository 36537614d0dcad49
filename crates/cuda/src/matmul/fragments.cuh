// Reads the A operands of MMAs from a stage of weights in shared memory: in a lane with lane % 4 =
// t of a row's group words t and 4 + t of its codes, four codes each. `read_group` (weights.cuh) is
// the same for a whole group.
//
// A stage has STAGE_GROUPS groups of a row, and behind them what is moved behind the row (`tail`).
// `i` is the number of a group in the stage, `run` its number modulo 8 in the row.

#pragma once

#include "arithmetic.cuh"
#include "copies.cuh"

constexpr u32 STAGE_GROUPS = IS_IN_EIGHTS ? 8 : 4;
constexpr u32 COPY = CODE_BYTES % 16 == 0 ? 16 : 4;
constexpr u32 TAIL_BYTES = MOVED * ((STAGE_GROUPS + BLOCK_GROUPS - 1) / BLOCK_GROUPS);
constexpr u32 TAIL_WORDS = (TAIL_BYTES + 3) / 4;
// Distance between rows in a stage: an odd number of 16 bytes.
constexpr u32 PITCH = ((CODE_BYTES + 4 * TAIL_WORDS + 15) / 16 | 1) * 16;

// Issues the copies of a row's stage, of whose groups `n` exist, by two lanes. Rows are a multiple
// of 16 bytes long: the last copies may exceed the groups that exist, but not the row.
template <bool IS_WHOLE>
__device__ __forceinline__ void copy_row(u8* codes_to, u8* tail_to, const u8* codes, const u8* tail, u32 n) {
    u32 odd = threadIdx.x % 2;
#pragma unroll
    for (u32 at = 0; at < CODE_BYTES; at += 2 * COPY) {
        bool is_there = IS_WHOLE ? at + 2 * COPY <= CODE_BYTES || odd == 0 : (at + COPY * odd) * STAGE_GROUPS < n * CODE_BYTES;
        if (!is_there) continue;
        if (COPY == 16) copy_16(codes_to + at, codes + at);
        else copy_4(codes_to + at, codes + at);
    }
#pragma unroll
    for (u32 at = 0; at < TAIL_BYTES; at += 8) {
        bool is_there = IS_WHOLE ? at + 8 <= 4 * TAIL_WORDS || odd == 0 : (at + 4 * odd) * STAGE_GROUPS < n * TAIL_BYTES;
        if (is_there) copy_4(tail_to + at, tail + at);
    }
}

struct Codes {
    u32 words[2];
#if HAS_TWO_BYTES
    u32 low[2];  // a code is 256 words + low
#endif
};

struct Scales {
    float scale[SCALES];
    float min[SCALES];  // undefined without HAS_FLOAT_MIN
};

__device__ __forceinline__ u32 pair_at(const u8* p) { return *(const u16*)p; }

#if TYPE == Q4_1 || TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q4_0
constexpr u32 HEAD = (TYPE == Q4_1 || TYPE == Q5_1 ? 4 : 0) + (TYPE == Q5_0 || TYPE == Q5_1 ? 4 : 0);
#endif

#if TYPE == TQ3T
// Returns word `k` = 2 m + `odd` of a group's codes from pairs m - 1 and m of its indices.
__device__ __forceinline__ u32 window_codes(const Codebook& book, u32 before, u32 pair, bool odd) {
    u32 first = pair >> 3 & 0x07070707 | (before & 0x07070707) << 3;
    return look_up_windows(book, odd ? pair : first);
}
#endif

#if TYPE == TQ3_1S
// Returns four indices of three bits, from bit `at` of a block's, as nibbles.
__device__ __forceinline__ u32 four_indices(const u8* block, u32 at) {
    u32 word = at / 32, next = min(word + 1, 2u);
    u32 four = __funnelshift_r(word_at(block + 4 + 4 * word), word_at(block + 4 + 4 * next), at % 32);
    return four & 7 | (four & 0070) << 1 | (four & 0700) << 2 | (four & 07000) << 3;
}
#endif

__device__ __forceinline__ Codes read_codes(const u8* row, u32 i, u32 t, const Codebook& book) {
    Codes codes;
#if TYPE == Q8_0
    const u8* block = row + 32 * i + 4 * t;
    codes.words[0] = word_at(block), codes.words[1] = word_at(block + 16);
#elif TYPE == Q4_0 || TYPE == Q4_1 || TYPE == Q5_0 || TYPE == Q5_1
    const u8* block = row + (16 + HEAD) * i;
    u32 word = word_at(block + HEAD + 4 * t);
    codes.words[0] = word & 0x0f0f0f0f, codes.words[1] = word >> 4 & 0x0f0f0f0f;
    if (TYPE == Q5_0 || TYPE == Q5_1) {
        u32 fifth = word_at(block + HEAD - 4) >> (4 * t);
        codes.words[0] |= spread(fifth) << 4, codes.words[1] |= spread(fifth >> 16) << 4;
    }
#elif TYPE == Q4_G128
    u32 word = word_at(row + 16 * i + 4 * t);
    codes.words[0] = word & 0x0f0f0f0f, codes.words[1] = word >> 4 & 0x0f0f0f0f;
#elif IS_IN_EIGHTS
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        const u8* at = row + 4 * t + 16 * h;
        u32& word = codes.words[h];
#if TYPE == Q4_K || TYPE == Q5_K
        word = word_at(at + (TYPE == Q5_K ? 48 : 16) + 32 * (i / 2)) >> (4 * (i % 2)) & 0x0f0f0f0f;
        if (TYPE == Q5_K) word |= (word_at(at + 16) >> i & 0x01010101) << 4;
#elif TYPE == Q6_K
        word = word_at(at + 64 * (i / 4) + 32 * (i % 2)) >> (4 * (i / 2 % 2)) & 0x0f0f0f0f;
        word |= (word_at(at + 128 + 32 * (i / 4)) >> (2 * (i % 4)) & 0x03030303) << 4;
#elif TYPE == Q2_K
        word = word_at(at + 16 + 32 * (i / 4)) >> (2 * (i % 4)) & 0x03030303;
#else
        word = word_at(at + 32 + 32 * (i / 4)) >> (2 * (i % 4)) & 0x03030303;
        word |= (word_at(at) >> i & 0x01010101) << 2;
#if HAS_TABLE
        word = look_up_bytes(book.high, word);
#endif
#endif
    }
#elif IS_NVFP4
    // Words 0 and 2 of the codes are the nibbles of one word, 1 and 3, 4 and 6, 5 and 7 of others.
    const u8* block = row + 16 * i + t % 2 * 4;
    codes.words[0] = look_up_bytes(book.high, word_at(block) >> (t / 2 * 4) & 0x0f0f0f0f);
    codes.words[1] = look_up_bytes(book.high, word_at(block + 8) >> (t / 2 * 4) & 0x0f0f0f0f);
#elif HAS_TABLE
    look_up_word(book.high, word_at(row + 16 * i + 4 * t), codes.words[0], codes.words[1]);
#elif TYPE == TQ3T
    const u8* block = row + 12 * i;
    u32 a = word_at(block), b = word_at(block + 4), c = word_at(block + 8);
    u32 last = a >> 6 & 0x03030303 | b >> 4 & 0x0c0c0c0c | c >> 2 & 0x30303030;
    bool odd = t % 2, second = t / 2;
    a &= 0x3f3f3f3f, b &= 0x3f3f3f3f, c &= 0x3f3f3f3f;
    // The ring closes a value further left.
    codes.words[0] = window_codes(book, second ? a : __byte_perm(last, 0, 0x2103), second ? b : a, odd);
    codes.words[1] = window_codes(book, second ? c : b, second ? last : c, odd);
#else
    const u8* block = row + (TYPE == TQ3_1S ? TQ3_1S_BYTES : TQ4_1S_BYTES) * i;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        u32 k = t + 4 * h;
#if TYPE == TQ3_1S
        u32 index = four_indices(block, 12 * k);
#else
        u32 index = pair_at(block + 4 + 2 * k);
#endif
        codes.words[h] = look_up(book.high, index);
        codes.low[h] = look_up(book.low, index);
    }
#endif
    return codes;
}

__device__ __forceinline__ Scales read_scales(const u8* row, const u8* tail, u32 i, u32 run, const Codebook& book) {
    Scales s;
#if TYPE == Q8_0 || TYPE == Q4_0 || TYPE == Q5_0 || TYPE == IQ4_NL
    s.scale[0] = half_at(tail + 2 * i);
#elif TYPE == Q4_1 || TYPE == Q5_1
    u32 both = word_at(row + (16 + HEAD) * i);
    s.scale[0] = from_half((u16)both), s.min[0] = from_half((u16)(both >> 16));
#elif TYPE == Q4_G128
    u32 head = word_at(tail);
    s.scale[0] = from_half((u16)head), s.min[0] = -s.scale[0] * (float)(head >> 16 & 255);
#elif TYPE == Q4_K || TYPE == Q5_K
    bool is_late = i & 4;
    u32 at = 8 * (i % 4), upper = at + (is_late ? 2 : 0);
    uint4 head = *(const uint4*)row;
    u32 scale = (is_late ? head.w : head.y) >> at & 15 | head.y >> upper & 0x30;
    u32 min = (is_late ? head.w >> 4 : head.z) >> at & 15 | head.z >> upper & 0x30;
    s.scale[0] = from_half((u16)head.x) * (float)scale;
    s.min[0] = -from_half((u16)(head.x >> 16)) * (float)min;
#elif TYPE == Q2_K
    u32 scales = pair_at(row + 2 * i), both = word_at(row + 80);
    float d = from_half((u16)both), m = -from_half((u16)(both >> 16));
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        s.scale[h] = d * (float)(scales >> (8 * h) & 15);
        s.min[h] = m * (float)(scales >> (8 * h + 4) & 15);
    }
#elif IS_LIKE_Q3_K
    float d = half_at(tail);
    if (HAS_TABLE) d *= book.unit;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
        u32 j = 2 * i + h;
        u32 lower = row[96 + j % 8] >> (4 * (j / 8)) & 15, upper = row[104 + j % 4] >> (2 * (j / 4)) & 3;
        s.scale[h] = d * (float)((int)(lower | upper << 4) - 32);
    }
#elif TYPE == Q6_K
    float d = half_at(tail);
    u32 scales = pair_at(row + 192 + 2 * i);
#pragma unroll
    for (u32 h = 0; h < 2; h++) s.scale[h] = d * (float)(signed char)(scales >> (8 * h));
#elif IS_LIKE_IQ4_XS
    u32 both = word_at(tail);
    u32 scale = word_at(tail + 4) >> (4 * run) & 15 | (both >> (16 + 2 * run) & 3) << 4;
    s.scale[0] = from_half((u16)both) * (float)((int)scale - 32);
    if (TYPE != IQ4_XS) s.scale[0] *= book.unit;
#elif TYPE == MXFP4
    // The smallest power of two is subnormal; levels count twice.
    u32 power = tail[i];
    s.scale[0] = 0.5f * __uint_as_float(power == 0 ? 1 << 22 : power << 23);
#elif IS_NVFP4
#if TYPE == NVFP4_G256
    u32 scales = pair_at(tail + 4 + 2 * run);
    float factor = *(const float*)tail;
#else
    u32 scales = pair_at(tail + 2 * i);
    const float factor = 1.0f;
#endif
    // Reinterprets an exponent with bias 7 as one with bias 127 (a factor of 2^120); levels count
    // twice.
#pragma unroll
    for (u32 h = 0; h < 2; h++) s.scale[h] = 0x1p119f * __uint_as_float((scales >> (8 * h) & 127) << 20) * factor;
#elif TYPE == TQ3T
    s.scale[0] = half_at(tail) * book.unit;
#else
    u32 scales = word_at(row + (TYPE == TQ3_1S ? TQ3_1S_BYTES : TQ4_1S_BYTES) * i);
    s.scale[0] = from_half((u16)scales) * book.unit, s.scale[1] = from_half((u16)(scales >> 16)) * book.unit;
#endif
    return s;
}

// Returns the scales that lane `from` of each four lanes has.
__device__ __forceinline__ Scales scales_of_lane(const Scales& of, u32 from) {
    Scales s;
#pragma unroll
    for (u32 h = 0; h < SCALES; h++) {
        s.scale[h] = __shfl_sync(~0u, of.scale[h], from, 4);
        if (HAS_FLOAT_MIN) s.min[h] = __shfl_sync(~0u, of.min[h], from, 4);
    }
    return s;
}
