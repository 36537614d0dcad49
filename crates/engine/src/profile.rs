//! Where the time of decode attention goes: the stages of reading the cache, left out one by one.

use std::time::Instant;

use kvant_backend::{AttendParams, Backend, BackendError};
use kvant_codec::random::Random;
use kvant_cpu::{CpuDevice, Stage};

use crate::runtime::Running;
use crate::{Error, Session};

/// What attention of one decoded token takes, with some stages left out.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTime {
    /// What was still done.
    pub stage: &'static str,
    /// Seconds per token, all layers together: the median of the repetitions.
    pub seconds: f64,
    /// Pairs of a query head and a key that were met.
    pub pairs: usize,
}

impl Session {
    /// Times the attention of one token over the whole cache, layer after layer, for each stage: constant codes and
    /// scales; scales; all bytes; low bits; everything. The cache must hold at least one token, and stays as it is.
    ///
    /// # Errors
    /// On a device or kernel set without stages.
    pub fn profile_attention(&self, repetitions: usize) -> Result<Vec<StageTime>, Error> {
        let c = self.model().config();
        let Some(running) = self.sequence().as_any().downcast_ref::<Running<CpuDevice>>() else {
            let (wanted, has) = (self.model().device().name, "the cpu".to_owned());
            return Err(BackendError::Unsupported { op: "attention in stages", wanted, has }.into());
        };
        let device = &running.on.device;
        let tokens = self.tokens().len();
        assert!(tokens > 0, "nothing to attend to");
        let params = AttendParams {
            n_heads: c.n_heads,
            n_kv_heads: c.n_kv_heads,
            k_head_dim: c.k_head_dim,
            v_head_dim: c.v_head_dim,
            scale: 1.0 / (c.k_head_dim as f32).sqrt(),
            first_row: 0,
            start: tokens - 1,
            rows: 1,
        };
        let mut values = vec![0.0; c.n_heads * c.k_head_dim];
        Random::new(1).fill_gaussian(&mut values, 1.0);
        let mut q = device.buffer(values.len())?;
        device.write(&mut q, &values)?;
        let mut out = device.buffer(c.n_heads * c.v_head_dim)?;
        let mut time = |stage: Stage| {
            let started = Instant::now();
            for layer in 0..c.n_layers {
                device.attend_staged(stage, &params, &q, running.cache.layer(layer), &mut out)?;
            }
            Ok::<_, Error>(started.elapsed().as_secs_f64())
        };
        // Stages take turns, so that what else the machine does meets them all.
        let mut seconds = vec![Vec::with_capacity(repetitions); Stage::ALL.len()];
        for repetition in 0..=repetitions {
            for (stage, seconds) in Stage::ALL.into_iter().zip(&mut seconds) {
                let taken = time(stage)?;
                // The first round warms up.
                if repetition > 0 {
                    seconds.push(taken);
                }
            }
        }
        let pairs = tokens * c.n_heads * c.n_layers;
        let median = |mut seconds: Vec<f64>| {
            seconds.sort_by(f64::total_cmp);
            seconds[seconds.len() / 2]
        };
        let times = Stage::ALL.into_iter().zip(seconds);
        Ok(times
            .map(|(stage, seconds)| StageTime { stage: stage.name(), seconds: median(seconds), pairs })
            .collect())
    }
}
