// y = W x + bias, or y = y + that. A thread computes OUTPUTS outputs of ROWS rows: it reads weights
// of its own, which are adjacent in memory for adjacent threads (layout.rs), and activations that
// all threads read. With several SLICES, threads of different slices share an output, and their
// sums are added in a fixed order. The kernel is batch invariant: a row has the same bits whatever
// ROWS and OUTPUTS.
//
// If HAS_GATE: y = a(W x) (U x), a the activation of a feed-forward layer; WRITTEN_OUTPUTS of the
// OUTPUTS are then those of W, and as many those of U.

struct Params {
    rows: u32,
    n_in: u32,
    n_out: u32,
    w_rows: u32,         // rows of weights in the buffer
    w_vectors: u32,      // of a row
    w_first: u32,        // row of weights of the first output
    x_first: u32,        // vector of the first float row
    x_stride: u32,       // vectors from one row to the next
    y_first: u32,
    y_stride: u32,
    has_bias: u32,
    bias_first: u32,     // of the first output
    accumulates: u32,
    blocks: u32,         // of ROWS slots, for experts
    slots_per_row: u32,  // slots that share a row of x
    first_output: u32,   // first output, over all experts, of this weight buffer
    end_output: u32,
    activation: u32,     // of the gate
    limit: f32,          // of the limited SiLU
}

@group(0) @binding(0) var<storage, read> p: Params;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;     // [n_out] of each matrix, optional
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read> experts: array<u32>;  // [slots]: those of `expert_matmul`
@group(0) @binding(6) var<storage, read> up: array<vec4<u32>>; // U, if there is a gate
// [blocks, ROWS]: slots, if ROWS > 1
@group(0) @binding(7) var<storage, read> order: array<u32>;

// Start of the weight rows of this thread, and the stride between vectors of a row.
var<private> begin: array<u32, OUTPUTS>;
var<private> vector_stride: array<u32, OUTPUTS>;
var<private> sums: array<array<f32, ROWS>, OUTPUTS>;
// Sums of all slices but the first.
var<workgroup> shared_sums: array<array<f32, SHARED>, PANEL>;

fn start_row(o: u32, row: u32) {
    let in_panel = row % PANEL;
    begin[o] = (row - in_panel) * p.w_vectors + in_panel;
    vector_stride[o] = min(PANEL, p.w_rows - (row - in_panel));
}

fn vector(o: u32, c: u32) -> vec4<u32> {
    let at = begin[o] + c * vector_stride[o];
    if o >= WRITTEN_OUTPUTS { return up[at]; }
    return weights[at];
}

// Adds the sums of all slices to those of the first.
fn add_slices(lane: u32, slice: u32) {
    for (var o = 0u; o < OUTPUTS; o++) {
        for (var r = 0u; r < ROWS; r++) {
            if slice > 0u { shared_sums[lane][((slice - 1u) * OUTPUTS + o) * ROWS + r] = sums[o][r]; }
        }
    }
    workgroupBarrier();
    for (var s = 0u; s < SLICES - 1u; s++) {
        for (var o = 0u; o < OUTPUTS; o++) {
            for (var r = 0u; r < ROWS; r++) { sums[o][r] += shared_sums[lane][(s * OUTPUTS + o) * ROWS + r]; }
        }
    }
}

fn write_output(o: u32, r: u32, bias_at: u32, index: u32) {
    var result = sums[o][r];
    if HAS_GATE { result = activated(p.activation, p.limit, result, sums[o + OUTPUTS - WRITTEN_OUTPUTS][r]); }
    if p.has_bias != 0u { result += bias[bias_at]; }
    if p.accumulates != 0u { result += y[index]; }
    y[index] = result;
}

@compute @workgroup_size(PANEL * SLICES)
fn matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let lane = thread % PANEL;
    let slice = select(thread / PANEL, 0u, SLICES == 1u);
    let first = workgroup_index(group, groups) * (PANEL * WRITTEN_OUTPUTS) + lane;
    let first_row = group.z * ROWS;
    // Outputs beyond the last repeat it.
    for (var o = 0u; o < OUTPUTS; o++) { start_row(o, p.w_first + min(first + o % WRITTEN_OUTPUTS * PANEL, p.n_out - 1u)); }
    multiply(first_row, slice);
    if SLICES > 1u { add_slices(lane, slice); }
    if slice > 0u { return; }
    for (var o = 0u; o < WRITTEN_OUTPUTS; o++) {
        let output = first + o * PANEL;
        for (var r = 0u; r < ROWS; r++) {
            let row = first_row + r;
            if output < p.n_out && row < p.rows {
                write_output(o, r, p.bias_first + output, p.y_first + row * p.y_stride + output);
            }
        }
    }
}

// Returns the slot at a position of the list; NONE beyond the last.
fn slot_at(position: u32) -> u32 {
    if ROWS == 1u { return position; }
    return order[position];
}

// Computes outputs of ROWS *slots*, each an expert of a row, with the same expert for all slots of
// a workgroup. With ROWS > 1, rows of x have the order of the list; an empty slot reads a row whose
// result is discarded.
@compute @workgroup_size(PANEL * SLICES)
fn expert_matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let lane = thread % PANEL;
    let slice = select(thread / PANEL, 0u, SLICES == 1u);
    let groups_per_block = (p.n_out + PANEL * WRITTEN_OUTPUTS - 1u) / (PANEL * WRITTEN_OUTPUTS);
    let number = workgroup_index(group, groups);
    let block = number / groups_per_block;
    if block >= p.blocks { return; }
    let first_slot = slot_at(block * ROWS);
    if first_slot == NONE { return; }
    let first_of_group = number % groups_per_block * (PANEL * WRITTEN_OUTPUTS);
    let first_expert_row = experts[first_slot] * p.n_out;
    // Another buffer has the weights of these outputs.
    if first_expert_row + min(first_of_group + PANEL * WRITTEN_OUTPUTS, p.n_out) <= p.first_output { return; }
    if first_expert_row + first_of_group >= p.end_output { return; }
    let first = first_of_group + lane;
    for (var o = 0u; o < OUTPUTS; o++) {
        let output = first_expert_row + min(first + o % WRITTEN_OUTPUTS * PANEL, p.n_out - 1u);
        start_row(o, clamp(output, p.first_output, p.end_output - 1u) - p.first_output);
    }
    multiply(select(block * ROWS, first_slot / p.slots_per_row, ROWS == 1u), slice);
    if SLICES > 1u { add_slices(lane, slice); }
    if slice > 0u { return; }
    for (var o = 0u; o < WRITTEN_OUTPUTS; o++) {
        let output = first + o * PANEL;
        let expert_row = first_expert_row + output;
        let is_in_buffer = output < p.n_out && expert_row >= p.first_output && expert_row < p.end_output;
        for (var r = 0u; r < ROWS; r++) {
            let slot = slot_at(block * ROWS + r);
            if is_in_buffer && slot != NONE { write_output(o, r, expert_row, slot * p.n_out + output); }
        }
    }
}
