// c [m, n] = a [m, k] b [n, k]^T, in f16 with f32 sums: one warp for 16 x 8 of c, tiles of 16 of k
// in two buffers that cp.async fills while the other is multiplied.
struct MatmulParams {
    const unsigned short* a;
    const unsigned short* b;
    float* c;
    unsigned n, k;
};

__device__ void fetch(const void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

extern "C" __global__ void matmul(const __grid_constant__ MatmulParams p) {
    __shared__ __align__(16) unsigned short a[2][16][16], b[2][8][16];
    const unsigned lane = threadIdx.x, row0 = 16 * blockIdx.y, col0 = 8 * blockIdx.x;
    float c[4] = {};
    auto fill = [&](unsigned buffer, unsigned k0) {
        const unsigned row = lane / 2, half = lane % 2 * 8;
        fetch(&a[buffer][row][half], p.a + (row0 + row) * p.k + k0 + half);
        if (lane < 16) fetch(&b[buffer][row][half], p.b + (col0 + row) * p.k + k0 + half);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    fill(0, 0);
    for (unsigned k0 = 0; k0 < p.k; k0 += 16) {
        const unsigned now = k0 / 16 % 2;
        if (k0 + 16 < p.k) {
            fill(now ^ 1, k0 + 16);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_all;" ::: "memory");
        }
        __syncthreads();
        unsigned x[4], y[2];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"((unsigned)__cvta_generic_to_shared(&a[now][lane % 16][lane / 16 * 8])));
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(y[0]), "=r"(y[1])
                     : "r"((unsigned)__cvta_generic_to_shared(&b[now][lane % 8][lane / 8 % 2 * 8])));
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
        __syncthreads();
    }
    float* out = p.c + (row0 + lane / 4) * p.n + col0 + lane % 4 * 2;
    out[0] = c[0];
    out[1] = c[1];
    out[8 * p.n] = c[2];
    out[8 * p.n + 1] = c[3];
}
