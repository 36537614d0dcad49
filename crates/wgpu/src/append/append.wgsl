// Writes new keys and values: channel scales, padding, rotation, and encoding into tiles. The
// method is that of kvant-codec, with the same bits.
//
// The host plans the writes: a list of tiles, one workgroup for each. A thread takes a slot of the
// tile and encodes its row as the reference does, slice by slice; the results of all slots are
// packed into words together, as a word holds several slots.

// A tile to write. Addresses are those of `word_at`, or NONE.
struct Write {
    tile: u32,
    tail: u32,           // the tail tile with the slots that are in the tail
    step_tile: u32,      // the step tile that receives the slots too
    centre: u32,         // subtracted from rows before they are encoded
    old_slots: u32,      // slots in the tail: the first, and one beyond the last in the upper half
    new_slots: u32,      // slots of new rows, likewise
    first_row: u32,      // row of the step for the first of these
    dtype: u32,          // of the tile
    is_key: u32,         // whether tiles have the layout of keys
    of_keys: u32,        // whether rows are those of keys
    rotates: u32,
    rounds_to_f16: u32,  // rows are rounded to f16 first
    dim: u32,            // stored values of a row
    head_dim: u32,       // values of a row before padding
    column: u32,         // first column of the head in the rows of the step
    width: u32,          // values of a row of the step
    scale: u32,          // offset of the channel scales of the head's values
    shift: u32,          // and of their shifts
    alpha: f32,          // factor on encoded values
    next_tail: u32,      // of a centre: the tail, the slots and the first row of the next tile
    next_old_slots: u32,
    next_new_slots: u32,
    next_row: u32,
    inverse_rows: f32,   // 1 / number of rows that a centre averages
}

@group(0) @binding(0) var<storage, read> writes: array<Write>;
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;

const SPAN: u32 = 128u;
// Codes, or 16-bit or 32-bit numbers, of a slice, for each slot.
var<workgroup> stage: array<u32, 2048>;
// Scales of the blocks of a slice, for each slot.
var<workgroup> scales: array<u32, 64>;

fn begin(range: u32) -> u32 { return range & 0xffffu; }
fn end(range: u32) -> u32 { return range >> 16u; }
fn is_in(slot: u32, range: u32) -> bool { return slot >= begin(range) && slot < end(range); }

fn half_bits_at(address: u32, index: u32) -> u32 {
    return (word_at(address + index / 2u) >> (16u * (index % 2u))) & 0xffffu;
}

// Loads values at .. at + n of the row of slot `slot`, ready to encode, into `row`. `old_range`
// and `new_range` are slots.
fn load(w: Write, slot: u32, at: u32, n: u32, tail: u32, old_range: u32, new_range: u32, first_row: u32) {
    if is_in(slot, old_range) && !is_in(slot, new_range) {
        for (var i = 0u; i < n; i++) {
            row[i] = from_half(half_bits_at(tail, float_index(w.is_key != 0u, w.dim, slot, at + i)));
        }
        return;
    }
    let first = (first_row + slot - begin(new_range)) * w.width + w.column;
    for (var i = 0u; i < n; i++) {
        var value = 0.0f;
        if at + i < w.head_dim {
            var bits = 0u;
            if w.of_keys != 0u { bits = keys[first + at + i]; } else { bits = values[first + at + i]; }
            value = bitcast<f32>(bits);
            if w.scale != NONE { value *= bitcast<f32>(word_at(w.scale + at + i)); }
            if w.shift != NONE { value += bitcast<f32>(word_at(w.shift + at + i)); }
        }
        row[i] = clamped(value, HALF_MAX);
    }
    if w.rotates != 0u { rotate(n); }
    if w.rounds_to_f16 != 0u {
        for (var i = 0u; i < n; i++) { row[i] = from_half(to_half(clamped(row[i], HALF_MAX))); }
    }
}

// Writes the slice of every slot in `range` from the stage to a float tile that begins at
// `address`.
fn write_floats(w: Write, address: u32, dtype: u32, at: u32, n: u32, range: u32, thread: u32) {
    let is_key = w.is_key != 0u;
    if dtype == F32 {
        if is_in(thread, range) {
            for (var i = 0u; i < n; i++) {
                set_word(address + float_index(is_key, w.dim, thread, at + i), stage[thread * SPAN + i]);
            }
        }
        return;
    }
    // Two per word: for keys two slots, for values two dims.
    for (var pair = thread; pair < n * TILE / 2u; pair += TILE) {
        let slot = select(pair / (n / 2u), 2u * (pair % (TILE / 2u)), is_key);
        let i = select(2u * (pair % (n / 2u)), pair / (TILE / 2u), is_key);
        let other_slot = select(slot, slot + 1u, is_key);
        let other = select(i + 1u, i, is_key);
        let index = address + float_index(is_key, w.dim, slot, at + i) / 2u;
        var word = word_at(index);
        if is_in(slot, range) { word = (word & 0xffff0000u) | stage[slot * SPAN + i]; }
        if is_in(other_slot, range) { word = (word & 0xffffu) | (stage[other_slot * SPAN + other] << 16u); }
        set_word(index, word);
    }
}

// Converts the thread's slice to a float type, into the stage.
fn stage_floats(dtype: u32, n: u32, thread: u32) {
    for (var i = 0u; i < n; i++) {
        let bits = bitcast<u32>(row[i]);
        var encoded = bits;
        if dtype == F16 {
            encoded = to_half(clamped(row[i], HALF_MAX));
        } else if dtype == BF16 {
            // Ties to even.
            encoded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
        }
        stage[thread * SPAN + i] = encoded;
    }
}

// Writes words of the planes of a block of `n` dims that begins at `address`; the block's first dim
// is `first` of the stage. Fields of a word are `bits` wide, in the codec's layout; slots out of
// `range` stay unchanged.
fn write_plane(w: Write, address: u32, bits: u32, is_high: bool, first: u32, n: u32, range: u32, thread: u32) {
    let words_of_group = 2u * bits;
    let mask = (1u << bits) - 1u;
    for (var index = thread; index < n / 4u * words_of_group; index += TILE) {
        let group = index / words_of_group;
        let at = index % words_of_group;
        var word = word_at(address + index);
        for (var field = 0u; field < 32u / bits; field++) {
            var j = 4u * at + field % 4u + 8u * bits * (field / 4u);
            var shift = 8u * (field % 4u) + bits * (field / 4u);
            if is_high {
                j = 32u * at + field;
                shift = field;
            }
            let slot = select(4u * (group % 4u) + j % 4u, j / 4u, w.is_key != 0u);
            let d = select(16u * (group / 4u) + j / 4u, 4u * group + j % 4u, w.is_key != 0u);
            if !is_in(slot, range) { continue; }
            let code = stage[slot * SPAN + first + d];
            let plane_bits = select(code & mask, code >> 2u, is_high);
            word = (word & ~(mask << shift)) | (plane_bits << shift);
        }
        set_word(address + index, word);
    }
}

fn write_block(w: Write, address: u32, first: u32, n: u32, block: u32, range: u32, thread: u32) {
    if thread < TILE / 2u {
        var word = word_at(address + thread);
        if is_in(2u * thread, range) { word = (word & 0xffff0000u) | scales[8u * thread + block]; }
        if is_in(2u * thread + 1u, range) { word = (word & 0xffffu) | (scales[8u * thread + 4u + block] << 16u); }
        set_word(address + thread, word);
    }
    let planes = address + SCALE_WORDS;
    let bits = code_bits(w.dtype);
    if bits == 3u {
        write_plane(w, planes, 2u, false, first, n, range, thread);
        write_plane(w, planes + n, 1u, true, first, n, range, thread);
    } else {
        write_plane(w, planes, bits, false, first, n, range, thread);
    }
}

// Encodes the thread's slice: codes and scales into the stage.
fn stage_codes(w: Write, at: u32, n: u32, thread: u32) {
    for (var i = 0u; i < n; i++) {
        if w.centre != NONE { row[i] -= from_half(half_bits_at(w.centre, at + i)); }
        row[i] *= w.alpha;
    }
    if is_turbo(w.dtype) {
        if is_trellis(w.dtype) {
            scales[4u * thread] = encode_trellis(w.dtype - TURBO2T, n);
        } else {
            scales[4u * thread] = encode_turbo(w.dtype - TURBO2, n);
        }
    } else {
        for (var first = 0u; first < n; first += 32u) {
            scales[4u * thread + first / 32u] = encode_block32(w.dtype, first);
        }
    }
    for (var i = 0u; i < n; i++) { stage[thread * SPAN + i] = u32(row[i]); }
}

@compute @workgroup_size(TILE)
fn append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_index(group, groups);
    if number >= arrayLength(&writes) { return; }
    let w = writes[number];
    let written = min(begin(w.old_slots) + select(0u, 99u, begin(w.old_slots) == end(w.old_slots)), begin(w.new_slots)) | (max(end(w.old_slots), end(w.new_slots)) << 16u);
    let has_slot = is_in(thread, written);
    var block = 0u;
    for (var at = 0u; at < w.dim;) {
        let n = slice_at(w.dim, at, SPAN);
        if has_slot { load(w, thread, at, n, w.tail, w.old_slots, w.new_slots, w.first_row); }
        if w.step_tile != NONE {
            if has_slot { stage_floats(F16, n, thread); }
            workgroupBarrier();
            write_floats(w, w.step_tile, F16, at, n, written, thread);
            workgroupBarrier();
        }
        if w.tile != NONE && !is_quantized(w.dtype) {
            if has_slot { stage_floats(w.dtype, n, thread); }
            workgroupBarrier();
            write_floats(w, w.tile, w.dtype, at, n, written, thread);
            workgroupBarrier();
        }
        if w.tile != NONE && is_quantized(w.dtype) {
            if has_slot { stage_codes(w, at, n, thread); }
            workgroupBarrier();
            let dims = select(32u, n, is_turbo(w.dtype));
            for (var first = 0u; first < n; first += dims) {
                let address = w.tile + block_word(w.dtype, block, at + first);
                write_block(w, address, first, dims, first / dims, written, thread);
                block += 1u;
            }
            workgroupBarrier();
        }
        at += n;
    }
}

// Sets centres, before any tile of their blocks is encoded and while the rows that they average are
// still in the tail.
@compute @workgroup_size(TILE)
fn centre(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_index(group, groups);
    if number >= arrayLength(&writes) { return; }
    let w = writes[number];
    let n_first = max(end(w.old_slots), end(w.new_slots));
    let n_next = max(end(w.next_old_slots), end(w.next_new_slots));
    for (var at = 0u; at < w.dim;) {
        let n = slice_at(w.dim, at, SPAN);
        // Eight dims per thread, in two halves of a word each.
        var sums = array<f32, 8>();
        if thread < n_first { load(w, thread, at, n, w.tail, w.old_slots, w.new_slots, w.first_row); }
        for (var i = 0u; i < n; i++) { stage[thread * SPAN + i] = bitcast<u32>(row[i]); }
        workgroupBarrier();
        for (var k = 0u; k < n / TILE; k++) {
            for (var slot = 0u; slot < n_first; slot++) {
                sums[k] += bitcast<f32>(stage[slot * SPAN + thread * (n / TILE) + k]);
            }
        }
        workgroupBarrier();
        if thread < n_next { load(w, thread, at, n, w.next_tail, w.next_old_slots, w.next_new_slots, w.next_row); }
        for (var i = 0u; i < n; i++) { stage[thread * SPAN + i] = bitcast<u32>(row[i]); }
        workgroupBarrier();
        for (var k = 0u; k < n / TILE; k++) {
            for (var slot = 0u; slot < n_next; slot++) {
                sums[k] += bitcast<f32>(stage[slot * SPAN + thread * (n / TILE) + k]);
            }
        }
        for (var k = 0u; k < n / TILE; k += 2u) {
            let low = to_half(clamped(sums[k] * w.inverse_rows, HALF_MAX));
            let high = to_half(clamped(sums[k + 1u] * w.inverse_rows, HALF_MAX));
            set_word(w.centre + (at + thread * (n / TILE) + k) / 2u, low | (high << 16u));
        }
        workgroupBarrier();
        at += n;
    }
}
