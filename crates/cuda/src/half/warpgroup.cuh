// f16 MMAs of a warpgroup (`wgmma`, compute capability 9.0 only): they run asynchronously, and
// threads wait for their completion.
//
// An operand in shared memory is rows of the reduction dimension, with swizzled groups of eight
// f16. The results, and left operands in registers, have the layout of `mma.m16n8k16`: warp w of
// the four has rows 16 w to 16 w + 16.

#pragma once

#include "half.cuh"

constexpr u32 WARPGROUP = 128;
// Rows of an MMA.
constexpr u32 MMA_ROWS = 64;

// A matrix descriptor: the lower half holds its address, in units of 16 bytes, and the upper half
// its layout: the distance between groups of eight rows, and the swizzle, of 128 bytes or of 32.
__device__ constexpr u32 descriptor_layout(u32 eight_rows, u32 swizzle) { return eight_rows * sizeof(u16) / 16 | swizzle << 30; }

// Rows of `dims` f16, a multiple of 64: eight rows together, 64 of their values after 64, in which
// a group of eight is at its number xor the row's (`token_major` of unpack.cuh).
__device__ constexpr u32 token_major_layout(u32 dims) { return descriptor_layout(8 * dims, 1); }
// Descriptor offsets of the next 16 dims, and after four of these of the next 64.
constexpr u32 NEXT_SIXTEEN = 2, NEXT_SIXTY_FOUR = 64;

// Rows of 16 f16, whose two groups of eight are swapped in every other four rows (`dim_major`).
constexpr u32 DIM_MAJOR_LAYOUT = descriptor_layout(8 * 16, 3);

// Returns the address of a matrix in descriptor units. All lanes have the same, which the shuffle
// makes explicit to the compiler.
__device__ inline u32 descriptor_address(const u16* at) { return __shfl_sync(~0u, (shared_address(at) & 0x3ffff) >> 4, 0); }

// Makes the stores of this thread to shared memory visible to MMAs that begin after a barrier.
__device__ inline void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Makes register contents visible to following MMAs.
__device__ inline void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Prevents the compiler from moving register accesses across the beginning or the end of an MMA.
template <u32 N>
__device__ inline void pin(float (&x)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

template <u32 N>
__device__ inline void pin(u32 (&x)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// Ends a group of MMAs.
__device__ inline void commit_mmas() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT groups are in flight.
template <u32 LEFT>
__device__ inline void wait_for_mmas() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define IN_8(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])
#define IN_32(x, i) IN_8(x, i), IN_8(x, i + 8), IN_8(x, i + 16), IN_8(x, i + 24)
#define FIRST_32                                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NEXT_32                                                                                                        \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
    "%55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a b, or d += a b if KEEPS: rows of 16 f16 of `a` and of `b`, 64 of each, in the same layout.
template <u32 LAYOUT, bool ACCUMULATES>
__device__ inline void multiply(float (&d)[32], u32 a, u32 b) {
    asm volatile("{ .reg .pred accumulates; .reg .b64 a, b; setp.ne.b32 accumulates, %35, 0; mov.b64 a, {%32, %34}; mov.b64 b, {%33, %34}; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FIRST_32 "}, a, b, accumulates, 1, 1, 0, 0; }"
                 : IN_32(d, 0)
                 : "r"(a), "r"(b), "r"(LAYOUT), "r"((u32)ACCUMULATES)
                 : "memory");
}

// d += a b: rows of 16 f16, 64 of `a` and 64 of `b`, in the same layout.
template <u32 LAYOUT>
__device__ inline void multiply(float (&d)[32], u32 a, u32 b) { multiply<LAYOUT, true>(d, a, b); }

// The same with 32 rows of `b`.
template <u32 LAYOUT>
__device__ inline void multiply(float (&d)[16], u32 a, u32 b) {
    asm volatile("{ .reg .pred accumulates; .reg .b64 a, b; setp.ne.b32 accumulates, %19, 0; mov.b64 a, {%16, %18}; mov.b64 b, {%17, %18}; "
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "a, b, accumulates, 1, 1, 0, 0; }"
                 : IN_8(d, 0), IN_8(d, 8)
                 : "r"(a), "r"(b), "r"(LAYOUT), "r"(1)
                 : "memory");
}

// The same with 128 rows of `b`.
template <u32 LAYOUT>
__device__ inline void multiply(float (&d)[64], u32 a, u32 b) {
    asm volatile("{ .reg .pred accumulates; .reg .b64 a, b; setp.ne.b32 accumulates, %67, 0; mov.b64 a, {%64, %66}; mov.b64 b, {%65, %66}; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" FIRST_32 ", " NEXT_32 "}, a, b, accumulates, 1, 1, 0, 0; }"
                 : IN_32(d, 0), IN_32(d, 32)
                 : "r"(a), "r"(b), "r"(LAYOUT), "r"(1)
                 : "memory");
}

// d += a b: `a` in registers, and 64 rows of `b`.
template <u32 LAYOUT>
__device__ inline void multiply(float (&d)[32], const u32 (&a)[4], u32 b) {
    asm volatile("{ .reg .pred accumulates; .reg .b64 b; setp.ne.b32 accumulates, %38, 0; mov.b64 b, {%36, %37}; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FIRST_32 "}, {%32, %33, %34, %35}, b, accumulates, 1, 1, 0; }"
                 : IN_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(LAYOUT), "r"(1)
                 : "memory");
}

// The same with 128 rows of `b`.
template <u32 LAYOUT>
__device__ inline void multiply(float (&d)[64], const u32 (&a)[4], u32 b) {
    asm volatile("{ .reg .pred accumulates; .reg .b64 b; setp.ne.b32 accumulates, %70, 0; mov.b64 b, {%68, %69}; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" FIRST_32 ", " NEXT_32
                 "}, {%64, %65, %66, %67}, b, accumulates, 1, 1, 0; }"
                 : IN_32(d, 0), IN_32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(LAYOUT), "r"(1)
                 : "memory");
}

// Waits at barrier `id` for `threads`, including this one.
__device__ inline void barrier_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Arrives at barrier `id`, of `threads`, without waiting.
__device__ inline void barrier_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// The barriers of N_STAGES stages, numbered after that of the block: of each stage one for each
// consumer warpgroup, and one for the producers.
template <u32 N_STAGES, u32 N_CONSUMERS>
struct StageBarriers {
    static_assert(N_STAGES * (N_CONSUMERS + 1) < 16, "a block has sixteen barriers");
    __device__ static u32 filled(u32 stage, u32 consumer) { return 1 + stage * (N_CONSUMERS + 1) + consumer; }
    __device__ static u32 emptied(u32 stage) { return filled(stage, N_CONSUMERS); }
};

// Raises the registers per thread of this warpgroup to REGISTERS.
template <u32 REGISTERS>
__device__ inline void claim_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// Lowers the registers per thread of this warpgroup to REGISTERS.
template <u32 REGISTERS>
__device__ inline void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
