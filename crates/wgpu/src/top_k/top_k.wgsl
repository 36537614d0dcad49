// The most probable tokens of slices of rows of logits. Each workgroup finds the k best of SLICE,
// one after the other: the best of those that rank below the last one. The host selects the overall
// best of a row from the list of its results.

struct Row {
    first: u32,    // first value
    k: u32,
    list: u32,     // first of its candidates, [slices, k]
}

struct Params {
    n: u32,
    rows: array<Row>,
}

struct Candidate {
    id: u32,    // NONE after the last
    bits: u32,  // of the logit
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<u32>;
@group(0) @binding(2) var<storage, read_write> candidates: array<Candidate>;

@compute @workgroup_size(THREADS)
fn top_k(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let row = p.rows[group.y];
    let list = row.list + group.x * row.k;
    let end = min(p.n, (group.x + 1u) * SLICE);
    var last_key = 0xffffffffu;
    var last_id = NONE;
    for (var round = 0u; round < row.k; round++) {
        var best_key = 0u;
        var best_id = NONE;
        for (var id = group.x * SLICE + thread; id < end; id += THREADS) {
            let key = key_of(logits[row.first + id]);
            let is_remaining = last_id == NONE || is_before(last_key, last_id, key, id);
            if is_remaining && is_before(key, id, best_key, best_id) {
                best_key = key;
                best_id = id;
            }
        }
        reduce_best(thread, best_key, best_id);
        let id = ids[0];
        last_key = keys[0];
        last_id = id;
        if thread == 0u {
            var bits = 0u;
            if id != NONE { bits = logits[row.first + id]; }
            candidates[list + round] = Candidate(id, bits);
        }
        // None is left.
        if workgroupUniformLoad(&ids[0]) == NONE { 
            for (var rest = round + 1u + thread; rest < row.k; rest += THREADS) {
                candidates[list + rest] = Candidate(NONE, 0u);
            }
            return;
        }
    }
}
