// Products of a warpgroup of halves, as compute capability 9.0 has them alone: they run beside the threads, which wait for them.
//
// An operand in shared memory is rows of what a product sums over, in the orders of unpack.cuh. A lane has of results, and of left
// operands in registers, what `mma.m16n8k16` gives it: warp w of the four has rows 16 w to 16 w + 16.

#pragma once

#include "half.cuh"

constexpr u32 WARPGROUP = 128;
// Rows of a product.
constexpr u32 PRODUCT_ROWS = 64;

// Swizzles of 128 and 32 bytes.
constexpr u64 IN_TOKENS_ORDER = 1ull << 62, IN_DIMS_ORDER = 3ull << 62;

// A matrix of rows of `dims` halves, which are queries or tokens, in the order of `in_tokens`. So many sixteens of bytes further on begin
// the next 16 dims, and in the end the next 64.
constexpr u32 NEXT_SIXTEEN = 2, NEXT_SIXTY_FOUR = 64;

__device__ inline u64 matrix(const u16* at, u32 eight_rows, u64 order) {
    return (shared_address(at) & 0x3ffff) >> 4 | (u64)(eight_rows * sizeof(u16) / 16) << 32 | order;
}

__device__ inline u64 matrix_in_tokens(const u16* at, u32 dims) { return matrix(at, 8 * dims, IN_TOKENS_ORDER); }

// A matrix whose rows are dims, of 16 tokens, in the order of `in_dims`.
__device__ inline u64 matrix_in_dims(const u16* at) { return matrix(at, 8 * 16, IN_DIMS_ORDER); }

// What this thread has stored to shared memory is seen by products that begin after a barrier.
__device__ inline void show_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What is in registers is seen by products that follow.
__device__ inline void show_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving what is done with registers across the beginning or the end of a product.
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

// Ends a group of products.
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most so many groups are under way.
template <u32 LEFT>
__device__ inline void wait_for_products() {
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

// d = a b, or d += a b where `keeps` is not 0: rows of 16 halves of `a` and of `b`, 64 of each.
__device__ inline void multiply(float (&d)[32], u64 a, u64 b, u32 keeps) {
    asm volatile("{ .reg .pred keeps; setp.ne.b32 keeps, %34, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FIRST_32 "}, %32, %33, keeps, 1, 1, 0, 0; }"
                 : IN_32(d, 0)
                 : "l"(a), "l"(b), "r"(keeps)
                 : "memory");
}

// d += a b: `a` in registers, and 64 rows of `b`.
__device__ inline void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("{ .reg .pred keeps; setp.ne.b32 keeps, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" FIRST_32 "}, {%32, %33, %34, %35}, %36, keeps, 1, 1, 0; }"
                 : IN_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1)
                 : "memory");
}

// The same with 128 rows of `b`.
__device__ inline void multiply(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile("{ .reg .pred keeps; setp.ne.b32 keeps, %69, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" FIRST_32 ", " NEXT_32 "}, {%64, %65, %66, %67}, %68, keeps, 1, 1, 0; }"
                 : IN_32(d, 0), IN_32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1)
                 : "memory");
}

// Waits at barrier `id` for `threads`, this one among them.
__device__ inline void meet(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Comes to barrier `id`, of `threads`, and goes on.
__device__ inline void arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// From here on the threads of this warpgroup have so many registers each, more than before.
template <u32 REGISTERS>
__device__ inline void claim_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// The same, fewer than before.
template <u32 REGISTERS>
__device__ inline void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
