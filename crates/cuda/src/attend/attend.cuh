// What the kernels of attention share. The method is in mod.rs and decode.rs.

#pragma once

#include "tile.cuh"

// The codebook of a type in bytes.
struct Book {
    u32 bytes[4];  // bytes of the levels, ascending
    float step;    // value = (byte - bias) * step * scale
    float bias;
};

// Bytes of the codes of two rows of a group, r and r + 8, interleaved: [0] has codes 0 and 1 of both (r, r + 8, r, r + 8),
// [1] codes 2 and 3.
struct Codes { u32 pair[2]; };

// A KV head of a sequence.
struct Slot {
    u32 first_row;  // of the sequence, among the queries and the outputs
    u32 kv_head;
    u32 start;      // position of its first row
    u32 unused;
};

// Within 2 ulp; subnormal results are 0.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
