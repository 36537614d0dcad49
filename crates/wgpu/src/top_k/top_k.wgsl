// The most probable tokens of a slice of logits. Each workgroup finds the k best of SLICE, one
// after the other: the best of those that rank below the last one. The host selects the overall
// best from the list of results.

struct Params {
    first: u32,    // first value of the row
    n: u32,
    k: u32,
}

struct Candidate {
    id: u32,    // NONE after the last
    bits: u32,  // of the logit
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<u32>;
@group(0) @binding(2) var<storage, read_write> candidates: array<Candidate>;  // [slices, k]

@compute @workgroup_size(THREADS)
fn top_k(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let end = min(p.n, (group.x + 1u) * SLICE);
    var last_key = 0xffffffffu;
    var last_id = NONE;
    for (var round = 0u; round < p.k; round++) {
        var best_key = 0u;
        var best_id = NONE;
        for (var id = group.x * SLICE + thread; id < end; id += THREADS) {
            let key = key_of(logits[p.first + id]);
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
            if id != NONE { bits = logits[p.first + id]; }
            candidates[group.x * p.k + round] = Candidate(id, bits);
        }
        // None is left.
        if workgroupUniformLoad(&ids[0]) == NONE { 
            for (var rest = round + 1u + thread; rest < p.k; rest += THREADS) {
                candidates[group.x * p.k + rest] = Candidate(NONE, 0u);
            }
            return;
        }
    }
}
