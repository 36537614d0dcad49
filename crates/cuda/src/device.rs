//! CUDA as a [`Backend`](kvant_backend::Backend): passes device addresses to the ops.

use std::sync::{Arc, Mutex, PoisonError};

use kvant_backend::host_ops::Pointwise;
use kvant_backend::{
    Activation, AttendParams, BackendError, BidirectionalParams, Buffer as _, Columns, DeviceInfo,
    ExpertWeights, Experts, FfnWeights, Gate, Heads, Input, KernelChoice, Kernels, KvBatchEntry, Matrix,
    Norm, Output, Page, Result, Rope, RopeParams, Router, ShortConv, StateBatchEntry, StateHeads,
    StateInputs, Streams, TopK, WeightSource, Xielu, batch_rows,
};

use crate::context::on_all_cores;
use crate::driver::Driver;
use crate::gate::PendingGate;
use crate::matmul::{MatmulArgs, Operand};
use crate::norm::NormParts;
use crate::nvrtc::Nvrtc;
use crate::rope::HeadRope;
use crate::{
    Context, CudaBuffer, CudaExperts, CudaMatrix, CudaPage, CudaVersion, DevicePtr, append, attend,
    bidirectional, columns, embed, experts, gate, kv, matmul, norm, pointwise, recurrent, rope, soft_cap,
    streams, top_k,
};

/// Environment variable that disables CUDA graphs for decode steps.
const GRAPH: &str = "KVANT_CUDA_GRAPH";

/// An NVIDIA GPU.
pub struct CudaDevice {
    cx: Context,
    name: String,
    /// Whether decode steps are recorded and launched as CUDA graphs.
    records: bool,
    /// Host buffer for embeddings on their way to the device, or logits from it.
    rows: Mutex<Vec<f32>>,
    /// Host buffer for coded embeddings on their way to the device.
    staged: Mutex<Vec<u8>>,
}

impl CudaDevice {
    /// Opens device `index`. Decode steps run as CUDA graphs unless `KVANT_CUDA_GRAPH=0`.
    ///
    /// # Errors
    /// A missing or outdated driver or device. [`BackendError::Setting`] when the
    /// variable is neither 0 nor 1.
    pub fn open(index: usize) -> Result<Self> {
        let records = match std::env::var(GRAPH).ok().as_deref() {
            None | Some("1") => true,
            Some("0") => false,
            Some(got) => {
                let (expected, got) = ("0 or 1".to_owned(), got.to_owned());
                return Err(BackendError::Setting { name: GRAPH, expected, got });
            }
        };
        let cx = Context::new(Arc::new(Driver::open(index)?));
        Ok(Self::on(cx, format!("cuda:{index}"), records))
    }

    /// Returns the number of GPUs.
    ///
    /// # Errors
    /// A missing or outdated driver.
    pub fn count() -> Result<usize> {
        Ok(Driver::count()?)
    }

    pub(crate) fn on(cx: Context, name: String, records: bool) -> Self {
        Self { cx, name, records, rows: Mutex::default(), staged: Mutex::default() }
    }

    /// Returns the product name, such as `NVIDIA H200`.
    pub fn product(&self) -> &str {
        &self.cx.gpu().properties().name
    }

    /// Returns the newest CUDA version that the driver supports.
    pub fn driver(&self) -> CudaVersion {
        self.cx.gpu().properties().driver
    }

    /// Returns the version of NVRTC, which compiles kernels that are not part of this binary;
    /// `None` where there is none.
    ///
    /// # Errors
    /// When the library fails.
    pub fn nvrtc(&self) -> Result<Option<CudaVersion>> {
        Ok(Nvrtc::find().map(Nvrtc::version).transpose()?)
    }

    /// Returns the device memory in bytes.
    pub fn total_bytes(&self) -> usize {
        self.cx.gpu().properties().total_bytes
    }

    /// Queues the work of `ops`, waits for it and returns the seconds on the device clock.
    ///
    /// # Errors
    /// Those of `ops`, or a driver without a device clock.
    pub fn timed(&self, mut ops: impl FnMut() -> Result<()>) -> Result<f64> {
        let mut failed = Ok(());
        let seconds = self.cx.gpu().timed(&mut || {
            failed = ops();
            Ok(())
        })?;
        failed.map(|()| seconds)
    }

    /// Measures the copy bandwidth of device memory, in bytes read plus bytes written per second:
    /// the best of several copies of 1 GiB. It bounds decoding.
    ///
    /// # Errors
    /// When memory runs out, or the driver has no device clock.
    pub fn copy_bandwidth(&self) -> Result<f64> {
        const BYTES: usize = 1 << 30;
        let [from, to] = [self.cx.arena().take(BYTES)?, self.cx.arena().take(BYTES)?];
        let copy = || Ok(self.cx.gpu().copy(to.ptr(), from.ptr(), BYTES)?);
        let mut best = f64::INFINITY;
        for _ in 0..8 {
            best = best.min(self.timed(copy)?);
        }
        Ok(2.0 * BYTES as f64 / best)
    }

    /// Finds or compiles every listed kernel for this device. Returns the number of sources and
    /// variants.
    ///
    /// # Errors
    /// The first compilation error.
    pub fn compile_all(&self) -> Result<usize> {
        let builds = crate::builds::builds(self.cx.gpu().properties().arch);
        on_all_cores(&builds, |build| self.cx.compile(build))?;
        Ok(builds.len())
    }
}

/// The rows of `input`, which have `n_in` columns.
fn operand(input: &Input<'_, CudaDevice>, n_in: usize) -> Operand {
    let x = input.x.ptr() + bytes(input.first_row * n_in) as u64;
    Operand::new(x, [input.rows, n_in], input.norm.map(norm_parts))
}

/// Describes the product `y = w x`; the caller may change further fields.
fn matmul_args(op: &'static str, w: &CudaMatrix, y: DevicePtr) -> Result<MatmulArgs> {
    Ok(MatmulArgs::new(w.weights(op)?, w.dtype(), w.n_out(), y))
}

/// Weight and eps of a norm.
fn norm_parts(norm: Norm<'_, CudaBuffer>) -> NormParts {
    NormParts { weight: norm.weight.ptr(), eps: norm.eps }
}

/// Returns the addresses of new keys and values and of the step tiles.
fn new_rows(k: &CudaBuffer, v: &CudaBuffer, step_tiles: Option<&CudaPage>) -> append::NewRows {
    append::NewRows { k: k.ptr(), v: v.ptr(), step_tiles: step_tiles.map_or(0, CudaPage::ptr) }
}

/// Checks what the fused kernel needs beyond the op: heads of one size, and norms with one gain for
/// all heads.
fn check_rope_append(parts: &[KvBatchEntry<'_, CudaPage>], rope: &Rope<'_, CudaBuffer>) -> Result<()> {
    const OP: &str = "rope_append";
    let Rope { q_heads, k_heads, q_norm, k_norm, .. } = rope;
    BackendError::check_equal(OP, "size of a key head", q_heads.dim, k_heads.dim)?;
    for part in parts {
        BackendError::check_equal(OP, "key heads", part.layer.k.len(), k_heads.n)?;
    }
    for (norm, heads) in [(q_norm, q_heads), (k_norm, k_heads)] {
        let len = norm.map_or(heads.dim, |norm| norm.weight.len());
        BackendError::check_equal(OP, "length of the norm's weight", heads.dim, len)?;
    }
    Ok(())
}

impl Kernels for CudaDevice {
    type Buffer = CudaBuffer;
    type Matrix = CudaMatrix;
    type Experts = CudaExperts;
    type Page = CudaPage;

    fn info(&self) -> DeviceInfo {
        let properties = self.cx.gpu().properties();
        DeviceInfo {
            name: self.name.clone(),
            kernels: format!("{}, sm_{}", properties.name, properties.arch),
            n_threads: properties.n_sms as usize,
            thread_unit: "SMs",
            max_step_rows: properties.max_step_rows(),
            batch_invariant_rows: matmul::INVARIANT_ROWS.min(attend::INVARIANT_ROWS),
            checks_finite_rows: false,
            selects_tokens: false,
            runs_encoders: true,
        }
    }

    fn kernel_choices(&self) -> Vec<KernelChoice> {
        let weights = matmul::TYPES.into_iter().map(|dtype| KernelChoice {
            op: "matmul",
            dtype,
            kernel: matmul::kernel_names(dtype).to_owned(),
        });
        let caches = kv::TYPES.into_iter().map(|dtype| KernelChoice {
            op: "attend",
            dtype,
            kernel: "attend (f16 mma)".to_owned(),
        });
        weights.chain(caches).collect()
    }

    fn free_bytes(&self) -> Result<Option<usize>> {
        Ok(Some(self.cx.gpu().free_bytes()?))
    }

    fn step<T, E: From<BackendError>>(
        &self,
        is_decode: bool,
        ops: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        self.cx.forget_plans();
        let records = self.records && is_decode;
        let recording = if records { self.cx.record().map_err(BackendError::from)? } else { None };
        let result = ops()?;
        if let Some(recording) = recording {
            recording.end().map_err(BackendError::from)?;
        }
        Ok(result)
    }

    fn rehearsal(&self) -> Option<Self> {
        Some(Self::on(self.cx.rehearsal(), self.name.clone(), false))
    }

    fn load_kernels(&self, rehearsal: &Self) -> Result<usize> {
        Ok(self.cx.load_kernels(&rehearsal.cx)?)
    }

    fn buffer(&self, len: usize) -> Result<CudaBuffer> {
        Ok(CudaBuffer::zeroed(self.cx.arena(), len)?)
    }

    fn write(&self, dst: &mut CudaBuffer, src: &[f32]) -> Result<()> {
        Ok(self.cx.gpu().write(dst.ptr(), bytemuck::cast_slice(src))?)
    }

    fn copy(&self, src: &CudaBuffer, from: usize, dst: &mut CudaBuffer, to: usize, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let [from, to] = [(src.ptr(), from), (dst.ptr(), to)].map(|(ptr, at)| ptr + bytes(at) as u64);
        Ok(self.cx.gpu().copy(to, from, bytes(len))?)
    }

    fn read(&self, src: &CudaBuffer, offset: usize, dst: &mut [f32]) -> Result<()> {
        let from = src.ptr() + bytes(offset) as u64;
        Ok(self.cx.gpu().read(from, bytemuck::cast_slice_mut(dst))?)
    }

    fn top_k(&self, logits: &CudaBuffer, n_vocab: usize, rows: &mut [TopK<'_>]) -> Result<()> {
        let mut values = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |row: usize, values: &mut [f32]| self.read(logits, row * n_vocab, values);
        let mut on_device = TopK::answer_on_host(rows, n_vocab, top_k::MAX_K, &mut values, read)?;
        Ok(top_k::top_k(&self.cx, logits.ptr(), n_vocab, &mut on_device)?)
    }

    fn finish(&self) -> Result<()> {
        Ok(self.cx.gpu().finish()?)
    }

    fn upload_matrix(&self, source: WeightSource) -> Result<CudaMatrix> {
        CudaMatrix::new(&self.cx, source)
    }

    fn table(&self, source: WeightSource) -> Result<CudaMatrix> {
        Ok(CudaMatrix::table(source))
    }

    fn upload_tied(&self, source: WeightSource) -> Result<CudaMatrix> {
        CudaMatrix::tied(&self.cx, source)
    }

    fn upload_experts(&self, source: WeightSource, n_experts: usize) -> Result<CudaExperts> {
        CudaExperts::new(&self.cx, source, n_experts)
    }

    fn page(&self, n_bytes: usize) -> Result<CudaPage> {
        Ok(CudaPage::zeroed(self.cx.arena(), n_bytes)?)
    }

    fn read_page(&self, page: &CudaPage, dst: &mut [u8]) -> Result<()> {
        BackendError::check_equal("read_page", "bytes of the destination", page.n_bytes(), dst.len())?;
        Ok(self.cx.gpu().read_page(page.ptr(), dst)?)
    }

    fn write_page(&self, page: &mut CudaPage, src: &[u8]) -> Result<()> {
        BackendError::check_equal("write_page", "bytes of the source", page.n_bytes(), src.len())?;
        Ok(self.cx.gpu().write_page(page.ptr(), src)?)
    }

    fn embed(&self, table: &CudaMatrix, tokens: &[u32], scale: f32, out: &mut CudaBuffer) -> Result<()> {
        if let Some(table) = table.device_table() {
            return Ok(embed::embed(&self.cx, table, tokens, scale, out.ptr(), &self.staged)?);
        }
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.resize(tokens.len() * table.n_in(), 0.0);
        table.decode_rows(tokens, scale, &mut rows)?;
        Ok(self.cx.gpu().write(out.ptr(), bytemuck::cast_slice(&rows))?)
    }

    fn project(&self, input: Input<'_, Self>, outputs: &mut [Output<'_, Self>]) -> Result<()> {
        const OP: &str = "project";
        let Some(first) = outputs.first() else { return Ok(()) };
        let mut x = operand(&input, first.w.n_in());
        let product = |output: &Output<'_, Self>| {
            let bias = output.bias.map(CudaBuffer::ptr);
            let plain = matmul_args(OP, output.w, output.y.ptr())?;
            Ok(MatmulArgs { bias, accumulate: output.accumulate, ..plain })
        };
        let products = outputs.iter().map(product).collect::<Result<Vec<_>>>()?;
        Ok(matmul::matmuls(&self.cx, &mut x, &products)?)
    }

    fn gated_ffn(
        &self,
        input: Input<'_, Self>,
        activation: Activation,
        gate: &CudaMatrix,
        up: &CudaMatrix,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        const OP: &str = "gated_ffn";
        BackendError::check_activation(OP, activation)?;
        let (mut x, mut gates) = (operand(&input, gate.n_in()), None);
        let products = [matmul_args(OP, gate, y.ptr())?, matmul_args(OP, up, y.ptr())?];
        match matmul::gated_products(&self.cx, &mut x, products, activation, &mut gates)? {
            Some(pending) => Ok(gate::gate(&self.cx, pending, y.ptr(), x.rows * up.n_out())?),
            None => Ok(()),
        }
    }

    fn dense_ffn(
        &self,
        x: &mut CudaBuffer,
        rows: usize,
        norm: Option<Norm<'_, CudaBuffer>>,
        weights: FfnWeights<'_, Self>,
        hidden: &mut CudaBuffer,
        to: Option<&mut CudaBuffer>,
    ) -> Result<()> {
        const OP: &str = "dense_ffn";
        let FfnWeights { activation, gate, up, down, bias } = weights;
        BackendError::check_activation(OP, activation)?;
        let (mut gates, hidden) = (None, hidden.ptr());
        let mut input = Operand::new(x.ptr(), [rows, gate.n_in()], norm.map(norm_parts));
        let products = [matmul_args(OP, gate, hidden)?, matmul_args(OP, up, hidden)?];
        let pending = matmul::gated_products(&self.cx, &mut input, products, activation, &mut gates)?;
        let mut input = Operand::gated(hidden, [rows, up.n_out()], pending);
        let (y, accumulate) = to.map_or((x, true), |to| (to, false));
        let plain = matmul_args(OP, down, y.ptr())?;
        let product = MatmulArgs { bias: bias.map(CudaBuffer::ptr), accumulate, ..plain };
        Ok(matmul::matmul(&self.cx, &mut input, &product)?)
    }

    fn moe_ffn(
        &self,
        x: &mut CudaBuffer,
        rows: usize,
        norm: Option<Norm<'_, CudaBuffer>>,
        router: Router<'_, Self>,
        weights: ExpertWeights<'_, Self>,
        to: Option<&mut CudaBuffer>,
    ) -> Result<()> {
        let ExpertWeights { activation, gate, up, down, biases } = weights;
        router.check_plain()?;
        BackendError::check_activation("moe_ffn", activation)?;
        let Router { routing, logits, selection_bias, scales, .. } = router;
        let n_groups = routing.expert_groups.map_or(0, |groups| groups.n);
        if n_groups > experts::MAX_EXPERT_GROUPS {
            let has = format!("up to {}", experts::MAX_EXPERT_GROUPS);
            let requested = format!("{n_groups} expert groups");
            return Err(BackendError::Unsupported { op: "expert_ffn", requested, has });
        }
        let biases = biases.map(|biases| biases.map(CudaBuffer::ptr));
        let layer = experts::Layer { activation, gate, up, down, biases };
        let [selection_bias, scales] = [selection_bias, scales].map(|of| of.map(CudaBuffer::ptr));
        let n_experts = gate.n_experts();
        let routes = experts::Routes { logits: logits.ptr(), selection_bias, scales, routing, n_experts };
        let (x, to, norm) = (x.ptr(), to.map(|to| to.ptr()), norm.map(norm_parts));
        Ok(experts::moe_ffn(&self.cx, x, [rows, gate.n_in()], norm, routes, layer, to)?)
    }

    fn project_per_expert(
        &self,
        x: &CudaBuffer,
        rows: usize,
        w: &CudaExperts,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        Ok(experts::project_each(&self.cx, x.ptr(), rows, w, y.ptr())?)
    }

    fn copy_columns(
        &self,
        src: &CudaBuffer,
        [rows, n]: [usize; 2],
        dst: &mut CudaBuffer,
        to: Columns,
    ) -> Result<()> {
        Ok(columns::copy_columns(&self.cx, src.ptr(), [rows, n], dst.ptr(), to)?)
    }

    fn gate_rows(
        &self,
        y: &mut CudaBuffer,
        rows: usize,
        cols: usize,
        gates: &CudaBuffer,
        gate: Gate,
    ) -> Result<()> {
        Ok(gate::gate_rows(&self.cx, gate, gates.ptr(), y.ptr(), [rows, cols])?)
    }

    fn add_normed(
        &self,
        x: &mut CudaBuffer,
        y: &CudaBuffer,
        rows: usize,
        norm: Norm<'_, CudaBuffer>,
    ) -> Result<()> {
        let n = norm.weight.len();
        let norm = norm_parts(norm);
        Ok(norm::norm(&self.cx, norm::NormKind::AddRms, y.ptr(), norm, [rows, n], x.ptr())?)
    }

    fn layer_norm(
        &self,
        x: &CudaBuffer,
        rows: usize,
        norm: Norm<'_, CudaBuffer>,
        bias: Option<&CudaBuffer>,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        let kind = norm::NormKind::Layer { bias: bias.map_or(0, CudaBuffer::ptr) };
        let (n, norm) = (norm.weight.len(), norm_parts(norm));
        Ok(norm::norm(&self.cx, kind, x.ptr(), norm, [rows, n], y.ptr())?)
    }

    fn scale(&self, x: &mut CudaBuffer, len: usize, by: f32) -> Result<()> {
        Ok(gate::scale(&self.cx, x.ptr(), len, by)?)
    }

    fn apply(&self, x: &mut CudaBuffer, len: usize, f: Pointwise) -> Result<()> {
        Ok(pointwise::apply(&self.cx, x.ptr(), len, f)?)
    }

    fn attend_bidirectional(
        &self,
        params: &BidirectionalParams,
        windows: &[usize],
        bias: Option<&CudaBuffer>,
        qkv: [&CudaBuffer; 3],
        out: &mut CudaBuffer,
    ) -> Result<()> {
        bidirectional::attend(&self.cx, params, windows, bias, qkv, out)
    }

    fn soft_cap(&self, x: &mut CudaBuffer, len: usize, cap: f32) -> Result<()> {
        Ok(soft_cap::soft_cap(&self.cx, x.ptr(), len, cap)?)
    }

    fn mix_streams(
        &self,
        coefs: &CudaBuffer,
        x: &CudaBuffer,
        rows: usize,
        of: Streams,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        Ok(streams::mix_streams(&self.cx, [coefs.ptr(), x.ptr(), y.ptr()], rows, of)?)
    }

    fn scale_by_rms(&self, x: &mut CudaBuffer, like: &CudaBuffer, rows: usize, width: usize) -> Result<()> {
        Ok(streams::scale_by_rms(&self.cx, like.ptr(), x.ptr(), [rows, width])?)
    }

    fn gate_sparsely(
        &self,
        y: &mut CudaBuffer,
        gates: &CudaBuffer,
        rows: usize,
        width: usize,
        deviations: f32,
    ) -> Result<()> {
        Ok(streams::gate_sparsely(&self.cx, gates.ptr(), y.ptr(), [rows, width], deviations)?)
    }

    fn add(&self, x: &mut CudaBuffer, y: &CudaBuffer, len: usize) -> Result<()> {
        Ok(gate::add(&self.cx, x.ptr(), y.ptr(), len)?)
    }

    fn xielu(&self, x: &mut CudaBuffer, len: usize, numbers: Xielu) -> Result<()> {
        Ok(gate::xielu(&self.cx, x.ptr(), len, numbers)?)
    }

    fn rope(
        &self,
        x: &mut CudaBuffer,
        rows: usize,
        heads: Heads,
        norm: Option<Norm<'_, CudaBuffer>>,
        params: RopeParams,
        angles: &CudaBuffer,
    ) -> Result<()> {
        let has_own_weights = norm.is_some_and(|norm| norm.weight.n_values() > heads.dim);
        let head_rope = HeadRope::new(norm.map(norm_parts), params, angles.ptr());
        Ok(rope::rope(&self.cx, x.ptr(), rows, heads, head_rope, has_own_weights)?)
    }

    fn kv_append(
        &self,
        parts: &mut [KvBatchEntry<'_, CudaPage>],
        k: &CudaBuffer,
        v: &CudaBuffer,
        step_tiles: Option<&mut CudaPage>,
    ) -> Result<()> {
        append::append(&self.cx, parts, new_rows(k, v, step_tiles.as_deref()), None)
    }

    /// Skips the check: its result would need a synchronization in every layer, which a recorded
    /// step cannot do.
    fn find_non_finite_row(&self, _: &CudaBuffer, _: usize, _: usize) -> Result<Option<usize>> {
        Ok(None)
    }

    fn rope_append(
        &self,
        parts: &mut [KvBatchEntry<'_, CudaPage>],
        rope: &Rope<'_, CudaBuffer>,
        q: &mut CudaBuffer,
        k: &mut CudaBuffer,
        v: &CudaBuffer,
        step_tiles: Option<&mut CudaPage>,
    ) -> Result<()> {
        check_rope_append(parts, rope)?;
        let head_rope = |norm: Option<_>| HeadRope::new(norm.map(norm_parts), rope.params, rope.angles.ptr());
        let ropes = append::RopeArgs {
            k: head_rope(rope.k_norm),
            q: head_rope(rope.q_norm),
            queries: q.ptr(),
            n_query_heads: rope.q_heads.n,
            rows: batch_rows(parts),
        };
        append::append(&self.cx, parts, new_rows(k, v, step_tiles.as_deref()), Some(ropes))
    }

    fn short_conv(
        &self,
        parts: &mut [StateBatchEntry<'_, CudaPage>],
        conv: ShortConv,
        x: &CudaBuffer,
        kernel: &CudaBuffer,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        for part in parts {
            let buffers = [x.ptr(), kernel.ptr(), y.ptr()];
            recurrent::short_conv(&self.cx, conv, part.rows, state_of(part), buffers)?;
        }
        Ok(())
    }

    fn linear_attention(
        &self,
        parts: &mut [StateBatchEntry<'_, CudaPage>],
        heads: StateHeads,
        inputs: StateInputs<&CudaBuffer>,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        for part in parts {
            let inputs = inputs.map(CudaBuffer::ptr);
            recurrent::linear_attention(&self.cx, &heads, part.rows, state_of(part), inputs, y.ptr())?;
        }
        Ok(())
    }

    fn gate(&self, y: &mut CudaBuffer, len: usize, gates: &CudaBuffer, gate: Gate) -> Result<()> {
        Ok(gate::gate_values(&self.cx, gate, gates.ptr(), y.ptr(), len)?)
    }

    fn activate(
        &self,
        y: &mut CudaBuffer,
        len: usize,
        gates: &CudaBuffer,
        activation: Activation,
    ) -> Result<()> {
        BackendError::check_activation("activate", activation)?;
        Ok(gate::gate(&self.cx, PendingGate { g: gates.ptr(), activation }, y.ptr(), len)?)
    }

    fn attend(
        &self,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, CudaPage>],
        q: &CudaBuffer,
        sinks: Option<&CudaBuffer>,
        step_tiles: Option<&CudaPage>,
        out: &mut CudaBuffer,
    ) -> Result<()> {
        let [sinks, step_tiles] = [sinks.map_or(0, CudaBuffer::ptr), step_tiles.map_or(0, CudaPage::ptr)];
        let rows = attend::Rows { q: q.ptr(), sinks, step_tiles, out: out.ptr() };
        attend::attend(&self.cx, params, parts, rows)
    }
}

/// Returns the address of a state.
fn state_of(part: &StateBatchEntry<'_, CudaPage>) -> DevicePtr {
    part.page.ptr() + part.offset as DevicePtr
}

/// Bytes of `values` f32 values.
fn bytes(values: usize) -> usize {
    values * size_of::<f32>()
}
