// Look-ups among the threads of a subgroup of at least eight: each holds a level of turbo2 and of
// turbo3, and a magnitude of turbo4, whose codes have their sign in the highest bit.

var<private> held: vec3<f32>;

fn begin_look_ups(thread: u32) {
    // The index of this thread in its subgroup.
    let i = subgroupExclusiveAdd(1u) % 8u;
    held = vec3<f32>(CENTROIDS[i], CENTROIDS[16u + i], CENTROIDS[40u + i]);
}

fn looked_up(dtype: u32, four: u32) -> vec4<f32> {
    let codes = bytes_of(four);
    let here = held[dtype - TURBO2];
    if dtype != TURBO4 {
        // At most eight levels: no sign is needed.
        return vec4<f32>(
            subgroupShuffle(here, codes.x), subgroupShuffle(here, codes.y),
            subgroupShuffle(here, codes.z), subgroupShuffle(here, codes.w),
        );
    }
    let is_high = codes >= vec4<u32>(8u);
    let number = select(~codes, codes, is_high) & vec4<u32>(7u);
    let magnitude = vec4<f32>(
        subgroupShuffle(here, number.x), subgroupShuffle(here, number.y),
        subgroupShuffle(here, number.z), subgroupShuffle(here, number.w),
    );
    return select(-magnitude, magnitude, is_high);
}
