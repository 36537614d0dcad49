// Causal attention of one head of one row over the tiles as they are:
//
//   out = Σ_t exp(s_t - m) v_t / Σ_t exp(s_t - m),  s_t = scale q . k_t
//
// A group of threads walks the tokens in chunks of 128, a block of the cache, counted from token 0, so that a row has the bits that
// it has alone. First a thread takes a token and makes its score; then the chunk's softmax joins that of those before (online
// softmax, arXiv 1805.02867); then a thread takes a dim, or a few, and adds up the values. The query is rotated once, as keys are,
// and the output turned back once.
//
// Where there are many tokens, each *span* of them, counted from token 0 too, has a group of its own, and another kernel joins what
// they leave: kernels stay short, and one row is work for many groups. A row of a single span has the same bits either way.

struct Params {
    heads: u32,
    group: u32,        // query heads of a KV head
    k_head_dim: u32,
    v_head_dim: u32,
    rows: u32,         // of the list that are attended to, from the first one on
    first_row: u32,
    first_span: u32,   // spans that any of the rows sees
    spans: u32,
    part_values: u32,  // of what a span leaves
    windows_at: u32,   // where in the list the other tables begin
    streams_at: u32,
    has_sinks: u32,
    scale: f32,
    soft_cap: f32,     // 0 for none
    not_a_number: u32, // the bits of NaN, which WGSL does not write
    // Rows of four: row of the step, position, the oldest token it sees, its part. Then for each row and KV head where its windows
    // of 16 bits begin, of keys and of values. Then streams: for each part and KV head that of keys and that of values.
    list: array<u32>,
}

// STREAM words of the list.
struct Stream {
    dtype: u32,
    dim: u32,
    value_dim: u32,   // of these, the first, that make values: not all where a stream is joint, keys and values in one
    is_key: u32,      // whether tiles are laid out as those of keys; those of joint streams are not
    rotates: u32,
    sink_tiles: u32,
    tail_tiles: u32,
    main: u32,        // its first tile within a block, and words of a tile
    tile_words: u32,
    centre: u32,      // within a block, or NONE
    sink: u32,        // where its parts in 16 bit lie
    tail: u32,
    band: u32,
    band_first: u32,  // tiles of the band
    band_end: u32,
    blocks: u32,      // where in the list the places of blocks are
    factors: u32,     // where factors on the head's queries lie, or on its outputs, or NONE
    shifts: u32,      // and what is added to these
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(1) var<storage, read> queries: array<f32>;      // [rows, heads, k_head_dim]
@group(0) @binding(2) var<storage, read> sinks: array<f32>;        // [heads]
@group(0) @binding(3) var<storage, read> arena: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;    // [rows, heads, v_head_dim]
// What spans leave, [rows, heads, spans, part_values]: the largest score, the sum of the weights, whether the query holds what is no
// number, and the sum of the values.
@group(0) @binding(5) var<storage, read_write> left: array<f32>;

var<workgroup> weights: array<f32, THREADS>;
var<workgroup> shared_values: array<f32, THREADS>;
// Of four tokens, over a quarter of the dims.
var<workgroup> quarters: array<vec4<f32>, THREADS>;
var<workgroup> is_bad: atomic<u32>;

fn stream_at(number: u32) -> Stream {
    let at = p.streams_at + number * STREAM;
    return Stream(
        p.list[at], p.list[at + 1u], p.list[at + 2u], p.list[at + 3u], p.list[at + 4u], p.list[at + 5u],
        p.list[at + 6u], p.list[at + 7u], p.list[at + 8u], p.list[at + 9u], p.list[at + 10u], p.list[at + 11u],
        p.list[at + 12u], p.list[at + 13u], p.list[at + 14u], p.list[at + 15u], p.list[at + 16u], p.list[at + 17u],
    );
}

fn is_main(s: Stream, tile: u32, window: u32) -> bool {
    return tile >= s.sink_tiles && tile < window;
}

// Where a tile lies that the row sees.
fn place_of(s: Stream, tile: u32, window: u32) -> u32 {
    let half_tile = s.dim * TILE / 2u;
    if tile < s.sink_tiles { return s.sink + tile * half_tile; }
    if tile < window { return p.list[s.blocks + tile / TILES_PER_BLOCK] + s.main + tile % TILES_PER_BLOCK * s.tile_words; }
    if tile >= s.band_first && tile < s.band_end { return s.band + (tile - s.band_first) * half_tile; }
    return s.tail + tile % s.tail_tiles * half_tile;
}

// q . k for the token in `slot` of the tile at `place`.
fn score(dtype: u32, dim: u32, place: u32, slot: u32) -> f32 {
    var total = 0.0f;
    if !is_coded(dtype) {
        for (var d = 0u; d < dim; d++) { total += vector[d] * float_at(dtype, place, d * TILE + slot); }
        return total;
    }
    var index = 0u;
    for (var at = 0u; at < dim;) {
        let n = slice_at(dim, at, most_dims(dtype));
        let block = place + block_word(dtype, index, at);
        var sum = 0.0f;
        for (var g = 0u; g < n / 4u; g++) {
            let levels = four_levels(dtype, true, block + SCALE_WORDS, n, g, slot);
            let d = at + 4u * g;
            sum += vector[d] * levels.x + vector[d + 1u] * levels.y + vector[d + 2u] * levels.z + vector[d + 3u] * levels.w;
        }
        total += sum * half_at(block, slot);
        at += n;
        index += 1u;
    }
    return total;
}

// As `score`, of tiles laid out as those of values: of the four tokens from slot 4 `quad` on, over every fourth dim from `part` on.
fn score_four(dtype: u32, dim: u32, place: u32, quad: u32, part: u32) -> vec4<f32> {
    var total = vec4<f32>(0.0f);
    if !is_coded(dtype) {
        for (var d = part; d < dim; d += 4u) {
            for (var i = 0u; i < 4u; i++) { total[i] += vector[d] * float_at(dtype, place, (4u * quad + i) * dim + d); }
        }
        return total;
    }
    var index = 0u;
    for (var at = 0u; at < dim;) {
        let n = slice_at(dim, at, most_dims(dtype));
        let block = place + block_word(dtype, index, at);
        var sum = vec4<f32>(0.0f);
        for (var d = part; d < n; d += 4u) {
            sum += vector[at + d] * four_levels(dtype, false, block + SCALE_WORDS, n, d / 16u * 4u + quad, d % 16u);
        }
        let first = 4u * quad;
        let scales = vec4<f32>(
            half_at(block, first), half_at(block, first + 1u), half_at(block, first + 2u), half_at(block, first + 3u),
        );
        total += sum * scales;
        at += n;
        index += 1u;
    }
    return total;
}

// Σ_t w_t v_t of dim `d` over the tokens of the tile at `place`, whose weights begin with number `first`.
fn weighted(dtype: u32, dim: u32, place: u32, first: u32, d: u32) -> f32 {
    var total = 0.0f;
    if !is_coded(dtype) {
        for (var slot = 0u; slot < TILE; slot++) {
            let weight = weights[first + slot];
            if weight != 0.0f { total += weight * float_at(dtype, place, slot * dim + d); }
        }
        return total;
    }
    var n = 0u;
    var at = 0u;
    var index = 0u;
    for (;; index++) {
        n = slice_at(dim, at, most_dims(dtype));
        if d < at + n { break; }
        at += n;
    }
    let block = place + block_word(dtype, index, at);
    for (var q = 0u; q < 4u; q++) {
        let levels = four_levels(dtype, false, block + SCALE_WORDS, n, (d - at) / 16u * 4u + q, (d - at) % 16u);
        for (var i = 0u; i < 4u; i++) {
            let slot = 4u * q + i;
            total += weights[first + slot] * half_at(block, slot) * levels[i];
        }
    }
    return total;
}

fn reduce_sum(value: f32, thread: u32) -> f32 {
    shared_values[thread] = value;
    workgroupBarrier();
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        if thread < step { shared_values[thread] += shared_values[thread + step]; }
        workgroupBarrier();
    }
    let total = shared_values[0];
    workgroupBarrier();
    return total;
}

fn reduce_max(value: f32, thread: u32) -> f32 {
    shared_values[thread] = value;
    workgroupBarrier();
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        if thread < step { shared_values[thread] = max(shared_values[thread], shared_values[thread + step]); }
        workgroupBarrier();
    }
    let most = shared_values[0];
    workgroupBarrier();
    return most;
}

// The query as the keys are stored, into `vector`; says whether it holds what is no number.
fn load_query(keys: Stream, row: u32, head: u32, thread: u32) {
    let first = (row * p.heads + head) * p.k_head_dim;
    for (var d = thread; d < keys.dim; d += THREADS) {
        var value = 0.0f;
        if d < p.k_head_dim {
            value = queries[first + d];
            if (bitcast<u32>(value) & 0x7f800000u) == 0x7f800000u { atomicStore(&is_bad, 1u); }
            if keys.factors != NONE { value *= bitcast<f32>(arena[keys.factors + d]); }
        }
        vector[d] = value;
    }
    workgroupBarrier();
    if keys.rotates != 0u { rotate(keys.dim, SIGNS_BEFORE, SIGNS_AFTER, thread); }
}

// A row of the list, and one of its heads.
struct Query {
    row: u32,
    head: u32,
    oldest: u32,
    position: u32,
    windows: u32,  // where in the list its windows are
    streams: u32,  // the number of its first stream
}

fn query_at(number: u32) -> Query {
    let listed = p.first_row + number / p.heads;
    let head = number % p.heads;
    let n_kv_heads = p.heads / p.group;
    let kv_head = head / p.group;
    let windows = p.windows_at + 2u * (listed * n_kv_heads + kv_head);
    let streams = 2u * (p.list[4u * listed + 3u] * n_kv_heads + kv_head);
    return Query(p.list[4u * listed], head, p.list[4u * listed + 2u], p.list[4u * listed + 1u], windows, streams);
}

// Turns `vector` back, and writes it.
fn finish(values: Stream, q: Query, has_bad: bool, thread: u32) {
    workgroupBarrier();
    if values.rotates != 0u { rotate(values.value_dim, SIGNS_AFTER, SIGNS_BEFORE, thread); }
    let to = (q.row * p.heads + q.head) * p.v_head_dim;
    for (var d = thread; d < p.v_head_dim; d += THREADS) {
        var value = vector[d];
        if values.factors != NONE { value *= bitcast<f32>(arena[values.factors + d]); }
        if values.shifts != NONE { value += bitcast<f32>(arena[values.shifts + d]); }
        out[to + d] = select(value, bitcast<f32>(p.not_a_number), has_bad);
    }
}

@compute @workgroup_size(THREADS)
fn attend(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = number_of(group, groups);
    if number >= p.rows * p.heads { return; }
    let q = query_at(number);
    let oldest = q.oldest;
    let position = q.position;
    let k_window = p.list[q.windows];
    let v_window = p.list[q.windows + 1u];
    let keys = stream_at(q.streams);
    let values = stream_at(q.streams + 1u);
    let span = p.first_span + group.z;
    let first_chunk = max(oldest / THREADS, span * CHUNKS_PER_SPAN);
    let last_chunk = min(position / THREADS, span * CHUNKS_PER_SPAN + CHUNKS_PER_SPAN - 1u);
    if first_chunk > last_chunk { return; }
    load_query(keys, q.row, q.head, thread);

    // A sink is a score that no value goes with.
    var most = LEAST;
    var total = 0.0f;
    if p.has_sinks != 0u && first_chunk == oldest / THREADS {
        most = sinks[q.head];
        total = 1.0f;
    }
    var acc = array<f32, MOST_EACH>();
    for (var chunk = first_chunk; chunk <= last_chunk; chunk++) {
        let first_tile = chunk * TILES_PER_BLOCK;
        let first_seen = max(first_tile, oldest / TILE);
        let last_tile = min(first_tile + TILES_PER_BLOCK - 1u, position / TILE);

        var of_centre = 0.0f;
        let first_main = max(first_seen, keys.sink_tiles);
        if keys.centre != NONE && first_main <= last_tile && first_main < k_window {
            let centre = p.list[keys.blocks + chunk] + keys.centre;
            var part_of_it = 0.0f;
            for (var d = thread; d < keys.dim; d += THREADS) { part_of_it += vector[d] * half_at(centre, d); }
            of_centre = reduce_sum(part_of_it, thread);
        }
        let token = chunk * THREADS + thread;
        let tile = token / TILE;
        let is_seen = token >= oldest && token <= position;
        // The four tokens that this thread and the next ones, or those before, have are of one tile.
        if keys.is_key == 0u {
            if tile >= first_seen && tile <= last_tile {
                let dtype = select(F16, keys.dtype, is_main(keys, tile, k_window));
                quarters[thread] =
                    score_four(dtype, keys.dim, place_of(keys, tile, k_window), token % TILE / 4u, thread % 4u);
            }
            workgroupBarrier();
        }
        var s = LEAST;
        if is_seen {
            let in_main = is_main(keys, tile, k_window);
            if keys.is_key == 0u {
                s = 0.0f;
                for (var i = 0u; i < 4u; i++) { s += quarters[thread / 4u * 4u + i][thread % 4u]; }
            } else {
                s = score(select(F16, keys.dtype, in_main), keys.dim, place_of(keys, tile, k_window), token % TILE);
            }
            if in_main { s += of_centre; }
            s *= p.scale;
            if p.soft_cap > 0.0f { s = p.soft_cap * hyperbolic_tangent(s / p.soft_cap); }
        }
        let new_most = max(most, reduce_max(s, thread));
        let weight = select(0.0f, exponential(s - new_most), is_seen);
        weights[thread] = weight;
        let older = exponential(most - new_most);
        total = total * older + reduce_sum(weight, thread);
        most = new_most;
        // What the weights of the block make of the centre of its values.
        var of_main = 0.0f;
        let has_centre = values.centre != NONE && first_main <= last_tile && first_main < v_window;
        if has_centre { of_main = reduce_sum(select(0.0f, weight, is_main(values, tile, v_window)), thread); }

        for (var k = 0u; k < MOST_EACH; k++) {
            let d = thread + k * THREADS;
            if d >= values.value_dim { break; }
            var sum = 0.0f;
            if has_centre { sum = of_main * half_at(p.list[values.blocks + chunk] + values.centre, d); }
            for (var t = first_seen; t <= last_tile; t++) {
                let dtype = select(F16, values.dtype, is_main(values, t, v_window));
                sum += weighted(dtype, values.dim, place_of(values, t, v_window), (t - first_tile) * TILE, d);
            }
            acc[k] = acc[k] * older + sum;
        }
        workgroupBarrier();
    }

    let has_bad = atomicLoad(&is_bad) != 0u;
    let at = (number * p.spans + group.z) * p.part_values;
    for (var k = 0u; k < MOST_EACH; k++) {
        let d = thread + k * THREADS;
        if d >= values.value_dim { break; }
        if p.spans == 1u { vector[d] = acc[k] / total; } else { left[at + SUMS + d] = acc[k]; }
    }
    if p.spans == 1u {
        finish(values, q, has_bad, thread);
    } else if thread == 0u {
        left[at] = most;
        left[at + 1u] = total;
        left[at + 2u] = select(0.0f, 1.0f, has_bad);
    }
}

// Joins what the spans of a head of a row have left, in their order.
@compute @workgroup_size(THREADS)
fn join_spans(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = number_of(group, groups);
    if number >= p.rows * p.heads { return; }
    let q = query_at(number);
    let values = stream_at(q.streams + 1u);
    let first = number * p.spans + q.oldest / (THREADS * CHUNKS_PER_SPAN) - p.first_span;
    let last = number * p.spans + q.position / (THREADS * CHUNKS_PER_SPAN) - p.first_span;
    var most = left[first * p.part_values];
    for (var span = first + 1u; span <= last; span++) { most = max(most, left[span * p.part_values]); }
    var total = 0.0f;
    var acc = array<f32, MOST_EACH>();
    for (var span = first; span <= last; span++) {
        let at = span * p.part_values;
        let weight = exponential(left[at] - most);
        total += left[at + 1u] * weight;
        for (var k = 0u; k < MOST_EACH; k++) {
            let d = thread + k * THREADS;
            if d >= values.value_dim { break; }
            acc[k] += left[at + SUMS + d] * weight;
        }
    }
    for (var k = 0u; k < MOST_EACH; k++) {
        let d = thread + k * THREADS;
        if d < values.value_dim { vector[d] = acc[k] / total; }
    }
    finish(values, q, left[first * p.part_values + 2u] != 0.0f, thread);
}
