//! A model whose layers are split between devices: the residual stream is handed on from one to the next through host
//! memory, `n_embd` values per token.

use std::any::Any;
use std::sync::Arc;

use kvant_backend::{Candidate, DeviceInfo, KernelChoice};
use kvant_codec::Side;
use kvant_codec::random::Random;
use kvant_kv::{KvError, KvShape, Plan, StreamImage};
use kvant_model::{Config, Entry, Want};

use crate::Error;
use crate::runtime::{Loaded, MAX_ROWS, Room, Sequence, downcast};

/// The parts of a model, in the order of their layers, each on a device.
pub(crate) struct Relay {
    parts: Vec<Arc<dyn Loaded>>,
}

impl Relay {
    /// A model from its parts.
    pub fn new(parts: Vec<Arc<dyn Loaded>>) -> Self {
        assert!(!parts.is_empty(), "a model has at least one part");
        Self { parts }
    }

    /// Each part with the number of layers before it.
    fn parts(&self) -> impl Iterator<Item = (usize, &Arc<dyn Loaded>)> {
        self.parts.iter().scan(0, |before, part| {
            let first = *before;
            *before += part.kv_shape().n_layers;
            Some((first, part))
        })
    }

    fn join(&self, mut plan: Plan, parts: Vec<Box<dyn Sequence>>) -> Box<dyn Sequence> {
        // A part may have had to make the context shorter, and says so.
        let n_ctx = parts.iter().map(|part| part.n_ctx()).min().unwrap_or(0);
        plan.notes.extend(parts.iter().flat_map(|part| part.plan().notes.iter().cloned()));
        let n_embd = self.config().n_embd;
        let residual = Vec::with_capacity(n_embd * MAX_ROWS.min(n_ctx));
        let mut running = Running { parts, plan, n_embd, residual };
        running.set_n_ctx(n_ctx);
        Box::new(running)
    }
}

impl Loaded for Relay {
    fn info(&self) -> DeviceInfo {
        let infos: Vec<_> = self.parts.iter().map(|part| part.info()).collect();
        let named = infos.iter().zip(&self.parts);
        let named = named.map(|(info, part)| format!("{} ({} layers)", info.name, part.kv_shape().n_layers));
        let kernels = infos.iter().map(|info| info.kernels.clone());
        let joined = |parts: Vec<String>| parts.join(" + ");
        let (name, kernels) = (joined(named.collect()), joined(kernels.collect()));
        DeviceInfo { name, kernels, ..infos[0].clone() }
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

    fn weight_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.weight_bytes()).sum()
    }

    fn weight_bytes_per_token(&self) -> usize {
        self.parts.iter().map(|part| part.weight_bytes_per_token()).sum()
    }

    fn start(self: Arc<Self>, plan: Plan, room: Room) -> Result<Box<dyn Sequence>, Error> {
        let start = |(first, part): (usize, &Arc<dyn Loaded>)| {
            Arc::clone(part).start(plan.part(first..first + part.kv_shape().n_layers), room)
        };
        let parts = self.parts().map(start).collect::<Result<_, _>>()?;
        Ok(self.join(plan, parts))
    }

    fn restore(
        self: Arc<Self>,
        plan: Plan,
        n_ctx: usize,
        next: &mut dyn FnMut(usize) -> Result<StreamImage, Error>,
    ) -> Result<Box<dyn Sequence>, Error> {
        let mut parts = Vec::new();
        for (first, part) in self.parts() {
            let KvShape { n_layers, n_kv_heads, .. } = part.kv_shape();
            let n_before = 2 * n_kv_heads * first;
            let own = plan.part(first..first + n_layers);
            parts.push(Arc::clone(part).restore(own, n_ctx, &mut |index| next(n_before + index))?);
        }
        Ok(self.join(plan, parts))
    }
}

/// A sequence, part by part.
struct Running {
    parts: Vec<Box<dyn Sequence>>,
    /// What all parts store.
    plan: Plan,
    n_embd: usize,
    /// What one part hands on to the next, `[rows, n_embd]`.
    residual: Vec<f32>,
}

impl Running {
    fn last(&self) -> &dyn Sequence {
        &**self.parts.last().expect("a model has at least one part")
    }

    fn run(&mut self, entry: Entry<'_>, want: Want) -> Result<(), Error> {
        self.hand_on(entry, want, |_, part, entry, want| part.step(entry, want))
    }

    fn run_together(&mut self, others: &mut [&mut Self], entry: Entry<'_>, want: Want) -> Result<(), Error> {
        self.hand_on(entry, want, |index, part, entry, want| {
            let others = others.iter_mut().map(|other| &mut *other.parts[index] as &mut dyn Sequence);
            part.step_together(&mut others.collect::<Vec<_>>(), entry, want)
        })
    }

    /// Takes `step` through the parts; what one leaves enters the next.
    fn hand_on(
        &mut self,
        entry: Entry<'_>,
        want: Want,
        mut step: impl FnMut(usize, &mut dyn Sequence, Entry<'_>, Want) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.residual.resize(entry.rows(self.n_embd) * self.n_embd, 0.0);
        let last = self.parts.len() - 1;
        let mut entry = entry;
        for (index, part) in self.parts.iter_mut().enumerate() {
            if index == last {
                return step(index, &mut **part, entry, want);
            }
            step(index, &mut **part, entry, Want::Nothing)?;
            part.residual(&mut self.residual)?;
            entry = Entry::Residual(&self.residual);
        }
        Ok(())
    }
}

impl Sequence for Running {
    fn step(&mut self, entry: Entry<'_>, want: Want) -> Result<(), Error> {
        let before = self.len();
        let result = self.run(entry, want);
        if result.is_err() {
            // Parts that had run already give the tokens back, so that all of them agree again.
            self.truncate(before)?;
        }
        result
    }

    fn step_together(
        &mut self,
        others: &mut [&mut dyn Sequence],
        entry: Entry<'_>,
        want: Want,
    ) -> Result<(), Error> {
        let mut others = downcast::<Self>(others)?;
        let before: Vec<_> = others.iter().map(|other| other.len()).collect();
        let my_before = self.len();
        let result = self.run_together(&mut others, entry, want);
        if result.is_err() {
            self.truncate(my_before)?;
            for (other, before) in others.into_iter().zip(before) {
                other.truncate(before)?;
            }
        }
        result
    }

    fn residual(&self, out: &mut [f32]) -> Result<(), Error> {
        self.last().residual(out)
    }

    fn logits(&self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        self.last().logits(row, out)
    }

    fn top_k(&self, row: usize, k: usize, out: &mut Vec<Candidate>) -> Result<(), Error> {
        self.last().top_k(row, k, out)
    }

    fn finish(&self) -> Result<(), Error> {
        self.last().finish()
    }

    fn append_random(&mut self, rows: usize, random: &mut Random) -> Result<(), Error> {
        self.parts.iter_mut().try_for_each(|part| part.append_random(rows, random))
    }

    fn truncate(&mut self, n: usize) -> Result<(), Error> {
        self.parts.iter_mut().try_for_each(|part| part.truncate(n))
    }

    fn clear(&mut self) {
        self.parts.iter_mut().for_each(|part| part.clear());
    }

    fn fork(&self) -> Result<Box<dyn Sequence>, Error> {
        let parts = self.parts.iter().map(|part| part.fork()).collect::<Result<_, _>>()?;
        let residual = Vec::with_capacity(self.residual.capacity());
        Ok(Box::new(Self { parts, plan: self.plan.clone(), n_embd: self.n_embd, residual }))
    }

    fn rows(&self, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        let mut first = 0;
        for part in &self.parts {
            let n_layers = part.plan().types.len();
            if layer < first + n_layers {
                return part.rows(layer - first, head, side);
            }
            first += n_layers;
        }
        panic!("layer {layer} of {first}")
    }

    fn images(&self) -> Box<dyn Iterator<Item = Result<StreamImage, KvError>> + '_> {
        Box::new(self.parts.iter().flat_map(|part| part.images()))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn len(&self) -> usize {
        self.parts[0].len()
    }

    fn n_ctx(&self) -> usize {
        self.parts[0].n_ctx()
    }

    fn set_n_ctx(&mut self, n_ctx: usize) {
        self.parts.iter_mut().for_each(|part| part.set_n_ctx(n_ctx));
    }

    fn n_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.n_bytes()).sum()
    }

    fn f16_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.f16_bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use kvant_codec::DType;
    use kvant_cpu::CpuDevice;
    use kvant_gguf::Gguf;
    use kvant_kv::Policies;
    use kvant_model::Part;

    use super::*;
    use crate::model::POCKET;
    use crate::runtime::load;

    /// The bundled model, cut before each of these layers.
    fn cut(gguf: &Arc<Gguf>, parts: &[Part]) -> Arc<Relay> {
        let part = |part: &Part| {
            let device = CpuDevice::from_env(Some(1)).unwrap();
            load(device, Config::from_gguf(gguf).unwrap(), part, gguf, &mut |_| ()).unwrap()
        };
        Arc::new(Relay::new(parts.iter().map(part).collect()))
    }

    fn start(relay: &Arc<Relay>) -> Box<dyn Sequence> {
        let plan = Plan::new(&relay.kv_shape(), DType::Turbo3, DType::Q8_0, &Policies::default()).unwrap();
        Arc::clone(relay).start(plan, Room::Exactly(200)).unwrap()
    }

    fn logits(sequence: &mut dyn Sequence, tokens: &[u32], n_vocab: usize) -> Vec<u32> {
        sequence.step(Entry::Tokens(tokens), Want::Last).unwrap();
        let mut row = vec![f32::NAN; n_vocab];
        sequence.logits(0, &mut row).unwrap();
        row.iter().map(|logit| logit.to_bits()).collect()
    }

    #[test]
    fn a_model_cut_anywhere_says_bit_for_bit_the_same() {
        let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
        let n_layers = Config::from_gguf(&gguf).unwrap().n_layers;
        let whole = cut(&gguf, &[Part::whole(n_layers)]);
        let n_vocab = whole.n_vocab();
        let text: Vec<u32> = (0..60).map(|i| i * 37 % 500).collect();
        let mut expected = start(&whole);
        let after_prompt = logits(&mut *expected, &text[..50], n_vocab);
        let after_token = logits(&mut *expected, &text[50..51], n_vocab);
        for n in 1..n_layers {
            let relay = cut(&gguf, &Part::split(n_layers, n));
            let mut sequence = start(&relay);
            assert_eq!(logits(&mut *sequence, &text[..50], n_vocab), after_prompt, "cut before layer {n}");
            let mut fork = sequence.fork().unwrap();
            assert_eq!(logits(&mut *sequence, &text[50..51], n_vocab), after_token);
            // A token that no vocabulary has leaves nothing behind.
            sequence.truncate(50).unwrap();
            sequence.step(Entry::Tokens(&[u32::MAX]), Want::Last).unwrap_err();
            assert_eq!(sequence.len(), 50);
            assert_eq!(logits(&mut *fork, &text[50..51], n_vocab), after_token, "a fork");
            assert_eq!((fork.n_bytes(), fork.f16_bytes()), (expected.n_bytes(), expected.f16_bytes()));
            for layer in [0, n_layers - 1] {
                assert_eq!(fork.rows(layer, 0, Side::K).unwrap(), expected.rows(layer, 0, Side::K).unwrap());
            }
        }
    }

    #[test]
    fn sequences_of_a_cut_model_run_together() {
        let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
        let n_layers = Config::from_gguf(&gguf).unwrap().n_layers;
        let relay = cut(&gguf, &Part::split(n_layers, 2));
        let n_vocab = relay.n_vocab();
        let text: Vec<u32> = (0..40).collect();
        let run = |together: bool| {
            let [mut a, mut b] = [start(&relay), start(&relay)];
            a.step(Entry::Tokens(&text[..30]), Want::Nothing).unwrap();
            b.step(Entry::Tokens(&text[..7]), Want::Nothing).unwrap();
            if together {
                a.step_together(&mut [&mut *b], Entry::Tokens(&[5, 6]), Want::From(0)).unwrap();
            } else {
                a.step(Entry::Tokens(&[5]), Want::Last).unwrap();
                b.step(Entry::Tokens(&[6]), Want::Last).unwrap();
            }
            [a, b].map(|mut sequence| (sequence.len(), logits(&mut *sequence, &[9], n_vocab)))
        };
        assert_eq!(run(true), run(false));
    }

    #[test]
    fn a_cut_model_goes_on_from_what_a_whole_one_stored() {
        let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
        let n_layers = Config::from_gguf(&gguf).unwrap().n_layers;
        let (whole, halves) = (cut(&gguf, &[Part::whole(n_layers)]), cut(&gguf, &Part::split(n_layers, 2)));
        let mut sequence = start(&whole);
        let text: Vec<u32> = (0..40).collect();
        logits(&mut *sequence, &text, whole.n_vocab());
        let images: Vec<_> = sequence.images().map(|image| image.unwrap()).collect();
        let next = &mut |index: usize| Ok(images[index].clone());
        let mut restored = halves.restore(sequence.plan().clone(), 200, next).unwrap();
        assert!(restored.images().map(|image| image.unwrap()).eq(images.iter().cloned()));
        let (got, expected) = [&mut restored, &mut sequence]
            .map(|sequence| logits(&mut **sequence, &[7], whole.n_vocab()))
            .into();
        assert_eq!(got, expected);
    }

    #[test]
    fn parts_own_every_tensor_between_them() {
        let gguf = Gguf::from_bytes(POCKET).unwrap();
        let n_layers = Config::from_gguf(&gguf).unwrap().n_layers;
        let whole = Part::whole(n_layers).n_bytes(&gguf);
        assert_eq!(whole, gguf.tensors().iter().map(|info| gguf.data(info).len()).sum::<usize>());
        // The embedding is the output matrix too, so both ends have it.
        let embedding = gguf.tensor("token_embd.weight").unwrap().bytes.len();
        for n in 1..n_layers {
            let halves = Part::split(n_layers, n).map(|part| part.n_bytes(&gguf));
            assert_eq!(halves[0] + halves[1], whole + embedding, "cut before layer {n}");
        }
    }
}
