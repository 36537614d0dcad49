// Short names of integers, and f16, represented by its bits: NVRTC comes without headers.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ inline float from_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Rounds to the nearest f16, ties to even.
__device__ inline u16 to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Packs a pair of f16, `low` in the lower bits.
__device__ inline u32 pack_halves(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Products, differences and maxima of f16 pairs.
__device__ inline u32 half_mul(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ inline u32 half_sub(u32 a, u32 b) {
    u32 c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ inline u32 half_max(u32 a, u32 b) {
    u32 c;
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// a b + c of f16 pairs, rounded once.
__device__ inline u32 half_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// f16 pairs with infinities replaced by the largest finite value.
__device__ inline u32 half_bounded(u32 a) {
    u32 b;
    asm("min.f16x2 %0, %1, %2;" : "=r"(b) : "r"(a), "r"(0x7bff7bffu));
    asm("max.f16x2 %0, %1, %2;" : "=r"(b) : "r"(b), "r"(0xfbfffbffu));
    return b;
}

// c plus the products of the four bytes of a and of b. NVRTC before 12.4 declares the builtins and
// defines none: their PTX calls functions that no driver finds.
__device__ inline int dot4(int a, int b, int c) {
    int d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ inline u32 dot4(u32 a, u32 b, u32 c) {
    u32 d;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

#define __dp4a dot4

// Adds an f16 product, [16][16] by [16][8], to `c`; the operands have the layout of `mma.m16n8k16`.
__device__ inline void multiply(float c[4], const u32 a[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Loads four 8 x 8 matrices of f16; each group of eight lanes gives the row addresses of one.
__device__ inline void load_matrices(u32 m[4], const u16* row, bool transposed) {
    if (transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
    }
}

// Issues a copy of eight f16 to shared memory; those beyond `bytes` become zero.
__device__ inline void copy_eight(u16* to, const void* from, u32 bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

// Waits for the copies of this thread.
__device__ inline void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Programmatic dependent launch: lets the next kernel begin as soon as all blocks of this one have,
// and waits for the previous one to end. Data that other kernels write may only be accessed after
// this; constant data, above all weights, may be loaded before.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
