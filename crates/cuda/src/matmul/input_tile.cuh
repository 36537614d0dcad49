// Inputs in 8 bits as skinny_q8.cu multiplies them.

#pragma once

#include "half.cuh"

// How a tile has the sums of the codes of a group: those of either half, 16 bits each, the first
// half's low; the sum times the scale, a float; or the start of an MMA, minus a multiple of the
// sum.
#define SUMS_OF_HALVES 0
#define SUMS_AS_FLOATS 1
#define SUMS_AS_STARTS 2

// Integers less than 2^22, added to these bits of 1.5 * 2^23, form the float 1.5 * 2^23 plus the
// integer.
#define MMA_ZERO 0x4b400000

// Of rows 2 t and 2 t + 1, whose products lanes with lane % 4 = t have.
struct __align__(16) InputScales {
    float scale[2];
    u32 sums[2];
};

// A group of 8 rows: the B operands of m16n8k32, in lane 4 row + t words t and 4 + t of the row's
// codes, and the scales.
struct __align__(16) InputTile {
    u32 codes[8][4][2];
    InputScales scales[4];
};
