// Normalizes rows, with one workgroup per row.
//
//   ADD_RMS      y = y + x / sqrt(mean(x²) + eps) w
//   LAYER        y = (x - m) / sqrt(mean((x - m)²) + eps) w, m the mean of x

struct Params {
    rows: u32,
    n: u32,
    kind: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;      // [n]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;     // [rows, n]

@compute @workgroup_size(THREADS)
fn norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = workgroup_index(group, groups);
    if row >= p.rows { return; }
    let start = row * p.n;
    var mean = 0.0f;
    if p.kind == LAYER {
        var total = 0.0f;
        for (var i = thread; i < p.n; i += THREADS) { total += x[start + i]; }
        mean = sum(total, thread) / f32(p.n);
    }
    var squares = 0.0f;
    for (var i = thread; i < p.n; i += THREADS) {
        let value = x[start + i] - mean;
        squares += value * value;
    }
    let factor = 1.0f / sqrt(sum(squares, thread) / f32(p.n) + p.eps);
    for (var i = thread; i < p.n; i += THREADS) {
        let value = (x[start + i] - mean) * factor * weight[i];
        let to = row * p.n + i;
        if p.kind == ADD_RMS { y[to] += value; } else { y[to] = value; }
    }
}
