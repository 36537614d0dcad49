// Slots in the order of their experts, so that products read weights once for several rows: each expert's slots, one after the other,
// fill blocks of their own, and what is left of the last one is NONE. Who stands beside whom is left to chance: a row's bits do not
// depend on it.

struct Params {
    slots: u32,
    n_experts: u32,  // up to MOST_EXPERTS
    places: u32,     // of the list: enough for any choice
    block: u32,      // places of a block
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> experts: array<u32>;      // [slots]
@group(0) @binding(2) var<storage, read_write> order: array<u32>;  // [places]: slots

// Of each expert: how many slots it has, then where the next of them goes. Zero at first.
var<workgroup> next: array<atomic<u32>, MOST_EXPERTS>;

// One group of threads for all.
@compute @workgroup_size(THREADS)
fn put_in_order(@builtin(local_invocation_index) thread: u32) {
    for (var place = thread; place < p.places; place += THREADS) { order[place] = NONE; }
    for (var slot = thread; slot < p.slots; slot += THREADS) { atomicAdd(&next[experts[slot]], 1u); }
    workgroupBarrier();
    if thread == 0u {
        var begin = 0u;
        for (var e = 0u; e < p.n_experts; e++) {
            let n = atomicExchange(&next[e], begin);
            begin += (n + p.block - 1u) / p.block * p.block;
        }
    }
    workgroupBarrier();
    storageBarrier();
    for (var slot = thread; slot < p.slots; slot += THREADS) {
        order[atomicAdd(&next[experts[slot]], 1u)] = slot;
    }
}
