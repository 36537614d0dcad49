// MoE feed-forward without its matrix products: routing and the weighted sum. A *slot* is an expert
// of a row, slot s of row s / n_used. Expert numbers stay on the device.

struct ChooseParams {
    rows: u32,
    n_experts: u32,
    n_used: u32,
    is_sigmoid: u32,
    normalises: u32,
    has_selection_bias: u32,
    has_scales: u32,
    n_expert_groups: u32,   // at most MAX_GROUPS
    groups_used: u32,
    scale: f32,
    not_a_number: u32,      // the bits of NaN, which WGSL has no literal for
}

@group(0) @binding(0) var<storage, read> p: ChooseParams;
@group(0) @binding(1) var<storage, read> logits: array<f32>;          // [rows, n_experts]
@group(0) @binding(2) var<storage, read> selection_bias: array<f32>;  // [n_experts], optional
@group(0) @binding(3) var<storage, read> scales: array<f32>;          // the same
// [slots], the highest-ranked of each row first
@group(0) @binding(4) var<storage, read_write> experts: array<u32>;
@group(0) @binding(5) var<storage, read_write> shares: array<f32>;    // |[slots]: their weights

var<workgroup> sums: array<f32, THREADS>;
// Keys of groups of experts.
var<workgroup> group_keys: array<u32, MAX_GROUPS>;
var<workgroup> is_open: array<u32, MAX_GROUPS>;

fn sigmoid(x: f32) -> f32 {
    return 1.0f / (1.0f + exponential(-x));
}

// The maximum and the sum of the softmax of a row.
var<private> row_most: f32;
var<private> row_total: f32;

// Computes them, ignoring NaN; each thread for itself.
fn measure(first: u32) {
    row_most = -3.4e38f;
    for (var e = 0u; e < p.n_experts; e++) {
        let logit = logits[first + e];
        if !is_bad(bitcast<u32>(logit)) { row_most = max(row_most, logit); }
    }
    row_total = 0.0f;
    for (var e = 0u; e < p.n_experts; e++) {
        let logit = logits[first + e];
        if !is_bad(bitcast<u32>(logit)) { row_total += exponential(logit - row_most); }
    }
}

// Returns the selection score of expert `e` of the row whose logits begin at `first`, as bits. NaN
// ranks first, and is preserved.
fn wish(first: u32, e: u32) -> u32 {
    let logit = logits[first + e];
    let bits = bitcast<u32>(logit);
    let is_itself = p.is_sigmoid == 0u && p.has_selection_bias == 0u;
    if is_itself || is_bad(bits) { return bits; }
    var score = 0.0f;
    if p.is_sigmoid != 0u { score = sigmoid(logit); } else { score = exponential(logit - row_most) / row_total; }
    if p.has_selection_bias != 0u { score += selection_bias[e]; }
    return bitcast<u32>(score);
}

// Selects the expert groups of a row: by their best expert, or by the sum of their best two.
fn open_groups(first: u32, thread: u32) {
    let size = p.n_experts / p.n_expert_groups;
    for (var g = thread; g < p.n_expert_groups; g += THREADS) {
        var best = 0u;
        var second = 0u;
        var best_bits = 0u;
        var second_bits = 0u;
        for (var e = g * size; e < (g + 1u) * size; e++) {
            let bits = wish(first, e);
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
        if p.is_sigmoid != 0u && second != 0u && !is_bad(best_bits) {
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
        is_open[g] = select(0u, 1u, before < p.groups_used);
    }
    workgroupBarrier();
}

// Runs the router, with a workgroup for each row. One expert after the other: the best of those
// that rank below the last one.
@compute @workgroup_size(THREADS)
fn choose(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = number_of(group, groups);
    if row >= p.rows { return; }
    let first = row * p.n_experts;
    let size = p.n_experts / p.n_expert_groups;
    // Without a selection bias, scores have the order of logits.
    let by_logit = p.has_selection_bias == 0u;
    let is_biased_softmax = !by_logit && p.is_sigmoid == 0u;
    if is_biased_softmax { measure(first); }
    open_groups(first, thread);
    var last_key = 0xffffffffu;
    var last_id = NONE;
    var most = 0.0f;
    var total = 0.0f;
    var has_bad = false;
    for (var j = 0u; j < p.n_used; j++) {
        var best_key = 0u;
        var best_id = NONE;
        for (var e = thread; e < p.n_experts; e += THREADS) {
            if is_open[e / size] == 0u { continue; }
            var bits = bitcast<u32>(logits[first + e]);
            if !by_logit { bits = wish(first, e); }
            let key = key_of(bits);
            let is_left = last_id == NONE || is_before(last_key, last_id, key, e);
            if is_left && is_before(key, e, best_key, best_id) {
                best_key = key;
                best_id = e;
            }
        }
        gather_best(thread, best_key, best_id);
        last_key = keys[0];
        last_id = ids[0];
        workgroupBarrier();
        let logit = logits[first + last_id];
        has_bad = has_bad || is_bad(bitcast<u32>(logit));
        if thread == 0u { experts[row * p.n_used + j] = last_id; }
        if j == 0u { most = select(logit, row_most, is_biased_softmax); }
        // All threads have the same sum.
        if p.is_sigmoid != 0u {
            total += sigmoid(logit);
        } else if p.normalises != 0u {
            total += exponential(logit - most);
        }
        sums[thread] = 0.0f;
    }
    if p.is_sigmoid != 0u {
        total = select(1.0f, total + MIN_SCORE, p.normalises != 0u);
    } else if p.normalises == 0u {
        for (var e = thread; e < p.n_experts; e += THREADS) { sums[thread] += exponential(logits[first + e] - most); }
        workgroupBarrier();
        for (var e = 0u; e < min(THREADS, p.n_experts); e++) { total += sums[e]; }
    }
    storageBarrier();
    for (var j = thread; j < p.n_used; j += THREADS) {
        let slot = row * p.n_used + j;
        let logit = logits[first + experts[slot]];
        var score = 0.0f;
        if p.is_sigmoid != 0u { score = sigmoid(logit); } else { score = exponential(logit - most); }
        var share = p.scale * (score / total);
        if p.has_scales != 0u { share *= scales[experts[slot]]; }
        shares[slot] = select(share, bitcast<f32>(p.not_a_number), has_bad);
    }
}
