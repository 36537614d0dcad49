// Copies rows to columns of wider rows: one value per thread.

#include "half.cuh"

struct ColumnsParams {
    const float* src;  // [rows, n]
    float* dst;        // [rows, width]; columns first .. first + n are written
    unsigned rows;
    unsigned n;
    unsigned width;
    unsigned first;
};

extern "C" __global__ void copy_columns(const __grid_constant__ ColumnsParams p) {
    wait_for_kernel_before();
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)p.rows * p.n) p.dst[i / p.n * p.width + p.first + i % p.n] = p.src[i];
}
