//! Weights of alternating updates (AltUp) and of the learned residual layers (Laurel) beside them;
//! the [decoder](crate::Decoder) has their equations.

use std::iter;

use kvant_backend::{Backend, WeightSource};
use kvant_codec::DType;

use super::Loader;
use crate::{Config, ModelError};

/// Projections between the only stream outside of the layers and those within.
pub(crate) struct StreamProjections<B: Backend> {
    /// Of the embedding into each stream but the first, `[n_embd, n_embd]`.
    pub(crate) into: Vec<B::Matrix>,
    /// Of each stream but the first behind the last layer.
    pub(crate) from: Vec<B::Matrix>,
    /// Weight of a norm without one: all ones, `[n_embd]`.
    pub(crate) ones: B::Buffer,
}

/// Alternating updates of one layer, and its learned residual layer.
pub(crate) struct AltUp<B: Backend> {
    /// Router, `[n, n_embd]` for n streams.
    pub(crate) router: B::Matrix,
    /// Its norm, divided by `n_embd`.
    pub(crate) router_norm: B::Buffer,
    /// Coefficients of the predictions.
    pub(crate) predict: Coefficients<B>,
    /// Coefficients of the corrections.
    pub(crate) correct: Coefficients<B>,
    /// Weight of the corrected first stream before the per-layer embeddings, `[n_embd]`.
    pub(crate) output_scale: B::Buffer,
    /// The learned residual layer, `[rank, n_embd]` and `[n_embd, rank]`.
    pub(crate) laurel: [B::Matrix; 2],
    /// Norm of its output, `[n_embd]`.
    pub(crate) laurel_norm: B::Buffer,
}

/// Coefficients that make n streams of n + 1, as a function of the router's n numbers.
pub(crate) struct Coefficients<B: Backend> {
    /// `[n * (n + 1), n]`
    pub(crate) w: B::Matrix,
    /// `[n * (n + 1)]`
    pub(crate) bias: B::Buffer,
}

impl<B: Backend> Loader<'_, B> {
    pub(super) fn stream_projections(&mut self, c: &Config) -> Result<StreamProjections<B>, ModelError> {
        let mut all = |name| {
            let shape = [c.n_embd, c.n_embd, c.streams.n() - 1];
            let each = (0..c.streams.n() - 1).map(|i| {
                let source = self.rows(name, &shape, i * c.n_embd..(i + 1) * c.n_embd)?;
                Ok(self.backend.upload_matrix(source)?)
            });
            each.collect::<Result<Vec<_>, ModelError>>()
        };
        let (into, from) = (all("altup_proj.weight")?, all("altup_unembd_proj.weight")?);
        Ok(StreamProjections { into, from, ones: self.upload(&vec![1.0; c.n_embd])? })
    }

    pub(super) fn altup(&mut self, c: &Config, index: usize) -> Result<AltUp<B>, ModelError> {
        let name = |suffix: &str| format!("blk.{index}.{suffix}.weight");
        let (n, n_embd) = (c.streams.n(), c.n_embd);
        let predict = self.values(&name("altup_predict_coef"), &[n, n * n])?;
        let correct = self.values(&name("altup_correct_coef"), &[n, n])?;
        let left = name("laurel_l");
        let rank = self.gguf.tensor(&left)?.info.rows();
        Ok(AltUp {
            router: self.matrix(&name("altup_router"), n_embd, n)?,
            router_norm: self.scaled_vector(&name("altup_router_norm"), n_embd, 1.0 / n_embd as f32)?,
            predict: self.coefficients(n, &predictions(&predict, n))?,
            correct: self.coefficients(n, &corrections(&correct, n))?,
            output_scale: self.vector(&name("altup_correct_scale"), n_embd)?,
            laurel: [self.matrix(&left, n_embd, rank)?, self.matrix(&name("laurel_r"), rank, n_embd)?],
            laurel_norm: self.vector(&name("laurel_post_norm"), n_embd)?,
        })
    }

    /// Loads coefficients, a row and a bias for each.
    fn coefficients(&self, n: usize, all: &[Coefficient]) -> Result<Coefficients<B>, ModelError> {
        let bytes: Vec<u8> = all.iter().flat_map(|c| &c.row).flat_map(|x| x.to_le_bytes()).collect();
        let source = WeightSource { dtype: DType::F32, n_out: all.len(), n_in: n, bytes: bytes.into() };
        let bias: Vec<f32> = all.iter().map(|c| c.bias).collect();
        Ok(Coefficients { w: self.backend.upload_matrix(source)?, bias: self.upload(&bias)? })
    }
}

/// A coefficient as a function of the router's numbers.
#[derive(Debug, Clone, PartialEq)]
struct Coefficient {
    row: Vec<f32>,
    bias: f32,
}

/// Returns the coefficients of the predictions `[n, n + 1]`, given those of the file, `[n * n, n]`:
/// stream i is itself and a combination of all. The per-layer embedding of the layer before is an
/// additional one, which belongs to every stream but the first.
fn predictions(file: &[f32], n: usize) -> Vec<Coefficient> {
    let row = |i: usize, j: usize| &file[(i * n + j) * n..][..n];
    let of_stream = |i: usize| {
        let own =
            (0..n).map(move |j| Coefficient { row: row(i, j).to_vec(), bias: f32::from(u8::from(i == j)) });
        let sum = |p: usize| (1..n).map(|j| row(i, j)[p]).sum();
        let added = Coefficient { row: (0..n).map(sum).collect(), bias: f32::from(u8::from(i > 0)) };
        own.chain(iter::once(added))
    };
    (0..n).flat_map(of_stream).collect()
}

/// Returns the coefficients of the corrections `[n, n + 1]`, given those of the file, `[n, n]`:
/// stream i is itself and `1 + c` times what the layer, an additional stream, changed in the first.
fn corrections(file: &[f32], n: usize) -> Vec<Coefficient> {
    let of_stream = |i: usize| {
        let c = &file[i * n..][..n];
        (0..=n).map(move |j| {
            let own = f32::from(u8::from(i == j));
            match j {
                0 => Coefficient { row: c.iter().map(|c| -c).collect(), bias: own - 1.0 },
                j if j == n => Coefficient { row: c.to_vec(), bias: 1.0 },
                _ => Coefficient { row: vec![0.0; n], bias: own },
            }
        })
    };
    (0..n).flat_map(of_stream).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the streams that coefficients make of others, of one value each.
    fn mixed(coefs: &[Coefficient], router: &[f64], x: &[f64]) -> Vec<f64> {
        let value = |c: &Coefficient| {
            f64::from(c.bias) + c.row.iter().zip(router).map(|(w, r)| f64::from(*w) * r).sum::<f64>()
        };
        coefs.chunks(x.len()).map(|of| of.iter().zip(x).map(|(c, x)| value(c) * x).sum()).collect()
    }

    #[test]
    fn coefficients_predict_and_correct_as_in_the_paper() {
        let (n, router) = (3, [0.5, -0.25, 0.125]);
        let file: Vec<f32> = (0..n * n * n).map(|i| (i as f32 * 1.7).sin()).collect();
        let of_router = |rows: &[f32]| -> Vec<f64> {
            let dot = |row: &[f32]| row.iter().zip(router).map(|(w, r)| f64::from(*w) * r).sum();
            rows.chunks(n).map(dot).collect()
        };
        let (x, added) = ([2.0, 3.0, -5.0], 7.0);
        let streams = [x[0], x[1] + added, x[2] + added];
        let raw = of_router(&file);
        let want: Vec<f64> =
            (0..n).map(|i| streams[i] + (0..n).map(|j| raw[i * n + j] * streams[j]).sum::<f64>()).collect();
        let got = mixed(&predictions(&file, n), &router, &[x[0], x[1], x[2], added]);
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5), "{got:?} for {want:?}");

        let (raw, activated) = (of_router(&file[..n * n]), 11.0);
        let want: Vec<f64> = (0..n).map(|i| x[i] + (raw[i] + 1.0) * (activated - x[0])).collect();
        let got = mixed(&corrections(&file[..n * n], n), &router, &[x[0], x[1], x[2], activated]);
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5), "{got:?} for {want:?}");
    }
}
