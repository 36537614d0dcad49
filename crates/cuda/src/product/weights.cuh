// Decodes 32 weights in a row of any type, as the codec does (crates/codec/src/{block32,kquant,tq}.rs have the layouts).
// TYPE is one of the numbers below; product/mod.rs has the same.

#define F32 0
#define F16 1
#define BF16 2
#define Q8_0 3
#define Q4_0 4
#define Q4_1 5
#define Q5_0 6
#define Q5_1 7
#define Q2_K 8
#define Q3_K 9
#define Q4_K 10
#define Q5_K 11
#define Q6_K 12
#define TQ3_1S 13
#define TQ4_1S 14

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

__device__ __forceinline__ float half_at(const u8* p) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(*(const u16*)p));
    return value;
}

// Four bytes at an even address.
__device__ __forceinline__ u32 word_at(const u8* p) {
    return (u32)((const u16*)p)[0] | (u32)((const u16*)p)[1] << 16;
}

// What the types with codebooks need besides the bytes.
struct Codebook {
    float levels[16];
    u32 signs;  // of the rotation, before its butterfly
};

// Undoes the rotation of tq3_1s and tq4_1s.
__device__ __forceinline__ void rotate_back(const Codebook& book, float (&w)[32]) {
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
    for (int i = 0; i < 32; i++) w[i] *= (book.signs >> i & 1) ? -0.17677669529663687f : 0.17677669529663687f;
}

// Weights 32 g .. 32 g + 32 of the row that starts at `row`; of `n` weights the last group may be cut short, where the
// type has no blocks.
__device__ __forceinline__ void decode_group(
    const u8* row, u32 g, u32 n, const Codebook& book, float (&w)[32]) {
#if TYPE == F32 || TYPE == F16 || TYPE == BF16
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 at = 32 * g + i;
        w[i] = 0.0f;
        if (at < n) {
#if TYPE == F32
            w[i] = ((const float*)row)[at];
#elif TYPE == F16
            w[i] = half_at(row + 2 * at);
#else
            w[i] = __uint_as_float((u32)((const u16*)row)[at] << 16);
#endif
        }
    }
#elif TYPE == Q8_0
    const u8* block = row + 34 * g;
    float d = half_at(block);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 four = word_at(block + 2 + 4 * i);
#pragma unroll
        for (int j = 0; j < 4; j++) w[4 * i + j] = (float)(signed char)(four >> (8 * j)) * d;
    }
#elif TYPE == Q4_0 || TYPE == Q4_1 || TYPE == Q5_0 || TYPE == Q5_1
    const bool has_min = TYPE == Q4_1 || TYPE == Q5_1, has_fifth = TYPE == Q5_0 || TYPE == Q5_1;
    const u8* block = row + (18 + 2 * has_min + 4 * has_fifth) * g;
    float d = half_at(block);
    float m = has_min ? half_at(block + 2) : 0.0f;
    u32 fifth = has_fifth ? word_at(block + 2 + 2 * has_min) : 0;
    const u8* nibbles = block + 2 + 2 * has_min + 4 * has_fifth;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        u32 four = word_at(nibbles + i % 16 / 4 * 4);
        int code = (int)(four >> (8 * (i % 4) + 4 * (i / 16)) & 15 | (fifth >> i & 1) << 4);
        w[i] = has_min ? (float)code * d + m : (float)(code - (has_fifth ? 16 : 8)) * d;
    }
#elif TYPE == Q2_K
    const u8* block = row + 84 * (g / 8);
    u32 run = g % 8;
    float d = half_at(block + 80), dmin = half_at(block + 82);
    const u8* codes = block + 16 + 32 * (run / 4);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        u32 scale = block[2 * run + i / 16];
        u32 code = codes[i] >> (2 * (run % 4)) & 3;
        w[i] = d * (float)(scale & 15) * (float)code - dmin * (float)(scale >> 4);
    }
#elif TYPE == Q3_K
    const u8* block = row + 110 * (g / 8);
    u32 run = g % 8;
    float d = half_at(block + 108);
    const u8* codes = block + 32 + 32 * (run / 4);
    float scales[2];
#pragma unroll
    for (int s = 0; s < 2; s++) {
        u32 j = 2 * run + s;
        u32 low = block[96 + j % 8] >> (4 * (j / 8)) & 15, high = block[104 + j % 4] >> (2 * (j / 4)) & 3;
        scales[s] = d * (float)((int)(low | high << 4) - 32);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        u32 code = codes[i] >> (2 * (run % 4)) & 3 | (block[i] >> run & 1) << 2;
        w[i] = scales[i / 16] * (float)((int)code - 4);
    }
#elif TYPE == Q4_K || TYPE == Q5_K
    const bool has_fifth = TYPE == Q5_K;
    const u8* block = row + (has_fifth ? 176 : 144) * (g / 8);
    u32 run = g % 8;
    const u8* packed = block + 4;
    u32 scale, min;
    if (run < 4) {
        scale = packed[run] & 63;
        min = packed[run + 4] & 63;
    } else {
        scale = packed[run + 4] & 15 | packed[run - 4] >> 6 << 4;
        min = packed[run + 4] >> 4 | packed[run] >> 6 << 4;
    }
    float d = half_at(block) * (float)scale, m = half_at(block + 2) * (float)min;
    const u8* fifth = block + 16;
    const u8* codes = block + (has_fifth ? 48 : 16) + 32 * (run / 2);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        u32 code = codes[i] >> (4 * (run % 2)) & 15;
        if (has_fifth) code |= (fifth[i] >> run & 1) << 4;
        w[i] = d * (float)code - m;
    }
#elif TYPE == Q6_K
    const u8* block = row + 210 * (g / 8);
    u32 run = g % 8, quarter = run % 4;
    float d = half_at(block + 208);
    const u8* low = block + 64 * (run / 4) + 32 * (quarter % 2);
    const u8* high = block + 128 + 32 * (run / 4);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        u32 code = low[i] >> (4 * (quarter / 2)) & 15 | (high[i] >> (2 * quarter) & 3) << 4;
        w[i] = d * (float)(signed char)block[192 + 2 * run + i / 16] * (float)((int)code - 32);
    }
#elif TYPE == TQ3_1S || TYPE == TQ4_1S
    const u8* block = row + (TYPE == TQ3_1S ? 16 : 20) * g;
    float d[2] = {half_at(block), half_at(block + 2)};
#pragma unroll
    for (int i = 0; i < 32; i++) {
#if TYPE == TQ3_1S
        const u8* three = block + 4 + 3 * (i / 8);
        u32 index = ((u32)three[0] | (u32)three[1] << 8 | (u32)three[2] << 16) >> (3 * (i % 8)) & 7;
#else
        u32 index = block[4 + i / 2] >> (4 * (i % 2)) & 15;
#endif
        w[i] = book.levels[index] * d[i / 16];
    }
    rotate_back(book, w);
#else
#error TYPE is not one of the numbers above
#endif
}

// The parameter of every kernel that multiplies with them.
struct ProductParams {
    const u8* w;        // [n_out] rows of row_bytes
    const float* x;     // [rows, n_in]
    const float* bias;  // [n_out], or null
    float* y;           // [rows, n_out]
    unsigned long long row_bytes;
    u32 n_in;
    u32 n_out;
    u32 rows;
    u32 accumulate;
    Codebook book;
    u32 unused;
};
