// RoPE in place, one warp per head.

#include "half.cuh"
#include "rope.cuh"

struct RopeParams {
    HeadRope head_rope;
    float* x;              // [rows, n_heads, dim]
    unsigned n_heads;
    unsigned dim;
    unsigned total;        // rows * n_heads
    unsigned weight_step;  // distance between the weights of heads
};

extern "C" __global__ void rope(const __grid_constant__ RopeParams p) {
    wait_for_kernel_before();
    unsigned head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= p.total) return;
    HeadRope head_rope = p.head_rope;
    if (head_rope.weight) head_rope.weight += (size_t)(head % p.n_heads) * p.weight_step;
    rope_head(head_rope, p.x + (size_t)head * p.dim, p.dim, head / p.n_heads, threadIdx.x % 32);
}
