//! Outputs of a product that one thread writes.

use std::ops::Range;

use super::kernel_set::KernelSet;
use super::kernels::Register;
use super::product::{Product, Scatter};
use crate::simd::matmul::format::PANEL;
use crate::simd::matmul::{Kernel, Simd};

/// Size in bytes from which on a result bypasses the caches, in sets with non-temporal stores: no
/// L2 cache holds it until it is read.
const MIN_STREAMED: usize = 2 << 20;

impl<'a> Product<'a> {
    /// Returns the outputs of some panels for some rows, to write.
    ///
    /// # Safety
    /// While they are borrowed, no other outputs of this product may share both a panel and a row
    /// with them.
    pub(super) unsafe fn outputs(&self, panels: Range<usize>, rows: Range<usize>) -> Outputs<'_, 'a> {
        Outputs { product: self, panels, rows }
    }
}

/// Outputs of a product that one thread writes: some panels, for some rows.
pub(super) struct Outputs<'a, 'b> {
    pub product: &'a Product<'b>,
    pub panels: Range<usize>,
    pub rows: Range<usize>,
}

impl Outputs<'_, '_> {
    /// Writes outputs `first ..` of one row, as many as there are values.
    ///
    /// # Panics
    /// When they are not among these outputs.
    pub(super) fn put(&mut self, row: usize, first: usize, values: &[f32]) {
        let outputs = self.panels.start * PANEL..self.panels.end * PANEL;
        assert!(self.rows.contains(&row) && outputs.start <= first && first + values.len() <= outputs.end);
        let Product { w, bias, to, accumulate, .. } = self.product;
        let n = values.len().min(w.n_out - first);
        let factor = match to {
            Scatter::Rows(_) => None,
            Scatter::Picked { factors, .. } => Some(factors[row]),
        };
        let y = self.outputs(row, first..first + n);
        if let Some(factor) = factor {
            if let Some(bias) = bias {
                return (0..n).for_each(|i| y[i] += factor * (values[i] + bias[first + i]));
            }
            let add = |(y, value): (&mut f32, &f32)| *y += factor * value;
            // A whole panel is one register.
            return match (y.as_chunks_mut::<PANEL>(), values.as_chunks::<PANEL>()) {
                (([y], []), ([values], [])) => y.iter_mut().zip(values).for_each(add),
                _ => y.iter_mut().zip(values).for_each(add),
            };
        }
        match bias {
            Some(bias) if *accumulate => {
                (0..n).for_each(|i| y[i] += values[i] + bias[first + i]);
            }
            Some(bias) => (0..n).for_each(|i| y[i] = values[i] + bias[first + i]),
            None if *accumulate => (0..n).for_each(|i| y[i] += values[i]),
            // A whole panel is one store, not a call of `memcpy`.
            None => match (y.as_chunks_mut::<PANEL>(), values.as_chunks()) {
                (([y], []), ([values], [])) => *y = *values,
                _ => y.copy_from_slice(&values[..n]),
            },
        }
    }

    /// Writes the outputs of neighbouring panels of one row, from panel `first` on.
    ///
    /// # Panics
    /// When they are not among these outputs.
    pub(super) fn put_panels<'a, S: KernelSet>(
        &mut self,
        set: S,
        row: usize,
        first: usize,
        panels: impl ExactSizeIterator<Item = &'a Register>,
    ) {
        let end = first + panels.len();
        let Product { w, bias, to, accumulate, .. } = self.product;
        if bias.is_some() || matches!(to, Scatter::Picked { .. }) || end * PANEL > w.n_out {
            return (first..).zip(panels).for_each(|(panel, sums)| self.put(row, panel * PANEL, &sums.0));
        }
        assert!(self.rows.contains(&row) && self.panels.start <= first && end <= self.panels.end);
        let streams = S::NON_TEMPORAL && size_of::<f32>() * self.product.y.len() >= MIN_STREAMED;
        let y = self.outputs(row, first * PANEL..end * PANEL).as_chunks_mut().0;
        set.vectors().run(PutPanels { panels, y, accumulate: *accumulate, streams });
    }

    /// Returns the destination of some outputs of a row, which are among these.
    fn outputs(&mut self, row: usize, outputs: Range<usize>) -> &mut [f32] {
        let Product { w, y, to, .. } = self.product;
        let row = match to {
            Scatter::Rows(first) => first + row,
            Scatter::Picked { rows, .. } => rows[row] as usize,
        };
        // SAFETY: these outputs are exclusive by the contract of `Product::outputs`, and here they
        // are borrowed from `self`.
        unsafe { y.part(row * w.n_out + outputs.start..row * w.n_out + outputs.end) }
    }
}

/// Writes sums of neighbouring panels for one row.
struct PutPanels<'a, I> {
    panels: I,
    y: &'a mut [[f32; PANEL]],
    accumulate: bool,
    streams: bool,
}

impl<'a, I: Iterator<Item = &'a Register>> Kernel for PutPanels<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (y, sums) in self.y.iter_mut().zip(self.panels) {
            if self.accumulate {
                y.iter_mut().zip(sums.0).for_each(|(y, sum)| *y += sum);
                continue;
            }
            for part in 0..S::PARTS {
                let sums = simd.load_floats(&sums.0, part);
                if self.streams {
                    simd.store_floats_nt(sums, y, part);
                } else {
                    simd.store_floats(sums, y, part);
                }
            }
        }
    }
}
