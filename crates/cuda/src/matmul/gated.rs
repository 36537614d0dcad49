//! The first products of a gated feed-forward layer, dense or of experts.

use kvant_backend::Activation;

use super::{MatmulArgs, Operand, has_gate, matmul, matmuls};
use crate::gate::PendingGate;
use crate::memory::Block;
use crate::{Context, CudaError};

/// Multiplies by `up` into its `y`, and by `gate`: with the gate where a kernel applies it at once;
/// else into `gates`, or not at all where both products are one. Returns the gate that is left to
/// apply. The `y` of `gate` is not used.
pub(crate) fn gated_products(
    cx: &Context,
    x: &mut Operand,
    [gate, up]: [MatmulArgs; 2],
    activation: Activation,
    gates: &mut Option<Block>,
) -> Result<Option<PendingGate>, CudaError> {
    if gate.dtype == up.dtype && has_gate(cx, gate.dtype, [x.rows, x.n_in]) {
        let both = MatmulArgs { up: Some((up.w, activation)), up_bias: up.bias, y: up.y, ..gate };
        matmul(cx, x, &both)?;
        return Ok(None);
    }
    if (gate.w, gate.bias) == (up.w, up.bias) {
        matmul(cx, x, &up)?;
        return Ok(Some(PendingGate { g: up.y, activation }));
    }
    let rows = x.rows * gate.expert_slots.map_or(1, |slots| slots.slots_of_row);
    let g = gates.insert(cx.scratch(rows * gate.n_out * size_of::<f32>())?).ptr();
    let products = [MatmulArgs { y: g, ..gate }, up];
    match gate.expert_slots {
        None => matmuls(cx, x, &products)?,
        // A launch with expert slots has one matrix.
        Some(_) => products.iter().try_for_each(|product| matmul(cx, x, product))?,
    }
    Ok(Some(PendingGate { g, activation }))
}
