// x += sum (or x = sum) of weight y over the slots of a row, in their order; one value per thread.

struct Params {
    n_values: u32,  // of all rows
    n: u32,         // of a row
    n_used: u32,
    accumulates: u32,
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> y: array<f32>;       // [slots, n]
@group(0) @binding(2) var<storage, read> weights: array<f32>;  // [slots]
@group(0) @binding(3) var<storage, read_write> x: array<f32>;  // [rows, n]

@compute @workgroup_size(THREADS)
fn combine(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let i = id.x + id.y * groups.x * THREADS;
    if i >= p.n_values { return; }
    let slot = i / p.n * p.n_used;
    var sum = 0.0f;
    if p.accumulates != 0u { sum = x[i]; }
    for (var j = 0u; j < p.n_used; j++) { sum += weights[slot + j] * y[(slot + j) * p.n + i % p.n]; }
    x[i] = sum;
}
