// The codes of 32 weights in a row, as bytes, with what turns them into weights: of either half of 16,
// weight = scale * code + min. TYPE and the layouts are those of weights.cuh.

#include "weights.cuh"

struct Codes {
    int words[8];  // weight 4 i + j in byte j of word i, signed
    float scale[2];
    float min[2];
};

// Bits 0..4 of `bits` to bit 4 of the four bytes of a word.
__device__ __forceinline__ u32 fifth_bits(u32 bits) {
    return (bits & 15) * 0x02040810 & 0x10101010;
}

// The levels of a codebook of at most 16 as signed bytes.
struct ByteLevels {
    u32 words[4];
    float unit;  // what 1 stands for
    u32 unused;
};

// Four bytes of a table of 16, picked by the low nibbles of the bytes of `indices`.
__device__ __forceinline__ int pick(const ByteLevels& table, u32 indices) {
    // A selector of __byte_perm is a nibble: three bits of it pick of eight bytes.
    u32 four = indices & 0x07070707;
    u32 selectors = four & 7 | four >> 4 & 0x70 | four >> 8 & 0x700 | four >> 12 & 0x7000;
    u32 low = __byte_perm(table.words[0], table.words[1], selectors);
    u32 high = __byte_perm(table.words[2], table.words[3], selectors);
    // Bit 3 of an index becomes a mask of its whole byte.
    u32 is_high = (indices >> 3 & 0x01010101) * 0xff;
    return (int)(low & ~is_high | high & is_high);
}

__device__ __forceinline__ void codes_of_group(const u8* row, u32 g, const ByteLevels& table, Codes& c) {
#if TYPE == Q8_0
    const u8* block = row + 34 * g;
#pragma unroll
    for (int i = 0; i < 8; i++) c.words[i] = (int)word_at(block + 2 + 4 * i);
    c.scale[0] = c.scale[1] = half_at(block);
    c.min[0] = c.min[1] = 0.0f;
#elif TYPE == Q4_0 || TYPE == Q4_1 || TYPE == Q5_0 || TYPE == Q5_1
    const bool has_min = TYPE == Q4_1 || TYPE == Q5_1, has_fifth = TYPE == Q5_0 || TYPE == Q5_1;
    const u8* block = row + (18 + 2 * has_min + 4 * has_fifth) * g;
    u32 fifth = has_fifth ? word_at(block + 2 + 2 * has_min) : 0;
    const u8* nibbles = block + 2 + 2 * has_min + 4 * has_fifth;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = word_at(nibbles + 4 * i);
        c.words[i] = (int)(word & 0x0f0f0f0f | fifth_bits(fifth >> (4 * i)));
        c.words[i + 4] = (int)(word >> 4 & 0x0f0f0f0f | fifth_bits(fifth >> (4 * i + 16)));
    }
    float d = half_at(block);
    c.scale[0] = c.scale[1] = d;
    c.min[0] = c.min[1] = has_min ? half_at(block + 2) : (has_fifth ? -16.0f : -8.0f) * d;
#elif TYPE == Q2_K
    const u8* block = row + 84 * (g / 8);
    u32 run = g % 8;
    const u32* codes = (const u32*)(block + 16 + 32 * (run / 4));
#pragma unroll
    for (int i = 0; i < 8; i++) c.words[i] = (int)(codes[i] >> (2 * (run % 4)) & 0x03030303);
    float d = half_at(block + 80), dmin = half_at(block + 82);
#pragma unroll
    for (int s = 0; s < 2; s++) {
        u32 scale = block[2 * run + s];
        c.scale[s] = d * (float)(scale & 15);
        c.min[s] = -dmin * (float)(scale >> 4);
    }
#elif TYPE == Q3_K
    const u8* block = row + 110 * (g / 8);
    u32 run = g % 8;
    const u8* low = block + 32 + 32 * (run / 4);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 high = word_at(block + 4 * i) >> run & 0x01010101;
        c.words[i] = (int)(word_at(low + 4 * i) >> (2 * (run % 4)) & 0x03030303 | high << 2);
    }
    float d = half_at(block + 108);
#pragma unroll
    for (int s = 0; s < 2; s++) {
        u32 j = 2 * run + s;
        u32 four = block[96 + j % 8] >> (4 * (j / 8)) & 15, two = block[104 + j % 4] >> (2 * (j / 4)) & 3;
        c.scale[s] = d * (float)((int)(four | two << 4) - 32);
        c.min[s] = -4.0f * c.scale[s];
    }
#elif TYPE == Q4_K || TYPE == Q5_K
    const bool has_fifth = TYPE == Q5_K;
    const u8* block = row + (has_fifth ? 176 : 144) * (g / 8);
    u32 run = g % 8;
    const u32* fifth = (const u32*)(block + 16);
    const u32* codes = (const u32*)(block + (has_fifth ? 48 : 16) + 32 * (run / 2));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 word = codes[i] >> (4 * (run % 2)) & 0x0f0f0f0f;
        if (has_fifth) word |= (fifth[i] >> run & 0x01010101) << 4;
        c.words[i] = (int)word;
    }
    const u8* packed = block + 4;
    u32 scale, min;
    if (run < 4) {
        scale = packed[run] & 63;
        min = packed[run + 4] & 63;
    } else {
        scale = packed[run + 4] & 15 | packed[run - 4] >> 6 << 4;
        min = packed[run + 4] >> 4 | packed[run] >> 6 << 4;
    }
    c.scale[0] = c.scale[1] = half_at(block) * (float)scale;
    c.min[0] = c.min[1] = -half_at(block + 2) * (float)min;
#elif TYPE == Q6_K
    const u8* block = row + 210 * (g / 8);
    u32 run = g % 8, quarter = run % 4;
    const u8* low = block + 64 * (run / 4) + 32 * (quarter % 2);
    const u8* high = block + 128 + 32 * (run / 4);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 four = word_at(low + 4 * i) >> (4 * (quarter / 2)) & 0x0f0f0f0f;
        c.words[i] = (int)(four | (word_at(high + 4 * i) >> (2 * quarter) & 0x03030303) << 4);
    }
    float d = half_at(block + 208);
#pragma unroll
    for (int s = 0; s < 2; s++) {
        c.scale[s] = d * (float)(signed char)block[192 + 2 * run + s];
        c.min[s] = -32.0f * c.scale[s];
    }
#elif TYPE == TQ3_1S || TYPE == TQ4_1S
    const u8* block = row + (TYPE == TQ3_1S ? 16 : 20) * g;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if TYPE == TQ3_1S
        // Eight indices of three bits; each goes to a byte of its own.
        const u8* three = block + 4 + 3 * i;
        u32 bits = (u32)three[0] | (u32)three[1] << 8 | (u32)three[2] << 16;
        u32 first = bits & 7 | (bits & 0x38) << 5 | (bits & 0x1c0) << 10 | (bits & 0xe00) << 15;
        bits >>= 12;
        u32 second = bits & 7 | (bits & 0x38) << 5 | (bits & 0x1c0) << 10 | (bits & 0xe00) << 15;
        c.words[2 * i] = pick(table, first);
        c.words[2 * i + 1] = pick(table, second);
#else
        // Value 2 j is the low nibble of byte j, value 2 j + 1 the high one.
        u32 word = word_at(block + 4 + 4 * i);
        u32 even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
        c.words[2 * i] = pick(table, __byte_perm(even, odd, 0x5140));
        c.words[2 * i + 1] = pick(table, __byte_perm(even, odd, 0x7362));
#endif
    }
    c.scale[0] = half_at(block) * table.unit;
    c.scale[1] = half_at(block + 2) * table.unit;
    c.min[0] = c.min[1] = 0.0f;
#else
#error TYPE has no codes
#endif
}
