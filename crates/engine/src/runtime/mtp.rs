//! The layer that predicts the token after the next, beside the model on its device.
//!
//! It follows each sequence with a cache of its own: at the place of a token lies what it made of that and of the stream of the token before, which the
//! model's step leaves. It reads a prompt with the model, and tokens of an answer when it is asked what comes next. What it says changes how long an
//! answer takes and nothing else, so that a sequence which it cannot follow (one that was restored, or ran out of memory) is just not guessed for.

use std::collections::HashMap;
use std::sync::Arc;

use kvant_backend::{Backend, Candidate, Page, TOKENS_PER_BLOCK};
use kvant_kv::{BlockKey, Cache, KvShape, Layout, Plan, Pool};
use kvant_model::{Activations, Decoder, Entry, Outputs, StepPart, Want, Weights};
use kvant_text::guess::MOST_GUESSES;

use super::{MAX_ROWS, SequenceId, StepRow};
use crate::Error;

/// The most tokens that wait to be read in company, as long as nobody asks what comes next, and how many of more do: they may be on trial.
const MOST_WAITING: usize = 16;
const ON_TRIAL: usize = MOST_GUESSES + 1;
/// The most tokens that may lack the stream before them, where a sequence begins with what others hold: those of a block that was not
/// complete here when it was for the model.
const MOST_WITHOUT: usize = TOKENS_PER_BLOCK;

/// Told a token that may come next, and by how much its logit leads; says whether to predict another one.
pub(crate) type OnPrediction<'a> = &'a mut dyn FnMut(u32, f32) -> bool;

/// The first of the likeliest tokens, and by how much its logit leads.
pub(crate) fn leader(likeliest: &[Candidate]) -> (u32, f32) {
    match likeliest {
        [first, second, ..] => (first.id, first.logit - second.logit),
        [first] => (first.id, f32::INFINITY),
        [] => unreachable!("a vocabulary has tokens"),
    }
}

/// The layer, and the sequences that it follows.
pub(super) struct Mtp<B: Backend> {
    layer: Layer<B>,
    followed: HashMap<SequenceId, Followed<B::Page>>,
    /// The streams of a step, `[rows, n_embd]`.
    streams: Vec<f32>,
}

/// What predicts.
struct Layer<B: Backend> {
    decoder: Decoder<B>,
    act: Activations<B>,
    /// Logits of a row.
    logits: B::Buffer,
    likeliest: Vec<Candidate>,
}

/// A sequence as far as the layer has read it.
struct Followed<P: Page> {
    cache: Cache<P>,
    /// The tokens behind those, which wait to be read.
    waiting: Vec<u32>,
    /// The stream before each of them, and the one before the token that comes next, `[waiting + 1, n_embd]`.
    streams: Vec<f32>,
}

impl<B: Backend> Mtp<B> {
    /// The layer of a model whose other weights are these; `None` where it has none.
    pub fn new(device: &B, model: &Decoder<B>, weights: Option<Weights<B>>) -> Result<Option<Self>, Error> {
        let Some((config, weights)) = model.config().of_mtp().zip(weights) else { return Ok(None) };
        let decoder = Decoder::new(config, weights).with_extra(model.extra());
        let act = decoder.activations(device, MAX_ROWS)?;
        let logits = device.buffer(decoder.n_vocab())?;
        let layer = Layer { decoder, act, logits, likeliest: Vec::new() };
        Ok(Some(Self { layer, followed: HashMap::new(), streams: Vec::new() }))
    }

    /// Bytes of its weights, but for what is the model's too.
    pub fn weight_bytes(&self) -> usize {
        self.layer.decoder.weight_bytes()
    }

    /// Where what it keeps lies, beside what a cache with `plan` holds: of the types of the last layer that attends.
    pub fn layout(&self, plan: &Plan) -> Layout {
        let shape = self.layer.decoder.kv_shape();
        Layout::new(&shape, own_plan(&shape, plan))
    }

    /// Follows a sequence from its beginning.
    pub fn start(&mut self, id: SequenceId, plan: &Plan, n_ctx: usize) {
        let cache = Cache::new(Arc::new(self.layout(plan)), n_ctx);
        self.followed.insert(id, Followed::new(cache, self.layer.n_embd()));
    }

    /// Whatever follows `from` follows `to` as well.
    pub fn fork(&mut self, from: SequenceId, to: SequenceId) {
        if let Some(followed) = self.followed.get(&from).cloned() {
            self.followed.insert(to, followed);
        }
    }

    /// Lets go of a sequence.
    pub fn release(&mut self, id: SequenceId) {
        self.followed.remove(&id);
    }

    /// Changes the cache of a sequence as the model's is changed.
    pub fn with(&mut self, id: SequenceId, f: impl FnOnce(&mut Cache<B::Page>)) {
        if let Some(followed) = self.followed.get_mut(&id) {
            f(&mut followed.cache);
        }
    }

    /// Forgets every token but the first `n`: those behind them that come again are the same, or this is called again.
    pub fn cut(&mut self, id: SequenceId, n: usize) {
        if let Some(followed) = self.followed.get_mut(&id) {
            followed.cut(n, self.layer.n_embd());
        }
    }

    /// Remembers this place: see [`Cache::mark`].
    pub fn mark(&mut self, device: &B, pool: &Pool<B::Page>, id: SequenceId) {
        let Self { layer, followed, .. } = self;
        let Some(one) = followed.get_mut(&id) else { return };
        match layer.read(device, pool, one, one.waiting.len()) {
            Ok(()) => one.cache.mark(),
            // No memory, most often.
            Err(_) => _ = followed.remove(&id),
        }
    }

    /// Makes known what others can begin with.
    pub fn publish(&mut self, pool: &Pool<B::Page>, id: SequenceId, tokens: &[u32]) {
        self.with(id, |cache| cache.publish(pool, tokens));
    }

    /// Says what the first block follows on, see [`Cache::set_root`]: another than the model's.
    pub fn set_root(&mut self, id: SequenceId, root: BlockKey) {
        self.with(id, |cache| cache.set_root(root.then(&[])));
    }

    /// Begins with what others hold of `tokens`, all of which the model's cache has.
    pub fn attach(&mut self, pool: &Pool<B::Page>, id: SequenceId, tokens: &[u32]) {
        let Some(followed) = self.followed.get_mut(&id) else { return };
        // The last of so many is never taken over.
        let held = [tokens, &[0]].concat();
        let n = followed.cache.attach(pool, &held);
        followed.wait_without(&tokens[n..], self.layer.n_embd());
        if tokens.len() - n > MOST_WITHOUT {
            self.followed.remove(&id);
        }
    }

    /// Bytes that a sequence has allocated.
    pub fn n_bytes(&self, id: SequenceId) -> usize {
        self.followed.get(&id).map_or(0, |followed| followed.cache.n_bytes())
    }

    /// Takes note of a step that the model has taken: its rows entered as `tokens`, those of each sequence at its place in `starts`.
    pub fn stepped(
        &mut self,
        (device, pool): (&B, &Pool<B::Page>),
        model: (&Decoder<B>, &mut Activations<B>),
        (batch, starts): (&[StepRow], &[usize]),
        tokens: &[u32],
    ) -> Result<(), Error> {
        if !batch.iter().any(|row| self.followed.contains_key(&row.id)) {
            return Ok(());
        }
        let n_embd = self.layer.n_embd();
        self.streams.resize(tokens.len() * n_embd, 0.0);
        model.0.stream(device, model.1, tokens.len(), &mut self.streams)?;
        let mut first = 0;
        for (row, &start) in batch.iter().zip(starts) {
            let rows = first..first + row.n;
            first = rows.end;
            let Some(followed) = self.followed.get_mut(&row.id) else { continue };
            let streams = &self.streams[rows.start * n_embd..rows.end * n_embd];
            let is_followed = followed.see(start, &tokens[rows], streams)
                && match followed.waiting.len() {
                    n if n > MOST_WAITING => self.layer.read(device, pool, followed, n - ON_TRIAL).is_ok(),
                    _ => true,
                };
            if !is_followed {
                self.followed.remove(&row.id);
            }
        }
        Ok(())
    }

    /// Tells what may come behind `next`, which comes behind the `at` tokens of a sequence, one token after the other as long as `on_prediction` likes.
    pub fn predict(
        &mut self,
        (device, pool): (&B, &Pool<B::Page>),
        (id, at): (SequenceId, usize),
        next: u32,
        on_prediction: OnPrediction<'_>,
    ) {
        let Self { layer, followed, .. } = self;
        let Some(one) = followed.get_mut(&id).filter(|one| one.len() == at) else { return };
        if layer.predict(device, pool, one, next, on_prediction).is_err() {
            followed.remove(&id);
        }
    }
}

/// The plan of what the layer keeps.
fn own_plan(shape: &KvShape, plan: &Plan) -> Plan {
    let n_kv_heads = shape.layers[0].n_kv_heads;
    let last = plan.types.last().expect("a model whose layers attend");
    let types = match last.len() == n_kv_heads {
        true => last.clone(),
        false => vec![last[0]; n_kv_heads],
    };
    Plan { types: vec![types], balance: None, notes: Vec::new(), ..plan.clone() }
}

impl<P: Page> Clone for Followed<P> {
    fn clone(&self) -> Self {
        Self { cache: self.cache.clone(), waiting: self.waiting.clone(), streams: self.streams.clone() }
    }
}

impl<P: Page> Followed<P> {
    fn new(cache: Cache<P>, n_embd: usize) -> Self {
        Self { cache, waiting: Vec::new(), streams: vec![0.0; n_embd] }
    }

    /// Tokens of the sequence.
    fn len(&self) -> usize {
        self.cache.len() + self.waiting.len()
    }

    /// Has `tokens` wait, whose streams nobody knows any more.
    fn wait_without(&mut self, tokens: &[u32], n_embd: usize) {
        self.waiting = tokens.to_vec();
        self.streams = vec![0.0; (tokens.len() + 1) * n_embd];
    }

    fn cut(&mut self, n: usize, n_embd: usize) {
        match n.checked_sub(self.cache.len()) {
            Some(waiting) => {
                self.waiting.truncate(waiting);
                self.streams.truncate((self.waiting.len() + 1) * n_embd);
            }
            None => {
                self.cache.cut(n);
                self.wait_without(&[], n_embd);
            }
        }
    }

    /// Takes note of tokens at place `start` and of the streams that they left, some of which it may have seen before. Whether nothing is missing
    /// between these and those that it knows.
    fn see(&mut self, start: usize, tokens: &[u32], streams: &[f32]) -> bool {
        let n_embd = streams.len() / tokens.len();
        let Some(known) = self.len().checked_sub(start) else { return false };
        let new = tokens.get(known..).unwrap_or_default();
        self.waiting.extend_from_slice(new);
        if let Some(last) = known.checked_sub(1)
            && let Some(stream) = streams.chunks_exact(n_embd).nth(last)
        {
            let at = self.streams.len() - n_embd;
            self.streams[at..].copy_from_slice(stream);
        }
        self.streams.extend_from_slice(streams.get(known * n_embd..).unwrap_or_default());
        true
    }

    /// Takes note of the first `n` waiting tokens having been read.
    fn have_read(&mut self, n: usize, n_embd: usize) {
        self.waiting.drain(..n);
        self.streams.drain(..n * n_embd);
    }
}

impl<B: Backend> Layer<B> {
    fn n_embd(&self) -> usize {
        self.decoder.config().n_embd
    }

    /// Reads the first `n` tokens that wait.
    fn read(
        &mut self,
        device: &B,
        pool: &Pool<B::Page>,
        followed: &mut Followed<B::Page>,
        n: usize,
    ) -> Result<(), Error> {
        let n_embd = self.n_embd();
        let Followed { cache, waiting, streams } = followed;
        for (tokens, streams) in waiting[..n].chunks(MAX_ROWS).zip(streams.chunks(MAX_ROWS * n_embd)) {
            let streams = &streams[..tokens.len() * n_embd];
            self.step(device, pool, cache, (tokens, streams), Want::Nothing)?;
        }
        followed.have_read(n, n_embd);
        Ok(())
    }

    fn predict(
        &mut self,
        device: &B,
        pool: &Pool<B::Page>,
        followed: &mut Followed<B::Page>,
        next: u32,
        on_prediction: OnPrediction<'_>,
    ) -> Result<(), Error> {
        let n_embd = self.n_embd();
        let Followed { cache, waiting, streams } = followed;
        let n_most = cache.try_on(device, pool, waiting.len(), MOST_GUESSES);
        if n_most == 0 {
            return Ok(());
        }
        let n_waiting = waiting.len();
        let len = cache.len() + n_waiting;
        waiting.push(next);
        let step = self.step(device, pool, cache, (waiting, streams), Want::Last);
        waiting.pop();
        step?;
        let mut rows = n_waiting + 1;
        let mut stream = vec![0.0; n_embd];
        for n_predicted in 1.. {
            let (token, lead) = self.likeliest(device)?;
            if !on_prediction(token, lead) || n_predicted == n_most {
                break;
            }
            self.decoder.stream(device, &mut self.act, rows, &mut stream)?;
            self.step(device, pool, cache, (&[token], &stream), Want::Last)?;
            rows = 1;
        }
        // What was read of predictions has streams that are predictions too.
        cache.cut(len);
        followed.have_read(n_waiting, n_embd);
        Ok(())
    }

    /// The likeliest token of the last row, and by how much its logit leads.
    fn likeliest(&mut self, device: &B) -> Result<(u32, f32), Error> {
        device.top_k(&self.logits, 0, self.decoder.n_vocab(), 2, &mut self.likeliest)?;
        Ok(leader(&self.likeliest))
    }

    fn step(
        &mut self,
        device: &B,
        pool: &Pool<B::Page>,
        cache: &mut Cache<B::Page>,
        (tokens, streams): (&[u32], &[f32]),
        want: Want,
    ) -> Result<(), Error> {
        let out = Outputs::logits((want != Want::Nothing).then_some(&mut self.logits));
        let part = StepPart { cache, n: tokens.len(), want, strengths: None, places: None };
        let entry = Entry::Pairs(tokens, streams);
        let step = self.decoder.step(device, pool, &mut [part], &mut self.act, entry, out);
        step.map_err(|error| super::on::take_back(error, [cache]))
    }
}
