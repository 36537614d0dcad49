// Prologue and epilogue of attention as separate kernels, where several blocks share queries or a
// block has too many.
//
// Macros: K_DIM, V_DIM (stored values per token, multiples of 16).

#pragma once

#include "prologue_epilogue.cuh"

// Prepares the queries: one warp per query, blocks of WARPS. Grid: queries, KV heads of all
// sequences.
extern "C" __global__ void __launch_bounds__(THREADS) prepare_queries(const __grid_constant__ AttendParams p) {
    wait_for_kernel_before();
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32;
    Slot slot(p.c, blockIdx.y);
    if (i >= slot.sequence.padded) return;
    u16* to = p.c.queries + slot.query(i) * K_DIM;
    for (u32 span = 0; span < K_DIM; span += SPAN) {
        uint2 four = prepared(p, slot, i, span, lane);
        if (span + 4 * lane < K_DIM) *(uint2*)(to + span + 4 * lane) = four;
    }
}

// Combines the KV splits: one warp per query. Grid: queries, KV heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ AttendParams p) {
    wait_for_kernel_before();
    u32 lane = threadIdx.x % 32, i = blockIdx.x * WARPS + threadIdx.x / 32;
    Slot slot(p.c, blockIdx.y);
    if (i < slot.n_queries(p.c)) combine_query(p, slot, i, lane);
}
