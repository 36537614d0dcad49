// The order of logits: larger keys are more probable, and of equal logits the one with the lower
// token id. A key is a logit as an integer of the same order, above the complement of its id. NaN
// and positive infinity are above everything. 0 is not a key.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ inline u64 key_of(float logit, u32 number) {
    u32 bits = __float_as_uint(logit + 0.0f);  // those of 0.0 for -0.0
    u32 order = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
    if (!(logit < __uint_as_float(0x7f800000u))) order = ~0u;
    return (u64)order << 32 | (u32)~number;
}
