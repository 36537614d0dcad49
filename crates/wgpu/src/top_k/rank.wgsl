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

fn is_before(key: u32, id: u32, other_key: u32, other_id: u32) -> bool {
    return key > other_key || key == other_key && id < other_id;
}
