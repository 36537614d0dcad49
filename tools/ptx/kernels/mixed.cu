// The constructs of ordinary kernels in one: a table in constant memory, a switch, a dynamically
// indexed local array, 64-bit integers, division, and the special functions. y [n], from x [n].
struct MixedParams {
    const int* x;
    long long* y;
    unsigned n;
};

__constant__ int primes[8] = {2, 3, 5, 7, 11, 13, 17, 19};

extern "C" __global__ void mixed(const __grid_constant__ MixedParams p) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    const int x = p.x[i];
    int digits[12];
    int n = 0;
    for (unsigned rest = x < 0 ? 0u - (unsigned)x : (unsigned)x; rest != 0; rest /= 10) digits[n++] = (int)(rest % 10);
    long long sum = 0;
    for (int at = 0; at < n; at++) sum += (long long)digits[(at * 5 + 1) % n] * primes[at % 8] * 1000000007ll;
    switch (x & 7) {
        case 0: sum ^= x; break;
        case 1: sum -= __popc((unsigned)x); break;
        case 2: sum += __clz(x) * 3; break;
        case 3: sum = sum % 1009; break;
        case 4: sum += (long long)floorf((float)x * 0.5f); break;
        case 5: sum = -sum; break;
        case 6: sum += (long long)rint(sqrt((double)(x & 0xffff))); break;
        default: sum += (long long)min(x, 100) + max(x, -100); break;
    }
    p.y[i] = sum;
}
