// Ops with a recurrent state in the memory of pages. mod.rs describes the method.

struct ConvParams {
    first_row: u32,
    rows: u32,
    channels: u32,
    taps: u32,
    is_gated: u32,
    state_at: u32,   // word of the arena: [taps - 1, channels]
}

struct RecurParams {
    first_row: u32,
    rows: u32,
    n_k_heads: u32,
    n_v_heads: u32,
    k_dim: u32,
    v_dim: u32,
    is_tiled: u32,
    is_delta: u32,   // else a state-space model
    eps: f32,
    state_at: u32,   // word of the arena: [n_v_heads, v_dim / COLUMNS, k_dim, COLUMNS]
}

@group(0) @binding(0) var<storage, read> conv: ConvParams;
// [rows, channels], or [rows, 3, channels] where gated
@group(0) @binding(1) var<storage, read> x: array<f32>;
// [taps + 1, channels]: weights, and then biases
@group(0) @binding(2) var<storage, read> kernel: array<f32>;
@group(0) @binding(3) var<storage, read_write> arena: array<u32>;
// [rows, channels], or [rows, n_v_heads, v_dim]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

@group(0) @binding(0) var<storage, read> p: RecurParams;
// [rows, 2 n_k_heads k_dim + n_v_heads v_dim]
@group(0) @binding(1) var<storage, read> qkv: array<f32>;
// delta: write strength (beta), [rows, n_v_heads]; space: skip weight, [n_v_heads]
@group(0) @binding(2) var<storage, read> of_rule: array<f32>;
@group(0) @binding(5) var<storage, read> step: array<f32>;         // [rows, n_v_heads]
@group(0) @binding(6) var<storage, read> bias: array<f32>;         // [n_v_heads]
@group(0) @binding(7) var<storage, read> rate: array<f32>;         // [n_v_heads]

// One thread per channel. Past inputs are in private memory, the latest last.
@compute @workgroup_size(CHANNELS)
fn short_conv(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let n = conv.channels;
    let c = id.x + id.y * groups.x * CHANNELS;
    if c >= n { return; }
    var entered = array<f32, MAX_TAPS>();
    var weights = array<f32, MAX_TAPS>();
    for (var j = 0u; j < conv.taps; j++) { weights[j] = kernel[j * n + c]; }
    // Shifted by one, as every row begins by shifting.
    for (var j = 1u; j < conv.taps; j++) { entered[j] = bitcast<f32>(arena[conv.state_at + (j - 1u) * n + c]); }
    let youngest = conv.taps - 1u;
    let width = select(n, 3u * n, conv.is_gated != 0u);
    for (var row = conv.first_row; row < conv.first_row + conv.rows; row++) {
        let at = row * width + c;
        for (var j = 0u; j < youngest; j++) { entered[j] = entered[j + 1u]; }
        var enters = x[at];
        if conv.is_gated != 0u { enters *= x[at + 2u * n]; }
        entered[youngest] = enters;
        var sum = kernel[conv.taps * n + c];
        for (var j = 0u; j < conv.taps; j++) { sum += weights[j] * entered[j]; }
        if conv.is_gated != 0u { sum *= x[at + n]; } else { sum /= 1.0f + exponential(-sum); }
        y[row * n + c] = sum;
    }
    for (var j = 1u; j < conv.taps; j++) { arena[conv.state_at + (j - 1u) * n + c] = bitcast<u32>(entered[j]); }
}

// Threads of a column.
const EACH: u32 = THREADS / COLUMNS;

// For a thread: squares of its part of the query and of the key, and their product with the state.
var<workgroup> parts: array<vec3<f32>, THREADS>;
var<workgroup> sums: array<f32, THREADS>;

// A workgroup has COLUMNS columns of a value head, a thread every EACH-th value of one of them.
@compute @workgroup_size(THREADS)
fn recur(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let per_head = p.v_dim / COLUMNS;
    let head = group.x / per_head;
    let column = thread / EACH;
    let part = thread % EACH;
    let first = column * EACH;
    let k_head = select(head / (p.n_v_heads / p.n_k_heads), head % p.n_k_heads, p.is_tiled != 0u);
    let n_qk = 2u * p.n_k_heads * p.k_dim;
    let n_out = p.n_v_heads * p.v_dim;
    let at = group.x * COLUMNS + column;
    let state = p.state_at + group.x * p.k_dim * COLUMNS + column;
    let n = p.k_dim / EACH;
    var s = array<f32, MAX_EACH>();
    var q = array<f32, MAX_EACH>();
    var k = array<f32, MAX_EACH>();
    for (var m = 0u; m < n; m++) { s[m] = bitcast<f32>(arena[state + (part + EACH * m) * COLUMNS]); }
    for (var row = p.first_row; row < p.first_row + p.rows; row++) {
        let of_row = row * (n_qk + n_out);
        var mine = vec3<f32>(0.0f);
        for (var m = 0u; m < n; m++) {
            let i = k_head * p.k_dim + part + EACH * m;
            q[m] = qkv[of_row + i];
            k[m] = qkv[of_row + p.n_k_heads * p.k_dim + i];
            mine += vec3<f32>(q[m] * q[m], k[m] * k[m], s[m] * k[m]);
        }
        parts[thread] = mine;
        workgroupBarrier();
        var whole = vec3<f32>(0.0f);
        for (var i = 0u; i < EACH; i++) { whole += parts[first + i]; }
        var length = step[row * p.n_v_heads + head] + bias[head];
        length = max(length, 0.0f) + log_1p(exponential(-abs(length)));
        let keep = exponential(rate[head] * length);
        let value = qkv[of_row + n_qk + at];
        var q_factor = 1.0f;
        var k_factor = 1.0f;
        var change = value * length;
        var past = 0.0f;
        if p.is_delta != 0u {
            q_factor = 1.0f / sqrt(whole.x + p.eps) / sqrt(f32(p.k_dim));
            k_factor = 1.0f / sqrt(whole.y + p.eps);
            let write = 1.0f / (1.0f + exponential(-of_rule[row * p.n_v_heads + head]));
            change = (value - keep * (whole.z * k_factor)) * write;
        } else {
            past = of_rule[head] * value;
        }
        var sum = 0.0f;
        for (var m = 0u; m < n; m++) {
            s[m] = keep * s[m] + k[m] * k_factor * change;
            sum += s[m] * q[m];
        }
        sums[thread] = sum;
        workgroupBarrier();
        if part == 0u {
            var of_column = 0.0f;
            for (var i = 0u; i < EACH; i++) { of_column += sums[first + i]; }
            y[row * n_out + at] = of_column * q_factor + past;
        }
    }
    for (var m = 0u; m < n; m++) { arena[state + (part + EACH * m) * COLUMNS] = bitcast<u32>(s[m]); }
}
