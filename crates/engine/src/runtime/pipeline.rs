//! A model whose layers are split over devices (layer pipeline): the residual stream passes from
//! one to the next through host memory, `n_embd` values per token.

use std::sync::{Arc, Mutex, PoisonError};

use kvant_backend::{BackendError, DeviceInfo, KernelChoice};
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_gguf::Gguf;
use kvant_kv::{BlockKey, CacheState, KvShape, Plan};
use kvant_model::{Config, Entry, LogitsFor, OnQueries, SoftTokens};

use super::{BatchEntry, ContextSize, KvCaches, LoadedModel, Logits, SequenceId};
use crate::Error;
use crate::profile::StageTime;

/// The parts of a model, in the order of their layers, each on a device.
pub(crate) struct LayerPipeline {
    parts: Vec<Arc<dyn LoadedModel>>,
    /// The residual stream between two parts, `[rows, n_embd]`.
    boundary: Mutex<Vec<f32>>,
}

impl LayerPipeline {
    /// Creates a model from its parts.
    pub fn new(parts: Vec<Arc<dyn LoadedModel>>) -> Self {
        assert!(!parts.is_empty(), "a model has at least one part");
        Self { parts, boundary: Mutex::default() }
    }

    /// Iterates over the parts, each with the number of layers before it.
    fn parts(&self) -> impl Iterator<Item = (usize, &Arc<dyn LoadedModel>)> {
        self.parts.iter().scan(0, |before, part| {
            let first = *before;
            *before += part.kv_shape().layers.len();
            Some((first, part))
        })
    }

    /// Returns the sum of `value` over the parts.
    fn sum(&self, value: impl Fn(&dyn LoadedModel) -> usize) -> usize {
        self.parts.iter().map(|part| value(&**part)).sum()
    }

    /// Returns the plan of the layers of a part that begins with layer `first`.
    fn own(plan: &Plan, first: usize, part: &Arc<dyn LoadedModel>) -> Plan {
        plan.part(first..first + part.kv_shape().layers.len())
    }

    /// Runs a step through the parts; the output of one enters the next.
    fn forward(
        &self,
        batch: &[BatchEntry],
        entry: Entry<'_>,
        mut left: Option<&mut Vec<f32>>,
        mut queries: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error> {
        let mut residual = self.boundary.lock().unwrap_or_else(PoisonError::into_inner);
        let without_logits: Vec<_> =
            batch.iter().map(|row| BatchEntry { logits_for: LogitsFor::None, ..row.clone() }).collect();
        let (mut previous, mut logits) = (Vec::new(), None);
        for (index, (first, part)) in self.parts().enumerate() {
            let is_last = index + 1 == self.parts.len();
            let entry = if index == 0 { entry } else { Entry::Residual(&previous) };
            let (batch, left) =
                if is_last { (batch, left.take()) } else { (&without_logits[..], Some(&mut *residual)) };
            // A part numbers its own layers from 0.
            let mut on_queries =
                queries.as_mut().map(|on_queries| |layer: usize, q: &[f32]| on_queries(first + layer, q));
            logits = part.step(batch, entry, left, on_queries.as_mut().map(|on_queries| on_queries as _))?;
            previous.clone_from(&residual);
        }
        Ok(logits)
    }
}

impl LoadedModel for LayerPipeline {
    fn info(&self) -> DeviceInfo {
        let infos: Vec<_> = self.parts.iter().map(|part| part.info()).collect();
        let named = infos.iter().zip(&self.parts);
        let named =
            named.map(|(info, part)| format!("{} ({} layers)", info.name, part.kv_shape().layers.len()));
        let kernels = infos.iter().map(|info| info.kernels.clone());
        let joined = |parts: Vec<String>| parts.join(" + ");
        let (name, kernels) = (joined(named.collect()), joined(kernels.collect()));
        let is_batch_invariant = infos.iter().all(|info| info.is_batch_invariant);
        let checks_finite_rows = infos.iter().all(|info| info.checks_finite_rows);
        DeviceInfo { name, kernels, is_batch_invariant, checks_finite_rows, ..infos[0].clone() }
    }

    fn kernel_choices(&self) -> Vec<KernelChoice> {
        self.parts.iter().flat_map(|part| part.kernel_choices()).collect()
    }

    fn config(&self) -> &Config {
        self.parts[0].config()
    }

    fn kv_shape(&self) -> KvShape {
        self.config().kv_shape()
    }

    fn n_vocab(&self) -> usize {
        self.parts[0].n_vocab()
    }

    fn soft_tokens(&self) -> &Arc<SoftTokens> {
        // Tokens enter the first part.
        self.parts[0].soft_tokens()
    }

    fn weight_bytes(&self) -> usize {
        self.sum(|part| part.weight_bytes())
    }

    fn weight_bytes_per_token(&self) -> usize {
        self.sum(|part| part.weight_bytes_per_token())
    }

    fn step(
        &self,
        batch: &[BatchEntry],
        entry: Entry<'_>,
        left: Option<&mut Vec<f32>>,
        queries: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error> {
        let result = self.forward(batch, entry, left, queries);
        if result.is_err() {
            // Completed parts roll back, so that all parts hold the same tokens again.
            for row in batch {
                while let Some(shortest) = self.shortest_if_unequal(row.id) {
                    self.parts
                        .iter()
                        .for_each(|part| _ = part.truncate(row.id, shortest.min(part.state(row.id).len)));
                }
            }
        }
        result
    }

    fn load_beside(
        &self,
        config: Config,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        self.parts[0].load_beside(config, gguf, progress)
    }

    fn finish(&self) -> Result<(), Error> {
        self.parts.iter().try_for_each(|part| part.finish())
    }

    fn append_random(&self, id: SequenceId, n: usize, random: &mut Random) -> Result<(), Error> {
        self.parts.iter().try_for_each(|part| part.append_random(id, n, random))
    }

    fn profile_attention(&self, _: SequenceId, _: usize) -> Result<Vec<StageTime>, Error> {
        let (wanted, has) = ("attention in stages".to_owned(), format!("none on {}", self.info().name));
        Err(BackendError::Unsupported { op: "attend", requested: wanted, has }.into())
    }
}

impl LayerPipeline {
    /// Returns the minimum of the tokens that parts hold of a sequence, if the numbers differ.
    fn shortest_if_unequal(&self, id: SequenceId) -> Option<usize> {
        let lens = || self.parts.iter().map(|part| part.state(id).len);
        let shortest = lens().min()?;
        lens().any(|len| len != shortest).then_some(shortest)
    }
}

impl KvCaches for LayerPipeline {
    fn start(&self, id: SequenceId, mut plan: Plan, room: ContextSize) -> Result<(usize, Plan), Error> {
        let mut min_n_ctx = usize::MAX;
        for (first, part) in self.parts() {
            // A part may have shortened the context, with a note.
            let started = part.start(id, Self::own(&plan, first, part), room);
            let (n_ctx, own) = started.inspect_err(|_| self.release(id))?;
            min_n_ctx = min_n_ctx.min(n_ctx);
            plan.notes.extend(own.notes);
        }
        self.set_n_ctx(id, min_n_ctx);
        Ok((min_n_ctx, plan))
    }

    fn restore(
        &self,
        id: SequenceId,
        plan: Plan,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error> {
        let mut read = 0;
        for (first, part) in self.parts() {
            let before = read;
            let own = Self::own(&plan, first, part);
            let restored = part.restore(id, own, n_ctx, state, &mut |index| {
                read = before + index + 1;
                next(before + index)
            });
            restored.inspect_err(|_| self.release(id))?;
        }
        Ok(())
    }

    fn fork(&self, from: SequenceId, to: SequenceId) {
        self.parts.iter().for_each(|part| part.fork(from, to));
    }

    fn release(&self, id: SequenceId) {
        self.parts.iter().for_each(|part| part.release(id));
    }

    fn state(&self, id: SequenceId) -> CacheState {
        // All parts hold equal numbers of tokens, but some may code none.
        let states = self.parts.iter().map(|part| part.state(id));
        states.max_by_key(|state| (state.coded, state.mark)).expect("a model has at least one part")
    }

    fn set_n_ctx(&self, id: SequenceId, n_ctx: usize) {
        self.parts.iter().for_each(|part| part.set_n_ctx(id, n_ctx));
    }

    fn max_rows(&self, id: SequenceId) -> usize {
        self.parts.iter().map(|part| part.max_rows(id)).min().unwrap_or(usize::MAX)
    }

    fn reserve_draft(&self, id: SequenceId, known: usize, max: usize) -> usize {
        self.parts.iter().fold(max, |max, part| part.reserve_draft(id, known, max))
    }

    fn release_scratch(&self, id: SequenceId) {
        self.parts.iter().for_each(|part| part.release_scratch(id));
    }

    fn truncate(&self, id: SequenceId, n: usize) -> usize {
        let mut n = n;
        // A part may have to truncate further than the others.
        loop {
            let cut = self.parts.iter().fold(n, |n, part| part.truncate(id, n.min(part.state(id).len)));
            if cut == n {
                return n;
            }
            n = cut;
        }
    }

    fn set_checkpoint(&self, id: SequenceId) {
        self.parts.iter().for_each(|part| part.set_checkpoint(id));
    }

    fn set_prefix_root(&self, id: SequenceId, root: BlockKey) {
        self.parts.iter().for_each(|part| part.set_prefix_root(id, root));
    }

    fn register_prefix(&self, id: SequenceId, tokens: &[u32]) {
        self.parts.iter().for_each(|part| part.register_prefix(id, tokens));
    }

    fn attach_prefix(&self, id: SequenceId, tokens: &[u32], max: usize) -> usize {
        let mut max = max;
        // All parts attach the prefix that each of them has.
        loop {
            let attached =
                self.parts.iter().map(|part| part.attach_prefix(id, tokens, max)).min().unwrap_or(0);
            if self.shortest_if_unequal(id).is_none() {
                return attached;
            }
            self.parts.iter().for_each(|part| _ = part.truncate(id, 0));
            max = attached;
        }
    }

    fn rows(&self, id: SequenceId, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        let part = self.parts().take_while(|(first, _)| *first <= layer).last();
        let (first, part) = part.expect("a model has at least one part");
        part.rows(id, layer - first, head, side)
    }

    fn page_bytes(&self, id: SequenceId) -> Vec<usize> {
        self.parts.iter().flat_map(|part| part.page_bytes(id)).collect()
    }

    fn pages(
        &self,
        id: SequenceId,
        visit: &mut dyn FnMut(Vec<u8>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.parts.iter().try_for_each(|part| part.pages(id, visit))
    }

    fn n_bytes(&self, id: SequenceId) -> usize {
        self.sum(|part| part.n_bytes(id))
    }

    fn bytes_for(&self, plan: &Plan, tokens: usize) -> usize {
        let parts = self.parts().map(|(first, part)| part.bytes_for(&Self::own(plan, first, part), tokens));
        parts.fold(0, usize::saturating_add)
    }

    fn pool_bytes(&self) -> usize {
        self.sum(|part| part.pool_bytes())
    }

    fn set_budget(&self, bytes: usize) {
        // Each part gets the share of its layers.
        let n_layers = self.kv_shape().layers.len().max(1);
        for part in &self.parts {
            part.set_budget(bytes / n_layers * part.kv_shape().layers.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kvant_codec::DType;
    use kvant_cpu::CpuDevice;
    use kvant_gguf::Gguf;
    use kvant_kv::Policies;
    use kvant_model::{EmbeddingInput, LayerRange, Lora};

    use super::*;
    use crate::model::POCKET;
    use crate::runtime::{Sequence, load};

    /// The bundled model, split into these parts.
    fn cut(gguf: &Arc<Gguf>, parts: &[LayerRange]) -> Arc<LayerPipeline> {
        let part = |part: &LayerRange| {
            let device = CpuDevice::from_env(Some(1)).unwrap();
            load(device, Config::from_gguf(gguf).unwrap(), part, gguf, &mut |_| ()).unwrap()
        };
        Arc::new(LayerPipeline::new(parts.iter().map(part).collect()))
    }

    fn start(pipeline: &Arc<LayerPipeline>) -> Sequence {
        start_with(pipeline, &Policies::default())
    }

    fn start_with(pipeline: &Arc<LayerPipeline>, policies: &Policies) -> Sequence {
        let plan = Plan::new(&pipeline.kv_shape(), DType::Turbo3, DType::Q8_0, policies).unwrap();
        Sequence::start(Arc::clone(pipeline) as Arc<dyn LoadedModel>, plan, ContextSize::Exactly(700))
            .unwrap()
    }

    fn logits(sequence: &Sequence, tokens: &[u32]) -> Vec<u32> {
        let batch = [sequence.step_row(tokens.len(), LogitsFor::Last)];
        let logits = sequence.loaded().step(&batch, Entry::Tokens(tokens), None, None).unwrap().unwrap();
        let mut row = vec![f32::NAN; sequence.loaded().n_vocab()];
        logits.read(0, &mut row).unwrap();
        row.iter().map(|logit| logit.to_bits()).collect()
    }

    /// Returns the hidden states of these tokens after the last layer, `[tokens, n_embd]`.
    fn left(sequence: &Sequence, tokens: &[u32]) -> Vec<f32> {
        let (batch, mut left) = ([sequence.step_row(tokens.len(), LogitsFor::None)], Vec::new());
        sequence.loaded().step(&batch, Entry::Tokens(tokens), Some(&mut left), None).unwrap();
        left
    }

    fn images(sequence: &Sequence) -> Vec<Vec<u8>> {
        let mut images = Vec::new();
        let visit = &mut |image| {
            images.push(image);
            Ok(())
        };
        sequence.loaded().pages(sequence.id(), visit).unwrap();
        images
    }

    fn text(n: u32) -> Vec<u32> {
        (0..n).map(|i| i * 37 % 500).collect()
    }

    #[test]
    fn lora_scales_of_a_sequence_apply_to_all_parts() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
        let open = |name: &str| Arc::new(Gguf::open(folder.join(name)).unwrap());
        let (gguf, adapter) = (open("llama-h64-g8.gguf"), open("adapters/llama-h64-g8.gguf"));
        let adapted =
            |part: LayerRange| part.with_loras(vec![Lora::new(adapter.clone(), 1.0, &gguf).unwrap()]);
        let [whole, halves] =
            [cut(&gguf, &[adapted(LayerRange::whole(2))]), cut(&gguf, &LayerRange::split(2, 1).map(adapted))];
        let text: Vec<u32> = (0..40).map(|i| i * 29 % 64).collect();
        let by_strength = [None, Some(0.0), Some(0.5)].map(|strength| {
            let start = |pipeline| start(pipeline).with_strengths(strength.map(|strength| [strength].into()));
            let whole_logits = logits(&start(&whole), &text);
            assert_eq!(logits(&start(&halves), &text), whole_logits, "{strength:?}");
            whole_logits
        });
        assert!(
            by_strength[0] != by_strength[1]
                && by_strength[1] != by_strength[2]
                && by_strength[0] != by_strength[2]
        );
        assert_eq!(by_strength[1], logits(&start(&cut(&gguf, &[LayerRange::whole(2)])), &text));
    }

    /// DeepStack adds image features behind the first two layers, so both must be in the first
    /// part.
    #[test]
    fn image_rows_enter_the_first_part() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/models/qwen3vl");
        let gguf = Arc::new(Gguf::open(folder.join("text.gguf")).unwrap());
        let (n_layers, n_embd) = (3, Config::from_gguf(&gguf).unwrap().n_embd);
        let rows = |seed: u64| {
            let mut rows = vec![0.0; 6 * n_embd];
            Random::new(seed).fill_gaussian(&mut rows, 0.5);
            rows
        };
        let shown = |pipeline: &Arc<LayerPipeline>| {
            let given = EmbeddingInput { rows: (0..3).map(rows).collect(), columns: Some(3) };
            let shown = pipeline.soft_tokens().add(given, None).unwrap();
            let text: Vec<u32> = (1..9).chain(shown.tokens()).chain(30..40).collect();
            (shown, text)
        };
        let whole = cut(&gguf, &[LayerRange::whole(n_layers)]);
        let (_kept, text) = shown(&whole);
        let expected = logits(&start(&whole), &text);
        let parts = cut(&gguf, &LayerRange::split(n_layers, 2));
        let (_kept, text) = shown(&parts);
        assert_eq!(logits(&start(&parts), &text), expected);
        let parts = cut(&gguf, &LayerRange::split(n_layers, 1));
        let (_kept, text) = shown(&parts);
        let sequence = start(&parts);
        let batch = [sequence.step_row(text.len(), LogitsFor::Last)];
        let error = parts.step(&batch, Entry::Tokens(&text), None, None).err().unwrap().to_string();
        assert!(error.contains("fewer than 2 layers on the first device"), "{error}");
    }

    #[test]
    fn a_model_split_anywhere_gives_the_same_bits() {
        let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
        let n_layers = Config::from_gguf(&gguf).unwrap().layers.len();
        let whole = cut(&gguf, &[LayerRange::whole(n_layers)]);
        let text = text(60);
        let expected = start(&whole);
        let after_prompt = logits(&expected, &text[..50]);
        let after_token = logits(&expected, &text[50..51]);
        let leaves = left(&expected.fork(), &text[51..]);
        for n in 1..n_layers {
            let pipeline = cut(&gguf, &LayerRange::split(n_layers, n));
            let sequence = start(&pipeline);
            assert_eq!(logits(&sequence, &text[..50]), after_prompt, "cut before layer {n}");
            let fork = sequence.fork();
            assert_eq!(logits(&sequence, &text[50..51]), after_token);
            // A token outside the vocabulary leaves nothing in the caches.
            let bad = [sequence.step_row(1, LogitsFor::Last)];
            assert!(pipeline.step(&bad, Entry::Tokens(&[u32::MAX]), None, None).is_err());
            assert_eq!(sequence.len(), 51);
            assert_eq!(logits(&fork, &text[50..51]), after_token, "a fork");
            assert_eq!(left(&fork.fork(), &text[51..]), leaves);
            assert_eq!(pipeline.n_bytes(fork.id()), whole.n_bytes(expected.id()));
            for layer in [0, n_layers - 1] {
                let rows = |pipeline: &LayerPipeline, of: &Sequence| {
                    pipeline.rows(of.id(), layer, 0, Side::K).unwrap()
                };
                assert_eq!(rows(&pipeline, &fork), rows(&whole, &expected));
            }
        }
    }

    #[test]
    fn sequences_of_a_split_model_batch_and_share_prefixes() {
        let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
        let n_layers = Config::from_gguf(&gguf).unwrap().layers.len();
        let pipeline = cut(&gguf, &LayerRange::split(n_layers, 2));
        let text = text(600);
        let [a, b, alone] = [(); 3].map(|()| start(&pipeline));
        logits(&a, &text[..500]);
        let batch = [a.step_row(50, LogitsFor::None), b.step_row(7, LogitsFor::Last)];
        let entered = [&text[500..550], &text[..7]].concat();
        let together = pipeline.step(&batch, Entry::Tokens(&entered), None, None).unwrap().unwrap();
        let mut got = vec![f32::NAN; pipeline.n_vocab()];
        together.read(0, &mut got).unwrap();
        let want = logits(&alone, &text[..7]);
        assert!(got.iter().map(|logit| logit.to_bits()).eq(want));

        let root = BlockKey::root(&[b"test"]);
        a.loaded().set_prefix_root(a.id(), root);
        a.loaded().register_prefix(a.id(), &text[..550]);
        let c = start(&pipeline);
        c.loaded().set_prefix_root(c.id(), root);
        assert_eq!(c.loaded().attach_prefix(c.id(), &text, usize::MAX - 1), 512);
        assert_eq!(pipeline.truncate(a.id(), 512), 512);
        assert_eq!(logits(&c, &text[512..540]), logits(&a, &text[512..540]));
    }

    #[test]
    fn a_split_model_restores_its_own_page_images() {
        let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
        let n_layers = Config::from_gguf(&gguf).unwrap().layers.len();
        let halves = cut(&gguf, &LayerRange::split(n_layers, 1));
        // With the second plan, the first part codes nothing.
        for policies in ["none", "boundary:1"] {
            let sequence = start_with(&halves, &policies.parse().unwrap());
            logits(&sequence, &text(300));
            let images_of = images(&sequence);
            let state = sequence.loaded().state(sequence.id());
            let restore = |next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>| {
                let plan = sequence.plan().clone();
                Sequence::restore(Arc::clone(&halves) as _, plan, 400, state, next)
            };
            let restored = restore(&mut |index| Ok(images_of[index].clone())).unwrap();
            assert_eq!(images(&restored), images_of, "{policies}");
            assert_eq!(logits(&restored, &[7]), logits(&sequence, &[7]), "{policies}");
            drop(restored);

            // After a failure in the last part, the first part holds nothing.
            let bytes = halves.pool_bytes();
            let last = images_of.len() - 1;
            let broken =
                restore(&mut |index| Ok(if index == last { vec![] } else { images_of[index].clone() }));
            assert!(broken.is_err(), "{policies}");
            assert_eq!(halves.pool_bytes(), bytes, "{policies}");
        }
    }

    #[test]
    fn parts_own_every_tensor_between_them() {
        let gguf = Gguf::from_bytes(POCKET).unwrap();
        let n_layers = Config::from_gguf(&gguf).unwrap().layers.len();
        let whole = LayerRange::whole(n_layers).n_bytes(&gguf);
        assert_eq!(whole, gguf.tensors().iter().map(|info| gguf.data(info).len()).sum::<usize>());
        // The embedding is also the output matrix, so both ends have it.
        let embedding = gguf.tensor("token_embd.weight").unwrap().bytes.len();
        for n in 1..n_layers {
            let halves = LayerRange::split(n_layers, n).map(|part| part.n_bytes(&gguf));
            assert_eq!(halves[0] + halves[1], whole + embedding, "cut before layer {n}");
        }
    }
}
