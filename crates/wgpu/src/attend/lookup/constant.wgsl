// Look-ups in a constant table, per thread or in constant memory.

fn lookup(dtype: u32, four: u32) -> vec4<f32> {
    let codes = bytes_of(four) + vec4<u32>((dtype - TURBO2) * 16u);
    return vec4<f32>(CENTROIDS[codes.x], CENTROIDS[codes.y], CENTROIDS[codes.z], CENTROIDS[codes.w]);
}

fn init_lookup(thread: u32) {}
