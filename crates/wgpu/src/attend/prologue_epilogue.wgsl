// Prologue and epilogue of attention: rotates queries as their keys are, combines the partial
// results of the spans and rotates them back.

@group(0) @binding(1) var<storage, read> queries: array<f32>;  // [rows, heads, k_head_dim]
// [jobs, KV heads, query_values, slots]; the last value of a query flags NaN.
@group(0) @binding(2) var<storage, read_write> prepared: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;  // [rows, heads, v_head_dim]
// Partial results of spans, [jobs, KV heads, slots, spans, partial_values]: the largest score, the
// sum of the weights, the sum of the values.
@group(0) @binding(5) var<storage, read> partials: array<f32>;

var<workgroup> has_non_finite: atomic<u32>;

@compute @workgroup_size(THREADS)
fn prepare_queries(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_index(group, groups);
    let unit = number / p.slots;
    if unit >= p.jobs * (p.heads / p.group) { return; }
    let q = query_at(unit, number % p.slots);
    if !q.is_valid { return; }
    let keys = kv_tensor(q.first_tensor);
    let first = (q.row * p.heads + q.head) * p.k_head_dim;
    for (var d = thread; d < keys.dim; d += THREADS) {
        var value = 0.0f;
        if d < p.k_head_dim {
            value = queries[first + d];
            if (bitcast<u32>(value) & 0x7f800000u) == 0x7f800000u { atomicStore(&has_non_finite, 1u); }
            if keys.factors != NONE { value *= bitcast<f32>(word_at(keys.factors + d)); }
        }
        vector[d] = value;
    }
    workgroupBarrier();
    if keys.rotates != 0u { rotate(keys.dim, SIGNS_BEFORE, SIGNS_AFTER, thread); }
    let to = unit * p.query_values * p.slots + number % p.slots;
    for (var d = thread; d < keys.dim; d += THREADS) { prepared[to + d * p.slots] = vector[d]; }
    if thread == 0u { prepared[to + (p.query_values - 1u) * p.slots] = f32(atomicLoad(&has_non_finite)); }
}

// Combines the partial results of a query's spans in order, rotates the output back and writes it.
@compute @workgroup_size(THREADS)
fn combine_spans(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_index(group, groups);
    let unit = number / p.slots;
    if unit >= p.jobs * (p.heads / p.group) { return; }
    let q = query_at(unit, number % p.slots);
    if !q.is_valid { return; }
    let values = kv_tensor(q.first_tensor + 1u);
    let first = number * p.spans + q.oldest / (TOKENS * CHUNKS_PER_SPAN) - p.first_span;
    let last = number * p.spans + q.position / (TOKENS * CHUNKS_PER_SPAN) - p.first_span;
    var max_score = partials[first * p.partial_values];
    for (var span = first + 1u; span <= last; span++) { max_score = max(max_score, partials[span * p.partial_values]); }
    var total = 0.0f;
    var acc = array<f32, MAX_DIMS_PER_THREAD>();
    for (var span = first; span <= last; span++) {
        let at = span * p.partial_values;
        let weight = exponential(partials[at] - max_score);
        total += partials[at + 1u] * weight;
        for (var k = 0u; k < MAX_DIMS_PER_THREAD; k++) {
            let d = thread + k * THREADS;
            if d >= values.value_dim { break; }
            acc[k] += partials[at + SUMS + d] * weight;
        }
    }
    for (var k = 0u; k < MAX_DIMS_PER_THREAD; k++) {
        let d = thread + k * THREADS;
        if d < values.value_dim { vector[d] = acc[k] / total; }
    }
    workgroupBarrier();
    if values.rotates != 0u { rotate(values.value_dim, SIGNS_AFTER, SIGNS_BEFORE, thread); }
    let is_finite = prepared[unit * p.query_values * p.slots + (p.query_values - 1u) * p.slots + number % p.slots] == 0.0f;
    let to = (q.row * p.heads + q.head) * p.v_head_dim;
    for (var d = thread; d < p.v_head_dim; d += THREADS) {
        var value = vector[d];
        if values.factors != NONE { value *= bitcast<f32>(word_at(values.factors + d)); }
        if values.shifts != NONE { value += bitcast<f32>(word_at(values.shifts + d)); }
        out[to + d] = select(bitcast<f32>(p.nan_bits), value, is_finite);
    }
}
