// The order of logits: larger keys are more probable, and of equal ones the one with the lower
// token id.

const NONE: u32 = 0xffffffffu;

// Returns a key that is larger for more probable tokens; 0 is not a key. NaN and positive infinity
// are above everything.
fn key_of(bits: u32) -> u32 {
    if is_invalid(bits) { return 0xffffffffu; }
    // Both zeros are equal.
    if (bits & 0x7fffffffu) == 0u { return 0x80000000u; }
    return select(bits | 0x80000000u, ~bits, bits >> 31u == 1u);
}

fn is_invalid(bits: u32) -> bool {
    return (bits & 0x7fffffffu) > 0x7f800000u || bits == 0x7f800000u;
}

// The best key of each thread of a workgroup.
var<workgroup> keys: array<u32, THREADS>;
var<workgroup> ids: array<u32, THREADS>;

// Moves the best key to index 0 of both arrays; called by every thread of the workgroup, with its
// own best.
fn reduce_best(thread: u32, key: u32, id: u32) {
    keys[thread] = key;
    ids[thread] = id;
    workgroupBarrier();
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        if thread < step && is_before(keys[thread + step], ids[thread + step], keys[thread], ids[thread]) {
            keys[thread] = keys[thread + step];
            ids[thread] = ids[thread + step];
        }
        workgroupBarrier();
    }
}

fn is_before(key: u32, id: u32, other_key: u32, other_id: u32) -> bool {
    return key > other_key || (key == other_key && id < other_id);
}
