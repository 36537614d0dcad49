//! wgpu as a [`Backend`](kvant_backend::Backend): passes buffers to the ops.

use std::sync::{Arc, Mutex, PoisonError};

use kvant_backend::{
    Activation, AttendParams, BackendError, Columns, DeviceInfo, ExpertWeights, Experts, Gate, Heads, Input,
    KernelChoice, KernelTime, Kernels, KvBatchEntry, Matrix, Norm, Output, Page, Result, RopeParams, Router,
    ShortConv, StateBatchEntry, StateHeads, StateInputs, Streams, TopK, WeightSource, Xielu,
};
use kvant_codec::DType;

use crate::adapter::{self, AdapterReport};
use crate::arena::Arena;
use crate::attend::{AttendArgs, AttendVariant, TypeClass};
use crate::matmul::{Operand, Rows, Weights};
use crate::norm::NormKind;
use crate::recording::Traffic;
use crate::{
    Gpu, WgpuBuffer, WgpuExperts, WgpuMatrix, WgpuPage, append, attend, elementwise, experts, kv, matmul,
    norm, recurrent, rope, streams, top_k,
};

/// An opened adapter.
pub struct WgpuDevice {
    gpu: Arc<Gpu>,
    arena: Arc<Arena>,
    report: AdapterReport,
    /// Host buffer for rows on their way to the device or from it.
    rows: Mutex<Vec<f32>>,
    /// The variant of each class of types, in the order of [`TypeClass::ALL`].
    variants: [AttendVariant; 3],
}

impl WgpuDevice {
    /// Opens adapter `index`, as [`adapters`](crate::adapters) counts them.
    ///
    /// # Errors
    /// [`BackendError::Failed`] that lists the adapters, or states why the driver opens no device.
    pub fn open(index: usize) -> Result<Self> {
        Self::open_within(index, u64::MAX)
    }

    /// As [`WgpuDevice::open`], with bindings of at most `max_bytes`.
    pub(crate) fn open_within(index: usize, max_bytes: u64) -> Result<Self> {
        let (gpu, report) = adapter::open(index, max_bytes)?;
        Self::new(gpu, report, usize::MAX)
    }

    /// As [`WgpuDevice::open`], with slabs of the cache of at most `max_slab_bytes`.
    #[cfg(test)]
    pub(crate) fn open_with_slabs(index: usize, max_slab_bytes: usize) -> Result<Self> {
        let (gpu, report) = adapter::open(index, u64::MAX)?;
        Self::new(gpu, report, max_slab_bytes)
    }

    /// Opens the first adapter with the kernel shapes of a GPU if it is software, and vice versa.
    #[cfg(test)]
    pub(crate) fn open_with_other_shapes() -> Result<Self> {
        let (mut gpu, report) = adapter::open(0, u64::MAX)?;
        gpu.invert_is_software();
        Self::new(gpu, report, usize::MAX)
    }

    fn new(gpu: Gpu, report: AdapterReport, max_slab_bytes: usize) -> Result<Self> {
        let gpu = Arc::new(gpu);
        let arena = Arc::new(Arena::new(Arc::clone(&gpu), max_slab_bytes)?);
        let variants = [AttendVariant::of_adapter(&report); 3];
        Ok(Self { gpu, arena, report, rows: Mutex::default(), variants })
    }

    /// Returns the description of the adapter.
    pub fn report(&self) -> &AdapterReport {
        &self.report
    }

    /// Selects the attention variant for these classes of types; `kernel_choices` reports it. If a
    /// layer has types of several classes, the variant of the last of them is used.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for look-ups that need a missing feature, and for values
    /// without kernels.
    pub fn with_attend_variant(mut self, classes: &[TypeClass], variant: AttendVariant) -> Result<Self> {
        classes.iter().try_for_each(|class| self.set_way(*class, variant))?;
        Ok(self)
    }

    /// As [`WgpuDevice::with_attend_variant`].
    pub(crate) fn set_way(&mut self, class: TypeClass, variant: AttendVariant) -> Result<()> {
        variant.check(&self.report)?;
        self.variants[class as usize] = variant;
        Ok(())
    }

    /// Returns the attention variant of a class of types.
    pub fn way(&self, class: TypeClass) -> AttendVariant {
        self.variants[class as usize]
    }

    /// Returns the work submitted and the bytes moved since the device was opened.
    pub fn traffic(&self) -> Traffic {
        self.gpu.traffic()
    }

    /// Returns the number of slabs of the cache.
    #[cfg(test)]
    pub(crate) fn n_slabs(&self) -> usize {
        self.arena.buffers().len()
    }

    #[cfg(test)]
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn multiply(
        &self,
        op: &'static str,
        x: &mut Operand<'_>,
        w: &WgpuMatrix,
        y: &wgpu::Buffer,
        bias: Option<&WgpuBuffer>,
        accumulates: bool,
    ) -> Result<()> {
        let y = Rows { buffer: y, first: 0, stride: w.n_out() };
        let bias = bias.map(|bias| &bias.buffer);
        Ok(matmul::multiply(&self.gpu, weights(op, w)?, x, y, bias, accumulates)?)
    }

    /// Reads values of `src` from value `from` on to the host.
    fn fetch(&self, src: &WgpuBuffer, from: usize, dst: &mut [f32]) -> Result<()> {
        Ok(self.gpu.read(&src.buffer, bytes(from), bytemuck::cast_slice_mut(dst))?)
    }
}

impl Kernels for WgpuDevice {
    type Buffer = WgpuBuffer;
    type Matrix = WgpuMatrix;
    type Experts = WgpuExperts;
    type Page = WgpuPage;

    fn info(&self) -> DeviceInfo {
        let AdapterReport { device, product, interface, .. } = &self.report;
        let is_tuned = self.variants != [AttendVariant::of_adapter(&self.report); 3];
        DeviceInfo {
            name: device.clone(),
            kernels: format!("{product}, WGSL on {interface}{}", if is_tuned { ", tuned" } else { "" }),
            n_threads: 1,
            thread_unit: "queue",
            max_step_rows: DeviceInfo::MAX_STEP_ROWS,
            batch_invariant_rows: 1,
            checks_finite_rows: false,
            selects_tokens: false,
            runs_encoders: false,
        }
    }

    fn kernel_choices(&self) -> Vec<KernelChoice> {
        let choice = |op, dtype, kernel: &str| KernelChoice { op, dtype, kernel: kernel.to_owned() };
        let weights = DType::weights().map(|dtype| choice("matmul", dtype, matmul::kernel_name(dtype)));
        let attend = kv::TYPES.map(|dtype| {
            choice("attend", dtype, &format!("attend (f32), {}", self.way(TypeClass::of(dtype))))
        });
        weights.chain(attend).collect()
    }

    fn free_bytes(&self) -> Result<Option<usize>> {
        Ok(self.report.has_own_memory.then(|| self.gpu.free_bytes()).transpose()?)
    }

    fn max_page_bytes(&self) -> Option<usize> {
        Some(self.arena.max_bytes())
    }

    fn buffer(&self, len: usize) -> Result<WgpuBuffer> {
        let buffer = self.gpu.allocate(bytes(len), "activations")?;
        Ok(WgpuBuffer { buffer, n_values: len })
    }

    fn write(&self, dst: &mut WgpuBuffer, src: &[f32]) -> Result<()> {
        Ok(self.gpu.write(&dst.buffer, 0, bytemuck::cast_slice(src))?)
    }

    fn copy(&self, src: &WgpuBuffer, from: usize, dst: &mut WgpuBuffer, to: usize, len: usize) -> Result<()> {
        self.gpu.copy(&src.buffer, bytes(from), &dst.buffer, bytes(to), bytes(len));
        Ok(())
    }

    fn read(&self, src: &WgpuBuffer, offset: usize, dst: &mut [f32]) -> Result<()> {
        self.fetch(src, offset, dst)
    }

    fn top_k(&self, logits: &WgpuBuffer, n_vocab: usize, rows: &mut [TopK<'_>]) -> Result<()> {
        let mut values = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |row: usize, values: &mut [f32]| self.fetch(logits, row * n_vocab, values);
        let mut on_device = TopK::answer_on_host(rows, n_vocab, top_k::MAX_K, &mut values, read)?;
        Ok(top_k::top_k(&self.gpu, &logits.buffer, n_vocab, &mut on_device)?)
    }

    fn finish(&self) -> Result<()> {
        Ok(self.gpu.finish()?)
    }

    fn upload_matrix(&self, source: WeightSource) -> Result<WgpuMatrix> {
        WgpuMatrix::new(&self.gpu, source)
    }

    fn table(&self, source: WeightSource) -> Result<WgpuMatrix> {
        Ok(WgpuMatrix::table(source))
    }

    fn upload_tied(&self, source: WeightSource) -> Result<WgpuMatrix> {
        WgpuMatrix::tied(&self.gpu, source)
    }

    fn upload_experts(&self, source: WeightSource, n_experts: usize) -> Result<WgpuExperts> {
        WgpuExperts::new(&self.gpu, &source, n_experts)
    }

    fn page(&self, n_bytes: usize) -> Result<WgpuPage> {
        WgpuPage::new(&self.arena, n_bytes)
    }

    fn read_page(&self, page: &WgpuPage, dst: &mut [u8]) -> Result<()> {
        BackendError::check_equal("read_page", "length of the page", page.n_bytes(), dst.len())?;
        let mut words = vec![0; page.padded()];
        self.gpu.read(&page.slab(), page.at(), &mut words)?;
        dst.copy_from_slice(&words[..dst.len()]);
        Ok(())
    }

    fn write_page(&self, page: &mut WgpuPage, src: &[u8]) -> Result<()> {
        BackendError::check_equal("write_page", "length of the page", page.n_bytes(), src.len())?;
        let mut words = src.to_vec();
        words.resize(page.padded(), 0);
        Ok(self.gpu.write(&page.slab(), page.at(), &words)?)
    }

    fn embed(&self, table: &WgpuMatrix, tokens: &[u32], scale: f32, out: &mut WgpuBuffer) -> Result<()> {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.resize(tokens.len() * table.n_in(), 0.0);
        table.decode_rows(tokens, scale, &mut rows)?;
        Ok(self.gpu.write(&out.buffer, 0, bytemuck::cast_slice(&rows))?)
    }

    fn project(&self, input: Input<'_, Self>, outputs: &mut [Output<'_, Self>]) -> Result<()> {
        let Some(first) = outputs.first() else { return Ok(()) };
        let mut x = operand(&self.gpu, &input, first.w.n_in());
        for Output { w, bias, y, accumulate } in outputs {
            self.multiply("project", &mut x, w, &y.buffer, *bias, *accumulate)?;
        }
        Ok(())
    }

    fn gated_ffn(
        &self,
        input: Input<'_, Self>,
        activation: Activation,
        gate: &WgpuMatrix,
        up: &WgpuMatrix,
        y: &mut WgpuBuffer,
    ) -> Result<()> {
        const OP: &str = "gated_ffn";
        BackendError::check_activation(OP, activation)?;
        let mut x = operand(&self.gpu, &input, gate.n_in());
        if gate.dtype() == up.dtype() {
            let matrices = [weights(OP, gate)?, weights(OP, up)?];
            return Ok(matmul::gated(&self.gpu, matrices, activation, &mut x, &y.buffer)?);
        }
        let len = input.rows * up.n_out();
        let g = self.gpu.scratch(bytes(len), "gates")?;
        self.multiply(OP, &mut x, gate, &g, None, false)?;
        self.multiply(OP, &mut x, up, &y.buffer, None, false)?;
        Ok(elementwise::activate(&self.gpu, activation, &g, &y.buffer, len)?)
    }

    fn moe_ffn(
        &self,
        x: &mut WgpuBuffer,
        rows: usize,
        norm: Option<Norm<'_, WgpuBuffer>>,
        choice: Router<'_, Self>,
        weights: ExpertWeights<'_, Self>,
        to: Option<&mut WgpuBuffer>,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let ExpertWeights { activation, gate, up, down, biases } = weights;
        choice.check_plain()?;
        BackendError::check_activation("moe_ffn", activation)?;
        let Router { routing, logits, selection_bias, scales, .. } = choice;
        let input = operand(&self.gpu, &Input { x, norm, first_row: 0, rows }, gate.n_in());
        let [selection_bias, scales] = [selection_bias, scales].map(|of| of.map(|of| &of.buffer));
        let (logits, n_experts) = (&logits.buffer, gate.n_experts());
        let router = experts::RouterInputs { logits, selection_bias, scales, n_experts, routing };
        let biases = biases.map(|biases| biases.map(|bias| &bias.buffer));
        let layer = experts::Layer { activation, gate, up, down, biases };
        let sum = match &to {
            Some(to) => experts::MoeOutput { to: &to.buffer, accumulates: false },
            None => experts::MoeOutput { to: &x.buffer, accumulates: true },
        };
        experts::expert_ffn(&self.gpu, input, sum, router, layer)
    }

    fn project_per_expert(
        &self,
        x: &WgpuBuffer,
        rows: usize,
        w: &WgpuExperts,
        y: &mut WgpuBuffer,
    ) -> Result<()> {
        let (n, n_out, n_in) = (w.n_experts(), w.n_out(), w.n_in());
        for i in 0..n {
            let weights = Weights { slabs: &w.slabs, dtype: w.dtype, first: i * n_out, n_out, n_in };
            let x = Rows { buffer: &x.buffer, first: i * n_in, stride: n * n_in };
            let y = Rows { buffer: &y.buffer, first: i * n_out, stride: n * n_out };
            let mut x = Operand::new(&self.gpu, x, [rows, n_in], None);
            matmul::multiply(&self.gpu, weights, &mut x, y, None, false)?;
        }
        Ok(())
    }

    fn copy_columns(
        &self,
        src: &WgpuBuffer,
        shape: [usize; 2],
        dst: &mut WgpuBuffer,
        to: Columns,
    ) -> Result<()> {
        Ok(elementwise::copy_columns(&self.gpu, &src.buffer, shape, &dst.buffer, to)?)
    }

    fn gate_rows(
        &self,
        y: &mut WgpuBuffer,
        rows: usize,
        cols: usize,
        gates: &WgpuBuffer,
        gate: Gate,
    ) -> Result<()> {
        Ok(elementwise::gate_rows(&self.gpu, gate, &gates.buffer, &y.buffer, [rows, cols])?)
    }

    fn add_normed(
        &self,
        x: &mut WgpuBuffer,
        y: &WgpuBuffer,
        rows: usize,
        norm: Norm<'_, WgpuBuffer>,
    ) -> Result<()> {
        let Norm { weight, eps } = norm;
        let shape = [rows, weight.n_values];
        Ok(norm::norm(&self.gpu, NormKind::AddRms, &y.buffer, shape, &weight.buffer, eps, &x.buffer)?)
    }

    fn layer_norm(
        &self,
        x: &WgpuBuffer,
        rows: usize,
        norm: Norm<'_, WgpuBuffer>,
        bias: Option<&WgpuBuffer>,
        y: &mut WgpuBuffer,
    ) -> Result<()> {
        if bias.is_some() {
            return Err(BackendError::no_layer_norm_bias());
        }
        let Norm { weight, eps } = norm;
        let shape = [rows, weight.n_values];
        Ok(norm::norm(&self.gpu, NormKind::Layer, &x.buffer, shape, &weight.buffer, eps, &y.buffer)?)
    }

    fn soft_cap(&self, x: &mut WgpuBuffer, len: usize, cap: f32) -> Result<()> {
        Ok(elementwise::soft_cap(&self.gpu, &x.buffer, len, cap)?)
    }

    fn mix_streams(
        &self,
        coefs: &WgpuBuffer,
        x: &WgpuBuffer,
        rows: usize,
        of: Streams,
        y: &mut WgpuBuffer,
    ) -> Result<()> {
        Ok(streams::mix_streams(&self.gpu, [&coefs.buffer, &x.buffer, &y.buffer], rows, of)?)
    }

    fn scale_by_rms(&self, x: &mut WgpuBuffer, like: &WgpuBuffer, rows: usize, width: usize) -> Result<()> {
        Ok(streams::scale_by_rms(&self.gpu, &like.buffer, &x.buffer, [rows, width])?)
    }

    fn gate_sparsely(
        &self,
        y: &mut WgpuBuffer,
        gates: &WgpuBuffer,
        rows: usize,
        width: usize,
        deviations: f32,
    ) -> Result<()> {
        Ok(streams::gate_sparsely(&self.gpu, &gates.buffer, &y.buffer, [rows, width], deviations)?)
    }

    fn add(&self, x: &mut WgpuBuffer, y: &WgpuBuffer, len: usize) -> Result<()> {
        Ok(elementwise::add(&self.gpu, &x.buffer, &y.buffer, len)?)
    }

    fn xielu(&self, x: &mut WgpuBuffer, len: usize, numbers: Xielu) -> Result<()> {
        Ok(elementwise::xielu(&self.gpu, &x.buffer, len, numbers)?)
    }

    fn scale(&self, x: &mut WgpuBuffer, len: usize, by: f32) -> Result<()> {
        Ok(elementwise::scale(&self.gpu, &x.buffer, len, by)?)
    }

    fn rope(
        &self,
        x: &mut WgpuBuffer,
        rows: usize,
        heads: Heads,
        norm: Option<Norm<'_, WgpuBuffer>>,
        params: RopeParams,
        angles: &WgpuBuffer,
    ) -> Result<()> {
        let norm = norm.map(|norm| (norm.weight, norm.eps));
        Ok(rope::rope(&self.gpu, &x.buffer, rows, heads, norm, params, &angles.buffer)?)
    }

    /// Skips the check: its result would need a synchronization in every layer.
    fn find_non_finite_row(&self, _: &WgpuBuffer, _: usize, _: usize) -> Result<Option<usize>> {
        Ok(None)
    }

    fn kv_append(
        &self,
        parts: &mut [KvBatchEntry<'_, WgpuPage>],
        k: &WgpuBuffer,
        v: &WgpuBuffer,
        step_tiles: Option<&mut WgpuPage>,
    ) -> Result<()> {
        let (k, v) = (&k.buffer, &v.buffer);
        append::append(&self.gpu, &self.arena.buffers(), parts, [k, v], step_tiles.as_deref())
    }

    fn attend(
        &self,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, WgpuPage>],
        q: &WgpuBuffer,
        sinks: Option<&WgpuBuffer>,
        step_tiles: Option<&WgpuPage>,
        out: &mut WgpuBuffer,
    ) -> Result<()> {
        let (q, sinks, out) = (&q.buffer, sinks.map(|sinks| &sinks.buffer), &out.buffer);
        let args = AttendArgs { params, parts, q, sinks, step_tiles, out };
        let all_stages = attend::STAGES.len() - 1;
        attend::attend(&self.gpu, &self.arena.buffers(), self.variants, all_stages, args)
    }

    fn time_kernels(&self, is_on: bool) -> Result<bool> {
        Ok(self.gpu.time_kernels(is_on)?)
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>> {
        Ok(self.gpu.kernel_times()?)
    }

    fn attend_stages(&self) -> &'static [&'static str] {
        &attend::STAGES
    }

    fn attend_staged(
        &self,
        stage: usize,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, WgpuPage>],
        q: &WgpuBuffer,
        step_tiles: Option<&WgpuPage>,
        out: &mut WgpuBuffer,
    ) -> Result<()> {
        let (q, out) = (&q.buffer, &out.buffer);
        let args = AttendArgs { params, parts, q, sinks: None, step_tiles, out };
        attend::attend(&self.gpu, &self.arena.buffers(), self.variants, stage, args)
    }

    fn short_conv(
        &self,
        parts: &mut [StateBatchEntry<'_, WgpuPage>],
        conv: ShortConv,
        x: &WgpuBuffer,
        kernel: &WgpuBuffer,
        y: &mut WgpuBuffer,
    ) -> Result<()> {
        let buffers = [&x.buffer, &kernel.buffer, &y.buffer];
        Ok(recurrent::short_conv(&self.gpu, parts, conv, buffers)?)
    }

    fn linear_attention(
        &self,
        parts: &mut [StateBatchEntry<'_, WgpuPage>],
        heads: StateHeads,
        inputs: StateInputs<&WgpuBuffer>,
        y: &mut WgpuBuffer,
    ) -> Result<()> {
        Ok(recurrent::linear_attention(&self.gpu, parts, &heads, inputs, &y.buffer)?)
    }

    fn gate(&self, y: &mut WgpuBuffer, len: usize, gates: &WgpuBuffer, gate: Gate) -> Result<()> {
        Ok(elementwise::gate(&self.gpu, gate, &gates.buffer, &y.buffer, len)?)
    }

    fn activate(
        &self,
        y: &mut WgpuBuffer,
        len: usize,
        gates: &WgpuBuffer,
        activation: Activation,
    ) -> Result<()> {
        BackendError::check_activation("activate", activation)?;
        Ok(elementwise::activate(&self.gpu, activation, &gates.buffer, &y.buffer, len)?)
    }
}

/// The whole of a matrix.
fn weights<'a>(op: &'static str, w: &'a WgpuMatrix) -> Result<Weights<'a>> {
    Ok(Weights { slabs: w.slabs(op)?, dtype: w.dtype(), first: 0, n_out: w.n_out(), n_in: w.n_in() })
}

/// The rows of `input`, `n` values each, as input of products.
fn operand<'a>(gpu: &'a Gpu, input: &Input<'a, WgpuDevice>, n: usize) -> Operand<'a> {
    let x = Rows { buffer: &input.x.buffer, first: input.first_row * n, stride: n };
    let norm = input.norm.map(|Norm { weight, eps }| (&weight.buffer, eps));
    Operand::new(gpu, x, [input.rows, n], norm)
}

/// Returns the bytes of `values` f32 values.
fn bytes(values: usize) -> usize {
    values.saturating_mul(size_of::<f32>())
}
