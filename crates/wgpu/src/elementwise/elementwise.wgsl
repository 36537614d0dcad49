// Elementwise ops.

struct Params {
    n: u32,      // values
    kind: u32,   // number of the activation or gate
    cols: u32,   // of a row
    width: u32,  // of a row of the destination, and the first of its columns
    first: u32,
    factor: f32,
    negative: f32,  // the other numbers of xIELU
    slope: f32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> g: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

fn index(id: vec3<u32>, groups: vec3<u32>) -> u32 {
    return id.x + id.y * groups.x * THREADS;
}

// y = a(g) y, a the activation of a feed-forward layer.
@compute @workgroup_size(THREADS)
fn activate(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = index(id, groups);
    if i >= p.n { return; }
    y[i] = activated(p.kind, p.factor, g[i], y[i]);
}

// s(g) y, s the logistic function, SiLU, the identity, softplus or GELU.
fn gated_by(kind: u32, g: f32, y: f32) -> f32 {
    if kind == GATE_SIGMOID { return gated(y, g); }
    if kind == GATE_SILU { return gated(g, g) * y; }
    if kind == GATE_PLAIN { return g * y; }
    if kind == GATE_SOFTPLUS { return (select(g, 0.0f, g < 0.0f) + log_1p(exponential(-abs(g)))) * y; }
    return activated(GELU, 0.0f, g, y);
}

// y = s(g) y.
@compute @workgroup_size(THREADS)
fn gate(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = index(id, groups);
    if i >= p.n { return; }
    y[i] = gated_by(p.kind, g[i], y[i]);
}

// y = s(g) y, one g for each row.
@compute @workgroup_size(THREADS)
fn gate_rows(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = index(id, groups);
    if i >= p.n { return; }
    y[i] = gated_by(p.kind, g[i / p.cols], y[i]);
}

// y = factor y.
@compute @workgroup_size(THREADS)
fn scale(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = index(id, groups);
    if i >= p.n { return; }
    y[i] *= p.factor;
}

// y = y + g.
@compute @workgroup_size(THREADS)
fn add(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = index(id, groups);
    if i >= p.n { return; }
    y[i] += g[i];
}

// y = factor tanh(y / factor).
@compute @workgroup_size(THREADS)
fn soft_cap(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = index(id, groups);
    if i >= p.n { return; }
    y[i] = p.factor * hyperbolic_tangent(y[i] / p.factor);
}

// y = y (factor y + slope) where y is positive, else negative (exp(min(y, eps)) - 1 - y) + slope y.
// A NaN is not positive, and subtracted there.
@compute @workgroup_size(THREADS)
fn xielu(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = index(id, groups);
    if i >= p.n { return; }
    let x = y[i];
    let below = p.negative * (exponential(select(p.eps, x, x < p.eps)) - 1.0f - x) + p.slope * x;
    y[i] = select(below, x * (p.factor * x + p.slope), x > 0.0f);
}

// Copies to columns of wider rows.
@compute @workgroup_size(THREADS)
fn copy_columns(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = index(id, groups);
    if i >= p.n { return; }
    y[i / p.cols * p.width + p.first + i % p.cols] = g[i];
}
