//! The CPU as a [`Backend`](kvant_backend::Backend): passes slices to the ops.

mod description;
mod open;
mod operands;
mod roofline;
pub(crate) mod tuning;

use std::sync::{Arc, Mutex, PoisonError};

use kvant_backend::host_ops::{self, Pointwise};
use kvant_backend::{
    Activation, AttendParams, BackendError, BidirectionalParams, BlockSelection, Columns, DeviceInfo,
    ExpertWeights, Experts, Gate, GatedStreams, Heads, HyperConnections, Input, InputSquares, KernelChoice,
    Kernels, KvBatchEntry, Matrix, NgramInjection, Norm, Output, Page, PooledBatchEntry, PooledKeys, Result,
    RopeParams, Router, Selected, Selection, ShortConv, StateBatchEntry, StateHeads, StateInputs,
    StreamAttention, Streams, TokenPool, TokenShift, TopK, WeightSource, Wkv7Inputs, Xielu,
};

use crate::host::buffer::CpuBuffer;
use crate::host::disjoint::DisjointMut;
use crate::host::page::CpuPage;
use crate::host::pool::Pool;
use crate::ops::attend::select::{self, SelectArgs, SelectBlocksArgs};
use crate::ops::attend::selected::{self, PooledNumbers};
use crate::ops::attend::selection::{Blocks, SelectedRows};
use crate::ops::attend::{self, AttendArgs, Stage};
use crate::ops::attend_bidirectional::{self, Bias, Windows};
use crate::ops::columns::copy_columns;
use crate::ops::matmul::prefill_precision::PrefillPrecision;
use crate::ops::matmul::{self, Biased, CpuExperts, CpuMatrix, ExpertFfn, Product, Scatter};
use crate::ops::ngrams::{self, InjectArgs};
use crate::ops::norm::LayerNorm;
use crate::ops::pooled::{self, PoolArgs};
use crate::ops::{
    append, embed, gate_rows, linear_attention, norm, rope, rwkv, short_conv, soft_cap, streams, xielu,
};
use crate::simd::isa::Isa;
use operands::{norm_parts, operand, state_of};

/// The CPU device.
pub struct CpuDevice {
    isa: Isa,
    pool: Pool,
    is_tuned: bool,
    prefill_precision: PrefillPrecision,
    matmul: Mutex<matmul::Scratch>,
    append: Mutex<append::Scratch>,
    attend: Mutex<attend::Scratch>,
    select: Mutex<select::Scratch>,
    attend_selected: Mutex<selected::Scratch>,
    recur: Mutex<linear_attention::Scratch>,
    attend_all: Mutex<attend_bidirectional::Scratch>,
}

impl Kernels for CpuDevice {
    type Buffer = CpuBuffer;
    type Matrix = CpuMatrix;
    type Experts = CpuExperts;
    type Page = CpuPage;

    fn info(&self) -> DeviceInfo {
        description::info(self)
    }

    fn kernel_choices(&self) -> Vec<KernelChoice> {
        description::kernel_choices(self)
    }

    fn buffer(&self, len: usize) -> Result<CpuBuffer> {
        CpuBuffer::zeroed(len)
    }

    fn write(&self, dst: &mut CpuBuffer, src: &[f32]) -> Result<()> {
        dst.as_mut_slice()[..src.len()].copy_from_slice(src);
        Ok(())
    }

    fn copy(&self, src: &CpuBuffer, from: usize, dst: &mut CpuBuffer, to: usize, len: usize) -> Result<()> {
        dst.as_mut_slice()[to..][..len].copy_from_slice(&src.as_slice()[from..][..len]);
        Ok(())
    }

    fn read(&self, src: &CpuBuffer, offset: usize, dst: &mut [f32]) -> Result<()> {
        dst.copy_from_slice(&src.as_slice()[offset..][..dst.len()]);
        Ok(())
    }

    fn top_k(&self, logits: &CpuBuffer, n_vocab: usize, rows: &mut [TopK<'_>]) -> Result<()> {
        let (logits, n_rows) = (logits.as_slice(), rows.len());
        let rows = DisjointMut::new(rows);
        self.pool.for_each(n_rows, &|i| {
            // SAFETY: one call of this job has each row.
            let [TopK { row, k, out }] = (unsafe { rows.part(i..i + 1) }) else { unreachable!() };
            kvant_backend::top_k(&logits[*row * n_vocab..][..n_vocab], *k, out);
        });
        Ok(())
    }

    fn upload_matrix(&self, source: WeightSource) -> Result<CpuMatrix> {
        CpuMatrix::new(self.isa, &self.pool, source)
    }

    fn table(&self, source: WeightSource) -> Result<CpuMatrix> {
        Ok(CpuMatrix::in_rows(source))
    }

    fn upload_experts(&self, source: WeightSource, n_experts: usize) -> Result<CpuExperts> {
        CpuExperts::new(self.isa, &self.pool, source, n_experts)
    }

    fn map_experts(&self, source: WeightSource, n_experts: usize) -> Result<CpuExperts> {
        Ok(CpuExperts::mapped(source, n_experts))
    }

    fn watch_inputs(&self, w: &mut CpuMatrix, squares: &Arc<InputSquares>) -> Result<()> {
        w.watch_inputs(squares);
        Ok(())
    }

    fn watch_expert_inputs(&self, w: &mut CpuExperts, squares: &Arc<InputSquares>) -> Result<()> {
        w.watch_inputs(squares);
        Ok(())
    }

    fn page(&self, n_bytes: usize) -> Result<CpuPage> {
        CpuPage::zeroed(n_bytes)
    }

    fn read_page(&self, page: &CpuPage, dst: &mut [u8]) -> Result<()> {
        BackendError::check_equal("read_page", "bytes of the destination", page.n_bytes(), dst.len())?;
        dst.copy_from_slice(page.as_bytes());
        Ok(())
    }

    fn write_page(&self, page: &mut CpuPage, src: &[u8]) -> Result<()> {
        BackendError::check_equal("write_page", "bytes of the source", page.n_bytes(), src.len())?;
        page.as_mut_bytes().copy_from_slice(src);
        Ok(())
    }

    fn embed(&self, table: &CpuMatrix, tokens: &[u32], scale: f32, out: &mut CpuBuffer) -> Result<()> {
        embed::embed(&self.pool, table, tokens, scale, out.as_mut_slice());
        Ok(())
    }

    fn project(&self, input: Input<'_, Self>, outputs: &mut [Output<'_, Self>]) -> Result<()> {
        let Some(first) = outputs.first() else { return Ok(()) };
        let x = operand(&input, first.w.n_in());
        let mut products = outputs.iter_mut().map(|output| Product {
            w: output.w,
            bias: output.bias.map(CpuBuffer::as_slice),
            y: DisjointMut::new(output.y.as_mut_slice()),
            to: Scatter::Rows(0),
            accumulate: output.accumulate,
            gate: None,
        });
        let mut scratch = self.matmul.lock().unwrap_or_else(PoisonError::into_inner);
        matmul::project(self.context(&mut scratch), x, &mut products);
        Ok(())
    }

    fn gated_ffn(
        &self,
        input: Input<'_, Self>,
        activation: Activation,
        gate: &CpuMatrix,
        up: &CpuMatrix,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let x = operand(&input, gate.n_in());
        let mut scratch = self.matmul.lock().unwrap_or_else(PoisonError::into_inner);
        matmul::gated_ffn(self.context(&mut scratch), x, activation, gate, up, y.as_mut_slice());
        Ok(())
    }

    fn moe_ffn(
        &self,
        x: &mut CpuBuffer,
        rows: usize,
        norm: Option<Norm<'_, CpuBuffer>>,
        choice: Router<'_, Self>,
        weights: ExpertWeights<'_, Self>,
        to: Option<&mut CpuBuffer>,
    ) -> Result<()> {
        let ExpertWeights { activation, gate, up, down, biases } = weights;
        let Router { routing, logits, selection_bias, scales, chosen } = choice;
        let n = gate.n_in();
        let (norm, logits) = (norm.map(norm_parts), &logits.as_slice()[..rows * gate.n_experts()]);
        let biased = |w, i: usize| Biased::new(w, biases.map(|biases| biases[i].as_slice()));
        let (gate, up, down) = (biased(gate, 0), biased(up, 1), biased(down, 2));
        let [selection_bias, scales, chosen] =
            [selection_bias, scales, chosen].map(|of| of.map(CpuBuffer::as_slice));
        let choice = matmul::Choice { routing, logits, selection_bias, scales, chosen };
        let layer = ExpertFfn { norm, choice, activation, gate, up, down };
        let mut scratch = self.matmul.lock().unwrap_or_else(PoisonError::into_inner);
        let x = &mut x.as_mut_slice()[..rows * n];
        let to = to.map(|to| &mut to.as_mut_slice()[..rows * n]);
        matmul::moe_ffn(self.context(&mut scratch), layer, x, to)
    }

    fn project_per_expert(
        &self,
        x: &CpuBuffer,
        rows: usize,
        w: &CpuExperts,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let n = rows * w.n_experts();
        let (x, y) = (&x.as_slice()[..n * w.n_in()], &mut y.as_mut_slice()[..n * w.n_out()]);
        let mut scratch = self.matmul.lock().unwrap_or_else(PoisonError::into_inner);
        matmul::project_each(self.context(&mut scratch), w, x, y)
    }

    fn copy_columns(
        &self,
        src: &CpuBuffer,
        [rows, n]: [usize; 2],
        dst: &mut CpuBuffer,
        to: Columns,
    ) -> Result<()> {
        if n > 0 {
            copy_columns(&src.as_slice()[..rows * n], n, dst.as_mut_slice(), to);
        }
        Ok(())
    }

    fn gate_rows(
        &self,
        y: &mut CpuBuffer,
        rows: usize,
        cols: usize,
        gates: &CpuBuffer,
        gate: Gate,
    ) -> Result<()> {
        gate_rows::gate_rows(&self.pool, &mut y.as_mut_slice()[..rows * cols], gates.as_slice(), cols, gate);
        Ok(())
    }

    fn add_normed(
        &self,
        x: &mut CpuBuffer,
        y: &CpuBuffer,
        rows: usize,
        norm: Norm<'_, CpuBuffer>,
    ) -> Result<()> {
        norm::add_normed(&self.pool, x.as_mut_slice(), y.as_slice(), rows, norm.weight.as_slice(), norm.eps);
        Ok(())
    }

    fn layer_norm(
        &self,
        x: &CpuBuffer,
        rows: usize,
        norm: Norm<'_, CpuBuffer>,
        bias: Option<&CpuBuffer>,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let (weight, bias) = (norm.weight.as_slice(), bias.map(CpuBuffer::as_slice));
        let layer_norm = LayerNorm { weight, bias, eps: norm.eps };
        norm::layer_norm(&self.pool, x.as_slice(), rows, layer_norm, y.as_mut_slice());
        Ok(())
    }

    fn scale(&self, x: &mut CpuBuffer, len: usize, by: f32) -> Result<()> {
        gate_rows::scale(&self.pool, &mut x.as_mut_slice()[..len], by);
        Ok(())
    }

    fn attend_bidirectional(
        &self,
        params: &BidirectionalParams,
        windows: &[usize],
        bias: Option<&CpuBuffer>,
        qkv: [&CpuBuffer; 3],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let longest = windows.iter().copied().max().unwrap_or(0);
        let bias = bias.map(|bias| Bias { values: bias.as_slice(), longest });
        let windows = Windows { rows: windows, params: *params, bias };
        let scratch = &mut self.attend_all.lock().unwrap_or_else(PoisonError::into_inner);
        let (qkv, out) = (qkv.map(CpuBuffer::as_slice), out.as_mut_slice());
        attend_bidirectional::attend_windows(self.context(scratch), windows, qkv, out);
        Ok(())
    }

    fn apply(&self, x: &mut CpuBuffer, len: usize, f: Pointwise) -> Result<()> {
        host_ops::apply(&mut x.as_mut_slice()[..len], f);
        Ok(())
    }

    fn soft_cap(&self, x: &mut CpuBuffer, len: usize, cap: f32) -> Result<()> {
        soft_cap::soft_cap(self.isa, &self.pool, &mut x.as_mut_slice()[..len], cap);
        Ok(())
    }

    fn mix_streams(
        &self,
        coefs: &CpuBuffer,
        x: &CpuBuffer,
        rows: usize,
        of: Streams,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let y = &mut y.as_mut_slice()[..of.n_out * rows * of.width];
        streams::mix_streams(&self.pool, coefs.as_slice(), x.as_slice(), rows, of, y);
        Ok(())
    }

    fn connect_streams(
        &self,
        connections: HyperConnections<'_, CpuBuffer>,
        products: &CpuBuffer,
        streams: &CpuBuffer,
        rows: usize,
        reads: &mut CpuBuffer,
        writes: Option<&mut CpuBuffer>,
    ) -> Result<()> {
        let of = streams::StreamInputs { connections, products, streams, rows };
        streams::connect_streams(&self.pool, of, reads.as_mut_slice(), writes.map(CpuBuffer::as_mut_slice));
        Ok(())
    }

    fn attend_streams(
        &self,
        attention: StreamAttention<'_, CpuBuffer>,
        streams: &CpuBuffer,
        rows: usize,
        reads: &mut CpuBuffer,
        writes: Option<&mut CpuBuffer>,
    ) -> Result<()> {
        let (reads, writes) = (reads.as_mut_slice(), writes.map(CpuBuffer::as_mut_slice));
        streams::attend_streams(&self.pool, attention, streams.as_slice(), rows, reads, writes);
        Ok(())
    }

    fn gate_streams(
        &self,
        gated: GatedStreams<'_, CpuBuffer>,
        streams: &CpuBuffer,
        rows: usize,
        x: &mut CpuBuffer,
        writes: Option<&mut CpuBuffer>,
    ) -> Result<()> {
        let (x, writes) = (x.as_mut_slice(), writes.map(CpuBuffer::as_mut_slice));
        streams::gate_streams(&self.pool, gated, streams.as_slice(), rows, x, writes);
        Ok(())
    }

    fn inject_ngrams(
        &self,
        parts: &mut [StateBatchEntry<'_, CpuPage>],
        injection: NgramInjection<'_, CpuBuffer>,
        keys: &CpuBuffer,
        values: &CpuBuffer,
        rows: usize,
        streams: &mut CpuBuffer,
    ) -> Result<()> {
        let args = InjectArgs { injection, keys: keys.as_slice(), values: values.as_slice(), rows };
        for part in parts {
            let (of, streams) = (part.rows, streams.as_mut_slice());
            ngrams::inject_ngrams(&self.pool, args, of, state_of(part), streams);
        }
        Ok(())
    }

    fn scale_by_rms(&self, x: &mut CpuBuffer, like: &CpuBuffer, rows: usize, width: usize) -> Result<()> {
        streams::scale_by_rms(&self.pool, x.as_mut_slice(), like.as_slice(), rows, width);
        Ok(())
    }

    fn gate_sparsely(
        &self,
        y: &mut CpuBuffer,
        gates: &CpuBuffer,
        rows: usize,
        width: usize,
        deviations: f32,
    ) -> Result<()> {
        streams::gate_sparsely(&self.pool, y.as_mut_slice(), gates.as_slice(), rows, width, deviations);
        Ok(())
    }

    fn add(&self, x: &mut CpuBuffer, y: &CpuBuffer, len: usize) -> Result<()> {
        gate_rows::add(&self.pool, &mut x.as_mut_slice()[..len], y.as_slice());
        Ok(())
    }

    fn xielu(&self, x: &mut CpuBuffer, len: usize, numbers: Xielu) -> Result<()> {
        xielu::xielu(self.isa, &self.pool, &mut x.as_mut_slice()[..len], numbers);
        Ok(())
    }

    fn rope(
        &self,
        x: &mut CpuBuffer,
        rows: usize,
        heads: Heads,
        norm: Option<Norm<'_, CpuBuffer>>,
        params: RopeParams,
        angles: &CpuBuffer,
    ) -> Result<()> {
        let norm = norm.map(norm_parts);
        rope::rope(&self.pool, x.as_mut_slice(), rows, heads, norm, params, angles.as_slice());
        Ok(())
    }

    fn find_non_finite_row(&self, x: &CpuBuffer, rows: usize, cols: usize) -> Result<Option<usize>> {
        // No early exit within a row, so that the loop vectorizes.
        let is_broken = |row: &[f32]| row.iter().fold(false, |any, v| any | !v.is_finite());
        Ok(x.as_slice()[..rows * cols].chunks_exact(cols.max(1)).position(is_broken))
    }

    fn kv_append(
        &self,
        parts: &mut [KvBatchEntry<'_, CpuPage>],
        k: &CpuBuffer,
        v: &CpuBuffer,
        step_tiles: Option<&mut CpuPage>,
    ) -> Result<()> {
        let scratch = &mut self.append.lock().unwrap_or_else(PoisonError::into_inner);
        append::kv_append(self.context(scratch), parts, [k.as_slice(), v.as_slice()], step_tiles);
        Ok(())
    }

    fn attend(
        &self,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, CpuPage>],
        q: &CpuBuffer,
        sinks: Option<&CpuBuffer>,
        step_tiles: Option<&CpuPage>,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let scratch = &mut self.attend.lock().unwrap_or_else(PoisonError::into_inner);
        let (q, sinks, out) = (q.as_slice(), sinks.map(CpuBuffer::as_slice), out.as_mut_slice());
        let args = AttendArgs { p: params, parts, q, sinks, step_tiles, selected: None };
        attend::attend(self.context(scratch), Stage::All, args, out)
    }

    fn select_tokens(
        &self,
        selection: Selection,
        parts: &[KvBatchEntry<'_, CpuPage>],
        q: &CpuBuffer,
        weights: &CpuBuffer,
        step_tiles: Option<&CpuPage>,
        selected: &mut CpuBuffer,
    ) -> Result<()> {
        let scratch = &mut self.select.lock().unwrap_or_else(PoisonError::into_inner);
        let args = SelectArgs { selection, q: q.as_slice(), weights: weights.as_slice(), step_tiles };
        select::select_tokens(self.context(scratch), args, parts, selected.as_mut_slice());
        Ok(())
    }

    fn select_blocks(
        &self,
        selection: BlockSelection,
        parts: &[KvBatchEntry<'_, CpuPage>],
        q: &CpuBuffer,
        step_tiles: Option<&CpuPage>,
        selected: &mut CpuBuffer,
    ) -> Result<()> {
        let scratch = &mut self.select.lock().unwrap_or_else(PoisonError::into_inner);
        let args = SelectBlocksArgs { selection, parts, q: q.as_slice(), step_tiles };
        select::select_blocks(self.context(scratch), args, selected.as_mut_slice());
        Ok(())
    }

    fn attend_selected(
        &self,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, CpuPage>],
        q: &CpuBuffer,
        selected: Selected<'_, CpuBuffer>,
        step_tiles: Option<&CpuPage>,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let (q, sinks) = (q.as_slice(), selected.sinks.map(CpuBuffer::as_slice));
        let blocks = Blocks { of_rows: selected.numbers.as_slice(), of: selected };
        let [whole, apart] = selected::divide(self.isa, parts, blocks);
        if !whole.is_empty() {
            let selected = Some(SelectedRows { blocks, spans: &whole });
            let args = AttendArgs { p: params, parts, q, sinks, step_tiles, selected };
            let scratch = &mut self.attend.lock().unwrap_or_else(PoisonError::into_inner);
            attend::attend(self.context(scratch), Stage::All, args, out.as_mut_slice())?;
        }
        let args = AttendArgs { p: params, parts, q, sinks, step_tiles, selected: None };
        let (rows, out) = (SelectedRows { blocks, spans: &apart }, out.as_mut_slice());
        let scratch = &mut self.attend_selected.lock().unwrap_or_else(PoisonError::into_inner);
        selected::attend_selected(self.context(scratch), args, rows, out);
        Ok(())
    }

    fn pool_tokens(
        &self,
        parts: &mut [StateBatchEntry<'_, CpuPage>],
        pool: TokenPool,
        x: &CpuBuffer,
        gates: &CpuBuffer,
        bias: &CpuBuffer,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let [x, gates, bias] = [x, gates, bias].map(CpuBuffer::as_slice);
        let mut y = y.as_mut_slice();
        for part in parts {
            let n = TokenPool::completed(pool.stride, part.rows).len() * pool.width;
            let (own, others) = y.split_at_mut(n);
            let args = PoolArgs { pool, x, gates, bias };
            pooled::pool_tokens(&self.pool, args, part.rows, state_of(part), own);
            y = others;
        }
        Ok(())
    }

    fn select_pooled(
        &self,
        selection: Selection,
        parts: &[PooledBatchEntry<'_, CpuPage>],
        q: &CpuBuffer,
        weights: &CpuBuffer,
        selected: &mut CpuBuffer,
    ) -> Result<()> {
        let scratch = &mut self.select.lock().unwrap_or_else(PoisonError::into_inner);
        let args = SelectArgs { selection, q: q.as_slice(), weights: weights.as_slice(), step_tiles: None };
        select::select_pooled(self.context(scratch), args, parts, selected.as_mut_slice());
        Ok(())
    }

    fn attend_pooled(
        &self,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, CpuPage>],
        q: &CpuBuffer,
        PooledKeys { parts: pooled, selected, sinks }: PooledKeys<'_, '_, CpuPage, CpuBuffer>,
        step_tiles: Option<&CpuPage>,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let scratch = &mut self.attend_selected.lock().unwrap_or_else(PoisonError::into_inner);
        let sinks = sinks.map(CpuBuffer::as_slice);
        let args = AttendArgs { p: params, parts, q: q.as_slice(), sinks, step_tiles, selected: None };
        let selected = selected.map(|of| PooledNumbers { of_rows: of.numbers.as_slice(), n_used: of.n_used });
        selected::attend_pooled(self.context(scratch), args, pooled, selected, out.as_mut_slice());
        Ok(())
    }

    fn short_conv(
        &self,
        parts: &mut [StateBatchEntry<'_, CpuPage>],
        conv: ShortConv,
        x: &CpuBuffer,
        kernel: &CpuBuffer,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        for part in parts {
            let rows = part.rows.range();
            let (inputs, y) = ([x.as_slice(), kernel.as_slice()], y.as_mut_slice());
            short_conv::short_conv(&self.pool, conv, rows, state_of(part), inputs, y);
        }
        Ok(())
    }

    fn linear_attention(
        &self,
        parts: &mut [StateBatchEntry<'_, CpuPage>],
        heads: StateHeads,
        inputs: StateInputs<&CpuBuffer>,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let inputs = inputs.map(CpuBuffer::as_slice);
        let scratch = &mut self.recur.lock().unwrap_or_else(PoisonError::into_inner);
        for part in parts {
            let (rows, y) = (part.rows, y.as_mut_slice());
            let (context, state) = (self.context(&mut **scratch), state_of(part));
            linear_attention::linear_attention(context, &heads, rows, state, inputs, y);
        }
        Ok(())
    }

    fn shift_tokens(
        &self,
        parts: &mut [StateBatchEntry<'_, CpuPage>],
        shift: TokenShift,
        x: &CpuBuffer,
        amounts: &CpuBuffer,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        for part in parts {
            let (rows, inputs) = (part.rows.range(), [x.as_slice(), amounts.as_slice()]);
            rwkv::shift_tokens(&self.pool, shift, rows, state_of(part), inputs, y.as_mut_slice());
        }
        Ok(())
    }

    fn wkv7(
        &self,
        parts: &mut [StateBatchEntry<'_, CpuPage>],
        heads: Heads,
        inputs: Wkv7Inputs<&CpuBuffer>,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let inputs = inputs.map(CpuBuffer::as_slice);
        for part in parts {
            rwkv::wkv7(self.isa, &self.pool, heads, part.rows, state_of(part), inputs, y.as_mut_slice());
        }
        Ok(())
    }

    fn gate(&self, y: &mut CpuBuffer, len: usize, gates: &CpuBuffer, gate: Gate) -> Result<()> {
        gate_rows::gate(self.isa, &self.pool, &mut y.as_mut_slice()[..len], &gates.as_slice()[..len], gate);
        Ok(())
    }

    fn activate(
        &self,
        y: &mut CpuBuffer,
        len: usize,
        gates: &CpuBuffer,
        activation: Activation,
    ) -> Result<()> {
        let (y, gates) = (&mut y.as_mut_slice()[..len], &gates.as_slice()[..len]);
        gate_rows::activate(self.isa, &self.pool, y, gates, activation);
        Ok(())
    }

    fn attend_stages(&self) -> &'static [&'static str] {
        // The scalar kernels leave no stage out.
        if self.isa == Isa::Scalar { &Stage::NAMES[Stage::NAMES.len() - 1..] } else { &Stage::NAMES }
    }

    fn attend_staged(
        &self,
        stage: usize,
        params: &AttendParams,
        parts: &[KvBatchEntry<'_, CpuPage>],
        q: &CpuBuffer,
        step_tiles: Option<&CpuPage>,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let stage = Stage::ALL[stage + Stage::ALL.len() - self.attend_stages().len()];
        let scratch = &mut self.attend.lock().unwrap_or_else(PoisonError::into_inner);
        let (q, out) = (q.as_slice(), out.as_mut_slice());
        let args = AttendArgs { p: params, parts, q, sinks: None, step_tiles, selected: None };
        attend::attend(self.context(scratch), stage, args, out)
    }
}

#[cfg(test)]
mod tests;
