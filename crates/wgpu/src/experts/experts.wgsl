// MoE feed-forward without its matrix products: routing and the weighted sum. A *slot* is an expert
// of a row, slot s of row s / n_used. Expert numbers stay on the device.

struct RouteParams {
    rows: u32,
    n_experts: u32,
    n_used: u32,
    scores: u32,           // softmax (0), sigmoid (1) or SparseMixer (2)
    normalizes: u32,
    has_selection_bias: u32,
    has_scales: u32,
    n_expert_groups: u32,  // at most MAX_GROUPS
    groups_used: u32,
    scale: f32,
    nan_bits: u32,         // the bits of NaN, which WGSL has no literal for
}

@group(0) @binding(0) var<storage, read> p: RouteParams;
@group(0) @binding(1) var<storage, read> logits: array<f32>;          // [rows, n_experts]
@group(0) @binding(2) var<storage, read> selection_bias: array<f32>;  // [n_experts], optional
@group(0) @binding(3) var<storage, read> scales: array<f32>;          // the same
// [slots], the highest-ranked of each row first
@group(0) @binding(4) var<storage, read_write> experts: array<u32>;
@group(0) @binding(5) var<storage, read_write> weights: array<f32>;   // [slots]: their weights

var<workgroup> sums: array<f32, THREADS>;
// Keys of groups of experts.
var<workgroup> group_keys: array<u32, MAX_GROUPS>;
var<workgroup> is_selected: array<u32, MAX_GROUPS>;

fn sigmoid(x: f32) -> f32 {
    return 1.0f / (1.0f + exponential(-x));
}

// The maximum and the sum of the softmax of a row.
var<private> row_max: f32;
var<private> row_total: f32;

// Computes them, ignoring NaN; each thread for itself.
fn compute_softmax(first: u32) {
    row_max = -3.4e38f;
    for (var e = 0u; e < p.n_experts; e++) {
        let logit = logits[first + e];
        if !is_invalid(bitcast<u32>(logit)) { row_max = max(row_max, logit); }
    }
    row_total = 0.0f;
    for (var e = 0u; e < p.n_experts; e++) {
        let logit = logits[first + e];
        if !is_invalid(bitcast<u32>(logit)) { row_total += exponential(logit - row_max); }
    }
}

// Returns the selection score of expert `e` of the row whose logits begin at `first`, as bits. NaN
// ranks first, and is preserved.
fn selection_score(first: u32, e: u32) -> u32 {
    let logit = logits[first + e];
    let bits = bitcast<u32>(logit);
    let is_logit = p.scores != 1u && p.has_selection_bias == 0u;
    if is_logit || is_invalid(bits) { return bits; }
    var score = 0.0f;
    if p.scores == 1u { score = sigmoid(logit); } else { score = exponential(logit - row_max) / row_total; }
    if p.has_selection_bias != 0u { score += selection_bias[e]; }
    return bitcast<u32>(score);
}

// Selects the expert groups of a row: by their best expert, or by the sum of their best two.
fn select_groups(first: u32, thread: u32) {
    let size = p.n_experts / p.n_expert_groups;
    for (var g = thread; g < p.n_expert_groups; g += THREADS) {
        var best = 0u;
        var second = 0u;
        var best_bits = 0u;
        var second_bits = 0u;
        for (var e = g * size; e < (g + 1u) * size; e++) {
            let bits = selection_score(first, e);
            let key = key_of(bits);
            if key > best {
                second = best;
                second_bits = best_bits;
                best = key;
                best_bits = bits;
            } else if key > second {
                second = key;
                second_bits = bits;
            }
        }
        var sum = best_bits;
        if p.scores == 1u && second != 0u && !is_invalid(best_bits) {
            sum = bitcast<u32>(bitcast<f32>(best_bits) + bitcast<f32>(second_bits));
        }
        group_keys[g] = key_of(sum);
    }
    workgroupBarrier();
    for (var g = thread; g < p.n_expert_groups; g += THREADS) {
        var before = 0u;
        for (var other = 0u; other < p.n_expert_groups; other++) {
            before += select(0u, 1u, is_before(group_keys[other], other, group_keys[g], g));
        }
        is_selected[g] = select(0u, 1u, before < p.groups_used);
    }
    workgroupBarrier();
}

// Returns the sum of SparseMixer for the expert in `slot`, of the row whose slots begin at
// `first_slot`.
fn near_total(first: u32, first_slot: u32, slot: u32) -> f32 {
    let top = logits[first + experts[slot]];
    var total = 0.0f;
    for (var e = 0u; e < p.n_experts; e++) {
        var is_left = true;
        for (var before = first_slot; before < slot; before++) { is_left = is_left && experts[before] != e; }
        let logit = logits[first + e];
        // A product, since a quotient of zeros counts as near.
        let is_far = top - logit > NEARNESS * max(abs(logit), top);
        if is_left && !is_far { total += exponential(logit - top); }
    }
    return total;
}

// Runs the router, with a workgroup for each row. One expert after the other: the best of those
// that rank below the last one.
@compute @workgroup_size(THREADS)
fn route(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = workgroup_index(group, groups);
    if row >= p.rows { return; }
    let first = row * p.n_experts;
    let size = p.n_experts / p.n_expert_groups;
    // Without a selection bias, scores have the order of logits.
    let by_logit = p.has_selection_bias == 0u;
    let is_biased_softmax = !by_logit && p.scores != 1u;
    if is_biased_softmax { compute_softmax(first); }
    select_groups(first, thread);
    var last_key = 0xffffffffu;
    var last_id = NONE;
    var max_logit = 0.0f;
    var total = 0.0f;
    var has_invalid = false;
    for (var j = 0u; j < p.n_used; j++) {
        var best_key = 0u;
        var best_id = NONE;
        for (var e = thread; e < p.n_experts; e += THREADS) {
            if is_selected[e / size] == 0u { continue; }
            var bits = bitcast<u32>(logits[first + e]);
            if !by_logit { bits = selection_score(first, e); }
            let key = key_of(bits);
            let is_remaining = last_id == NONE || is_before(last_key, last_id, key, e);
            if is_remaining && is_before(key, e, best_key, best_id) {
                best_key = key;
                best_id = e;
            }
        }
        reduce_best(thread, best_key, best_id);
        last_key = keys[0];
        last_id = ids[0];
        workgroupBarrier();
        let logit = logits[first + last_id];
        has_invalid = has_invalid || is_invalid(bitcast<u32>(logit));
        if thread == 0u { experts[row * p.n_used + j] = last_id; }
        if j == 0u { max_logit = select(logit, row_max, is_biased_softmax); }
        // All threads have the same sum.
        if p.scores == 1u {
            total += sigmoid(logit);
        } else if p.normalizes != 0u {
            total += exponential(logit - max_logit);
        }
        sums[thread] = 0.0f;
    }
    if p.scores == 1u {
        total = select(1.0f, total + MIN_SCORE, p.normalizes != 0u);
    } else if p.normalizes == 0u {
        for (var e = thread; e < p.n_experts; e += THREADS) { sums[thread] += exponential(logits[first + e] - max_logit); }
        workgroupBarrier();
        for (var e = 0u; e < min(THREADS, p.n_experts); e++) { total += sums[e]; }
    }
    storageBarrier();
    for (var j = thread; j < p.n_used; j += THREADS) {
        let slot = row * p.n_used + j;
        let logit = logits[first + experts[slot]];
        var score = 0.0f;
        if p.scores == 1u { score = sigmoid(logit); } else { score = exponential(logit - max_logit); }
        if p.scores == 2u {
            score = 1.0f;
            total = near_total(first, row * p.n_used, slot);
        }
        var weight = p.scale * (score / total);
        if p.has_scales != 0u { weight *= scales[experts[slot]]; }
        weights[slot] = select(weight, bitcast<f32>(p.nan_bits), has_invalid);
    }
}
