// Look-ups in a table in workgroup memory.

var<workgroup> table: array<f32, 48>;

fn lookup(dtype: u32, four: u32) -> vec4<f32> {
    let codes = bytes_of(four) + vec4<u32>((dtype - TURBO2) * 16u);
    return vec4<f32>(table[codes.x], table[codes.y], table[codes.z], table[codes.w]);
}

fn init_lookup(thread: u32) {
    for (var i = thread; i < 48u; i += THREADS) { table[i] = CENTROIDS[i]; }
    workgroupBarrier();
}
