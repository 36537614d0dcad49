// Reads 32 consecutive weights of any type; the layouts are in crates/codec/src:
// {block32,grouped,kquant,iq4,fp4,factored_fp4,fp8,nf4,tq,tq3t}.rs. TYPE is one of the type numbers
// of matmul/mod.rs.
//
// Where they would misalign the codes, scales are moved behind the last block of the row
// (layout.rs), so that the rest is aligned for reads of words, or of 16 bytes.

#pragma once

#include "constants.cuh"
#include "expert_tiles.cuh"
#include "half.cuh"
#include "to_bytes.cuh"

#define IS_FLOAT (TYPE == F32 || TYPE == F16 || TYPE == BF16 || TYPE == FP8_G128 || IS_NF4)
// Whether codes are indices of a table of floats.
#define IS_NF4 (TYPE == NF4_G64 || TYPE == FP4_G64)
#define IS_ROTATED (HAS_TWO_BYTES || TYPE == TQ3T)
// Whether codes have two bytes.
#define HAS_TWO_BYTES (TYPE == TQ3_1S || TYPE == TQ4_1S)
// Whether codes are indices of a table of signed bytes.
#define HAS_TABLE (TYPE == IQ4_NL || IS_LIKE_IQ4_XS || TYPE == MXFP4 || IS_NVFP4 || TYPE == IQ1 || TYPE == IQ2)
// Whether scales are E4M3, of 16 weights each.
#define IS_NVFP4 (TYPE == NVFP4 || TYPE == NVFP4_G256)
// Types with the layout of another, but different levels.
#define IS_LIKE_Q3_K (TYPE == Q3_K || TYPE == IQ1 || TYPE == IQ2)
#define IS_LIKE_IQ4_XS (TYPE == IQ4_XS || TYPE == IQ3 || TYPE == IQ3X)
// Whether groups of 32 are stored in blocks of eight, and share bytes there.
#define IS_IN_EIGHTS (TYPE == Q2_K || IS_LIKE_Q3_K || TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K)
// Whether the two halves of 32 weights have separate scales.
#define HAS_HALVES (TYPE == Q2_K || IS_LIKE_Q3_K || TYPE == Q6_K || IS_NVFP4 || HAS_TWO_BYTES)
// Whether a code of zero is another value than 0.
#define HAS_MIN (TYPE != Q8_0 && !HAS_TABLE && !IS_ROTATED)

__device__ __forceinline__ float half_at(const u8* p) { return from_half(*(const u16*)p); }
__device__ __forceinline__ u32 word_at(const u8* p) { return *(const u32*)p; }

// The data of types with codebooks or tables besides the bytes.
struct Codebook {
    u32 high[4];  // bytes h of the levels, level = (256 h + l) unit, or h of a table
    u32 low[4];   // bytes l; with `high`, those of windows below 32 of tq3t
    float unit;   // the value of level 1
    u32 signs;  // of the rotation, before its butterfly
};

#if TYPE == FP8_G128
// 32 weights: E4M3 bytes, and their scale.
struct Group {
    u32 words[8];
    float scale;
};

// Reads weights 32 g .. 32 g + 32 of the row of `n` weights that starts at `row`.
__device__ __forceinline__ Group read_group(const u8* row, u32 g, u32 n, const Codebook&) {
    uint4 a = ((const uint4*)row)[2 * g], b = ((const uint4*)row)[2 * g + 1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, *(const float*)(row + n + 4 * (g / 4))};
}

__device__ __forceinline__ void decode_group(const Group& group, const Codebook&, float (&w)[32]) {
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 code = group.words[i / 4] >> (8 * (i % 4));
        // Reinterprets an exponent with bias 7 as one with bias 127 (a factor of 2^120).
        w[i] = 0x1p120f * __uint_as_float((code & 128) << 24 | (code & 127) << 20) * group.scale;
    }
}
#elif IS_NF4
// 32 weights: nibbles, the first of two in the high half, and their scale.
struct Group {
    u32 words[4];
    float scale;
};

// The bits of the levels. In global memory: lanes read different ones, which constant memory serves
// one after the other, and the L1 cache at once, as they are in one line.
#if TYPE == NF4_G64
__device__ const int LEVELS[16] = NF4_LEVELS;
#else
__device__ const int LEVELS[16] = FP4_LEVELS;
#endif

// Reads weights 32 g .. 32 g + 32 of the row of `n` weights that starts at `row`.
__device__ __forceinline__ Group read_group(const u8* row, u32 g, u32 n, const Codebook&) {
    uint4 four = ((const uint4*)row)[g];
    return {{four.x, four.y, four.z, four.w}, *(const float*)(row + n / 2 + 4 * (g / 2))};
}

__device__ __forceinline__ void decode_group(const Group& group, const Codebook&, float (&w)[32]) {
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 code = group.words[i / 8] >> (4 * (i % 8 ^ 1)) & 15;
        w[i] = __int_as_float(LEVELS[code]) * group.scale;
    }
}
#elif IS_FLOAT
// 32 weights as stored in memory; the last group of a row may have fewer, and zeros.
struct Group {
    u32 words[TYPE == F32 ? 32 : 16];
};

// Reads weights 32 g .. 32 g + 32 of the row of `n` weights that starts at `row`.
__device__ __forceinline__ Group read_group(const u8* row, u32 g, u32 n, const Codebook&) {
    constexpr u32 WORDS = sizeof(Group) / 4, OF_WORD = 32 / WORDS;
    const u32* at = (const u32*)row + WORDS * g;
    Group group;
    if (n % 8 == 0 && 32 * g + 32 <= n) {
#pragma unroll
        for (u32 i = 0; i < WORDS / 4; i++) {
            uint4 four = ((const uint4*)at)[i];
            group.words[4 * i] = four.x, group.words[4 * i + 1] = four.y;
            group.words[4 * i + 2] = four.z, group.words[4 * i + 3] = four.w;
        }
        return group;
    }
    // Rows are not aligned then.
#pragma unroll
    for (u32 i = 0; i < WORDS; i++) {
        group.words[i] = 0;
#pragma unroll
        for (u32 j = 0; j < OF_WORD; j++) {
            u32 number = 32 * g + OF_WORD * i + j;
            if (number >= n) continue;
            group.words[i] |= TYPE == F32 ? ((const u32*)row)[number] : (u32)((const u16*)row)[number] << (16 * j);
        }
    }
    return group;
}

__device__ __forceinline__ void decode_group(const Group& group, const Codebook&, float (&w)[32]) {
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
#if TYPE == F32
        w[i] = __uint_as_float(group.words[i]);
#elif TYPE == F16
        w[i] = from_half((u16)(group.words[i / 2] >> (16 * (i % 2))));
#else
        w[i] = __uint_as_float(i % 2 ? group.words[i / 2] & 0xffff0000 : group.words[i / 2] << 16);
#endif
    }
}
#else
// 32 weights: weight i is code i times scale[i / 16] plus min[i / 16]. Codes are signed bytes, four
// to a word.
struct Group {
    u32 codes[8];
#if HAS_TWO_BYTES
    u32 low[8];  // a code is 256 codes + low
#endif
    float scale[2];
    float min[2];
};

__device__ __forceinline__ void load_words(const u8* p, u32 (&words)[8]) {
#if TYPE == Q2_K || IS_LIKE_Q3_K
#pragma unroll
    for (int k = 0; k < 8; k++) words[k] = word_at(p + 4 * k);
#else
    uint4 a = ((const uint4*)p)[0], b = ((const uint4*)p)[1];
    words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
    words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
#endif
}

// Bits 0 to 3 as the lowest bits of four bytes.
__device__ __forceinline__ u32 spread(u32 bits) { return (bits & 15) * 0x00204081 & 0x01010101; }

// Returns four bytes of a table of eight or 16 by the four nibbles of `index`.
__device__ __forceinline__ u32 look_up(const u32 (&table)[4], u32 index) {
#if TYPE == TQ3_1S || TYPE == IQ1 || TYPE == IQ2
    return __byte_perm(table[0], table[1], index);
#else
    u32 lower = __byte_perm(table[0], table[1], index & 0x7777);
    u32 upper = __byte_perm(table[2], table[3], index & 0x7777);
    return __byte_perm(lower, upper, 0x3210 | (index & 0x8888) >> 1);
#endif
}

#if HAS_TABLE
// Looks up the levels of the eight codes in a word: those of the low nibbles, and those of the high
// ones.
__device__ __forceinline__ void look_up_word(const u32 (&table)[4], u32 word, u32& low, u32& high) {
    u32 first = look_up(table, word & 0xffff), second = look_up(table, word >> 16);
    low = __byte_perm(first, second, 0x6420);
    high = __byte_perm(first, second, 0x7531);
}

// Returns the levels of the four codes in a word, a byte each.
__device__ __forceinline__ u32 look_up_bytes(const u32 (&table)[4], u32 word) {
    return look_up(table, __byte_perm(word | word >> 4, 0, 0x4420));
}
#endif

#if TYPE == TQ3T
// Returns 255 in each byte whose bit `bit` is set.
__device__ __forceinline__ u32 bytes_with(u32 bytes, u32 bit) { return (bytes >> bit & 0x01010101) * 255; }

// Returns `a` in the bytes of `mask`, and `b` in the others.
__device__ __forceinline__ u32 choose(u32 mask, u32 a, u32 b) { return a & mask | b & ~mask; }

// Returns the levels of four windows of six bits: level 63 - w is minus level w.
__device__ __forceinline__ u32 look_up_windows(const Codebook& book, u32 windows) {
    u32 upper = bytes_with(windows, 5), w = windows ^ upper & 0x3f3f3f3f, codes = w & 0x07070707;
    u32 index = __byte_perm(codes | codes >> 4, 0, 0x4420), odd = bytes_with(w, 3);
    u32 first = choose(odd, __byte_perm(book.high[2], book.high[3], index), __byte_perm(book.high[0], book.high[1], index));
    u32 second = choose(odd, __byte_perm(book.low[2], book.low[3], index), __byte_perm(book.low[0], book.low[1], index));
    // No level is 0, so that no byte carries over.
    return (choose(bytes_with(w, 4), second, first) ^ upper) + (upper & 0x01010101);
}
#endif

// Reads weights 32 g .. 32 g + 32 of the row of `n` weights that starts at `row`.
__device__ __forceinline__ Group read_group(const u8* row, u32 g, u32 n, const Codebook& book) {
    Group group;
    float d, m = 0.0f;
#if TYPE == Q8_0
    load_words(row + 32 * g, group.codes);
    d = half_at(row + n + 2 * g);
#elif TYPE == Q4_0 || TYPE == Q4_1 || TYPE == Q5_0 || TYPE == Q5_1
    const bool has_fifth = TYPE == Q5_0 || TYPE == Q5_1, has_min = TYPE == Q4_1 || TYPE == Q5_1;
    const u32 size = 16 + 4 * has_fifth + 4 * has_min;
    const u8* block = row + size * g;
    if (has_min) {
        u32 both = word_at(block);
        d = from_half((u16)both);
        m = from_half((u16)(both >> 16));
    } else {
        d = half_at(row + size * (n / 32) + 2 * g);
        m = (has_fifth ? -16.0f : -8.0f) * d;
    }
    u32 fifth = has_fifth ? word_at(block + 4 * has_min) : 0;
    const u8* nibbles = block + size - 16;
#if TYPE == Q4_0
    uint4 four = *(const uint4*)nibbles;
    u32 words[4] = {four.x, four.y, four.z, four.w};
#else
    u32 words[4] = {word_at(nibbles), word_at(nibbles + 4), word_at(nibbles + 8), word_at(nibbles + 12)};
#endif
#pragma unroll
    for (int k = 0; k < 8; k++) {
        group.codes[k] = words[k % 4] >> (k / 4 * 4) & 0x0f0f0f0f;
        if (has_fifth) group.codes[k] |= spread(fifth >> (4 * k)) << 4;
    }
#elif TYPE == Q4_G128
    uint4 four = *(const uint4*)(row + 16 * g);
    u32 words[4] = {four.x, four.y, four.z, four.w}, head = word_at(row + n / 2 + 4 * (g / 4));
    d = from_half((u16)head);
    m = -d * (float)(head >> 16 & 255);
#pragma unroll
    for (int k = 0; k < 8; k++) group.codes[k] = words[k % 4] >> (k / 4 * 4) & 0x0f0f0f0f;
#elif TYPE == Q4_K || TYPE == Q5_K
    const bool has_fifth = TYPE == Q5_K;
    const u8* block = row + (has_fifth ? Q5_K_BYTES : Q4_K_BYTES) * (g / 8);
    // The lower four bits of scales 4 to 7 are stored separately; their upper two are
    // the top bits of a byte whose rest is a scale 0 to 3.
    bool is_late = g & 4;
    u32 at = 8 * (g % 4), upper = at + (is_late ? 2 : 0);
    uint4 head = *(const uint4*)block;
    u32 scale = (is_late ? head.w : head.y) >> at & 15 | head.y >> upper & 0x30;
    u32 min = (is_late ? head.w >> 4 : head.z) >> at & 15 | head.z >> upper & 0x30;
    d = from_half((u16)head.x) * (float)scale;
    m = -from_half((u16)(head.x >> 16)) * (float)min;
    load_words(block + (has_fifth ? 48 : 16) + 32 * (g / 2 % 4), group.codes);
#pragma unroll
    for (int k = 0; k < 8; k++) group.codes[k] = group.codes[k] >> (4 * (g % 2)) & 0x0f0f0f0f;
    if (has_fifth) {
        u32 fifth[8];
        load_words(block + 16, fifth);
#pragma unroll
        for (int k = 0; k < 8; k++) group.codes[k] |= (fifth[k] >> (g % 8) & 0x01010101) << 4;
    }
#elif TYPE == Q2_K
    const u8* block = row + Q2_K_BYTES * (g / 8);
    u32 run = g % 8, scales = ((const u16*)block)[run], both = word_at(block + 80);
    d = from_half((u16)both);
    m = -from_half((u16)(both >> 16));
    load_words(block + 16 + 32 * (run / 4), group.codes);
#pragma unroll
    for (int k = 0; k < 8; k++) group.codes[k] = group.codes[k] >> (2 * (run % 4)) & 0x03030303;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        group.scale[s] = d * (float)(scales >> (8 * s) & 15);
        group.min[s] = m * (float)(scales >> (8 * s + 4) & 15);
    }
#elif IS_LIKE_Q3_K
    const u8* block = row + Q3_K_BYTES * (g / 8);
    u32 run = g % 8, high[8];
    d = half_at(row + Q3_K_BYTES * (n / 256) + 2 * (g / 8));
    load_words(block, high);
    load_words(block + 32 + 32 * (run / 4), group.codes);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        group.codes[k] = group.codes[k] >> (2 * (run % 4)) & 0x03030303 | (high[k] >> run & 0x01010101) << 2;
#if HAS_TABLE
        group.codes[k] = look_up_bytes(book.high, group.codes[k]);
#endif
    }
    if (HAS_TABLE) d *= book.unit;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        u32 j = 2 * run + s;
        u32 lower = block[96 + j % 8] >> (4 * (j / 8)) & 15, upper = block[104 + j % 4] >> (2 * (j / 4)) & 3;
        group.scale[s] = d * (float)((int)(lower | upper << 4) - 32);
        group.min[s] = HAS_TABLE ? 0.0f : -4.0f * group.scale[s];
    }
#elif TYPE == Q6_K
    const u8* block = row + Q6_K_BYTES * (g / 8);
    u32 scales = ((const u16*)(block + 192))[g % 8], high[8];
    d = half_at(row + Q6_K_BYTES * (n / 256) + 2 * (g / 8));
    load_words(block + 64 * (g / 4 % 2) + 32 * (g % 2), group.codes);
    load_words(block + 128 + 32 * (g / 4 % 2), high);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        u32 lower = group.codes[k] >> (4 * (g / 2 % 2)) & 0x0f0f0f0f;
        group.codes[k] = lower | (high[k] >> (2 * (g % 4)) & 0x03030303) << 4;
    }
#pragma unroll
    for (int s = 0; s < 2; s++) {
        group.scale[s] = d * (float)(signed char)(scales >> (8 * s));
        group.min[s] = -32.0f * group.scale[s];
    }
#elif TYPE == IQ4_NL || IS_LIKE_IQ4_XS || TYPE == MXFP4
    uint4 four = *(const uint4*)(row + 16 * g);
    u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; k++) look_up_word(book.high, words[k], group.codes[k], group.codes[k + 4]);
#if TYPE == IQ4_NL
    d = half_at(row + n / 2 + 2 * g);
#elif IS_LIKE_IQ4_XS
    const u32* head = (const u32*)(row + n / 2 + 8 * (g / 8));
    u32 run = g % 8, both = head[0];
    u32 scale = head[1] >> (4 * run) & 15 | (both >> (16 + 2 * run) & 3) << 4;
    d = from_half((u16)both) * (float)((int)scale - 32);
    if (TYPE != IQ4_XS) d *= book.unit;
#else
    // The smallest power of two is subnormal; levels count twice.
    u32 power = row[n / 2 + g];
    d = 0.5f * __uint_as_float(power == 0 ? 1 << 22 : power << 23);
#endif
#elif IS_NVFP4
    // Two sub-blocks of 16: 8 bytes each, value j in the low nibble and j + 8 in the high one of
    // byte j.
    uint4 four = *(const uint4*)(row + 16 * g);
    u32 words[4] = {four.x, four.y, four.z, four.w};
#if TYPE == NVFP4_G256
    const u8* head = row + n / 2 + 20 * (g / 8);
    u32 scales = *(const u16*)(head + 4 + 2 * (g % 8));
    float factor = *(const float*)head;
#else
    u32 scales = *(const u16*)(row + n / 2 + 2 * g);
    const float factor = 1.0f;
#endif
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 at = k / 2 * 4 + k % 2;
        look_up_word(book.high, words[k], group.codes[at], group.codes[at + 2]);
    }
    // Reinterprets an exponent with bias 7 as one with bias 127 (a factor of 2^120); levels count
    // twice.
#pragma unroll
    for (int s = 0; s < 2; s++) {
        group.scale[s] = 0x1p119f * __uint_as_float((scales >> (8 * s) & 127) << 20) * factor;
        group.min[s] = 0.0f;
    }
    d = 0.0f;
#elif TYPE == TQ3T
    u32 words[3] = {word_at(row + 12 * g), word_at(row + 12 * g + 4), word_at(row + 12 * g + 8)};
    u32 last = words[0] >> 6 & 0x03030303 | words[1] >> 4 & 0x0c0c0c0c | words[2] >> 2 & 0x30303030;
    // The ring closes a value further left.
    u32 before = __byte_perm(last, 0, 0x2103);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 pair = k < 3 ? words[k] & 0x3f3f3f3f : last;
        group.codes[2 * k] = look_up_windows(book, pair >> 3 & 0x07070707 | (before & 0x07070707) << 3);
        group.codes[2 * k + 1] = look_up_windows(book, pair);
        before = pair;
    }
    d = half_at(row + 3 * n / 8 + 2 * (g / 4)) * book.unit;
#elif IS_ROTATED
    const u8* block = row + (TYPE == TQ3_1S ? TQ3_1S_BYTES : TQ4_1S_BYTES) * g;
    u32 index[8];  // four indices in the nibbles of the lower half
#if TYPE == TQ3_1S
    uint4 all = *(const uint4*)block;
    u32 scales = all.x;
    u32 eights[4] = {all.y, all.y >> 24 | all.z << 8, all.z >> 16 | all.w << 16, all.w >> 8};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        u32 four = eights[k / 2] >> (12 * (k % 2));
        index[k] = four & 7 | (four & 0070) << 1 | (four & 0700) << 2 | (four & 07000) << 3;
    }
#else
    u32 scales = word_at(block);
#pragma unroll
    for (int k = 0; k < 8; k++) index[k] = word_at(block + 4 + k / 2 * 4) >> (16 * (k % 2)) & 0xffff;
#endif
#pragma unroll
    for (int k = 0; k < 8; k++) {
        group.codes[k] = look_up(book.high, index[k]);
        group.low[k] = look_up(book.low, index[k]);
    }
    group.scale[0] = from_half((u16)scales) * book.unit;
    group.scale[1] = from_half((u16)(scales >> 16)) * book.unit;
    group.min[0] = group.min[1] = 0.0f;
    d = 0.0f;
#else
#error TYPE is not one of those numbers
#endif
    if (!HAS_HALVES) {
        group.scale[0] = group.scale[1] = d;
        group.min[0] = group.min[1] = m;
    }
    return group;
}

// Code k of a word of four, as a float: a byte below the bits of 2^23 is that float plus the byte.
template <bool SIGNED>
__device__ __forceinline__ float code_at(u32 codes, u32 k) {
    u32 bytes = SIGNED ? codes ^ 0x80808080 : codes;
    return __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440 | k)) - (SIGNED ? 8388736.0f : 8388608.0f);
}

// Decodes the weights of a group.
__device__ __forceinline__ void decode_group(const Group& group, const Codebook& book, float (&w)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        float code = code_at<!HAS_MIN>(group.codes[i / 4], i % 4);
#if HAS_TWO_BYTES
        code = 256.0f * code + code_at<true>(group.low[i / 4], i % 4);
#endif
        w[i] = group.scale[i / 16] * code + group.min[i / 16];
    }
#if IS_ROTATED
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (i & step) continue;
            float a = w[i], b = w[i + step];
            w[i] = a + b;
            w[i + step] = a - b;
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) w[i] *= rotation_sign(book.signs, i);
#endif
}
#endif

// Decodes the weights of a group, times 1 / `unit`, as pairs of f16.
__device__ __forceinline__ void decode_pairs(Group group, const Codebook& book, float unit, u32 (&pairs)[16]) {
#if TYPE == F16
#pragma unroll
    for (int i = 0; i < 16; i++) pairs[i] = group.words[i];
#else
    // 1 / unit: the exponents of reciprocal powers of two are negatives of each other, and both are
    // stored with bias 127.
    float by = __uint_as_float((2 * 127u << 23) - __float_as_uint(unit));
#if !IS_FLOAT
#pragma unroll
    for (int half = 0; half < 2; half++) group.scale[half] *= by, group.min[half] *= by;
#endif
    float w[32];
    decode_group(group, book, w);
#pragma unroll
    for (int i = 0; i < 16; i++) {
#if IS_FLOAT
        w[2 * i] *= by, w[2 * i + 1] *= by;
#endif
        pairs[i] = pack_halves(w[2 * i], w[2 * i + 1]);
    }
#endif
}

// One of the matrices that a launch multiplies the same inputs with.
struct MatrixParams {
    const u8* w;        // [n_out] rows of row_bytes
    const float* bias;  // [n_out], or null; of experts [n_experts, n_out]
    float* y;           // [rows, n_out]
    u32 n_out;
    u32 blocks;         // of its features
    u32 accumulate;
    float unit;         // of weights rounded to f16: a power of two
};

// The parameter of every kernel that multiplies with these weights.
struct MatmulParams {
    MatrixParams matrices[MAX_MATRICES];
    const u8* up;        // null, or as w of the only matrix: y = a(w x) (up x) then, a the activation
    const float* x;      // [rows, n_in]
    const float* norm;   // null, or [n_in]: x / sqrt(mean(x^2) + eps) * norm in place of x
    const void* inputs;  // x in 8 bits, `InputTile`s, or in f16, where it is converted before
    const float* factors; // [rows] of the products, or null
    float* shares;       // of splits that add to the same results
    u32* counters;       // of their blocks that are done, 0 between launches
    unsigned long long row_bytes;
    u32 n_matrices;
    u32 n_in;
    u32 rows;
    float eps;
    Codebook book;
    u32 activation;      // of the gate
    u32 slots_of_row;
    float limit;         // of the limited SiLU
    u32 splits;          // that share a tile
    const float* up_bias; // as bias, which is then the gate's
    // For experts, w and up are the first of many matrices, expert_bytes apart: rows of y are then
    // slots, slots_of_row of which have the same row of x.
    const ExpertTile* expert_tiles;  // null, or [gridDim.y]: the rows of each block of rows
    const u32* order;    // [slots]
    unsigned long long expert_bytes;
};

// The matrix of a block, and the block's number within it.
struct BlockMatrix {
    const MatrixParams& matrix;
    u32 block;
};

__device__ __forceinline__ BlockMatrix block_matrix(const MatmulParams& p) {
    u32 number = 0, block = blockIdx.x;
    while (number + 1 < p.n_matrices && block >= p.matrices[number].blocks) block -= p.matrices[number++].blocks;
    return {p.matrices[number], block};
}

// The rows of a block, at most `max_rows`, and the offset of their weights.
struct BlockRows {
    u32 first, n;
    size_t w_offset;     // bytes
    size_t bias_offset;  // of their biases
};

__device__ __forceinline__ BlockRows block_rows(const MatmulParams& p, const MatrixParams& matrix, u32 max_rows) {
    if (!p.expert_tiles) return {blockIdx.y * max_rows, min(p.rows - blockIdx.y * max_rows, max_rows), 0, 0};
    ExpertTile tile = p.expert_tiles[blockIdx.y];
    return {tile.first, tile.n, (size_t)p.expert_bytes * tile.expert, (size_t)matrix.n_out * tile.expert};
}

// Returns the index in x and in y of row `row` of a block's rows.
__device__ __forceinline__ size_t x_row(const MatmulParams& p, u32 row) {
    return p.expert_tiles ? p.order[row] / p.slots_of_row : row;
}
__device__ __forceinline__ size_t y_row(const MatmulParams& p, u32 row) {
    return p.expert_tiles ? p.order[row] : row;
}
