// Look-ups among the threads of a subgroup of at least eight: each holds a level of turbo2 and of
// turbo3, and a magnitude of turbo4, whose codes have their sign in the highest bit.

var<private> lane_levels: vec3<f32>;

fn init_lookup(thread: u32) {
    // The index of this thread in its subgroup.
    let i = subgroupExclusiveAdd(1u) % 8u;
    lane_levels = vec3<f32>(CENTROIDS[i], CENTROIDS[16u + i], CENTROIDS[40u + i]);
}

fn lookup(dtype: u32, four: u32) -> vec4<f32> {
    let codes = bytes_of(four);
    let level = lane_levels[dtype - TURBO2];
    if dtype != TURBO4 {
        // At most eight levels: no sign is needed.
        return vec4<f32>(
            subgroupShuffle(level, codes.x), subgroupShuffle(level, codes.y),
            subgroupShuffle(level, codes.z), subgroupShuffle(level, codes.w),
        );
    }
    let is_high = codes >= vec4<u32>(8u);
    let index = select(~codes, codes, is_high) & vec4<u32>(7u);
    let magnitude = vec4<f32>(
        subgroupShuffle(level, index.x), subgroupShuffle(level, index.y),
        subgroupShuffle(level, index.z), subgroupShuffle(level, index.w),
    );
    return select(-magnitude, magnitude, is_high);
}
