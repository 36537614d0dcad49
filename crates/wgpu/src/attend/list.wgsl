// The visible tokens of a launch, as listed by the host: rows, jobs of queries, KV tensors.

struct Params {
    heads: u32,
    group: u32,           // query heads of a KV head
    k_head_dim: u32,
    v_head_dim: u32,
    slots: u32,           // maximum queries of a job
    jobs: u32,            // jobs of the launch, from the first one of the list on
    first_job: u32,
    first_span: u32,      // first span that any of the rows sees
    spans: u32,
    query_values: u32,    // stored values of a query, as of keys, and one more
    partial_values: u32,  // values of a partial result
    jobs_at: u32,         // offsets of the other tables in the list
    windows_at: u32,
    tensors_at: u32,
    has_sinks: u32,
    scale: f32,
    soft_cap: f32,        // 0 for none
    nan_bits: u32,        // the bits of NaN, which WGSL has no literal for
    // Rows of four: row of the step, position, the oldest visible token, its sequence. Then jobs of
    // three: the first row of a sequence, and the range of the sequence's queries (the heads of a
    // group, row after row): the first and their number. Then for each row and KV head the start of
    // its 16-bit windows, of keys and of values. Then KV tensors: for each sequence and KV head
    // that of keys and that of values.
    list: array<u32>,
}

// TENSOR_WORDS words of the list.
struct KvTensor {
    dtype: u32,
    dim: u32,
    value_dim: u32,        // the first of these that are values: not all in a shared-KV tensor
    is_key: u32,           // whether tiles have the layout of keys; those of shared-KV tensors have not
    rotates: u32,
    sink_tiles: u32,
    tail_tiles: u32,
    main: u32,             // its first tile within a block, and words of a tile
    tile_words: u32,
    centre: u32,           // within a block, or NONE
    sink: u32,             // addresses of its parts in 16 bit
    tail: u32,
    step_tiles: u32,
    first_step_tile: u32,  // the first of these, and one beyond the last
    end_step_tile: u32,
    blocks: u32,           // offset in the list of the addresses of blocks
    // offset of the channel scales of the head's queries, or of its outputs, or NONE
    factors: u32,
    shifts: u32,           // and of their shifts
}

@group(0) @binding(0) var<storage, read> p: Params;

fn kv_tensor(number: u32) -> KvTensor {
    let at = p.tensors_at + number * TENSOR_WORDS;
    return KvTensor(
        p.list[at], p.list[at + 1u], p.list[at + 2u], p.list[at + 3u], p.list[at + 4u], p.list[at + 5u],
        p.list[at + 6u], p.list[at + 7u], p.list[at + 8u], p.list[at + 9u], p.list[at + 10u], p.list[at + 11u],
        p.list[at + 12u], p.list[at + 13u], p.list[at + 14u], p.list[at + 15u], p.list[at + 16u], p.list[at + 17u],
    );
}

// A query of a job: one of the heads of a row of the list that share a KV head.
struct Query {
    is_valid: bool,
    row: u32,
    head: u32,
    oldest: u32,
    position: u32,
    windows: u32,       // offset in the list of its windows
    first_tensor: u32,  // the number of its first KV tensor
}

// Returns query `slot` of unit `unit`, a job and a KV head. Beyond the last it is the first one
// again, with all tokens masked.
fn query_at(unit: u32, slot: u32) -> Query {
    let n_kv_heads = p.heads / p.group;
    let kv_head = unit % n_kv_heads;
    let job = p.jobs_at + 3u * (p.first_job + unit / n_kv_heads);
    let is_valid = slot < p.list[job + 2u];
    let number = select(0u, p.list[job + 1u] + slot, is_valid);
    let list_row = p.list[job] + number / p.group;
    let position = p.list[4u * list_row + 1u];
    let oldest = select(0xffffffffu, p.list[4u * list_row + 2u], is_valid);
    let windows = p.windows_at + 2u * (list_row * n_kv_heads + kv_head);
    let first_tensor = 2u * (p.list[4u * list_row + 3u] * n_kv_heads + kv_head);
    return Query(is_valid, p.list[4u * list_row], kv_head * p.group + number % p.group, oldest, position, windows, first_tensor);
}
