//! Batched steps: feeds several sessions in shared steps, each one pass over the
//! weights.

use kvant_model::{Entry, LogitsFor};

use super::Session;
use crate::embed::HiddenStatePool;
use crate::error::Error;
use crate::model::Model;

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
}

impl<'a> BatchItem<'a> {
    /// Creates a feed of `tokens` for `session`, without draft tokens.
    pub fn new(session: &'a mut Session, tokens: &'a [u32]) -> Self {
        Self { session, tokens, draft_tokens: &[], pooled: None }
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
    /// processed in part.
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
}

/// Returns the rows of the next step, at most `room`, for each feed with tokens left. Pooling feeds come first, as
/// a step returns either hidden states or logits. `None` when all tokens are processed.
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
        let BatchItem { session, tokens, draft_tokens, pooled } = &mut feeds[index];
        if let Ok(logits) = &result {
            if let Some(pooled) = pooled {
                let own = states.by_ref().take(row.n).skip(n_uncommitted);
                pooled.add_states(session.tokens.len(), own);
            }
            session.draft_tokens.clear();
            session.draft_tokens.extend_from_slice(&draft_tokens[..n_draft_tokens]);
            session.commit_step(&tokens[read[index]..][..n]);
            if row.logits_for != LogitsFor::None {
                session.logits_loan = logits.clone().map(|logits| (logits, next_row));
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
