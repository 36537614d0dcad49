// Layers with several residual streams (AltUp, arXiv 2301.13310), and the sparse feed-forward
// layers beside them (statistical top-k, arXiv 2506.06644).

struct Params {
    rows: u32,
    width: u32,
    n_in: u32,
    n_out: u32,
    deviations: f32,
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;           // [n_in, rows, width], or [rows, width]
@group(0) @binding(2) var<storage, read> coefs: array<f32>;       // [rows, n_out, n_in]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;     // [n_out, rows, width], or [rows, width]

// y[i] = sum over j of coefs[row, i, j] x[j], one value per thread.
@compute @workgroup_size(THREADS)
fn mix_streams(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let at = id.x + id.y * groups.x * THREADS;
    let stream = p.rows * p.width;
    if at >= p.n_out * stream { return; }
    let value = at % stream;
    let first = (value / p.width * p.n_out + at / stream) * p.n_in;
    var total = 0.0f;
    for (var j = 0u; j < p.n_in; j++) { total += coefs[first + j] * x[j * stream + value]; }
    y[at] = total;
}

// y = rms(x) y, one workgroup per row.
@compute @workgroup_size(THREADS)
fn scale_by_rms(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = workgroup_index(group, groups);
    if row >= p.rows { return; }
    let start = row * p.width;
    var squares = 0.0f;
    for (var i = thread; i < p.width; i += THREADS) { squares += x[start + i] * x[start + i]; }
    let rms = sqrt(sum(squares, thread) / f32(p.width));
    for (var i = thread; i < p.width; i += THREADS) { y[start + i] *= rms; }
}

// y = gelu(max(0, x - cutoff)) y, cutoff the mean of the row and some of its standard deviations.
@compute @workgroup_size(THREADS)
fn gate_sparsely(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = workgroup_index(group, groups);
    if row >= p.rows { return; }
    let start = row * p.width;
    var total = 0.0f;
    for (var i = thread; i < p.width; i += THREADS) { total += x[start + i]; }
    let mean = sum(total, thread) / f32(p.width);
    var squares = 0.0f;
    for (var i = thread; i < p.width; i += THREADS) {
        let value = x[start + i] - mean;
        squares += value * value;
    }
    let cutoff = mean + p.deviations * sqrt(sum(squares, thread) / f32(p.width));
    for (var i = thread; i < p.width; i += THREADS) {
        let g = x[start + i];
        // A comparison, so that NaN is preserved.
        y[start + i] = activated(GELU, 0.0f, select(g - cutoff, 0.0f, g <= cutoff), y[start + i]);
    }
}
