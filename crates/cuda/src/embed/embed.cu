// Embedding rows: the weights of some rows of a table, times a factor. A thread decodes 32 of them.

#include "weights.cuh"

struct EmbedParams {
    const u8* table;  // rows of row_bytes
    float* out;       // [rows, n]
    unsigned long long row_bytes;
    u32 n;            // weights of a row
    float scale;
    Codebook book;
    u32 tokens[MAX_TOKENS];  // of each row of `out`, the row of the table
};

extern "C" __global__ void embed(const __grid_constant__ EmbedParams p) {
    u32 g = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    wait_for_kernel_before();
    if (32 * g >= p.n) return;
    Group group = read_group(p.table + p.row_bytes * p.tokens[row], g, p.n, p.book);
    float w[32];
    decode_group(group, p.book, w);
    float* out = p.out + (size_t)p.n * row + 32 * g;
    u32 left = p.n - 32 * g;
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        if (i < left) out[i] = w[i] * p.scale;
    }
}
