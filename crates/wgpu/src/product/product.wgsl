// y = W x + bias, or y = y + that. A group of threads makes one output of up to ROWS rows of activations: threads take turns
// with 32 columns each, and add up in a fixed order. So a row has the bits that it has alone.

struct Params {
    dtype: u32,
    rows: u32,
    n_in: u32,
    n_out: u32,
    row_bytes: u32,
    w_first: u32,     // byte that the first row of weights begins at
    x_first: u32,     // value of x that the first row begins with
    x_stride: u32,    // values start a row to the next
    y_first: u32,
    y_stride: u32,
    has_bias: u32,
    accumulates: u32,
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;     // [n_out], where there is one
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

var<workgroup> sums: array<f32, THREADS>;

fn multiply(output: u32, first_row: u32, rows: u32, thread: u32) {
    var acc = array<f32, MOST_ROWS>();
    let row = p.w_first + output * p.row_bytes;
    let n_groups = (p.n_in + 31u) / 32u;
    for (var g = thread; g < n_groups; g += THREADS) {
        read_weights(p.dtype, row, g, p.n_in);
        let n = min(32u, p.n_in - 32u * g);
        for (var r = 0u; r < rows; r++) {
            let start = p.x_first + (first_row + r) * p.x_stride + 32u * g;
            var sum = acc[r];
            for (var i = 0u; i < n; i++) { sum += w[i] * x[start + i]; }
            acc[r] = sum;
        }
    }
    for (var r = 0u; r < rows; r++) {
        sums[thread] = acc[r];
        workgroupBarrier();
        for (var step = THREADS / 2u; step > 0u; step /= 2u) {
            if thread < step { sums[thread] += sums[thread + step]; }
            workgroupBarrier();
        }
        if thread == 0u {
            var result = sums[0];
            if p.has_bias != 0u { result += bias[output]; }
            let to = p.y_first + (first_row + r) * p.y_stride + output;
            if p.accumulates != 0u { result += y[to]; }
            y[to] = result;
        }
        workgroupBarrier();
    }
}

@compute @workgroup_size(THREADS)
fn product(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let output = number_of(group, groups);
    if output >= p.n_out { return; }
    let first_row = group.z * MOST_ROWS;
    multiply(output, first_row, min(MOST_ROWS, p.rows - first_row), thread);
}
