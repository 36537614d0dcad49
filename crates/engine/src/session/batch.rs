//! Batched steps: feeds several sessions in shared steps, each one pass over the
//! weights.

use std::iter;
use std::sync::Arc;

use kvant_backend::TopK;
use kvant_model::{Entry, LogitsFor};

use super::Session;
use super::logits::LogitsLoan;
use crate::embed::HiddenStatePool;
use crate::error::Error;
use crate::model::Model;
use crate::runtime::Logits;

/// The input of one session in a batch.
pub struct BatchItem<'a> {
    /// The session.
    pub session: &'a mut Session,
    /// Tokens to append, at least one.
    pub tokens: &'a [u32],
    /// Draft tokens to verify behind a single token, as in [`Session::verify`]; ignored behind
    /// several tokens.
    pub draft_tokens: &'a [u32],
    /// Receives the hidden states of the tokens; such a feed has no logits and no draft tokens.
    pub pooled: Option<&'a mut HiddenStatePool>,
    /// Candidates that [`Session::sample`] will need behind the tokens, as
    /// [`Sampler::n_candidates`](kvant_generate::sampler::Sampler::n_candidates) returns them: they
    /// are selected for the whole batch at once. With `None`, each session selects its own when it
    /// samples.
    pub n_candidates: Option<usize>,
}

impl<'a> BatchItem<'a> {
    /// Creates a feed of `tokens` for `session`, without draft tokens and candidates.
    pub fn new(session: &'a mut Session, tokens: &'a [u32]) -> Self {
        Self { session, tokens, draft_tokens: &[], pooled: None, n_candidates: None }
    }
}

/// The rows of a feed in a step: the feed's index, and its numbers of uncommitted, new and draft
/// tokens.
struct Slot {
    index: usize,
    n_uncommitted: usize,
    n: usize,
    n_draft_tokens: usize,
}

impl Session {
    /// Feeds tokens to several sessions of one model in shared steps, each one pass over its
    /// weights: a batch takes little longer than one session, while the weights bound the time.
    /// Each session is then bit-identical to one that was fed alone (batch invariance).
    ///
    /// # Errors
    /// As [`Session::feed`]; sessions of several models. Feeds of several steps may have been
    /// processed in part, and all have where the selection of candidates failed: each session then
    /// selects its own when it samples.
    pub fn step_batch(feeds: &mut [BatchItem<'_>]) -> Result<(), Error> {
        let Some(first) = feeds.first() else { return Ok(()) };
        let model = first.session.model.clone();
        for feed in feeds.iter() {
            if !feed.session.sequence.is_of(model.loaded()) {
                let (expected, got) = ("sessions of one model".to_owned(), "one of another".to_owned());
                return Err(Error::Setting { name: "sessions", expected, got });
            }
            feed.session.check_capacity(feed.tokens)?;
        }
        let mut read: Vec<_> = feeds.iter_mut().map(BatchItem::accept_draft_tokens).collect();
        let max_rows = model.device().max_step_rows;
        while let Some(batch) = next_batch(max_rows, feeds, &read)? {
            step(&model, feeds, &batch, &mut read)?;
        }
        select_candidates(feeds)?;
        model.loaded().finish()
    }
}

impl BatchItem<'_> {
    /// Accepts verified draft tokens, unless their hidden states are needed, which were not kept.
    /// Returns how many.
    fn accept_draft_tokens(&mut self) -> usize {
        if self.pooled.is_some() {
            self.session.discard_drafts();
            return 0;
        }
        self.session.accept_draft_tokens(self.tokens)
    }

    /// Returns the row whose candidates are requested, if any, and the logits that hold it.
    fn request_candidates(&mut self) -> Option<(Arc<dyn Logits>, TopK<'_>)> {
        let Session { logits_loan, candidates, .. } = &mut *self.session;
        let (k, loan) = (self.n_candidates?, logits_loan.as_mut()?);
        loan.n_selected = 0;
        Some((Arc::clone(&loan.logits), TopK { row: loan.row, k, out: candidates }))
    }
}

/// Returns the rows of the next step, at most `room`, for each feed with tokens left. Pooling feeds
/// come first, as a step returns either hidden states or logits. `None` when all tokens are
/// processed.
fn next_batch(mut room: usize, feeds: &[BatchItem<'_>], read: &[usize]) -> Result<Option<Vec<Slot>>, Error> {
    let mut batch = Vec::new();
    let unread = |(feed, read): (&BatchItem<'_>, &usize)| feed.tokens.len() - read;
    let pools = feeds.iter().zip(read).any(|all| all.0.pooled.is_some() && unread(all) > 0);
    for (index, (feed, read)) in feeds.iter().zip(read).enumerate() {
        let left = unread((feed, read));
        if left > 0 && feed.pooled.is_some() == pools {
            let n_uncommitted = feed.session.uncommitted_with(1)?.len();
            let n = left
                .min(room.saturating_sub(n_uncommitted))
                .min(feed.session.sequence.max_step_rows() - n_uncommitted);
            if n > 0 {
                room -= n_uncommitted + n;
                batch.push(Slot { index, n_uncommitted, n, n_draft_tokens: 0 });
            }
        }
    }
    for share in &mut batch {
        let BatchItem { session, tokens, draft_tokens, .. } = &feeds[share.index];
        if tokens.len() == 1 && !pools {
            share.n_draft_tokens = session.draft_capacity(draft_tokens.len().min(room));
            room -= share.n_draft_tokens;
        }
    }
    Ok((!batch.is_empty()).then_some(batch))
}

/// Runs one step of a batch.
fn step(model: &Model, feeds: &mut [BatchItem<'_>], batch: &[Slot], read: &mut [usize]) -> Result<(), Error> {
    let (mut rows, mut entering) = (Vec::new(), Vec::new());
    let pools = batch.iter().all(|share| feeds[share.index].pooled.is_some());
    for &Slot { index, n_uncommitted, n, n_draft_tokens } in batch {
        let BatchItem { session, tokens, draft_tokens, .. } = &mut feeds[index];
        session.logits_loan = None;
        let is_all = read[index] + n == tokens.len();
        let want = if is_all && !pools { LogitsFor::From(n_uncommitted + n - 1) } else { LogitsFor::None };
        let first = entering.len();
        entering.extend_from_slice(session.uncommitted());
        entering.extend_from_slice(&tokens[read[index]..][..n]);
        entering.extend_from_slice(&draft_tokens[..n_draft_tokens]);
        session.keep_media(&entering[first..]);
        rows.push(session.batch_entry(&entering[first..], want));
    }
    let mut left = Vec::new();
    let result = model.loaded().step(&rows, Entry::Tokens(&entering), pools.then_some(&mut left), None);
    let mut states = left.chunks_exact(model.config().n_embd.max(1));
    let (mut next_row, is_alone) = (0, feeds.len() == 1);
    for (&Slot { index, n_uncommitted, n, n_draft_tokens }, row) in batch.iter().zip(&rows) {
        let BatchItem { session, tokens, draft_tokens, pooled, .. } = &mut feeds[index];
        if let Ok(logits) = &result {
            if let Some(pooled) = pooled {
                let own = states.by_ref().take(row.n).skip(n_uncommitted);
                pooled.add_states(session.tokens.len(), own);
            }
            session.draft_tokens.clear();
            session.draft_tokens.extend_from_slice(&draft_tokens[..n_draft_tokens]);
            session.commit_step(&tokens[read[index]..][..n]);
            if row.logits_for != LogitsFor::None {
                session.logits_loan = logits.clone().map(|logits| LogitsLoan::new(logits, next_row));
                next_row += 1 + n_draft_tokens;
            }
            read[index] += n;
            // A prefill of the draft model here would delay the other sessions of a batch.
            if is_alone && !pools {
                session.sync_drafter(n);
            }
        } else {
            session.tokens.truncate(session.sequence.len());
        }
    }
    result.map(|_| ())
}

/// Selects the candidates of all feeds, in one call for the logits of each step.
fn select_candidates(feeds: &mut [BatchItem<'_>]) -> Result<(), Error> {
    let mut requests: Vec<_> = feeds.iter_mut().filter_map(BatchItem::request_candidates).collect();
    while let Some((logits, first)) = requests.pop() {
        let others = requests.extract_if(.., |(other, _)| Arc::ptr_eq(other, &logits));
        let mut rows: Vec<_> = iter::once(first).chain(others.map(|(_, row)| row)).collect();
        logits.top_k(&mut rows)?;
    }
    for BatchItem { session, n_candidates, .. } in feeds {
        if let (Some(k), Some(loan)) = (*n_candidates, &mut session.logits_loan) {
            loan.n_selected = k;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvant_generate::sampler::{Sampler, SamplerParams};

    use super::*;
    use crate::model::OpenOptions;
    use crate::session::SessionOptions;

    /// Sessions with different numbers of candidates, some without a request, some without logits
    /// yet, sample what they sample alone.
    #[test]
    fn a_batch_selects_candidates_for_its_sessions() {
        let model = Model::bundled(OpenOptions::default()).unwrap();
        let params =
            |i: usize| SamplerParams { seed: i as u64, top_k: [40, 3, 7, 40, 1][i], ..Default::default() };
        let mut samplers: Vec<_> = (0..5).map(|i| Sampler::new(params(i))).collect();
        let mut samplers_alone = samplers.clone();
        let mut sessions: Vec<_> =
            (0..5).map(|_| model.session(SessionOptions::default()).unwrap()).collect();
        // Longer than a step: its logits are those of another step.
        let max_rows = model.device().max_step_rows;
        let mut tokens: Vec<Vec<u32>> =
            [3, 1, 8, max_rows + 5, 2].map(|n| (0..n as u32).map(|i| i * 37 % 500).collect()).to_vec();
        for step in 0..6 {
            let mut items: Vec<_> = sessions
                .iter_mut()
                .zip(&tokens)
                .map(|(session, tokens)| BatchItem::new(session, tokens))
                .collect();
            for (i, item) in items.iter_mut().enumerate() {
                let n = item.session.tokens().len() + item.tokens.len();
                item.n_candidates = samplers[i].n_candidates(n).filter(|_| (i + step) % 3 > 0);
            }
            let requested: Vec<_> = items.iter().map(|item| item.n_candidates).collect();
            Session::step_batch(&mut items).unwrap();
            for (i, session) in sessions.iter_mut().enumerate() {
                assert_eq!(session.logits_loan.as_ref().unwrap().n_selected, requested[i].unwrap_or(0));
                let token = session.sample(&mut samplers[i]).unwrap();
                let logits = session.logits().unwrap().to_vec();
                let alone = samplers_alone[i].sample(&logits, session.tokens()).unwrap();
                assert_eq!(token, alone, "session {i}, step {step}");
                let k = samplers[i].n_candidates(session.tokens().len()).unwrap();
                let mut likeliest = Vec::new();
                kvant_backend::top_k(&logits, k, &mut likeliest);
                assert_eq!(session.candidates, likeliest, "session {i}, step {step}");
                tokens[i] = vec![token];
            }
        }
    }
}
