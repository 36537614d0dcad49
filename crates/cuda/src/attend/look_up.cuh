// Decodes codes to bytes of levels, by register permutations. The integer pipe is the bottleneck,
// so work moves to other pipes where possible.

#pragma once

#include "tile.cuh"

// The codebook of a type in bytes.
struct Book {
    u32 bytes[4];  // bytes of the levels, ascending
    float step;    // value = (byte - bias) * step * scale
    float bias;
};

// Bytes of the codes of two rows of a group, r and r + 8, interleaved: [0] has codes 0 and 1 of
// both (r, r + 8, r, r + 8), [1] codes 2 and 3.
struct Codes { u32 pair[2]; };

// Returns bit 4 a + 2 b + c of TABLE, for each bit. One instruction (inline assembly, because
// compilers split the equivalent expression into several).
template <u32 TABLE>
__device__ inline u32 logic(u32 a, u32 b, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
    return d;
}

// Returns bits of `a` where those of `mask` are 1, of `b` where they are 0.
__device__ inline u32 choose(u32 mask, u32 a, u32 b) { return logic<0xca>(mask, a, b); }

// Levels of turbo2t and turbo3t above -128, four to a word, by the last six bits of the code
// sequence.
__constant__ u32 TRELLIS[2][16] = TRELLIS_BYTES;

// Returns bytes of `low` and `high` by the lower four nibbles of `index`, below 8; 8 more make the
// sign of a byte all of its bits. (`__byte_perm` takes no such selectors.)
__device__ inline u32 pick(u32 low, u32 high, u32 index) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(index));
    return bytes;
}

// Returns the upper half of `x`, as an f16 that is not NaN: equivalent to a shift, but on the f16
// pipe, which has less load.
__device__ inline u32 upper(u32 x) {
    u32 y;
    asm("{ .reg .b16 low, high; .reg .b32 twice; mov.b32 {low, high}, %1; mov.b32 twice, {high, high}; "
        "sub.rn.f16x2 %0, twice, %2; }" : "=r"(y) : "r"(x), "r"(0));
    return y;
}

// Returns masks of the bytes whose nibble of `bits` is 1, not 0, for the lower four nibbles.
__device__ inline u32 mask_of(u32 bits) { return pick(0x0000ff00, 0, bits); }

// Looks up codes of up to four levels, by nibbles.
__device__ inline Codes four_levels(const Book& book, u32 index) {
    return {{pick(book.bytes[0], 0, index), pick(book.bytes[0], 0, upper(index))}};
}

// Looks up codes of up to eight levels.
__device__ inline Codes eight_levels(const Book& book, u32 index) {
    return {{pick(book.bytes[0], book.bytes[1], index), pick(book.bytes[0], book.bytes[1], upper(index))}};
}

// Looks up codes of sixteen levels: two registers hold eight, so two look-ups, and bit 3 selects.
// It is the sign of a byte, of `nibbles` in every other nibble, of these 4 to the left in the rest;
// a permutation spreads signs over bytes where bit 3 of its selector is 1.
__device__ inline Codes sixteen_levels(const Book& book, u32 nibbles) {
    u32 index = nibbles & 0x77777777, left = nibbles << 4;
    u32 indices[2] = {index, upper(index)}, masks[2] = {pick(left, nibbles, 0xd9c8), pick(left, nibbles, 0xfbea)};
    Codes codes;
    for (u32 pair = 0; pair < 2; pair++) {
        u32 low = pick(book.bytes[0], book.bytes[1], indices[pair]);
        u32 high = pick(book.bytes[2], book.bytes[3], indices[pair]);
        codes.pair[pair] = choose(masks[pair], high, low);
    }
    return codes;
}

// Looks up codes of 64 bytes: nibbles of `low` and of `high` hold the lower and upper three bits of
// their numbers.
__device__ inline Codes look_up(const u32* bytes, u32 low, u32 high) {
    u32 index = low & 0x77777777, bits[3];
#pragma unroll
    for (u32 level = 0; level < 3; level++) bits[level] = high >> level & 0x11111111;
    Codes codes;
#pragma unroll
    for (u32 pair = 0; pair < 2; pair++) {
        u32 eights[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) eights[i] = pick(bytes[2 * i], bytes[2 * i + 1], pair ? upper(index) : index);
#pragma unroll
        for (u32 level = 0; level < 3; level++) {
            u32 mask = mask_of(pair ? upper(bits[level]) : bits[level]);
#pragma unroll
            for (u32 i = 0; i < 4 >> level; i++) eights[i] = choose(mask, eights[2 * i + 1], eights[2 * i]);
        }
        codes.pair[pair] = eights[0];
    }
    return codes;
}

// The last six bits of a code sequence, in bytes: of a row of four values, and of the row eight
// further on.
struct Windows { u32 row[2]; };

// Returns the windows of a trellis type, from indices in nibbles: their own, their predecessors,
// and the predecessors of these.
template <u32 TYPE>
__device__ inline Windows windows(u32 own, u32 before, u32 earlier) {
    static_assert(is_trellis(TYPE), "only trellis codes depend on their predecessors");
    if constexpr (TYPE == TURBO2T) {
        u32 last = own + 4 * before;
        return {{(last & 0x0f0f0f0f) + 16 * (earlier & 0x03030303), choose(0x0f0f0f0f, last >> 4, earlier & 0x30303030)}};
    }
    return {{(own & 0x07070707) + 8 * (before & 0x07070707), choose(0x07070707, own >> 4, before >> 1 & 0x38383838)}};
}

// Returns the codes of a trellis type, from indices in nibbles: their own, their predecessors, and
// the predecessors of these.
template <u32 TYPE>
__device__ inline Codes trellis_codes(u32 own, u32 before, u32 earlier) {
    static_assert(is_trellis(TYPE), "only trellis codes depend on their predecessors");
    u32 low = own, high = before;
    if constexpr (TYPE == TURBO2T) low |= (before & 0x11111111) << 2, high = (before >> 1 & 0x11111111) | earlier << 1;
    const u32* bytes = TRELLIS[TYPE - TURBO2T];
    return look_up(bytes, low, high);
}
