// Rotary position embedding (RoFormer, arXiv 2104.09864) of whole heads, with the per-head RMS norm that may precede it:
// one warp per head, in place. A pair (a, b) becomes (a cos - b sin, a sin + b cos).

struct RopeParams {
    float* x;             // [rows, n_heads, dim]
    const float* angles;  // [rows, n_rot / 2, 2]: cosine and sine
    const float* weight;  // [dim], or null for no norm
    unsigned n_heads;
    unsigned dim;
    unsigned n_rot;
    unsigned total;       // rows * n_heads
    unsigned stride;      // from one value of a pair to the other: 1, or n_rot / 2
    float eps;
};

extern "C" __global__ void rope(const __grid_constant__ RopeParams p) {
    unsigned head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    unsigned lane = threadIdx.x % 32;
    if (head >= p.total) return;
    float* x = p.x + (size_t)head * p.dim;
    const float* angles = p.angles + (size_t)(head / p.n_heads) * p.n_rot;

    float factor = 1.0f;
    if (p.weight) {
        float squares = 0.0f;
        for (unsigned i = lane; i < p.dim; i += 32) squares += x[i] * x[i];
        for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
        factor = 1.0f / sqrtf(squares / (float)p.dim + p.eps);
        __syncwarp();
    }
    for (unsigned pair = lane; pair < p.n_rot / 2; pair += 32) {
        unsigned i = p.stride == 1 ? 2 * pair : pair;
        unsigned j = i + p.stride;
        float a = x[i], b = x[j];
        if (p.weight) {
            a = a * factor * p.weight[i];
            b = b * factor * p.weight[j];
        }
        float c = angles[2 * pair], s = angles[2 * pair + 1];
        x[i] = a * c - b * s;
        x[j] = a * s + b * c;
    }
    if (p.weight) {
        for (unsigned i = p.n_rot + lane; i < p.dim; i += 32) x[i] = x[i] * factor * p.weight[i];
    }
}
