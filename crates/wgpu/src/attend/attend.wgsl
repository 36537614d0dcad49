// Causal attention of the queries of a job over the stored tiles:
//
//   out = Σ_t exp(s_t - m) v_t / Σ_t exp(s_t - m),  s_t = scale q . k_t
//
// A *job* is a few queries of one KV head: heads of a group, of one row or of several consecutive
// rows. A workgroup iterates over the tokens in chunks of 128, a block of the cache, counted from
// token 0. A thread takes a few tokens of each chunk, reads each word of their keys once, and
// scores all queries with it; then the chunk's softmax is merged with the previous ones (online
// softmax, arXiv 1805.02867); then a thread takes a few dims, reads each word of the values once,
// and adds for all queries. Masked tokens add exactly zero, and every sum is in the order of the
// tokens and the dims, so that the kernel is batch invariant: the bits of a query do not depend on
// its job, or on the words per thread.
//
// A workgroup takes CHUNKS chunks at a time, each with threads of its own: the sums of a chunk
// begin at zero, and are merged in the order of the chunks whatever their number.
//
// Each *span* of tokens (KV split), counted from token 0 too, has a workgroup of its own, and
// another kernel combines the partial results: kernels stay short, and one row occupies many
// workgroups.
//
// There is a kernel for each pair of types (K_TYPE, V_TYPE), of keys and values stored separately
// or shared (SHARED_KV), with centres or without (CENTRES), for values of at most DIM_CHUNKS times
// 128 dims; QUADS, groups of four queries, WORDS, of four per thread, and CHUNKS depend on the
// adapter.
// Head groups with other types have a kernel of their own.

const SHARED_KV: bool = IS_SHARED_KV != 0u;
const CENTRES: bool = HAS_CENTRES != 0u;
// Threads of a chunk: the words of 128 tokens, or of 128 dims, four to a tile.
const LANES: u32 = 32u / WORDS;
const THREADS: u32 = LANES * CHUNKS;
// Sums of a thread for a chunk, of 128 dims and QUADS; and those that it merges.
const CHUNK_SUMS: u32 = 4u * WORDS * QUADS;
const MERGED_SUMS: u32 = CHUNK_SUMS / CHUNKS;

// [jobs, KV heads, query_values, QUADS]
@group(0) @binding(1) var<storage, read> prepared: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> sinks: array<f32>;           // [heads]
// [jobs, KV heads, slots, spans, partial_values], see combine_spans
@group(0) @binding(5) var<storage, read_write> partials: array<f32>;

// Scores of the chunks, then softmax weights, [CHUNKS, tokens, QUADS]; then, if there are several,
// their sums of values, [CHUNKS, dims, QUADS].
var<workgroup> weights: array<vec4<f32>, CHUNKS * TOKENS * QUADS>;
// The largest of the scores of each thread, and the sums of the weights of each chunk.
var<workgroup> thread_max: array<vec4<f32>, THREADS * QUADS>;
var<workgroup> chunk_totals: array<vec4<f32>, CHUNKS * QUADS>;

// For each query the oldest visible token, its position, its windows of keys and of values and the
// score of its sink, [5, slots].
var<workgroup> query_words: array<u32, 20 * QUADS>;
// The first and the last chunk of the span that a query sees.
var<workgroup> shared_chunk_range: vec2<u32>;

// For each query.
alias PerQuery = array<vec4<f32>, QUADS>;
// For each of four tokens or dims and each query.
alias FourOf = array<vec4<f32>, 4 * QUADS>;
// For each token or dim of a thread and each query: WORDS times four.
alias Sums = array<vec4<f32>, 4 * WORDS * QUADS>;

// The visible tokens of the queries of the job.
struct VisibleRanges {
    oldest: array<vec4<u32>, QUADS>,
    position: array<vec4<u32>, QUADS>,
    k_window: array<vec4<u32>, QUADS>,
    v_window: array<vec4<u32>, QUADS>,
}

fn is_main(s: KvTensor, tile: u32, window: vec4<u32>) -> vec4<bool> {
    return vec4<bool>(tile >= s.sink_tiles) & (vec4<u32>(tile) < window);
}

// Returns the address of a main tile.
fn main_address(s: KvTensor, tile: u32) -> u32 {
    return p.list[s.blocks + tile / TILES_PER_BLOCK] + s.main + tile % TILES_PER_BLOCK * s.tile_words;
}

// Returns the address of a tile in 16 bit.
fn half_address(s: KvTensor, tile: u32) -> u32 {
    let half_tile = s.dim * TILE / 2u;
    if tile < s.sink_tiles { return s.sink + tile * half_tile; }
    if tile >= s.first_step_tile && tile < s.end_step_tile { return s.step_tiles + (tile - s.first_step_tile) * half_tile; }
    return s.tail + tile % s.tail_tiles * half_tile;
}

// Adds Σ a b of sixteen values and of four vectors of queries: of value `f`, `b` to sum `f`, or to
// sum `b`.
fn add_word(sums: ptr<function, Sums>, word: u32, values: Sixteen, queries: ptr<function, FourOf>, is_turned: bool) {
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            let value = select(values[i][j], values[j][i], is_turned);
            for (var x = 0u; x < QUADS; x++) { (*sums)[(4u * word + i) * QUADS + x] += value * (*queries)[j * QUADS + x]; }
        }
    }
}

// Returns the slot in its tile of token number `i` of word `word` of a thread: in quantized tiles
// of keys they are four apart.
fn slot_of(first: u32, word: u32, i: u32) -> u32 {
    return select(4u * (first + word) + i, first + word + 4u * i, is_quantized(K_TYPE) && !SHARED_KV);
}

// Returns the dim, of sixteen, of number `i` of word `word` of a thread.
fn dim_of(first: u32, word: u32, i: u32) -> u32 {
    return select(4u * (first + word) + i, first + word + 4u * i, is_quantized(V_TYPE));
}

// Adds q . k of the thread's tokens of the quantized tile at `address`, whose words begin with
// `first`, to `scores`; and of the centre of their block.
fn score_codes(
    keys: KvTensor, address: u32, centre: u32, queries_at: u32, first: u32, scores: ptr<function, Sums>, centre_scores: ptr<function, PerQuery>,
) {
    var index = 0u;
    for (var at = 0u; at < keys.dim;) {
        let n = slice_at(keys.dim, at, max_dims(K_TYPE));
        let block = address + block_word(K_TYPE, index, at);
        var sums = Sums();
        for (var step = 0u; step < n / 4u; step++) {
            // Four dims: contiguous ones, or for shared-KV tensors, whose words hold dims that are
            // four apart, strided ones.
            let d = at + select(4u * step, step / 4u * 16u + step % 4u, SHARED_KV);
            let stride = select(1u, 4u, SHARED_KV);
            var queries = FourOf();
            for (var j = 0u; j < 4u; j++) {
                for (var x = 0u; x < QUADS; x++) { queries[j * QUADS + x] = prepared[queries_at + (d + j * stride) * QUADS + x]; }
            }
            if CENTRES {
                var centre_values = vec4<f32>();
                if SHARED_KV {
                    centre_values = vec4<f32>(half_at(centre, d), half_at(centre, d + 4u), half_at(centre, d + 8u), half_at(centre, d + 12u));
                } else {
                    centre_values = vec4<f32>(two_halves(centre, d), two_halves(centre, d + 2u));
                }
                for (var j = 0u; j < 4u; j++) {
                    for (var x = 0u; x < QUADS; x++) { (*centre_scores)[x] += centre_values[j] * queries[j * QUADS + x]; }
                }
            }
            var high = vec2<u32>();
            if !SHARED_KV { high = high_bits(K_TYPE, block + SCALE_WORDS, n, step); }
            add_keys(&sums, 0u, block, n, step, first, high, &queries);
            if WORDS > 1u { add_keys(&sums, 1u, block, n, step, first, high, &queries); }
            if WORDS > 2u {
                add_keys(&sums, 2u, block, n, step, first, high, &queries);
                add_keys(&sums, 3u, block, n, step, first, high, &queries);
            }
        }
        add_slice(scores, 0u, block, first, &sums);
        if WORDS > 1u { add_slice(scores, 1u, block, first, &sums); }
        if WORDS > 2u {
            add_slice(scores, 2u, block, first, &sums);
            add_slice(scores, 3u, block, first, &sums);
        }
        at += n;
        index += 1u;
    }
}

fn add_keys(
    sums: ptr<function, Sums>, word: u32,
    block: u32, n: u32, step: u32, first: u32, shared_high_bits: vec2<u32>, queries: ptr<function, FourOf>,
) {
    let planes = block + SCALE_WORDS;
    if SHARED_KV {
        let g = step / 4u * 4u + first + word;
        let high = high_bits(K_TYPE, planes, n, g);
        add_word(sums, word, sixteen_levels(K_TYPE, false, true, planes, n, g, step % 4u, high), queries, true);
    } else {
        add_word(sums, word, sixteen_levels(K_TYPE, true, true, planes, n, step, first + word, shared_high_bits), queries, false);
    }
}

// Adds sums over a slice, times the scales of its tokens.
fn add_slice(scores: ptr<function, Sums>, word: u32, block: u32, first: u32, sums: ptr<function, Sums>) {
    for (var i = 0u; i < 4u; i++) {
        let scale = half_at(block, slot_of(first, word, i));
        for (var x = 0u; x < QUADS; x++) {
            let at = (4u * word + i) * QUADS + x;
            (*scores)[at] += (*sums)[at] * scale;
        }
    }
}

// Adds q . k of the thread's tokens of the float tile at `address`.
fn score_floats(dtype: u32, keys: KvTensor, address: u32, queries_at: u32, first: u32, scores: ptr<function, Sums>) {
    for (var d = 0u; d < keys.dim; d++) {
        var queries = PerQuery();
        for (var x = 0u; x < QUADS; x++) { queries[x] = prepared[queries_at + d * QUADS + x]; }
        add_dim(scores, 0u, dtype, keys.dim, address, d, first, &queries);
        if WORDS > 1u { add_dim(scores, 1u, dtype, keys.dim, address, d, first, &queries); }
        if WORDS > 2u {
            add_dim(scores, 2u, dtype, keys.dim, address, d, first, &queries);
            add_dim(scores, 3u, dtype, keys.dim, address, d, first, &queries);
        }
    }
}

fn add_dim(
    scores: ptr<function, Sums>, word: u32, dtype: u32, dim: u32, address: u32, d: u32, first: u32, queries: ptr<function, PerQuery>,
) {
    var values = vec4<f32>();
    if STAGE != NO_CODES {
        if SHARED_KV {
            for (var i = 0u; i < 4u; i++) { values[i] = float_at(dtype, address, (4u * (first + word) + i) * dim + d); }
        } else {
            values = four_floats(dtype, address, d * TILE, first + word, is_quantized(K_TYPE));
        }
    }
    for (var i = 0u; i < 4u; i++) {
        for (var x = 0u; x < QUADS; x++) { (*scores)[(4u * word + i) * QUADS + x] += values[i] * (*queries)[x]; }
    }
}

// Writes the scores of word `word`, ready for the softmax, to `weights`; updates
// `max_score`.
fn finish_scores(
    word: u32, first: u32, tile: u32, scale: f32, keys: KvTensor, visible: ptr<function, VisibleRanges>,
    main_scores: ptr<function, Sums>, half_scores: ptr<function, Sums>, centre_scores: ptr<function, PerQuery>, max_score: ptr<function, PerQuery>,
) {
    for (var i = 0u; i < 4u; i++) {
        let token = tile * TILE + slot_of(first, word, i);
        for (var x = 0u; x < QUADS; x++) {
            let at = (4u * word + i) * QUADS + x;
            var s = select((*half_scores)[at], (*main_scores)[at] + (*centre_scores)[x], is_main(keys, tile, (*visible).k_window[x])) * scale;
            let is_visible = (vec4<u32>(token) >= (*visible).oldest[x]) & (vec4<u32>(token) <= (*visible).position[x]);
            s = select(vec4<f32>(MIN_F32), s, is_visible);
            weights[token % (CHUNKS * TOKENS) * QUADS + x] = s;
            (*max_score)[x] = max((*max_score)[x], s);
        }
    }
}

// Applies the soft cap; masked scores stay the lowest f32.
fn apply_soft_cap(s: vec4<f32>, cap: f32) -> vec4<f32> {
    if cap <= 0.0f { return s; }
    let x = s / cap;
    let t = vec4<f32>(hyperbolic_tangent(x.x), hyperbolic_tangent(x.y), hyperbolic_tangent(x.z), hyperbolic_tangent(x.w));
    return select(cap * t, s, s == vec4<f32>(MIN_F32));
}

// Returns e^(s - max_score); 0 for masked scores.
fn softmax_weight(s: vec4<f32>, max_score: vec4<f32>) -> vec4<f32> {
    let d = s - max_score;
    let weight = vec4<f32>(exponential(d.x), exponential(d.y), exponential(d.z), exponential(d.w));
    return select(weight, vec4<f32>(), s == vec4<f32>(MIN_F32));
}

// Adds the weighted values of the quantized tile at `address` for the thread's dims, for queries
// that see it in this form. The sum of these weights is added to `total`.
fn add_codes(
    address: u32, slice: vec3<u32>, first_weight: u32, d: u32, first: u32, read_mask: PerQuery,
    sums: ptr<function, Sums>, total: ptr<function, PerQuery>,
) {
    let block = address + block_word(V_TYPE, slice.z, slice.y);
    let planes = block + SCALE_WORDS;
    for (var quad = 0u; quad < 4u; quad++) {
        let scales = vec4<f32>(two_halves(block, 4u * quad), two_halves(block, 4u * quad + 2u));
        var query_weights = FourOf();
        for (var j = 0u; j < 4u; j++) {
            for (var x = 0u; x < QUADS; x++) {
                let weight = weights[(first_weight + 4u * quad + j) * QUADS + x] * read_mask[x];
                (*total)[x] += weight;
                query_weights[j * QUADS + x] = weight * scales[j];
            }
        }
        let g = (d - slice.y) / 4u + quad;
        let high = high_bits(V_TYPE, planes, slice.x, g);
        add_word(sums, 0u, sixteen_levels(V_TYPE, false, false, planes, slice.x, g, first, high), &query_weights, false);
        if WORDS > 1u {
            add_word(sums, 1u, sixteen_levels(V_TYPE, false, false, planes, slice.x, g, first + 1u, high), &query_weights, false);
        }
        if WORDS > 2u {
            add_word(sums, 2u, sixteen_levels(V_TYPE, false, false, planes, slice.x, g, first + 2u, high), &query_weights, false);
            add_word(sums, 3u, sixteen_levels(V_TYPE, false, false, planes, slice.x, g, first + 3u, high), &query_weights, false);
        }
    }
}

// As `add_codes`, for a float tile.
fn add_floats(
    dtype: u32, dim: u32, address: u32, first_weight: u32, d: u32, first: u32, read_mask: PerQuery,
    sums: ptr<function, Sums>, total: ptr<function, PerQuery>,
) {
    for (var slot = 0u; slot < TILE; slot++) {
        var query_weights = PerQuery();
        for (var x = 0u; x < QUADS; x++) {
            query_weights[x] = weights[(first_weight + slot) * QUADS + x] * read_mask[x];
            (*total)[x] += query_weights[x];
        }
        let row = slot * dim + d;
        add_token(sums, 0u, four_floats(dtype, address, row, first, is_quantized(V_TYPE)), &query_weights);
        if WORDS > 1u { add_token(sums, 1u, four_floats(dtype, address, row, first + 1u, is_quantized(V_TYPE)), &query_weights); }
        if WORDS > 2u {
            add_token(sums, 2u, four_floats(dtype, address, row, first + 2u, is_quantized(V_TYPE)), &query_weights);
            add_token(sums, 3u, four_floats(dtype, address, row, first + 3u, is_quantized(V_TYPE)), &query_weights);
        }
    }
}

fn add_token(sums: ptr<function, Sums>, word: u32, values: vec4<f32>, query_weights: ptr<function, PerQuery>) {
    for (var i = 0u; i < 4u; i++) {
        for (var x = 0u; x < QUADS; x++) { (*sums)[(4u * word + i) * QUADS + x] += values[i] * (*query_weights)[x]; }
    }
}

// Returns the end of the main tiles. If main tiles hold all that a query sees, other tokens are
// looked up there too: none of them is elsewhere.
fn window_of(q: Query, window: u32) -> u32 {
    return select(window, 0xffffffffu, window > q.position / TILE);
}

fn query_words_at(at: u32) -> vec4<u32> {
    return vec4<u32>(query_words[at], query_words[at + 1u], query_words[at + 2u], query_words[at + 3u]);
}

fn min_of(v: vec4<u32>) -> u32 {
    return min(min(v.x, v.y), min(v.z, v.w));
}

fn max_of(v: vec4<u32>) -> u32 {
    return max(max(v.x, v.y), max(v.z, v.w));
}

// Writes the visible tokens of query `slot` of a unit to `query_words`, and the score of its sink
// where its tokens begin in this span.
fn store_visible_range(unit: u32, slot: u32, span: u32) {
    let q = query_at(unit, slot);
    var sink = MIN_F32;
    if p.has_sinks != 0u && q.is_valid && q.oldest / (TOKENS * CHUNKS_PER_SPAN) == span { sink = sinks[q.head]; }
    query_words[slot] = q.oldest;
    query_words[4u * QUADS + slot] = q.position;
    query_words[8u * QUADS + slot] = window_of(q, p.list[q.windows]);
    query_words[12u * QUADS + slot] = window_of(q, p.list[q.windows + 1u]);
    query_words[16u * QUADS + slot] = bitcast<u32>(sink);
}

// Returns the offset of the partial result of query `slot` of a unit for a span of the launch.
fn partial_at(unit: u32, slot: u32, span: u32) -> u32 {
    return ((unit * p.slots + slot) * p.spans + span) * p.partial_values;
}

@compute @workgroup_size(THREADS)
fn attend(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let unit = workgroup_index(group, groups);
    if unit >= p.jobs * (p.heads / p.group) { return; }
    let first_query = query_at(unit, 0u);
    let keys = kv_tensor(first_query.first_tensor);
    let values = kv_tensor(first_query.first_tensor + 1u);
    let is_variant = keys.dtype == K_TYPE && values.dtype == V_TYPE && (keys.is_key == 0u) == SHARED_KV
        && (keys.centre != NONE) == CENTRES && (values.value_dim + TOKENS - 1u) / TOKENS == DIM_CHUNKS;
    if !is_variant { return; }
    init_lookup(thread);

    let span = p.first_span + group.z;
    if thread < 4u * QUADS { store_visible_range(unit, thread, span); }
    if THREADS < 4u * QUADS && thread + THREADS < 4u * QUADS { store_visible_range(unit, thread + THREADS, span); }
    workgroupBarrier();
    var visible: VisibleRanges;
    var max_score = PerQuery();
    var total = PerQuery();
    var oldest = 0xffffffffu;
    var position = 0u;
    var k_windows = vec2<u32>(0xffffffffu, 0u);
    var v_windows = vec2<u32>(0xffffffffu, 0u);
    for (var x = 0u; x < QUADS; x++) {
        visible.oldest[x] = query_words_at(4u * x);
        visible.position[x] = query_words_at(4u * QUADS + 4u * x);
        visible.k_window[x] = query_words_at(8u * QUADS + 4u * x);
        visible.v_window[x] = query_words_at(12u * QUADS + 4u * x);
        max_score[x] = bitcast<vec4<f32>>(query_words_at(16u * QUADS + 4u * x));
        // A sink is a score without a value.
        total[x] = select(vec4<f32>(1.0f), vec4<f32>(0.0f), max_score[x] == vec4<f32>(MIN_F32));
        oldest = min(oldest, min_of(visible.oldest[x]));
        position = max(position, max_of(visible.position[x]));
        k_windows = vec2<u32>(min(k_windows.x, min_of(visible.k_window[x])), max(k_windows.y, max_of(visible.k_window[x])));
        v_windows = vec2<u32>(min(v_windows.x, min_of(visible.v_window[x])), max(v_windows.y, max_of(visible.v_window[x])));
    }
    // The value is uniform over the workgroup; `workgroupUniformLoad` proves it to browsers, as the
    // loop contains barriers.
    if thread == 0u {
        let first_chunk = max(oldest / TOKENS, span * CHUNKS_PER_SPAN);
        shared_chunk_range = vec2<u32>(first_chunk, min(position / TOKENS, span * CHUNKS_PER_SPAN + CHUNKS_PER_SPAN - 1u));
    }
    let chunk_range = workgroupUniformLoad(&shared_chunk_range);
    if chunk_range.x > chunk_range.y { return; }

    let slice = select(thread / LANES, 0u, CHUNKS == 1u);
    let lane = thread % LANES;
    let first = lane * WORDS % 4u;
    let queries_at = unit * p.query_values * QUADS;
    let scale = p.scale;
    let cap = p.soft_cap;
    var acc = array<vec4<f32>, DIM_CHUNKS * MERGED_SUMS>();
    for (var first_chunk = chunk_range.x; first_chunk <= chunk_range.y; first_chunk += CHUNKS) {
        // The tiles of all chunks, and those of the thread's chunk: none if it is beyond the last.
        let n_chunks = min(CHUNKS, chunk_range.y + 1u - first_chunk);
        let all_first_tile = max(first_chunk * TILES_PER_BLOCK, oldest / TILE);
        let all_end_tile = min((first_chunk + n_chunks) * TILES_PER_BLOCK, position / TILE + 1u);
        let chunk = first_chunk + slice;
        let first_tile = max(chunk * TILES_PER_BLOCK, all_first_tile);
        let end_tile = min(chunk * TILES_PER_BLOCK + TILES_PER_BLOCK, all_end_tile);

        let tile = chunk * TILES_PER_BLOCK + lane * WORDS / 4u;
        let is_visible = tile >= first_tile && tile < end_tile;
        var main_scores = Sums();
        var half_scores = Sums();
        var centre_scores = PerQuery();
        if max(all_first_tile, keys.sink_tiles) < min(all_end_tile, k_windows.y) {
            let has_tile = is_visible && tile >= keys.sink_tiles && tile < k_windows.y;
            // Threads without a tile read another one, so that control flow is uniform.
            let tile_to_read = select(max(all_first_tile, keys.sink_tiles), tile, has_tile);
            if is_quantized(K_TYPE) {
                var centre = 0u;
                if CENTRES { centre = p.list[keys.blocks + tile_to_read / TILES_PER_BLOCK] + keys.centre; }
                score_codes(keys, main_address(keys, tile_to_read), centre, queries_at, first, &main_scores, &centre_scores);
            } else {
                score_floats(K_TYPE, keys, main_address(keys, tile_to_read), queries_at, first, &main_scores);
            }
        }
        if all_first_tile < keys.sink_tiles || all_end_tile > k_windows.x {
            let has_tile = is_visible && (tile < keys.sink_tiles || tile >= k_windows.x);
            let tile_to_read = select(select(all_end_tile - 1u, all_first_tile, all_first_tile < keys.sink_tiles), tile, has_tile);
            score_floats(F16, keys, half_address(keys, tile_to_read), queries_at, first, &half_scores);
        }
        var thread_max_score = PerQuery();
        for (var x = 0u; x < QUADS; x++) { thread_max_score[x] = vec4<f32>(MIN_F32); }
        finish_scores(0u, first, tile, scale, keys, &visible, &main_scores, &half_scores, &centre_scores, &thread_max_score);
        if WORDS > 1u { finish_scores(1u, first, tile, scale, keys, &visible, &main_scores, &half_scores, &centre_scores, &thread_max_score); }
        if WORDS > 2u {
            finish_scores(2u, first, tile, scale, keys, &visible, &main_scores, &half_scores, &centre_scores, &thread_max_score);
            finish_scores(3u, first, tile, scale, keys, &visible, &main_scores, &half_scores, &centre_scores, &thread_max_score);
        }
        for (var x = 0u; x < QUADS; x++) { thread_max[thread * QUADS + x] = thread_max_score[x]; }
        workgroupBarrier();

        // For each chunk the factor of the sums before it; the largest score up to the thread's.
        var rescale = array<vec4<f32>, CHUNKS * QUADS>();
        var chunk_max = max_score;
        for (var c = 0u; c < n_chunks; c++) {
            for (var x = 0u; x < QUADS; x++) {
                var new_max = vec4<f32>(MIN_F32);
                for (var other = 0u; other < LANES; other++) { new_max = max(new_max, thread_max[(c * LANES + other) * QUADS + x]); }
                new_max = max(max_score[x], apply_soft_cap(new_max, cap));
                rescale[c * QUADS + x] = softmax_weight(max_score[x], new_max);
                max_score[x] = new_max;
                if c <= slice { chunk_max[x] = new_max; }
            }
        }
        let first_weight_of_chunk = chunk % CHUNKS * TOKENS;
        for (var i = lane; i < TOKENS; i += LANES) {
            for (var x = 0u; x < QUADS; x++) {
                let at = (first_weight_of_chunk + i) * QUADS + x;
                weights[at] = softmax_weight(apply_soft_cap(weights[at], cap), chunk_max[x]);
            }
        }
        workgroupBarrier();

        var chunk_total = PerQuery();
        var chunk_sums = array<vec4<f32>, DIM_CHUNKS * CHUNK_SUMS>();
        let first_main_tile = max(first_tile, values.sink_tiles);
        let end_main_tile = min(end_tile, v_windows.y);
        let all_first_main_tile = max(all_first_tile, values.sink_tiles);
        for (var dim_chunk = 0u; dim_chunk < DIM_CHUNKS; dim_chunk++) {
            // Threads without dims of their own repeat the first ones.
            var d = (dim_chunk * TOKENS + lane * WORDS / 4u * 16u);
            if d >= values.value_dim { d = 0u; }
            var sums = Sums();
            var main_weight_sum = PerQuery();
            var half_weight_sum = PerQuery();
            if all_first_main_tile < min(all_end_tile, v_windows.y) {
                let slice_of_dims = slice_containing(V_TYPE, values.dim, d);
                var tile_range = vec2<u32>(first_main_tile, end_main_tile);
                // Look-ups among threads of several chunks need uniform control flow.
                if CHUNKS > 1u && is_turbo(V_TYPE) { tile_range = vec2<u32>(chunk, chunk + 1u) * TILES_PER_BLOCK; }
                for (var t = tile_range.x; t < tile_range.y; t++) {
                    let has_tile = t >= first_main_tile && t < end_main_tile;
                    var read_mask = PerQuery();
                    for (var x = 0u; x < QUADS; x++) {
                        let is_read = is_main(values, t, visible.v_window[x]) & vec4<bool>(has_tile);
                        read_mask[x] = select(vec4<f32>(0.0f), vec4<f32>(1.0f), is_read);
                    }
                    let address = main_address(values, select(all_first_main_tile, t, has_tile));
                    let first_weight = t % (CHUNKS * TILES_PER_BLOCK) * TILE;
                    if is_quantized(V_TYPE) {
                        add_codes(address, slice_of_dims, first_weight, d, first, read_mask, &sums, &main_weight_sum);
                    } else {
                        add_floats(V_TYPE, values.dim, address, first_weight, d, first, read_mask, &sums, &main_weight_sum);
                    }
                }
                if SHARED_KV && CENTRES && first_main_tile < end_main_tile {
                    let centre = p.list[values.blocks + chunk] + values.centre;
                    for (var i = 0u; i < 4u * WORDS; i++) {
                        let centre_value = half_at(centre, d + dim_of(first, i / 4u, i % 4u));
                        for (var x = 0u; x < QUADS; x++) { sums[i * QUADS + x] += main_weight_sum[x] * centre_value; }
                    }
                }
            }
            for (var t = first_tile; t < end_tile; t++) {
                if t >= values.sink_tiles && t < v_windows.x { continue; }
                var read_mask = PerQuery();
                for (var x = 0u; x < QUADS; x++) {
                    read_mask[x] = select(vec4<f32>(1.0f), vec4<f32>(0.0f), is_main(values, t, visible.v_window[x]));
                }
                let first_weight = t % (CHUNKS * TILES_PER_BLOCK) * TILE;
                add_floats(F16, values.dim, half_address(values, t), first_weight, d, first, read_mask, &sums, &half_weight_sum);
            }
            if CHUNKS == 1u {
                for (var i = 0u; i < MERGED_SUMS; i++) {
                    let at = dim_chunk * MERGED_SUMS + i;
                    acc[at] = acc[at] * rescale[i % QUADS] + sums[i];
                }
            } else {
                for (var i = 0u; i < CHUNK_SUMS; i++) { chunk_sums[dim_chunk * CHUNK_SUMS + i] = sums[i]; }
            }
            for (var x = 0u; x < QUADS; x++) { chunk_total[x] = main_weight_sum[x] + half_weight_sum[x]; }
        }
        if CHUNKS == 1u {
            for (var x = 0u; x < QUADS; x++) { total[x] = total[x] * rescale[x] + chunk_total[x]; }
        } else {
            if lane == 0u {
                for (var x = 0u; x < QUADS; x++) { chunk_totals[slice * QUADS + x] = chunk_total[x]; }
            }
            for (var dim_chunk = 0u; dim_chunk < DIM_CHUNKS; dim_chunk++) {
                // From here on the buffer holds sums of these dims.
                workgroupBarrier();
                for (var i = 0u; i < 4u * WORDS; i++) {
                    let d = lane * WORDS / 4u * 16u + dim_of(first, i / 4u, i % 4u);
                    for (var x = 0u; x < QUADS; x++) {
                        weights[(slice * TOKENS + d) * QUADS + x] = chunk_sums[dim_chunk * CHUNK_SUMS + i * QUADS + x];
                    }
                }
                workgroupBarrier();
                for (var k = 0u; k < MERGED_SUMS; k++) {
                    let i = thread + k * THREADS;
                    var merged = acc[dim_chunk * MERGED_SUMS + k];
                    for (var c = 0u; c < n_chunks; c++) {
                        merged = merged * rescale[c * QUADS + i % QUADS] + weights[c * TOKENS * QUADS + i];
                    }
                    acc[dim_chunk * MERGED_SUMS + k] = merged;
                }
            }
            for (var c = 0u; c < n_chunks; c++) {
                for (var x = 0u; x < QUADS; x++) { total[x] = total[x] * rescale[c * QUADS + x] + chunk_totals[c * QUADS + x]; }
            }
        }
        // From here on the buffer holds the weights of the next chunks.
        workgroupBarrier();
    }

    if thread == 0u {
        for (var x = 0u; x < QUADS; x++) {
            for (var c = 0u; c < 4u; c++) {
                let at = partial_at(unit, 4u * x + c, group.z);
                partials[at] = max_score[x][c];
                partials[at + 1u] = total[x][c];
            }
        }
    }
    for (var dim_chunk = 0u; dim_chunk < DIM_CHUNKS; dim_chunk++) {
        for (var k = 0u; k < MERGED_SUMS; k++) {
            // The dim, of 128, and the queries of this sum.
            var dim = lane * WORDS / 4u * 16u + dim_of(first, k / QUADS / 4u, k / QUADS % 4u);
            var x = k % QUADS;
            if CHUNKS > 1u {
                dim = (thread + k * THREADS) / QUADS;
                x = thread % QUADS;
            }
            let d = dim_chunk * TOKENS + dim;
            if d >= values.value_dim { continue; }
            for (var c = 0u; c < 4u; c++) {
                partials[partial_at(unit, 4u * x + c, group.z) + SUMS + d] = acc[dim_chunk * MERGED_SUMS + k][c];
            }
        }
    }
}
