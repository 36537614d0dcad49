// RoPE in place, one warp per head.

#include "rope.cuh"

struct RopeParams {
    Turn turn;
    float* x;              // [rows, n_heads, dim]
    unsigned n_heads;
    unsigned dim;
    unsigned total;        // rows * n_heads
    unsigned weight_step;  // distance between the weights of heads
};

extern "C" __global__ void rope(const __grid_constant__ RopeParams p) {
    unsigned head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= p.total) return;
    Turn turn = p.turn;
    if (turn.weight) turn.weight += (size_t)(head % p.n_heads) * p.weight_step;
    turn_head(turn, p.x + (size_t)head * p.dim, p.dim, head / p.n_heads, threadIdx.x % 32);
}
