// The signed Hadamard rotation of a vector in workgroup memory: as many slices of 128 as fit, then
// one of 64 and one of 32 where they do.

var<workgroup> vector: array<f32, MAX_DIMS>;

// Returns the dims of the slice of dim `d` of `dim`, and its first dim.
fn slice_of(dim: u32, d: u32) -> vec2<u32> {
    var at = d / 128u * 128u;
    var n = slice_at(dim, at, 128u);
    while d >= at + n {
        at += n;
        n = slice_at(dim, at, 128u);
    }
    return vec2<u32>(n, at);
}

fn sign_of(signs: vec4<u32>, i: u32) -> u32 {
    return ((signs[i / 32u] >> (i % 32u)) & 1u) << 31u;
}

// Computes D(last) H / sqrt(n) D(first) of each slice of the first `dim` values. Called by all
// threads of a workgroup of THREADS.
fn rotate(dim: u32, first: vec4<u32>, last: vec4<u32>, thread: u32) {
    workgroupBarrier();
    for (var d = thread; d < dim; d += THREADS) {
        let sign = sign_of(first, d - slice_of(dim, d).y);
        vector[d] = bitcast<f32>(bitcast<u32>(vector[d]) ^ sign);
    }
    workgroupBarrier();
    for (var h = 1u; h < 128u; h *= 2u) {
        for (var pair = thread; pair < MAX_DIMS / 2u; pair += THREADS) {
            let i = pair / h * 2u * h + pair % h;
            if i >= dim || slice_of(dim, i).x <= h { continue; }
            let a = vector[i];
            let b = vector[i + h];
            vector[i] = a + b;
            vector[i + h] = a - b;
        }
        workgroupBarrier();
    }
    for (var d = thread; d < dim; d += THREADS) {
        let slice = slice_of(dim, d);
        let factor = select(select(FACTOR_32, FACTOR_64, slice.x == 64u), FACTOR_128, slice.x == 128u);
        let value = vector[d] * factor;
        vector[d] = bitcast<f32>(bitcast<u32>(value) ^ sign_of(last, d - slice.y));
    }
    workgroupBarrier();
}
