// Look-ups in registers: the bits of a code select between constants. Codebooks are symmetric: the
// highest bit is a sign, and the others, inverted where it is low, are the index of a magnitude.

fn lookup(dtype: u32, four: u32) -> vec4<f32> {
    let codes = vec4<u32>(four, four >> 8u, four >> 16u, four >> 24u);
    let top = code_bits(dtype) - 1u;
    let is_high = ((codes >> vec4<u32>(top)) & vec4<u32>(1u)) == vec4<u32>(1u);
    let index = select(~codes, codes, is_high);
    let first = (index & vec4<u32>(1u)) == vec4<u32>(1u);
    let second = (index & vec4<u32>(2u)) == vec4<u32>(2u);
    let third = (index & vec4<u32>(4u)) == vec4<u32>(4u);
    var magnitude = select_two(TURBO2_0, TURBO2_1, first);
    if dtype == TURBO3 {
        magnitude = select(select_two(TURBO3_0, TURBO3_1, first), select_two(TURBO3_2, TURBO3_3, first), second);
    }
    if dtype == TURBO4 {
        let low = select(select_two(TURBO4_0, TURBO4_1, first), select_two(TURBO4_2, TURBO4_3, first), second);
        let high = select(select_two(TURBO4_4, TURBO4_5, first), select_two(TURBO4_6, TURBO4_7, first), second);
        magnitude = select(low, high, third);
    }
    return select(-magnitude, magnitude, is_high);
}

fn select_two(if_false: f32, if_true: f32, condition: vec4<bool>) -> vec4<f32> {
    return select(vec4<f32>(if_false), vec4<f32>(if_true), condition);
}

fn init_lookup(thread: u32) {}
