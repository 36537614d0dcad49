// Ops with a recurrent state in the memory of pages. mod.rs describes the method.

struct ConvParams {
    first_row: u32,
    rows: u32,
    channels: u32,
    taps: u32,
    is_gated: u32,
    state_at: u32,   // word of the slab: [taps - 1, channels]
}

// Rules: the gated delta rule, Kimi's, and state-space models.
const DELTA: u32 = 0u;
const KIMI_DELTA: u32 = 1u;
const SPACE: u32 = 2u;

struct LinearAttentionParams {
    first_row: u32,
    rows: u32,
    n_k_heads: u32,
    n_v_heads: u32,
    k_dim: u32,
    v_dim: u32,
    is_tiled: u32,
    rule: u32,
    eps: f32,
    bound: f32,     // of decays by Kimi's rule; 0 if there is none
    state_at: u32,  // word of the slab: [n_v_heads, v_dim / COLUMNS, k_dim, COLUMNS]
}

@group(0) @binding(0) var<storage, read> conv: ConvParams;
// [rows, channels], or [rows, 3, channels] where gated
@group(0) @binding(1) var<storage, read> x: array<f32>;
// [taps + 1, channels]: weights, and then biases
@group(0) @binding(2) var<storage, read> kernel: array<f32>;
@group(0) @binding(3) var<storage, read_write> slab: array<u32>;
// [rows, channels], or [rows, n_v_heads, v_dim]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

@group(0) @binding(0) var<storage, read> p: LinearAttentionParams;
// [rows, 2 n_k_heads k_dim + n_v_heads v_dim]
@group(0) @binding(1) var<storage, read> qkv: array<f32>;
// delta: write strength (beta), [rows, n_v_heads]; space: skip weight, [n_v_heads]
@group(0) @binding(2) var<storage, read> rule_input: array<f32>;
@group(0) @binding(5) var<storage, read> step: array<f32>;         // [rows, n_v_heads], for Kimi's rule [rows, n_v_heads, k_dim]
@group(0) @binding(6) var<storage, read> bias: array<f32>;         // a row of them
@group(0) @binding(7) var<storage, read> decay_rate: array<f32>;   // [n_v_heads]

// One thread per channel. Past inputs are in private memory, the latest last.
@compute @workgroup_size(CHANNELS)
fn short_conv(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let n = conv.channels;
    let c = id.x + id.y * groups.x * CHANNELS;
    if c >= n { return; }
    var inputs = array<f32, MAX_TAPS>();
    var weights = array<f32, MAX_TAPS>();
    for (var j = 0u; j < conv.taps; j++) { weights[j] = kernel[j * n + c]; }
    // Shifted by one, as every row begins by shifting.
    for (var j = 1u; j < conv.taps; j++) { inputs[j] = bitcast<f32>(slab[conv.state_at + (j - 1u) * n + c]); }
    let newest = conv.taps - 1u;
    let width = select(n, 3u * n, conv.is_gated != 0u);
    for (var row = conv.first_row; row < conv.first_row + conv.rows; row++) {
        let at = row * width + c;
        for (var j = 0u; j < newest; j++) { inputs[j] = inputs[j + 1u]; }
        var input = x[at];
        if conv.is_gated != 0u { input *= x[at + 2u * n]; }
        inputs[newest] = input;
        var sum = kernel[conv.taps * n + c];
        for (var j = 0u; j < conv.taps; j++) { sum += weights[j] * inputs[j]; }
        if conv.is_gated != 0u { sum *= x[at + n]; } else { sum /= 1.0f + exponential(-sum); }
        y[row * n + c] = sum;
    }
    for (var j = 1u; j < conv.taps; j++) { slab[conv.state_at + (j - 1u) * n + c] = bitcast<u32>(inputs[j]); }
}

// Threads of a column.
const THREADS_PER_COLUMN: u32 = THREADS / COLUMNS;

// For a thread: squares of its part of the query and of the key, and their product with the state.
var<workgroup> parts: array<vec3<f32>, THREADS>;
var<workgroup> sums: array<f32, THREADS>;
// Of Kimi's rule, for each dim of a key.
var<workgroup> decays: array<f32, MAX_K_DIM>;

fn softplus(x: f32) -> f32 { return max(x, 0.0f) + log_1p(exponential(-abs(x))); }

// A workgroup has COLUMNS columns of a value head, a thread every THREADS_PER_COLUMN-th value of
// one of them.
@compute @workgroup_size(THREADS)
fn linear_attention(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let groups_per_head = p.v_dim / COLUMNS;
    let head = group.x / groups_per_head;
    let column = thread / THREADS_PER_COLUMN;
    let part = thread % THREADS_PER_COLUMN;
    let first = column * THREADS_PER_COLUMN;
    let k_head = select(head / (p.n_v_heads / p.n_k_heads), head % p.n_k_heads, p.is_tiled != 0u);
    let n_qk = 2u * p.n_k_heads * p.k_dim;
    let n_out = p.n_v_heads * p.v_dim;
    let at = group.x * COLUMNS + column;
    let state = p.state_at + group.x * p.k_dim * COLUMNS + column;
    let n = p.k_dim / THREADS_PER_COLUMN;
    var s = array<f32, MAX_VALUES_PER_THREAD>();
    var q = array<f32, MAX_VALUES_PER_THREAD>();
    var k = array<f32, MAX_VALUES_PER_THREAD>();
    for (var m = 0u; m < n; m++) { s[m] = bitcast<f32>(slab[state + (part + THREADS_PER_COLUMN * m) * COLUMNS]); }
    for (var row = p.first_row; row < p.first_row + p.rows; row++) {
        let row_start = row * (n_qk + n_out);
        if p.rule == KIMI_DELTA {
            // Every thread has read those of the last row, which came before its last barrier.
            for (var i = thread; i < p.k_dim; i += THREADS) {
                let dim = head * p.k_dim + i;
                let time_step = step[row * p.n_v_heads * p.k_dim + dim] + bias[dim];
                var exponent = decay_rate[head] * softplus(time_step);
                if p.bound != 0.0f { exponent = p.bound / (1.0f + exponential(-decay_rate[head] * time_step)); }
                decays[i] = exponential(exponent);
            }
            workgroupBarrier();
            for (var m = 0u; m < n; m++) { s[m] *= decays[part + THREADS_PER_COLUMN * m]; }
        }
        var partial_sums = vec3<f32>(0.0f);
        for (var m = 0u; m < n; m++) {
            let i = k_head * p.k_dim + part + THREADS_PER_COLUMN * m;
            q[m] = qkv[row_start + i];
            k[m] = qkv[row_start + p.n_k_heads * p.k_dim + i];
            partial_sums += vec3<f32>(q[m] * q[m], k[m] * k[m], s[m] * k[m]);
        }
        parts[thread] = partial_sums;
        workgroupBarrier();
        var totals = vec3<f32>(0.0f);
        for (var i = 0u; i < THREADS_PER_COLUMN; i++) { totals += parts[first + i]; }
        var time_step = 0.0f;
        var decay = 1.0f;
        if p.rule != KIMI_DELTA {
            time_step = softplus(step[row * p.n_v_heads + head] + bias[head]);
            decay = exponential(decay_rate[head] * time_step);
        }
        let value = qkv[row_start + n_qk + at];
        var q_factor = 1.0f;
        var k_factor = 1.0f;
        var update = value * time_step;
        var skip = 0.0f;
        if p.rule != SPACE {
            q_factor = 1.0f / sqrt(totals.x + p.eps) / sqrt(f32(p.k_dim));
            k_factor = 1.0f / sqrt(totals.y + p.eps);
            let beta = 1.0f / (1.0f + exponential(-rule_input[row * p.n_v_heads + head]));
            update = (value - decay * (totals.z * k_factor)) * beta;
        } else {
            skip = rule_input[head] * value;
        }
        var sum = 0.0f;
        for (var m = 0u; m < n; m++) {
            s[m] = decay * s[m] + k[m] * k_factor * update;
            sum += s[m] * q[m];
        }
        sums[thread] = sum;
        workgroupBarrier();
        if part == 0u {
            var column_sum = 0.0f;
            for (var i = 0u; i < THREADS_PER_COLUMN; i++) { column_sum += sums[first + i]; }
            y[row * n_out + at] = column_sum * q_factor + skip;
        }
    }
    for (var m = 0u; m < n; m++) { slab[state + (part + THREADS_PER_COLUMN * m) * COLUMNS] = bitcast<u32>(s[m]); }
}
