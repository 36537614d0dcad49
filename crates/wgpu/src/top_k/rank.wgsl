// Numbers in an order: larger keys are likelier, and of equal ones that with the lower number.

const NONE: u32 = 0xffffffffu;

// Larger for likelier ones; 0 for none. What no model should give, NaN and positive infinity, comes before everything.
fn key_of(bits: u32) -> u32 {
    if is_bad(bits) { return 0xffffffffu; }
    // Both zeros are as likely.
    if (bits & 0x7fffffffu) == 0u { return 0x80000000u; }
    return select(bits | 0x80000000u, ~bits, bits >> 31u == 1u);
}

fn is_bad(bits: u32) -> bool {
    return (bits & 0x7fffffffu) > 0x7f800000u || bits == 0x7f800000u;
}

// What each thread of a group has found.
var<workgroup> keys: array<u32, THREADS>;
var<workgroup> ids: array<u32, THREADS>;

// Brings the best of them to the first place of both; every thread of the group comes here, with what it has found.
fn gather_best(thread: u32, key: u32, id: u32) {
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
