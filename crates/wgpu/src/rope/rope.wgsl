// Applies RoPE to heads, after a norm if there is one. A workgroup takes a head of a row.

struct Params {
    rows: u32,
    heads: u32,
    dim: u32,
    n_rot: u32,      // rotated values, from the first
    halves: u32,     // pairs are (i, i + n_rot / 2), not (2i, 2i + 1)
    has_norm: u32,
    weight_step: u32,   // distance between the weights of heads
    eps: f32,
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;   // [rows, heads, dim]
// [dim] or [heads, dim], if there is a norm
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> angles: array<f32>;    // [rows, n_rot / 2, 2]

var<workgroup> sums: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn rope(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = workgroup_index(group, groups);
    if head >= p.rows * p.heads { return; }
    let start = head * p.dim;
    var squares = 0.0f;
    for (var i = thread; i < p.dim; i += THREADS) {
        let value = x[start + i];
        squares += value * value;
    }
    sums[thread] = squares;
    workgroupBarrier();
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        if thread < step { sums[thread] += sums[thread + step]; }
        workgroupBarrier();
    }
    let factor = 1.0f / sqrt(sums[0] / f32(p.dim) + p.eps);
    let n_pairs = p.n_rot / 2u;
    for (var i = thread; i < n_pairs; i += THREADS) {
        let a = select(2u * i, i, p.halves != 0u);
        let b = select(2u * i + 1u, i + n_pairs, p.halves != 0u);
        let at = 2u * (head / p.heads * n_pairs + i);
        let cosine = angles[at];
        let sine = angles[at + 1u];
        let first = normed(head, a, factor);
        let second = normed(head, b, factor);
        x[start + a] = first * cosine - second * sine;
        x[start + b] = first * sine + second * cosine;
    }
    for (var i = p.n_rot + thread; i < p.dim; i += THREADS) { x[start + i] = normed(head, i, factor); }
}

fn normed(head: u32, i: u32, factor: f32) -> f32 {
    let value = x[head * p.dim + i];
    if p.has_norm == 0u { return value; }
    return value * factor * weight[head % p.heads * p.weight_step + i];
}
