// The sum of x [n] over a block: shuffles within warps, shared memory between them. The parameters
// are a struct by value.
struct ReduceParams {
    const float* x;
    float* sum;
    unsigned n;
    float scale;
};

extern "C" __global__ void reduce(const __grid_constant__ ReduceParams p) {
    __shared__ float of_warp[32];
    float sum = 0.0f;
    for (unsigned i = threadIdx.x; i < p.n; i += blockDim.x) sum += p.x[i] * p.scale;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0.0f;
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (threadIdx.x == 0) *p.sum = sum;
    }
}
