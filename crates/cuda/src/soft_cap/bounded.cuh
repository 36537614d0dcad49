// The soft cap (arXiv 2408.00118).

#pragma once

// Within 2^-22, relative; subnormal results are 0.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x within 2^-23, relative. A correctly rounded division has branches and more code.
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cap tanh(x / cap), and NaN for non-finite x; `rate` is -2 log2 e / cap.
//
// It is cap (1 - e) / (1 + e) with e = 2^(rate |x|), within 4 * 2^-23 of the cap. In units of cap *
// 2^-23: two roundings of the exponent, 0.37 of e at most, are 2 / (1 + e)^2 as much, the power's
// own 2 e are 4 e / (1 + e)^2, and roundings of both sums, of the quotient (one and a half) and of
// the product are 2.5 tanh(x / cap). All three are 2.8 together where x is some 1.1 caps, and less
// elsewhere.
__device__ inline float bounded(float x, float cap, float rate) {
    float e = power_of_two(rate * fabsf(x));
    float size = fmaf(-cap, e, cap) * reciprocal(1.0f + e);
    return fmaf(0.0f, x, copysignf(size, x));
}
