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
    // Loads of 128 values wait for memory together.
    for (unsigned first = lane; first < dim; first += 128) {
        float v[4];
        for (unsigned e = 0; e < 4; e++) v[e] = first + 32 * e < dim ? x[first + 32 * e] : 0.0f;
        for (unsigned e = 0; e < 4; e++) squares = __fmaf_rn(v[e], v[e], squares);
    }
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    return 1.0f / sqrtf(squares / (float)dim + t.eps);
}

// Returns a value after the norm.
__device__ inline float normed(const HeadRope& t, float x, float factor, float weight) {
    return t.weight ? __fmul_rn(__fmul_rn(x, factor), weight) : x;
}

// Rotates both values of a pair by an angle.
__device__ inline float2 rotated(float a, float b, float c, float s) {
    return {__fmaf_rn(a, c, -__fmul_rn(b, s)), __fmaf_rn(a, s, __fmul_rn(b, c))};
}

// Finds the other value of the pair of value i, one of the rotated ones, and the pair; returns
// whether i is the first of both.
__device__ inline bool pair_of(const HeadRope& t, unsigned i, unsigned& partner, unsigned& pair) {
    bool is_first = t.stride == 1 ? i % 2 == 0 : i < t.stride;
    partner = is_first ? i + t.stride : i - t.stride;
    pair = t.stride == 1 ? i / 2 : is_first ? i : partner;
    return is_first;
}

// Applies norm and RoPE to a head in place. Called by a whole warp.
__device__ inline void rope_head(const HeadRope& t, float* x, unsigned dim, unsigned row, unsigned lane) {
    constexpr unsigned AT_ONCE = 2;
    const float* angles = t.angles + (size_t)row * t.n_rot;
    unsigned n_pairs = t.n_rot / 2;
    float factor = norm_factor(t, x, dim, lane);
    __syncwarp();
    // Stores come after the loads of all pairs, as the compiler cannot tell that they are apart.
    for (unsigned first = lane; first < n_pairs; first += 32 * AT_ONCE) {
        float a[AT_ONCE], b[AT_ONCE], c[AT_ONCE], s[AT_ONCE], a_gain[AT_ONCE], b_gain[AT_ONCE];
        for (unsigned e = 0; e < AT_ONCE; e++) {
            unsigned pair = first + 32 * e, i = t.stride == 1 ? 2 * pair : pair, j = i + t.stride;
            bool is_here = pair < n_pairs, is_normed = is_here && t.weight;
            a[e] = is_here ? x[i] : 0.0f, b[e] = is_here ? x[j] : 0.0f;
            c[e] = is_here ? angles[2 * pair] : 0.0f, s[e] = is_here ? angles[2 * pair + 1] : 0.0f;
            a_gain[e] = is_normed ? t.weight[i] : 1.0f, b_gain[e] = is_normed ? t.weight[j] : 1.0f;
        }
        for (unsigned e = 0; e < AT_ONCE; e++) {
            unsigned pair = first + 32 * e, i = t.stride == 1 ? 2 * pair : pair, j = i + t.stride;
            float2 both = rotated(normed(t, a[e], factor, a_gain[e]), normed(t, b[e], factor, b_gain[e]), c[e], s[e]);
            if (pair < n_pairs) x[i] = both.x, x[j] = both.y;
        }
    }
    if (!t.weight) return;
    for (unsigned i = t.n_rot + lane; i < dim; i += 32) x[i] = normed(t, x[i], factor, t.weight[i]);
}
