// What is attended to, as the host lists it: rows, jobs of queries, streams.

struct Params {
    heads: u32,
    group: u32,         // query heads of a KV head
    k_head_dim: u32,
    v_head_dim: u32,
    slots: u32,         // queries of a job, at most
    jobs: u32,          // of the list that are attended to, from the first one on
    first_job: u32,
    first_span: u32,    // spans that any of the rows sees
    spans: u32,
    query_values: u32,  // of a query as keys are stored, and one more
    part_values: u32,   // of what a span leaves
    jobs_at: u32,       // where in the list the other tables begin
    windows_at: u32,
    streams_at: u32,
    has_sinks: u32,
    scale: f32,
    soft_cap: f32,      // 0 for none
    not_a_number: u32,  // the bits of NaN, which WGSL does not write
    // Rows of four: row of the step, position, the oldest token it sees, its part. Then jobs of three: the first row of a part, and
    // which of the part's queries (the heads of a group, row after row) are taken, from one on so many. Then for each row and KV head
    // where its windows of 16 bits begin, of keys and of values. Then streams: for each part and KV head that of keys and that of values.
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
@group(0) @binding(3) var<storage, read> arena: array<u32>;

fn stream_at(number: u32) -> Stream {
    let at = p.streams_at + number * STREAM;
    return Stream(
        p.list[at], p.list[at + 1u], p.list[at + 2u], p.list[at + 3u], p.list[at + 4u], p.list[at + 5u],
        p.list[at + 6u], p.list[at + 7u], p.list[at + 8u], p.list[at + 9u], p.list[at + 10u], p.list[at + 11u],
        p.list[at + 12u], p.list[at + 13u], p.list[at + 14u], p.list[at + 15u], p.list[at + 16u], p.list[at + 17u],
    );
}

// A query of a job: one of the heads of a row of the list that meet a KV head.
struct Query {
    is_there: bool,
    row: u32,
    head: u32,
    oldest: u32,
    position: u32,
    windows: u32,  // where in the list its windows are
    streams: u32,  // the number of its first stream
}

// Query `slot` of unit `unit`, a job and a KV head. Where there is none it is the first one again, and sees nothing.
fn query_at(unit: u32, slot: u32) -> Query {
    let n_kv_heads = p.heads / p.group;
    let kv_head = unit % n_kv_heads;
    let job = p.jobs_at + 3u * (p.first_job + unit / n_kv_heads);
    let is_there = slot < p.list[job + 2u];
    let number = select(0u, p.list[job + 1u] + slot, is_there);
    let listed = p.list[job] + number / p.group;
    let position = p.list[4u * listed + 1u];
    let oldest = select(0xffffffffu, p.list[4u * listed + 2u], is_there);
    let windows = p.windows_at + 2u * (listed * n_kv_heads + kv_head);
    let streams = 2u * (p.list[4u * listed + 3u] * n_kv_heads + kv_head);
    return Query(is_there, p.list[4u * listed], kv_head * p.group + number % p.group, oldest, position, windows, streams);
}
