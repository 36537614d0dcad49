//! A session of a smaller model that follows another session, to say ahead what comes next there.

use kvant_model::Want;
use kvant_text::guess::MOST_GUESSES;

use super::{Session, SessionOptions};
use crate::runtime::{MAX_ROWS, OnPrediction, leader};
use crate::{Error, Model, draft};

impl Session {
    /// A session of the model that drafts for `model`, where there is one.
    pub(super) fn drafter_of(model: &Model) -> Result<Option<Box<Self>>, Error> {
        let options = || SessionOptions { n_ctx: None, kv: draft::kv_options() };
        model.draft().map(|draft| draft.session(options()).map(Box::new)).transpose()
    }

    /// Reads what it lacks of `text`, at most as much as a step takes: whoever waits for it waits no longer.
    pub(super) fn follow(&mut self, text: &[u32]) -> Result<(), Error> {
        let lacking = self.lacking(text);
        match lacking.len().min(MAX_ROWS) {
            0 => Ok(()),
            n => self.queue(&lacking[..n], &mut |_| true),
        }
    }

    /// Reads what it lacks of `text`, and `next` behind it. Then tells what this model would say, one token after the other as long as
    /// `on_prediction` likes. What it has read of that is there already when it comes. Where it lacks much, it [follows](Self::follow) and tells nothing.
    pub(super) fn predict_behind(
        &mut self,
        text: &[u32],
        next: u32,
        on_prediction: OnPrediction<'_>,
    ) -> Result<(), Error> {
        let lacking = self.lacking(text);
        if lacking.len() >= MAX_ROWS {
            return self.follow(text);
        }
        self.queue(&[lacking, &[next]].concat(), &mut |_| true)?;
        let most = self.sequence.loaded().try_on(self.sequence.id(), 0, MOST_GUESSES);
        for n_read in 0.. {
            let (logits, row) = self.lent.as_ref().ok_or(Error::NoLogits)?;
            logits.top_k(*row, 2, &mut self.likeliest)?;
            let (token, lead) = leader(&self.likeliest);
            if !on_prediction(token, lead) || n_read == most {
                break;
            }
            self.run(&[token], Want::Last, None)?;
            self.ahead.push(token);
        }
        Ok(())
    }

    /// What it has not read of `text`, once it holds a beginning of that and nothing else: what it said ahead counts where it came true.
    fn lacking<'t>(&mut self, text: &'t [u32]) -> &'t [u32] {
        if self.tokens.is_empty() || !text.starts_with(&self.tokens) {
            self.keep_prefix(text);
        }
        self.take_ahead(&text[self.tokens.len()..]);
        self.settle();
        self.ahead.clear();
        &text[self.tokens.len()..]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvant_codec::random::Random;
    use kvant_gguf::Gguf;

    use super::*;
    use crate::{DeviceChoice, Feed, OpenOptions};

    const N_TEXT: usize = 620;

    fn file(name: &str) -> Arc<Gguf> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures");
        let file = match name {
            "bundled" => Model::bundled_file(),
            name => crate::open_file(format!("{folder}/{name}.gguf")),
        };
        Arc::new(file.unwrap())
    }

    fn drafted(name: &str) -> Model {
        let (device, n_threads) = (DeviceChoice::Cpu, Some(2));
        let options = OpenOptions { device, n_threads, draft: Some(file(name)), ..Default::default() };
        Model::from_gguf(file(name), options).unwrap()
    }

    /// A text that goes on as the model that drafts for `model` says, most often, and what that says behind each of its tokens.
    fn text_and_said(model: &Model, n: usize, random: &mut Random) -> (Vec<u32>, Vec<u32>) {
        let mut session = Session::drafter_of(model).unwrap().unwrap();
        let (mut text, mut said) = (vec![5], Vec::new());
        while text.len() < n {
            session.feed(&text[text.len() - 1..], &mut |_| true).unwrap();
            let logits = session.logits().unwrap();
            let likeliest =
                (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a }).unwrap();
            said.push(likeliest as u32);
            text.push(
                if random.bits().is_multiple_of(8) { random.bits() % 64 } else { likeliest as u64 } as u32
            );
        }
        (text, said)
    }

    /// Asked at any places of a text, after guesses that came true and others, after steps ahead and back, it says what it says there by itself.
    #[test]
    fn what_is_predicted_does_not_depend_on_what_was_before() {
        let names = ["bundled", "llama-h64-g1-yarn", "lfm2-h64-g2-conv3", "qwen35-h64-g2-delta"];
        for (seed, name) in names.into_iter().enumerate() {
            let model = drafted(name);
            let most = if model.device().kernels.contains("scalar") { 250 } else { N_TEXT };
            let n_text = model.config().n_ctx_train.min(most);
            let mut random = Random::new(seed as u64);
            let (text, by_itself) = text_and_said(&model, n_text, &mut random);
            let mut drafter = Session::drafter_of(&model).unwrap().unwrap();
            let mut below = |n: usize| (random.bits() % n as u64) as usize;
            let (mut at, mut n_several) = (5, 0);
            while at + MOST_GUESSES + 1 < n_text {
                let wanted = 1 + below(MOST_GUESSES);
                let mut said = Vec::new();
                let mut listen = |token, lead| {
                    assert!(lead >= 0.0, "{lead}");
                    said.push(token);
                    said.len() < wanted
                };
                drafter.predict_behind(&text[..at], text[at], &mut listen).unwrap();
                // Behind one that does not come, it says something else.
                let n_true =
                    said.iter().zip(&text[at + 1..]).take_while(|(said, comes)| said == comes).count();
                let n_known = said.len().min(n_true + 1);
                assert_eq!(said[..n_known], by_itself[at..][..n_known], "{name} at {at}");
                n_several += usize::from(n_known > 1);
                at = match below(16) {
                    0 => at - below(at.min(70) - 4),
                    1 => at + 40,
                    // Another text, of which it guesses as well.
                    2 => {
                        let other: Vec<u32> = text[..at].iter().rev().copied().collect();
                        drafter.predict_behind(&other, 1, &mut |_, _| below(2) == 0).unwrap();
                        at + 1
                    }
                    _ => at + 1 + n_true,
                };
            }
            assert!(n_several > 10, "{name}: several tokens were predicted {n_several} times");
        }
    }

    #[test]
    fn its_cache_is_counted_and_given_back_with_that_of_the_session() {
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
        // Where there is no memory for it, the session goes on without.
        model.set_kv_budget(own);
        session.feed(&text, &mut |_| true).unwrap();
        assert!(session.drafter.is_none());
        assert_eq!(model.kv_bytes(), own);
    }

    /// A prompt is followed as it is read, of one session by itself; else when it is asked, step by step.
    #[test]
    fn what_lacks_much_tells_nothing_before_it_has_read_that() {
        let model = drafted("bundled");
        let text: Vec<u32> = (0..2 * MAX_ROWS as u32 + 40).map(|i| i * 37 % 500).collect();
        let n_drafted = |session: &Session| session.drafter.as_ref().unwrap().tokens.len();
        let n_told = |session: &mut Session| {
            let mut n = 0;
            session.predict(9, &mut |_, _| {
                n += 1;
                false
            });
            n
        };
        let [mut alone, mut a, mut b] = [0; 3].map(|_| model.session(SessionOptions::default()).unwrap());
        alone.feed(&text, &mut |_| true).unwrap();
        assert_eq!((n_drafted(&alone), n_told(&mut alone)), (text.len(), 1));
        // What others have read is not there to be begun with.
        let others: Vec<u32> = text.iter().map(|token| token + 1).collect();
        Session::feed_together(&mut [Feed::new(&mut a, &others), Feed::new(&mut b, &others)]).unwrap();
        assert_eq!((n_drafted(&a), n_drafted(&b)), (0, 0));
        for (told, n) in [(0, MAX_ROWS), (0, 2 * MAX_ROWS), (1, text.len() + 1)] {
            assert_eq!((n_told(&mut a), n_drafted(&a)), (told, n));
        }
        Session::feed_together(&mut [Feed::new(&mut a, &[9, 9])]).unwrap();
        assert_eq!(n_drafted(&a), text.len() + 2);
    }
}
