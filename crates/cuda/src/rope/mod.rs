//! Rotary position embedding (RoFormer, arXiv 2104.09864) of whole heads, with the per-head norm that may precede it.
//!
//! 12 bytes and a few operations per value, `rows * heads * dim` values: a launch's own latency for one row.

use bytemuck::{Pod, Zeroable};
use kvant_backend::{Heads, Pairing, RopeParams};

use crate::constants::Constants;
use crate::norm::NormParts;
use crate::{Context, CudaError, DevicePtr, Header, Launch, Source};

/// The kernel of this op.
pub(crate) static SOURCE: Source = Source {
    name: "rope.cu",
    text: include_str!("rope.cu"),
    headers: &[TURN_HEADER],
    constants: Constants::default,
    options: &[],
};

/// How heads are turned, for every kernel that does.
pub(crate) const TURN_HEADER: Header = Header { name: "rope.cuh", text: include_str!("rope.cuh") };

/// Heads that one block turns, a warp each.
pub(crate) const HEADS_PER_BLOCK: u32 = 4;

/// `Turn` of `rope.cuh`; zeroed, it does nothing.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Turn {
    angles: DevicePtr,
    weight: DevicePtr,
    n_rot: u32,
    stride: u32,
    eps: f32,
    is_on: u32,
}

impl Turn {
    /// Norm, where there is one, and turn by `angles` `[rows, n_rot / 2, 2]`.
    pub fn new(norm: Option<NormParts>, params: RopeParams, angles: DevicePtr) -> Self {
        Self {
            angles,
            weight: norm.map_or(0, |norm| norm.weight),
            n_rot: params.n_rot as u32,
            stride: match params.pairing {
                Pairing::Interleaved => 1,
                Pairing::Halves => (params.n_rot / 2) as u32,
            },
            eps: norm.map_or(0.0, |norm| norm.eps),
            is_on: (norm.is_some() || params.n_rot > 0).into(),
        }
    }

    pub fn is_on(&self) -> bool {
        self.is_on != 0
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct KernelParams {
    turn: Turn,
    x: DevicePtr,
    n_heads: u32,
    dim: u32,
    total: u32,
    padding: u32,
}

/// Norms and turns `rows` rows of `x` `[rows, heads.n * heads.dim]` in place. Shapes have been checked.
pub(crate) fn rope(
    cx: &Context,
    x: DevicePtr,
    rows: usize,
    heads: Heads,
    turn: Turn,
) -> Result<(), CudaError> {
    let total = (rows * heads.n) as u32;
    if total == 0 || !turn.is_on() {
        return Ok(());
    }
    let (n_heads, dim) = (heads.n as u32, heads.dim as u32);
    let params = KernelParams { turn, x, n_heads, dim, total, padding: 0 };
    let launch = Launch::linear(total.div_ceil(HEADS_PER_BLOCK), HEADS_PER_BLOCK * 32);
    cx.launch(cx.kernel(&SOURCE, "rope")?, launch, &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator;
    use kvant_codec::random::Random;

    /// Normalises and turns one head, in f64.
    fn reference(head: &[f32], norm: Option<(&[f32], f32)>, params: RopeParams, angles: &[f32]) -> Vec<f64> {
        let mut y: Vec<f64> = head.iter().map(|&v| f64::from(v)).collect();
        if let Some((weight, eps)) = norm {
            let mean = y.iter().map(|v| v * v).sum::<f64>() / y.len() as f64;
            let factor = 1.0 / (mean + f64::from(eps)).sqrt();
            y.iter_mut().zip(weight).for_each(|(v, &w)| *v *= factor * f64::from(w));
        }
        for (pair, angle) in angles.chunks(2).enumerate() {
            let (i, j) = match params.pairing {
                Pairing::Interleaved => (2 * pair, 2 * pair + 1),
                Pairing::Halves => (pair, pair + params.n_rot / 2),
            };
            let (a, b, cos, sin) = (y[i], y[j], f64::from(angle[0]), f64::from(angle[1]));
            (y[i], y[j]) = (a * cos - b * sin, a * sin + b * cos);
        }
        y
    }

    /// Both pairings, with and without a norm; heads smaller and larger than a warp, a part passed through, rows that
    /// do not fill the last block.
    #[test]
    fn heads_are_normalised_and_turned_as_in_f64() {
        let Some(cx) = emulator::context(80) else { return };
        let mut random = Random::new(2);
        for (rows, n, dim, n_rot) in
            [(1, 1, 2, 2), (3, 3, 10, 8), (1, 2, 128, 128), (2, 5, 96, 64), (1, 1, 64, 0)]
        {
            let (mut x, mut weight) = (vec![0.0; rows * n * dim], vec![0.0; dim]);
            random.fill_gaussian(&mut x, 1.0);
            random.fill_gaussian(&mut weight, 1.0);
            let angles = (0..rows * n_rot / 2)
                .flat_map(|i| [(i as f32 * 0.7).cos() * 1.5, (i as f32 * 0.7).sin() * 1.5]);
            let angles: Vec<f32> = angles.collect();
            let on_angles = emulator::upload(&cx, &angles);
            let on_weight = emulator::upload(&cx, &weight);
            for pairing in [Pairing::Interleaved, Pairing::Halves] {
                let params = RopeParams { pairing, n_rot };
                for norm in [None, Some(NormParts { weight: on_weight.ptr(), eps: 1e-6 })] {
                    let on_x = emulator::upload(&cx, &x);
                    let turn = Turn::new(norm, params, on_angles.ptr());
                    rope(&cx, on_x.ptr(), rows, Heads { n, dim }, turn).unwrap();
                    let got = emulator::download(&cx, &on_x);
                    for (index, (got, head)) in got.chunks(dim).zip(x.chunks(dim)).enumerate() {
                        let norm = norm.map(|norm| (&weight[..], norm.eps));
                        let want = reference(head, norm, params, &angles[index / n * n_rot..][..n_rot]);
                        // Of the norm: as many roundings as in its own test. Of the turn: two products and a sum, whose
                        // error is relative to the products, at most 1.5 (|a| + |b|).
                        let largest = want.iter().fold(0.0, |max: f64, v| max.max(v.abs()));
                        let roundings = ((dim.div_ceil(32) + 5) as f64 / 2.0 + 6.0) + 3.0;
                        let tol = roundings * f64::from(f32::EPSILON) * 3.0 * largest.max(1e-3);
                        for (got, want) in got.iter().zip(want) {
                            let err = (f64::from(*got) - want).abs();
                            assert!(
                                err <= tol,
                                "{rows} x {n} x {dim}, {pairing:?}, head {index}: {got} for {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}
