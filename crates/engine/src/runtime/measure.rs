//! What measurements of speed and quality need of a loaded model, and generation does not.

use std::time::Instant;

use kvant_backend::autotune::median;
use kvant_backend::{Backend, BackendError, DeviceInfo, KernelTime};
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_model::{BatchSequence, LayerSpec, LogitsFor};

use super::device_model::{DeviceModel, roll_back};
use super::pipeline::LayerPipeline;
use super::{LoadedModel, SequenceId};
use crate::error::Error;

/// Attention time of one decoded token with some stages left out.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTime {
    /// The stages that ran.
    pub stage: &'static str,
    /// Seconds per token, all layers together: the median of the repetitions.
    pub seconds: f64,
    /// Pairs of a query head and a key that were scored.
    pub pairs: usize,
}

/// Measurements on a sequence.
pub(crate) trait Measure {
    /// Appends `n` tokens with random keys and values.
    fn append_random(&self, id: SequenceId, n: usize, random: &mut Random) -> Result<(), Error>;
    /// Times attention over a sequence with stages of the cache read left out.
    fn profile_attention(&self, id: SequenceId, repetitions: usize) -> Result<Vec<StageTime>, Error>;
    /// Starts timing kernels, or stops; returns whether a device can.
    fn time_kernels(&self, is_on: bool) -> Result<bool, Error>;
    /// Returns the time of each kernel since timing started, by device.
    fn kernel_times(&self) -> Result<Vec<KernelTime>, Error>;
    /// Returns the decoded keys or values of one head, `[tokens, head_dim]`.
    fn kv_rows(&self, id: SequenceId, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error>;
}

impl<B: Backend> Measure for DeviceModel<B> {
    fn append_random(&self, id: SequenceId, n: usize, random: &mut Random) -> Result<(), Error> {
        let mut state = self.state();
        let (cache, act) = state.cache_and_activations(id);
        let part = BatchSequence {
            cache,
            n,
            logits_for: LogitsFor::None,
            lora_scales: None,
            places: None,
            tokens_before: &[],
        };
        let device = &self.device;
        let result = self.decoder.append_random(&*device.backend, &device.pool, part, act, random);
        result.map_err(|error| roll_back(error, [cache]))
    }

    fn profile_attention(&self, id: SequenceId, repetitions: usize) -> Result<Vec<StageTime>, Error> {
        let backend = &*self.device.backend;
        let stages = backend.attend_stages();
        if stages.len() < 2 {
            let DeviceInfo { name, kernels, .. } = backend.info();
            let requested = "attention in stages".to_owned();
            let has = format!("none with the {kernels} kernels of {name}");
            return Err(BackendError::Unsupported { op: "attend", requested, has }.into());
        }
        let layers = self.decoder.layers();
        let mut seconds = vec![Vec::new(); stages.len()];
        let mut random = Random::new(1);
        let widest = |width: fn(&LayerSpec) -> usize| layers.iter().map(width).max().unwrap_or(0);
        let mut values = vec![0.0; widest(LayerSpec::n_q)];
        random.fill_gaussian(&mut values, 1.0);
        let mut q = backend.buffer(values.len())?;
        backend.write(&mut q, &values)?;
        let mut out = backend.buffer(widest(LayerSpec::n_out))?;
        let mut state = self.state();
        let (cache, _) = state.cache_and_activations(id);
        let tokens = cache.len();
        let attend = layers.iter().filter(|layer| layer.attends());
        let pairs = tokens * attend.map(|layer| layer.heads.n_heads).sum::<usize>();
        // Stages alternate, so that background load of the machine affects all of them alike.
        for repetition in 0..=repetitions {
            for (stage, seconds) in seconds.iter_mut().enumerate() {
                let started = Instant::now();
                for (index, layer) in layers.iter().enumerate() {
                    let Some(kv) = self.decoder.kv_layer(index) else { continue };
                    let params = layer.attend_params();
                    let part = cache.part(kv, cache.last_rows(1), 0);
                    backend.attend_staged(stage, &params, &[part], &q, None, &mut out)?;
                }
                backend.finish()?;
                // The first round warms up.
                if repetition > 0 {
                    seconds.push(started.elapsed().as_secs_f64());
                }
            }
        }
        let times = stages.iter().zip(seconds);
        Ok(times.map(|(stage, seconds)| StageTime { stage, seconds: median(seconds), pairs }).collect())
    }

    fn time_kernels(&self, is_on: bool) -> Result<bool, Error> {
        Ok(self.device.backend.time_kernels(is_on)?)
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>, Error> {
        Ok(self.device.backend.kernel_times()?)
    }

    fn kv_rows(&self, id: SequenceId, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        let mut state = self.state();
        let (cache, _) = state.cache_and_activations(id);
        Ok(cache.decoded_rows(&*self.device.backend, layer, head, side)?)
    }
}

impl Measure for LayerPipeline {
    fn append_random(&self, id: SequenceId, n: usize, random: &mut Random) -> Result<(), Error> {
        self.parts().try_for_each(|(_, part)| part.append_random(id, n, random))
    }

    fn profile_attention(&self, _: SequenceId, _: usize) -> Result<Vec<StageTime>, Error> {
        let name = &self.properties().info.name;
        let (requested, has) = ("attention in stages".to_owned(), format!("none on {name}"));
        Err(BackendError::Unsupported { op: "attend", requested, has }.into())
    }

    fn time_kernels(&self, is_on: bool) -> Result<bool, Error> {
        let parts: Result<Vec<bool>, Error> =
            self.parts().map(|(_, part)| part.time_kernels(is_on)).collect();
        Ok(parts?.contains(&true))
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>, Error> {
        let parts: Result<Vec<_>, Error> = self.parts().map(|(_, part)| part.kernel_times()).collect();
        Ok(parts?.concat())
    }

    fn kv_rows(&self, id: SequenceId, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        let part = self.parts().take_while(|(first, _)| *first <= layer).last();
        let (first, part) = part.expect("a model has at least one part");
        part.kv_rows(id, layer - first, head, side)
    }
}
