//! A session of the draft model that follows another session and proposes draft tokens.

use kvant_generate::speculative::MAX_DRAFT_TOKENS;
use kvant_model::LogitsFor;

use super::{Session, SessionOptions};
use crate::draft;
use crate::error::Error;
use crate::model::Model;
use crate::runtime::{OnDraft, top_with_margin};

impl Session {
    /// Creates a session of the draft model of `model`, if it has one.
    pub(super) fn drafter_of(model: &Model) -> Result<Option<Box<Self>>, Error> {
        let options = || SessionOptions { n_ctx: None, kv: draft::kv_options() };
        model.draft().map(|draft| draft.session(options()).map(Box::new)).transpose()
    }

    /// Prefills the missing tokens of `text`, at most one step of them: this bounds the delay.
    pub(super) fn catch_up(&mut self, text: &[u32]) -> Result<(), Error> {
        let missing = self.missing_tokens(text);
        match missing.len().min(self.max_tokens()) {
            0 => Ok(()),
            n => self.prefill(&missing[..n]),
        }
    }

    /// Prefills the missing tokens of `text`, and `next` behind it, and passes the greedy
    /// continuation to `on_prediction`, one token after the other until it returns `false`.
    /// Computed predictions stay in the cache and are reused when accepted. Where more than a step
    /// is missing, it only [catches up](Self::catch_up).
    pub(super) fn draft_behind(
        &mut self,
        text: &[u32],
        next: u32,
        on_prediction: OnDraft<'_>,
    ) -> Result<(), Error> {
        let missing = self.missing_tokens(text);
        if missing.len() >= self.max_tokens() {
            return self.catch_up(text);
        }
        self.prefill(&[missing, &[next]].concat())?;
        let capacity = self.sequence.reserve_draft(0, MAX_DRAFT_TOKENS);
        for n_read in 0.. {
            self.select_candidates(2)?;
            let (token, lead) = top_with_margin(&self.candidates);
            if !on_prediction(token, lead) || n_read == capacity {
                break;
            }
            self.step(&[token], LogitsFor::Last, None)?;
            self.draft_tokens.push(token);
        }
        Ok(())
    }

    /// Works as [`Session::feed`] without waiting for the device.
    fn prefill(&mut self, tokens: &[u32]) -> Result<(), Error> {
        self.check_capacity(tokens)?;
        self.recommit()?;
        self.queue(tokens, LogitsFor::Last)
    }

    /// Truncates to the common prefix with `text`, accepting predictions that match it, and returns
    /// the missing tokens.
    fn missing_tokens<'t>(&mut self, text: &'t [u32]) -> &'t [u32] {
        if self.tokens.is_empty() || !text.starts_with(&self.tokens) {
            self.reuse_prefix(text);
        }
        self.accept_draft_tokens(&text[self.tokens.len()..]);
        self.discard_drafts();
        self.draft_tokens.clear();
        &text[self.tokens.len()..]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvant_codec::random::Random;
    use kvant_gguf::Gguf;

    use super::*;
    use crate::devices::DeviceChoice;
    use crate::model::OpenOptions;
    use crate::session::BatchItem;

    const N_TEXT: usize = 620;

    fn file(name: &str) -> Arc<Gguf> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures");
        let file = match name {
            "bundled" => Model::bundled_file(),
            name => crate::model::open_file(format!("{folder}/{name}.gguf")),
        };
        Arc::new(file.unwrap())
    }

    fn drafted(name: &str) -> Model {
        let (device, n_threads) = (DeviceChoice::Cpu.into(), Some(2));
        let options = OpenOptions { device, n_threads, draft: Some(file(name)), ..Default::default() };
        Model::from_gguf(file(name), options).unwrap()
    }

    /// Samples a text that mostly follows the draft model of `model`; returns it with the model's
    /// greedy prediction behind each token.
    fn text_and_predictions(model: &Model, n: usize, random: &mut Random) -> (Vec<u32>, Vec<u32>) {
        let mut session = Session::drafter_of(model).unwrap().unwrap();
        let (mut text, mut predictions) = (vec![5], Vec::new());
        while text.len() < n {
            session.feed(&text[text.len() - 1..], &mut |_| true).unwrap();
            let logits = session.logits().unwrap();
            let likeliest =
                (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a }).unwrap();
            predictions.push(likeliest as u32);
            text.push(
                if random.bits().is_multiple_of(8) { random.bits() % 64 } else { likeliest as u64 } as u32
            );
        }
        (text, predictions)
    }

    /// Predictions at any position of a text, after accepted and rejected drafts, forward and
    /// backward jumps, equal those of a session that was fed the text alone.
    #[test]
    fn draft_predictions_depend_on_the_text_alone() {
        let names = ["bundled", "llama-h64-g1-yarn", "lfm2-h64-g2-conv3", "qwen35-h64-g2-delta"];
        for (seed, name) in names.into_iter().enumerate() {
            let model = drafted(name);
            let max = if model.device().kernels.contains("scalar") { 250 } else { N_TEXT };
            let n_text = model.config().n_ctx_train.min(max);
            let mut random = Random::new(seed as u64);
            let (text, by_itself) = text_and_predictions(&model, n_text, &mut random);
            let mut drafter = Session::drafter_of(&model).unwrap().unwrap();
            let mut below = |n: usize| (random.bits() % n as u64) as usize;
            let (mut at, mut n_several) = (5, 0);
            while at + MAX_DRAFT_TOKENS + 1 < n_text {
                let n_requested = 1 + below(MAX_DRAFT_TOKENS);
                let mut predictions = Vec::new();
                let mut on_prediction = |token, lead| {
                    assert!(lead >= 0.0, "{lead}");
                    predictions.push(token);
                    predictions.len() < n_requested
                };
                drafter.draft_behind(&text[..at], text[at], &mut on_prediction).unwrap();
                // Behind a rejected token, predictions differ.
                let n_true = predictions
                    .iter()
                    .zip(&text[at + 1..])
                    .take_while(|(predicted, next)| predicted == next)
                    .count();
                let n_known = predictions.len().min(n_true + 1);
                assert_eq!(predictions[..n_known], by_itself[at..][..n_known], "{name} at {at}");
                n_several += usize::from(n_known > 1);
                at = match below(16) {
                    0 => at - below(at.min(70) - 4),
                    1 => at + 40,
                    // Drafts for another text in between.
                    2 => {
                        let other: Vec<u32> = text[..at].iter().rev().copied().collect();
                        drafter.draft_behind(&other, 1, &mut |_, _| below(2) == 0).unwrap();
                        at + 1
                    }
                    _ => at + 1 + n_true,
                };
            }
            assert!(n_several > 10, "{name}: several tokens were predicted {n_several} times");
        }
    }

    #[test]
    fn the_draft_cache_is_counted_and_freed_with_the_session() {
        let model = drafted("bundled");
        let mut session = model.session(SessionOptions::default()).unwrap();
        let text: Vec<u32> = (0..400).map(|i| i * 37 % 500).collect();
        session.feed(&text, &mut |_| true).unwrap();
        let (both, own) = (model.kv_bytes(), session.kv().bytes);
        assert!(own > 0 && both > own, "{both} bytes, {own} without what drafts");
        assert_eq!(session.kv().bytes_draft, both - own);
        assert!(both <= model.kv_bytes_for(session.sequence.plan(), 512));
        let fork = session.fork();
        assert_eq!(model.kv_bytes(), both);
        drop(fork);
        session.clear();
        assert_eq!((model.kv_bytes(), session.kv().bytes_draft), (0, 0));
        // Without memory for the draft model's cache, the session continues without it.
        model.set_kv_budget(own);
        session.feed(&text, &mut |_| true).unwrap();
        assert!(session.drafter.is_none());
        assert_eq!(model.kv_bytes(), own);
    }

    /// The draft model prefills along with a session that is fed alone; in batches it catches up
    /// step by step when a prediction is requested.
    #[test]
    fn a_draft_model_behind_by_a_step_catches_up_first() {
        let model = drafted("bundled");
        let max_rows = model.device().max_step_rows;
        let text: Vec<u32> = (0..2 * max_rows as u32 + 40).map(|i| i * 37 % 500).collect();
        let n_drafted = |session: &Session| session.drafter.as_ref().unwrap().tokens.len();
        let n_predicted = |session: &mut Session| {
            let mut n = 0;
            session.predict(9, &mut |_, _| {
                n += 1;
                false
            });
            n
        };
        let [mut alone, mut a, mut b] = [0; 3].map(|_| model.session(SessionOptions::default()).unwrap());
        alone.feed(&text, &mut |_| true).unwrap();
        assert_eq!((n_drafted(&alone), n_predicted(&mut alone)), (text.len(), 1));
        // A text that other sessions do not hold, so that no prefix can be attached.
        let others: Vec<u32> = text.iter().map(|token| token + 1).collect();
        Session::step_batch(&mut [BatchItem::new(&mut a, &others), BatchItem::new(&mut b, &others)]).unwrap();
        assert_eq!((n_drafted(&a), n_drafted(&b)), (0, 0));
        for (n_predictions, n) in [(0, max_rows), (0, 2 * max_rows), (1, text.len() + 1)] {
            assert_eq!((n_predicted(&mut a), n_drafted(&a)), (n_predictions, n));
        }
        Session::step_batch(&mut [BatchItem::new(&mut a, &[9, 9])]).unwrap();
        assert_eq!(n_drafted(&a), text.len() + 2);
    }
}
