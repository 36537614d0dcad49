// The partial sums of the threads of a workgroup.

var<workgroup> sums: array<f32, THREADS>;

// Returns the sum over all threads, in a fixed order.
fn sum(value: f32, thread: u32) -> f32 {
    sums[thread] = value;
    workgroupBarrier();
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        if thread < step { sums[thread] += sums[thread + step]; }
        workgroupBarrier();
    }
    let total = sums[0];
    workgroupBarrier();
    return total;
}
