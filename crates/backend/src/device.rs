//! What a device is made of, and the operands of its [ops](crate::Backend).

use std::fmt::Debug;

use kvant_codec::DType;

use crate::RouterScores;
use crate::ops::{Backend, Kernels};
use crate::{Activation, BackendError, Norm, Routing, SharedBytes};

/// A result with a [`BackendError`].
pub type Result<T> = std::result::Result<T, BackendError>;

/// f32 activations on a device.
pub trait Buffer: Send + Sync {
    /// Returns the number of values.
    fn n_values(&self) -> usize;
}

/// A weight matrix `[n_out, n_in]` in a device's own layout.
pub trait Matrix: Send + Sync {
    /// Returns the rows: output features.
    fn n_out(&self) -> usize;
    /// Returns the columns: input features, at least one.
    fn n_in(&self) -> usize;
}

/// Weight matrices of one shape and type, one for each expert: `[n_experts, n_out, n_in]`.
pub trait Experts: Send + Sync {
    /// Returns the number of matrices, at least one.
    fn n_experts(&self) -> usize;
    /// Returns the rows of each: output features.
    fn n_out(&self) -> usize;
    /// Returns the columns of each: input features, at least one.
    fn n_in(&self) -> usize;
}

/// One allocation of cache memory on a device.
pub trait Page: Send + Sync + Sized {
    /// The device's own index of a sequence's KV blocks; `()` if it needs none.
    type Table: PageTable<Self>;

    /// Returns the size of the allocation in bytes.
    fn n_bytes(&self) -> usize;
    /// Copies the page: copy on write of shared prefixes.
    fn duplicate(&self) -> Result<Self>;
    /// Overwrites this page with the bytes of another page of the same length.
    fn copy_from(&mut self, other: &Self) -> Result<()> {
        *self = other.duplicate()?;
        Ok(())
    }
}

/// A device's own index of the KV blocks of a sequence, such as their device addresses.
///
/// Every change is reported to it, so that a device need not visit all blocks at each step. A clone
/// belongs to the clone of the sequence.
pub trait PageTable<P>: Clone + Default + Send + Sync + Debug {
    /// Sets block `index`, at most one past the last, to `page`.
    fn set(&mut self, index: usize, page: &P);
    /// Removes all blocks but the first `len`.
    fn truncate(&mut self, len: usize);
}

impl<P> PageTable<P> for () {
    fn set(&mut self, _: usize, _: &P) {}
    fn truncate(&mut self, _: usize) {}
}

/// Description of a device, for summary lines and benchmark rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's name, `cpu` or `cuda:0`.
    pub name: String,
    /// The kernel set in use, such as `avx512+vnni`.
    pub kernels: String,
    /// Threads that run an op, or the multiprocessors of a GPU.
    pub n_threads: usize,
    /// The unit of `n_threads`: `threads` or `SMs`.
    pub thread_unit: &'static str,
    /// Maximum of rows in a step. More rows fill a large device better; the activations of a step
    /// grow with them.
    pub max_step_rows: usize,
    /// Maximum number of rows of a step in which the device is batch-invariant: there a row has the
    /// bits that it has alone. `usize::MAX` for steps of any size, 1 for none but those of one row.
    pub batch_invariant_rows: usize,
    /// Whether [`Backend::find_non_finite_row`] checks rows. Where it does not, non-finite values
    /// show in the logits.
    pub checks_finite_rows: bool,
    /// Whether it has [`Backend::select_tokens`], [`Backend::select_blocks`] and
    /// [`Backend::attend_selected`], [`Backend::connect_streams`] and [`Backend::attend_streams`]
    /// of models that have those, [`Activation::Situ`](crate::Activation::Situ), and
    /// [`Backend::shift_tokens`] and [`Backend::wkv7`] of RWKV-7.
    pub selects_tokens: bool,
    /// Whether it has the ops of encoders: [`Backend::attend_bidirectional`], and
    /// [`Backend::layer_norm`] with a bias.
    pub runs_encoders: bool,
}

impl DeviceInfo {
    /// The usual [maximum of rows](Self::max_step_rows): a CPU and a small GPU are full with these.
    pub const MAX_STEP_ROWS: usize = 512;
}

/// Time of a kernel's launches on a device.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    /// The kernel's name.
    pub kernel: String,
    /// Number of launches.
    pub launches: u64,
    /// Seconds of all of them together, on the device.
    pub seconds: f64,
}

/// The kernel that a device runs for one op and type, for `kvant doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelChoice {
    /// The op, such as `matmul` or `attend`.
    pub op: &'static str,
    /// The weight or cache type.
    pub dtype: DType,
    /// The kernel's own name, such as `gemv-q4_0-avx512vnni`.
    pub kernel: String,
}

/// A weight matrix to be uploaded to a device.
#[derive(Debug, Clone)]
pub struct WeightSource {
    /// Storage type of the rows.
    pub dtype: DType,
    /// Rows: output features.
    pub n_out: usize,
    /// Columns: input features, contiguous in memory.
    pub n_in: usize,
    /// `n_out` rows of `dtype.row_bytes(n_in)` bytes.
    pub bytes: SharedBytes,
}

/// The left operand of a projection: `rows` rows of `[.., n_in]` activations, normalized first when
/// `norm` is given.
pub struct Input<'a, B: Backend> {
    /// Activations, `[first_row + rows, n_in]` or more.
    pub x: &'a B::Buffer,
    /// RMS norm applied to each row before the product. `x` itself is unchanged.
    pub norm: Option<Norm<'a, B::Buffer>>,
    /// First row to read; the outputs start at their row 0.
    pub first_row: usize,
    /// Number of rows to read.
    pub rows: usize,
}

/// One product of a projection: `y = W x + bias`, or `y += W x + bias`.
pub struct Output<'a, B: Backend> {
    /// Weights `[n_out, n_in]`.
    pub w: &'a B::Matrix,
    /// Added to every row, `[n_out]`.
    pub bias: Option<&'a B::Buffer>,
    /// Result `[rows, n_out]`.
    pub y: &'a mut B::Buffer,
    /// Add to `y` instead of overwriting it (a residual connection).
    pub accumulate: bool,
}

/// The weights of a dense feed-forward layer.
pub struct FfnWeights<'a, B: Backend> {
    /// Activation of the gate.
    pub activation: Activation,
    /// Gate projection, `[n_ff, n]`; if it is `up` itself, a device may multiply once.
    pub gate: &'a B::Matrix,
    /// Up projection, `[n_ff, n]`.
    pub up: &'a B::Matrix,
    /// Down projection to the hidden size, `[n, n_ff]`.
    pub down: &'a B::Matrix,
    /// Bias of down, `[n]`.
    pub bias: Option<&'a B::Buffer>,
}

impl<B: Backend> Clone for FfnWeights<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for FfnWeights<'_, B> {}

/// Computes [`Backend::dense_ffn`] as its two unfused ops.
pub(crate) fn dense_ffn<K: Kernels>(
    device: &K,
    x: &mut K::Buffer,
    rows: usize,
    norm: Option<Norm<'_, K::Buffer>>,
    FfnWeights { activation, gate, up, down, bias }: FfnWeights<'_, K>,
    hidden: &mut K::Buffer,
    to: Option<&mut K::Buffer>,
) -> Result<()> {
    Kernels::gated_ffn(device, Input { x: &*x, norm, first_row: 0, rows }, activation, gate, up, hidden)?;
    let input = Input { x: &*hidden, norm: None, first_row: 0, rows };
    let (y, accumulate) = to.map_or((x, true), |to| (to, false));
    Kernels::project(device, input, &mut [Output { w: down, bias, y, accumulate }])
}

/// The weights of a mixture-of-experts (MoE) feed-forward layer.
pub struct ExpertWeights<'a, B: Backend> {
    /// Activation of the gates.
    pub activation: Activation,
    /// Gate projection, `[n_experts, n_ff, n]`; if it is `up` itself, a device may multiply once.
    pub gate: &'a B::Experts,
    /// Up projection, `[n_experts, n_ff, n]`.
    pub up: &'a B::Experts,
    /// Down projection to the hidden size, `[n_experts, n, n_ff]`.
    pub down: &'a B::Experts,
    /// Biases of gate and up, `[n_experts, n_ff]` each, and of down, `[n_experts, n]`.
    pub biases: Option<[&'a B::Buffer; 3]>,
}

impl<B: Backend> Clone for ExpertWeights<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for ExpertWeights<'_, B> {}

/// The router of an MoE layer: selects experts for each row, and their weights.
pub struct Router<'a, B: Backend> {
    /// Selection rule.
    pub routing: Routing,
    /// Router logits, `[rows, n_experts]`.
    pub logits: &'a B::Buffer,
    /// Bias on the scores that select experts, `[n_experts]`, without effect on their weights:
    /// balances the load of experts (arXiv 2408.15664).
    pub selection_bias: Option<&'a B::Buffer>,
    /// Factor on the weight of each expert, `[n_experts]`.
    pub scales: Option<&'a B::Buffer>,
    /// The experts of each row, `[rows, n_used]`, where the router gives their weights alone (hash
    /// layers, arXiv 2106.04426). A device without them returns an error.
    pub chosen: Option<&'a B::Buffer>,
}

impl<B: Backend> Router<'_, B> {
    /// Refuses what only some devices route by: chosen experts, and scores by √softplus.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`].
    pub fn check_plain(&self) -> Result<()> {
        const OP: &str = "expert_ffn";
        if self.chosen.is_some() {
            return Err(BackendError::unsupported(OP, "chosen experts", "a router's choice"));
        }
        match self.routing.scores {
            RouterScores::SqrtSoftplus => {
                Err(BackendError::unsupported(OP, "scores by √softplus", "softmax and sigmoid"))
            }
            _ => Ok(()),
        }
    }
}

impl<B: Backend> Clone for Router<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Router<'_, B> {}
