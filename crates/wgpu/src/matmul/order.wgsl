// Orders slots by expert, so that products read weights once for several rows: each expert's slots
// fill contiguous blocks of their own, and the rest of the last one is NONE. The order within an
// expert is not deterministic: the bits of a row do not depend on it.

struct Params {
    slots: u32,
    n_experts: u32,    // at most MAX_EXPERTS
    n_positions: u32,  // length of the list: enough for any selection
    block: u32,        // slots of a block
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> experts: array<u32>;      // [slots]
@group(0) @binding(2) var<storage, read_write> order: array<u32>;  // [places]: slots

// For each expert: its number of slots, then the position of the next one. Initially zero.
var<workgroup> next_position: array<atomic<u32>, MAX_EXPERTS>;

// A single workgroup.
@compute @workgroup_size(THREADS)
fn order_slots(@builtin(local_invocation_index) thread: u32) {
    for (var position = thread; position < p.n_positions; position += THREADS) { order[position] = NONE; }
    for (var slot = thread; slot < p.slots; slot += THREADS) { atomicAdd(&next_position[experts[slot]], 1u); }
    workgroupBarrier();
    if thread == 0u {
        var begin = 0u;
        for (var e = 0u; e < p.n_experts; e++) {
            let n = atomicExchange(&next_position[e], begin);
            begin += (n + p.block - 1u) / p.block * p.block;
        }
    }
    workgroupBarrier();
    storageBarrier();
    for (var slot = thread; slot < p.slots; slot += THREADS) {
        order[atomicAdd(&next_position[experts[slot]], 1u)] = slot;
    }
}
