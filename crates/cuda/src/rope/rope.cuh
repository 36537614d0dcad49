// Rotary position embedding (RoFormer, arXiv 2104.09864) of heads, with an optional per-head RMS
// norm before it. A pair (a, b) becomes (a cos - b sin, a sin + b cos). Products and sums are
// explicit, so that every kernel rounds alike.

struct HeadRope {
    const float* angles;   // [rows, n_rot / 2, 2]: cosine and sine
    const float* weight;   // of the norm, [dim], or null for no norm
    unsigned n_rot;        // rotated values, from the first
    unsigned stride;       // distance between the values of a pair: 1, or n_rot / 2
    float eps;
    unsigned is_on;        // 0: do nothing
};

// Returns the norm's factor of a head, besides its weight. Called by a whole warp.
__device__ inline float norm_factor(const HeadRope& t, const float* x, unsigned dim, unsigned lane) {
    if (!t.weight) return 1.0f;
    float squares = 0.0f;
    for (unsigned i = lane; i < dim; i += 32) squares = __fmaf_rn(x[i], x[i], squares);
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    return 1.0f / sqrtf(squares / (float)dim + t.eps);
}

__device__ inline float normed(const HeadRope& t, const float* x, unsigned i, float factor) {
    return t.weight ? __fmul_rn(__fmul_rn(x[i], factor), t.weight[i]) : x[i];
}

// Rotates both values of a pair; the angles are those of its row.
__device__ inline float2 rotate_pair(float a, float b, const float* angles, unsigned pair) {
    float c = angles[2 * pair], s = angles[2 * pair + 1];
    return {__fmaf_rn(a, c, -__fmul_rn(b, s)), __fmaf_rn(a, s, __fmul_rn(b, c))};
}

// Returns value i of a head, after norm and RoPE.
__device__ inline float rope_value(const HeadRope& t, const float* x, unsigned i, float factor, const float* angles) {
    float own = normed(t, x, i, factor);
    if (i >= t.n_rot) return own;
    unsigned pair = t.stride == 1 ? i / 2 : i % t.stride;
    bool is_first = t.stride == 1 ? i % 2 == 0 : i < t.stride;
    float other = normed(t, x, is_first ? i + t.stride : i - t.stride, factor);
    return is_first ? rotate_pair(own, other, angles, pair).x : rotate_pair(other, own, angles, pair).y;
}

// Applies norm and RoPE to a head in place. Called by a whole warp.
__device__ inline void rope_head(const HeadRope& t, float* x, unsigned dim, unsigned row, unsigned lane) {
    const float* angles = t.angles + (size_t)row * t.n_rot;
    float factor = norm_factor(t, x, dim, lane);
    __syncwarp();
    for (unsigned pair = lane; pair < t.n_rot / 2; pair += 32) {
        unsigned i = t.stride == 1 ? 2 * pair : pair, j = i + t.stride;
        float2 both = rotate_pair(normed(t, x, i, factor), normed(t, x, j, factor), angles, pair);
        x[i] = both.x, x[j] = both.y;
    }
    if (!t.weight) return;
    for (unsigned i = t.n_rot + lane; i < dim; i += 32) x[i] = normed(t, x, i, factor);
}
