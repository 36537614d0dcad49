//! A model, or a part of one, on a device, whichever device it is.
//!
//! The types of weights, activations and pages are a device's own. They meet here and nowhere above: a model holds a
//! [`Loaded`], a session a [`Sequence`], and each step crosses that border once.

use std::any::Any;
use std::sync::Arc;

use kvant_backend::{Backend, Candidate, DeviceInfo, KernelChoice};
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_gguf::Gguf;
use kvant_kv::{Cache, KvError, KvShape, Plan, StreamImage};
use kvant_model::{Activations, Config, Decoder, Entry, Part, Want, Weights};

use crate::Error;

/// Tokens that go through the layers together while a prompt is read.
pub(crate) const MAX_ROWS: usize = 512;
/// Memory of a device that weights and cache leave to the scratch of its ops, in bytes.
const KEPT_FREE: usize = 256 << 20;

/// The weights of a model, or of a part of one, on a device.
pub(crate) trait Loaded: Send + Sync {
    /// The device.
    fn info(&self) -> DeviceInfo;
    /// The kernel for every op and type.
    fn kernel_choices(&self) -> Vec<KernelChoice>;
    /// The hyper-parameters.
    fn config(&self) -> &Config;
    /// The KV heads of the layers that are here.
    fn kv_shape(&self) -> KvShape;
    /// Size of the vocabulary.
    fn n_vocab(&self) -> usize;
    /// Bytes of weights in the file's types.
    fn weight_bytes(&self) -> usize;
    /// Bytes of weights that one decoded token reads.
    fn weight_bytes_per_token(&self) -> usize;
    /// An empty sequence.
    fn start(self: Arc<Self>, plan: Plan, room: Room) -> Result<Box<dyn Sequence>, Error>;
    /// A sequence from the images of another, asked for in the order of [`Sequence::images`] with their number.
    fn restore(
        self: Arc<Self>,
        plan: Plan,
        n_ctx: usize,
        next: &mut dyn FnMut(usize) -> Result<StreamImage, Error>,
    ) -> Result<Box<dyn Sequence>, Error>;
}

/// How many tokens a context is to hold.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Room {
    /// As many, or an error.
    Exactly(usize),
    /// As many as the device's memory holds, up to this.
    UpTo(usize),
}

/// A sequence of tokens on a device: its cache, and the activations of a step.
pub(crate) trait Sequence: Send + Sync {
    /// Runs what enters after what the cache holds. After an error the cache holds what it held before.
    fn step(&mut self, entry: Entry<'_>, want: Want) -> Result<(), Error>;
    /// [`Sequence::step`] of this sequence and others of the same model, a row for each in this order, in one pass over the
    /// weights. Each then has its own logits.
    fn step_together(
        &mut self,
        others: &mut [&mut dyn Sequence],
        entry: Entry<'_>,
        want: Want,
    ) -> Result<(), Error>;
    /// Copies what the layers of the last step have left of the residual stream into `out` `[rows, n_embd]`.
    fn residual(&self, out: &mut [f32]) -> Result<(), Error>;
    /// Copies the logits of the `row`-th wanted row of the last step into `out` `[n_vocab]`.
    fn logits(&self, row: usize, out: &mut [f32]) -> Result<(), Error>;
    /// The `k` likeliest tokens after the `row`-th wanted row of the last step into `out`.
    fn top_k(&self, row: usize, k: usize, out: &mut Vec<Candidate>) -> Result<(), Error>;
    /// Waits until the device has done what the steps asked for.
    fn finish(&self) -> Result<(), Error>;
    /// Appends `rows` tokens with random keys and values.
    fn append_random(&mut self, rows: usize, random: &mut Random) -> Result<(), Error>;
    /// Forgets every token but the first `n`.
    fn truncate(&mut self, n: usize) -> Result<(), Error>;
    /// Forgets everything.
    fn clear(&mut self);
    /// A second sequence that shares the full pages until one side writes.
    fn fork(&self) -> Result<Box<dyn Sequence>, Error>;
    /// Cached keys or values of one head as numbers, `[tokens, head_dim]`.
    fn rows(&self, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error>;
    /// Every stream of the cache, bit for bit.
    fn images(&self) -> Box<dyn Iterator<Item = Result<StreamImage, KvError>> + '_>;
    /// This, for what only one kind of device can do.
    fn as_any(&self) -> &dyn Any;
    /// As [`Sequence::as_any`].
    fn as_any_mut(&mut self) -> &mut dyn Any;
    /// What the cache stores.
    fn plan(&self) -> &Plan;
    /// Tokens stored.
    fn len(&self) -> usize;
    /// Tokens that fit.
    fn n_ctx(&self) -> usize;
    /// Changes how many tokens fit; at least those that are stored do.
    fn set_n_ctx(&mut self, n_ctx: usize);
    /// Bytes the cache has allocated.
    fn n_bytes(&self) -> usize;
    /// Bytes that an f16 cache of the same tokens would have allocated.
    fn f16_bytes(&self) -> usize;
}

/// A device and the weights on it.
pub(crate) struct On<B: Backend> {
    pub(crate) device: B,
    decoder: Decoder<B>,
}

/// Loads `part` of a model onto `device`; `progress` is told the fraction done.
pub(crate) fn load<B: Backend>(
    device: B,
    config: Config,
    part: &Part,
    gguf: &Arc<Gguf>,
    progress: &mut dyn FnMut(f32),
) -> Result<Arc<dyn Loaded>, Error> {
    check_weights(&device, part, config.n_layers, gguf)?;
    let weights = Weights::load(gguf, &config, part, &device, progress)?;
    Ok(Arc::new(On { device, decoder: Decoder::new(config, weights) }))
}

/// Refuses weights that do not fit before any of them is copied.
fn check_weights<B: Backend>(device: &B, part: &Part, n_layers: usize, gguf: &Gguf) -> Result<(), Error> {
    let needed = part.n_bytes(gguf);
    let Some(usable) = usable_bytes(device)? else { return Ok(()) };
    if needed <= usable {
        return Ok(());
    }
    let last =
        |n| if n < n_layers { Part::split(n_layers, n_layers - n)[1].n_bytes(gguf) } else { usize::MAX };
    let fitting = largest(n_layers, |n| n == 0 || last(n) <= usable);
    Err(Error::WeightMemory { device: device.info().name, needed, usable, fitting, n_layers })
}

/// Memory for weights and caches, where the device has memory of its own.
fn usable_bytes<B: Backend>(device: &B) -> Result<Option<usize>, Error> {
    Ok(device.free_bytes()?.map(|free| free.saturating_sub(KEPT_FREE)))
}

impl<B: Backend> On<B> {
    fn activations(&self, n_ctx: usize) -> Result<Activations<B>, Error> {
        Ok(self.decoder.activations(&self.device, MAX_ROWS.min(n_ctx))?)
    }

    /// The tokens of context there is memory for.
    fn fit(&self, plan: &mut Plan, room: Room) -> Result<usize, Error> {
        let (Room::Exactly(wanted) | Room::UpTo(wanted)) = room;
        let Some(usable) = usable_bytes(&self.device)? else { return Ok(wanted) };
        let shape = self.decoder.kv_shape();
        let needed = plan.n_bytes(&shape, wanted);
        if needed <= usable {
            return Ok(wanted);
        }
        let fitting = largest(wanted, |tokens| plan.n_bytes(&shape, tokens) <= usable);
        match room {
            Room::UpTo(_) if fitting > 0 => {
                plan.notes.push(format!("context of {fitting} tokens: {wanted} do not fit"));
                Ok(fitting)
            }
            _ => {
                let device = self.device.info().name;
                Err(Error::CacheMemory { device, tokens: wanted, needed, usable, fitting })
            }
        }
    }
}

/// The largest number up to `most` for which `holds`, which is true up to some number and false from there on.
fn largest(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = high - (high - low) / 2;
        if holds(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

impl<B: Backend> Loaded for On<B> {
    fn info(&self) -> DeviceInfo {
        self.device.info()
    }

    fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.device.kernel_choices()
    }

    fn config(&self) -> &Config {
        self.decoder.config()
    }

    fn kv_shape(&self) -> KvShape {
        self.decoder.kv_shape()
    }

    fn n_vocab(&self) -> usize {
        self.decoder.n_vocab()
    }

    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    fn weight_bytes_per_token(&self) -> usize {
        self.decoder.weight_bytes_per_token()
    }

    fn start(self: Arc<Self>, mut plan: Plan, room: Room) -> Result<Box<dyn Sequence>, Error> {
        let (Room::Exactly(wanted) | Room::UpTo(wanted)) = room;
        let act = self.activations(wanted)?;
        let n_ctx = self.fit(&mut plan, room)?;
        let cache = Cache::new(&self.device, &self.decoder.kv_shape(), plan, n_ctx)?;
        Ok(Box::new(Running { on: self, cache, act }))
    }

    fn restore(
        self: Arc<Self>,
        plan: Plan,
        n_ctx: usize,
        next: &mut dyn FnMut(usize) -> Result<StreamImage, Error>,
    ) -> Result<Box<dyn Sequence>, Error> {
        let shape = self.decoder.kv_shape();
        let cache = Cache::from_images(&self.device, &shape, plan, n_ctx, next)?;
        let act = self.activations(n_ctx)?;
        Ok(Box::new(Running { on: self, cache, act }))
    }
}

/// Sequences that are all of type `T`.
pub(crate) fn downcast<'a, T: 'static>(
    sequences: &'a mut [&mut dyn Sequence],
) -> Result<Vec<&'a mut T>, Error> {
    let each = sequences
        .iter_mut()
        .map(|sequence| sequence.as_any_mut().downcast_mut().ok_or_else(of_another_model));
    each.collect()
}

fn of_another_model() -> Error {
    let (expected, got) = ("sessions of one model".to_owned(), "one of another".to_owned());
    Error::Setting { name: "sessions", expected, got }
}

/// A sequence on a device of type `B`.
pub(crate) struct Running<B: Backend> {
    pub(crate) on: Arc<On<B>>,
    pub(crate) cache: Cache<B::Page>,
    act: Activations<B>,
}

impl<B: Backend> Sequence for Running<B> {
    fn step(&mut self, entry: Entry<'_>, want: Want) -> Result<(), Error> {
        let On { device, decoder } = &*self.on;
        let before = self.cache.len();
        let result = decoder.step(device, &mut self.cache, &mut self.act, entry, want);
        if let Err(error) = result {
            // Layers that had appended already give the tokens back, so that all of them agree again.
            self.cache.truncate(device, before)?;
            return Err(error.into());
        }
        Ok(())
    }

    fn step_together(
        &mut self,
        others: &mut [&mut dyn Sequence],
        entry: Entry<'_>,
        want: Want,
    ) -> Result<(), Error> {
        let Self { on, cache, act } = self;
        let On { device, decoder } = &**on;
        let mut others = downcast::<Self>(others)?;
        if others.iter().any(|other| !Arc::ptr_eq(&other.on, on)) {
            return Err(of_another_model());
        }
        let caches = std::iter::once(cache).chain(others.iter_mut().map(|other| &mut other.cache));
        let mut caches: Vec<_> = caches.collect();
        let before: Vec<_> = caches.iter().map(|cache| cache.len()).collect();
        if let Err(error) = decoder.step_together(device, &mut caches, act, entry, want) {
            for (cache, before) in caches.into_iter().zip(before) {
                cache.truncate(device, before)?;
            }
            return Err(error.into());
        }
        if want != Want::Nothing {
            for (row, other) in (1..).zip(others) {
                decoder.copy_logits(device, act, row, &mut other.act)?;
            }
        }
        Ok(())
    }

    fn residual(&self, out: &mut [f32]) -> Result<(), Error> {
        Ok(self.on.decoder.residual(&self.on.device, &self.act, out)?)
    }

    fn logits(&self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        Ok(self.on.decoder.logits(&self.on.device, &self.act, row, out)?)
    }

    fn top_k(&self, row: usize, k: usize, out: &mut Vec<Candidate>) -> Result<(), Error> {
        Ok(self.on.decoder.top_k(&self.on.device, &self.act, row, k, out)?)
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(self.on.device.finish()?)
    }

    fn append_random(&mut self, rows: usize, random: &mut Random) -> Result<(), Error> {
        let On { device, decoder } = &*self.on;
        Ok(decoder.append_random(device, &mut self.cache, &mut self.act, rows, random)?)
    }

    fn truncate(&mut self, n: usize) -> Result<(), Error> {
        Ok(self.cache.truncate(&self.on.device, n)?)
    }

    fn clear(&mut self) {
        self.cache.clear();
    }

    fn fork(&self) -> Result<Box<dyn Sequence>, Error> {
        let act = self.on.activations(self.cache.n_ctx())?;
        Ok(Box::new(Self { on: Arc::clone(&self.on), cache: self.cache.fork()?, act }))
    }

    fn rows(&self, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        Ok(self.cache.rows(&self.on.device, layer, head, side)?)
    }

    fn images(&self) -> Box<dyn Iterator<Item = Result<StreamImage, KvError>> + '_> {
        Box::new(self.cache.images(&self.on.device))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn plan(&self) -> &Plan {
        self.cache.plan()
    }

    fn len(&self) -> usize {
        self.cache.len()
    }

    fn n_ctx(&self) -> usize {
        self.cache.n_ctx()
    }

    fn set_n_ctx(&mut self, n_ctx: usize) {
        self.cache.set_n_ctx(n_ctx);
    }

    fn n_bytes(&self) -> usize {
        self.cache.n_bytes()
    }

    fn f16_bytes(&self) -> usize {
        self.cache.f16_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_that_holds_is_found() {
        for (most, limit) in [(0, 5), (1, 0), (1, 1), (100, 0), (100, 37), (100, 99), (100, 100), (100, 500)]
        {
            assert_eq!(largest(most, |n| n <= limit), most.min(limit));
        }
    }
}
