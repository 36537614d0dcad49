// y = W x + bias, or y = y + that. A group of threads makes one output of up to ROWS rows of activations: threads take turns
// with 32 columns each, and add up in a fixed order. So a row has the bits that it has alone. Where rows have chosen experts, a
// group makes one output of a *slot*, an expert of a row.

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
    bias_first: u32,  // of the first output
    accumulates: u32,
    slots: u32,       // where there are experts
    slots_of_row: u32,// that have a row of x together
    first_output: u32,// of all experts' that these weights have
    end_output: u32,
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;     // [n_out] of each matrix, where there is one
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read> experts: array<u32>;  // [slots]: those of `chosen`

var<workgroup> sums: array<f32, THREADS>;

// The weights that begin at byte `row`, times `rows` rows of x, to y; where those begin.
fn multiply(row: u32, bias_at: u32, x_at: u32, y_at: u32, rows: u32, thread: u32) {
    var acc = array<f32, MOST_ROWS>();
    let n_groups = (p.n_in + 31u) / 32u;
    for (var g = thread; g < n_groups; g += THREADS) {
        read_weights(p.dtype, row, g, p.n_in);
        let n = min(32u, p.n_in - 32u * g);
        for (var r = 0u; r < rows; r++) {
            let start = x_at + r * p.x_stride + 32u * g;
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
            if p.has_bias != 0u { result += bias[bias_at]; }
            let to = y_at + r * p.y_stride;
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
    let x_at = p.x_first + first_row * p.x_stride;
    let y_at = p.y_first + first_row * p.y_stride + output;
    multiply(p.w_first + output * p.row_bytes, p.bias_first + output, x_at, y_at, min(MOST_ROWS, p.rows - first_row), thread);
}

@compute @workgroup_size(THREADS)
fn chosen(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = number_of(group, groups);
    if number >= p.slots * p.n_out { return; }
    let slot = number / p.n_out;
    let output = experts[slot] * p.n_out + number % p.n_out;
    if output < p.first_output || output >= p.end_output { return; }
    let x_at = slot / p.slots_of_row * p.x_stride;
    multiply((output - p.first_output) * p.row_bytes, output, x_at, number, 1u, thread);
}
