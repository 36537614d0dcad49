//! Products of activations with weight matrices: `y = W norm(x) + bias`, several matrices on one input.

mod rows;

use kvant_backend::{BackendError, SharedBytes, WeightSource};
use kvant_codec::DType;

use crate::norm::rms_norm;
use crate::pool::Pool;
use crate::shards::Shards;

/// Output features that a thread takes at a time.
const PANEL: usize = 16;
/// Matrices that share one parallel region.
const MAX_FUSED: usize = 4;
/// Below this many values a region costs more than it saves.
const MIN_PARALLEL_VALUES: usize = 16 * 1024;

/// A weight matrix `[n_out, n_in]` on the CPU.
#[derive(Debug)]
pub struct CpuMatrix {
    dtype: DType,
    n_out: usize,
    n_in: usize,
    store: Store,
}

/// How the weights lie in memory.
#[derive(Debug)]
enum Store {
    /// As in the file, row by row.
    Rows(SharedBytes),
}

impl CpuMatrix {
    /// Takes the weights of `source`.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for a type or row length that no kernel reads, [`BackendError::Shape`] when the
    /// bytes are not as many as the shape says.
    pub(crate) fn new(source: WeightSource) -> Result<Self, BackendError> {
        const OP: &str = "matrix";
        let WeightSource { dtype, n_out, n_in, bytes } = source;
        if dtype.is_turbo() {
            return Err(BackendError::Unsupported {
                op: OP,
                wanted: format!("weights in {dtype}"),
                has: "every type but the turbo cache types".to_owned(),
            });
        }
        let row_bytes = dtype.row_bytes(n_in).map_err(|error| BackendError::Unsupported {
            op: OP,
            wanted: format!("{dtype} rows of {n_in} values"),
            has: error.to_string(),
        })?;
        BackendError::check_at_least(OP, "input features", 1, n_in)?;
        BackendError::check(OP, "bytes of the weights", n_out.saturating_mul(row_bytes), bytes.len())?;
        Ok(Self { dtype, n_out, n_in, store: Store::Rows(bytes) })
    }

    /// Storage type of the weights.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Output features.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Input features.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Decodes row `index` into `out` `[n_in]`.
    pub(crate) fn decode_row(&self, index: usize, out: &mut [f32]) {
        let bytes = self.row(index);
        kvant_codec::decode(self.dtype, bytes, out).expect("rows are whole blocks");
    }

    fn row(&self, index: usize) -> &[u8] {
        let Store::Rows(bytes) = &self.store;
        let row_bytes = bytes.len() / self.n_out;
        &bytes[index * row_bytes..][..row_bytes]
    }

    /// Computes the outputs `first .. first + PANEL` (as far as they exist) of every row of `x` `[rows, n_in]`.
    fn panel(&self, panel: usize, x: &[f32], mut put: impl FnMut(usize, usize, &[f32])) {
        for o in panel * PANEL..((panel + 1) * PANEL).min(self.n_out) {
            rows::row_products(self.dtype, self.row(o), x, self.n_in, |r, value| put(r, o, &[value]));
        }
    }
}

/// The left operand: `rows` rows of `x` `[.., n_in]`, normalised first when `norm` (weight, eps) is given.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub x: &'a [f32],
    pub n_in: usize,
    pub norm: Option<(&'a [f32], f32)>,
}

/// One product and where it goes.
pub(crate) struct Product<'a> {
    pub w: &'a CpuMatrix,
    /// `[n_out]`.
    pub bias: Option<&'a [f32]>,
    /// `[rows, n_out]`.
    pub y: Shards<'a, f32>,
    pub accumulate: bool,
}

impl Product<'_> {
    fn panel(&self, panel: usize, x: &[f32]) {
        self.w.panel(panel, x, |r, o, values| {
            // SAFETY: a panel is computed by one thread of the region, and panels share no column.
            let y = unsafe { self.y.part(r * self.w.n_out + o..r * self.w.n_out + o + values.len()) };
            for (i, (y, &value)) in y.iter_mut().zip(values).enumerate() {
                let value = value + self.bias.map_or(0.0, |bias| bias[o + i]);
                *y = if self.accumulate { *y + value } else { value };
            }
        });
    }
}

/// Memory that lives as long as the device, so that a step allocates nothing once it has grown.
#[derive(Default)]
pub(crate) struct Scratch {
    /// The normalised input, `[rows, n_in]`.
    normed: Vec<f32>,
    /// Gate activations, `[rows, n_ff]`.
    gate: Vec<f32>,
}

/// Computes every product of `products` (at most [`MAX_FUSED`]) on one input, in one parallel region.
fn run(pool: &Pool, normed: &mut Vec<f32>, input: Operand<'_>, products: &[Product<'_>]) {
    let x = normalise(pool, normed, input);
    let n_panels = |product: &Product<'_>| product.w.n_out.div_ceil(PANEL);
    let total = products.iter().map(n_panels).sum();
    pool.for_each(total, &|item| {
        let mut panel = item;
        for product in products {
            if panel < n_panels(product) {
                return product.panel(panel, x);
            }
            panel -= n_panels(product);
        }
    });
}

/// Shapes have been checked.
pub(crate) fn project<'a>(
    pool: &Pool,
    scratch: &mut Scratch,
    input: Operand<'_>,
    products: impl Iterator<Item = Product<'a>>,
) {
    let mut products = products.peekable();
    let mut group = Vec::new();
    while products.peek().is_some() {
        group.clear();
        group.extend(products.by_ref().take(MAX_FUSED));
        run(pool, &mut scratch.normed, input, &group);
    }
}

/// `y = silu(gate x) * (up x)`, `y` `[rows, n_ff]`. Shapes have been checked.
pub(crate) fn gated_ffn(
    pool: &Pool,
    scratch: &mut Scratch,
    input: Operand<'_>,
    gate: &CpuMatrix,
    up: &CpuMatrix,
    y: &mut [f32],
) {
    let (rows, n_ff) = (input.x.len() / input.n_in, gate.n_out);
    scratch.gate.resize(rows * n_ff, 0.0);
    let product = |w, y| Product { w, bias: None, y: Shards::new(y), accumulate: false };
    let products = [product(gate, &mut scratch.gate), product(up, y)];
    run(pool, &mut scratch.normed, input, &products);
    let (gate, y) = (&scratch.gate, Shards::new(y));
    pool.for_each(rows, &|r| {
        // SAFETY: every row is taken by one call of this job.
        let y = unsafe { y.part(r * n_ff..(r + 1) * n_ff) };
        y.iter_mut().zip(&gate[r * n_ff..]).for_each(|(y, &g)| *y *= silu(g));
    });
}

/// `x / (1 + exp(-x))`.
fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// The rows of the operand, normalised into `normed` when a norm is given.
fn normalise<'a>(pool: &Pool, normed: &'a mut Vec<f32>, input: Operand<'a>) -> &'a [f32] {
    let Some((weight, eps)) = input.norm else { return input.x };
    let (n_in, rows) = (input.n_in, input.x.len() / input.n_in);
    if normed.len() < input.x.len() {
        normed.resize(input.x.len(), 0.0);
    }
    let out = Shards::new(normed);
    let job = |r: usize| {
        // SAFETY: every row is taken by one call of this job.
        rms_norm(&input.x[r * n_in..][..n_in], weight, eps, unsafe { out.part(r * n_in..(r + 1) * n_in) });
    };
    if rows * n_in < MIN_PARALLEL_VALUES {
        (0..rows).for_each(job);
    } else {
        pool.for_each(rows, &job);
    }
    &normed[..input.x.len()]
}

#[cfg(test)]
mod tests;
