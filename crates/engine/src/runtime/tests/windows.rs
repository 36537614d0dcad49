//! Layers that differ: a sliding window on some of them.

use kvant_codec::DType;
use kvant_cpu::CpuDevice;
use kvant_gguf::Gguf;
use kvant_kv::Policies;
use kvant_model::LayerRange;

use super::super::*;
use crate::bundled::POCKET;

/// The bundled model with a sliding window of `window` tokens in every other layer.
fn windowed(window: Option<usize>) -> Arc<dyn LoadedModel> {
    let gguf = Arc::new(Gguf::from_bytes(POCKET).unwrap());
    let mut config = Config::from_gguf(&gguf).unwrap();
    config.layers.iter_mut().step_by(2).for_each(|layer| layer.heads.window = window);
    let whole = LayerRange::whole(config.layers.len());
    load(CpuDevice::from_env(Some(2)).unwrap(), config, &whole, &gguf, &mut |_| ()).unwrap()
}

fn start(loaded: &Arc<dyn LoadedModel>, dtype: DType) -> Sequence {
    start_with(loaded, dtype, &Policies::default())
}

fn start_with(loaded: &Arc<dyn LoadedModel>, dtype: DType, policies: &Policies) -> Sequence {
    let plan = Plan::new(&loaded.properties().kv_shape, dtype, dtype, policies).unwrap();
    Sequence::start(Arc::clone(loaded), plan, ContextSize::Exactly(3000)).unwrap()
}

/// Feeds tokens `from..to` in chunks; returns the last logits.
fn feed(sequence: &Sequence, from: u32, to: u32, chunk: usize) -> Vec<u32> {
    let tokens: Vec<u32> = (from..to).map(|i| i * 37 % 500).collect();
    let mut row = vec![f32::NAN; sequence.loaded().properties().n_vocab];
    for tokens in tokens.chunks(chunk) {
        let batch = [sequence.step_row(tokens.len(), LogitsFor::Last)];
        let logits = sequence.loaded().step(&batch, Entry::Tokens(tokens), None, None).unwrap();
        logits.unwrap().read(0, &mut row).unwrap();
    }
    row.iter().map(|logit| logit.to_bits()).collect()
}

/// Restores a sequence from its page images.
fn restored(model: &Arc<dyn LoadedModel>, sequence: &Sequence) -> Sequence {
    let mut images = Vec::new();
    let visit = &mut |image| {
        images.push(image);
        Ok(())
    };
    sequence.pages(visit).unwrap();
    let (plan, state) = (sequence.plan().clone(), sequence.state());
    let next = &mut |index: usize| Ok(images[index].clone());
    Sequence::restore(Arc::clone(model), plan, 3000, state, next).unwrap()
}

#[test]
fn windowed_layers_are_chunk_invariant_and_free_old_blocks() {
    let (plain, model) = (windowed(None), windowed(Some(150)));
    for dtype in [DType::F16, DType::Turbo3] {
        let sequence = start(&model, dtype);
        let at_once = feed(&sequence, 0, 600, 512);
        let by_seven = start(&model, dtype);
        assert_eq!(feed(&by_seven, 0, 600, 7), at_once, "{dtype}");
        let without = start(&plain, dtype);
        assert_ne!(feed(&without, 0, 600, 512), at_once, "{dtype}: the window counts");
        let wide = windowed(Some(600));
        assert_eq!(
            feed(&start(&wide, dtype), 0, 600, 512),
            feed(&start(&plain, dtype), 0, 600, 512),
            "{dtype}"
        );

        // Tokens before 451 are outside every window: three of five blocks of half the layers.
        let (bytes, all) = (sequence.n_bytes(), without.n_bytes());
        assert!(bytes < all, "{dtype}: {bytes} of {all}");
        assert_eq!(bytes, sequence.plan().n_bytes(&model.properties().kv_shape, 600), "{dtype}");
        // Freed tokens must be fed again.
        assert_eq!(sequence.truncate(520), 0);
        assert_eq!(feed(&sequence, 0, 600, 100), at_once, "{dtype}");
    }
}

#[test]
fn checkpoints_survive_in_memory_and_in_page_images() {
    let model = windowed(None);
    // The shortest context with a checkpoint, and one with blocks and a window before it.
    for (len, border) in [(128, 0), (2605, 2560)] {
        let sequence = start(&model, DType::Turbo3);
        feed(&sequence, 0, len, 512);
        let bytes = sequence.n_bytes();
        sequence.caches(|cache| cache.set_checkpoint());
        assert_eq!(sequence.n_bytes(), bytes, "nothing is copied yet");
        feed(&sequence, 3000, 3100, 100);
        assert_eq!(sequence.state().mark.map(|(len, _)| len), Some(len as usize));
        let restored = restored(&model, &sequence);

        let fresh = start(&model, DType::Turbo3);
        feed(&fresh, 0, len - 1, 512);
        let want = feed(&fresh, len - 1, len + 35, 36);
        for sequence in [sequence, restored] {
            assert_eq!(sequence.truncate(len as usize - 1), len as usize - 1);
            assert_eq!(feed(&sequence, len - 1, len + 35, 5), want, "{len} tokens");
            // Truncating before the checkpoint drops it; the aligned prefix remains.
            assert_eq!(sequence.truncate(len as usize - 5), border);
        }
    }
}

#[test]
fn a_tail_longer_than_the_window_leaves_empty_blocks() {
    let (model, policies) = (windowed(Some(150)), "recent:400".parse().unwrap());
    for len in [300, 511, 512, 513, 700] {
        let sequence = start_with(&model, DType::Turbo3, &policies);
        feed(&sequence, 0, len, 512);
        let planned = sequence.plan().n_bytes(&model.properties().kv_shape, len as usize);
        assert_eq!(sequence.n_bytes(), planned, "{len} tokens");
        let restored = restored(&model, &sequence);
        assert_eq!(feed(&restored, len, len + 200, 200), feed(&sequence, len, len + 200, 7), "{len} tokens");
    }
}
