//! Several sessions that read in the same steps.

use kvant_model::{Entry, Want};

use super::Session;
use crate::runtime::MAX_ROWS;
use crate::{Error, Model, Pooled};

/// What one of several sessions reads in a step.
pub struct Feed<'a> {
    /// The session.
    pub session: &'a mut Session,
    /// Tokens to read after what is there, at least one.
    pub tokens: &'a [u32],
    /// What may come after a single token, to be read on trial as [`Session::feed_ahead`] does; else, and behind several tokens, none.
    pub guesses: &'a [u32],
    /// Takes up the states of the tokens, where those are wanted: there are no logits, and no guesses, then.
    pub pooled: Option<&'a mut Pooled>,
}

impl<'a> Feed<'a> {
    /// `tokens` for `session`, and no guesses.
    pub fn new(session: &'a mut Session, tokens: &'a [u32]) -> Self {
        Self { session, tokens, guesses: &[], pooled: None }
    }
}

/// What a feed has in a step: its index, what is owed to its cache, its rows, and guesses behind them.
struct Share {
    index: usize,
    n_owed: usize,
    n: usize,
    n_guesses: usize,
}

impl Session {
    /// Reads tokens for each of several sessions of one model, as many as each likes, in one pass over its weights: together
    /// they take little longer than one of them, as long as the weights are what takes the time. Afterwards each stands, bit
    /// for bit, as if it had been fed alone.
    ///
    /// # Errors
    /// As [`Session::feed`]; sessions of several models. What takes several steps may have been read in part.
    pub fn feed_together(feeds: &mut [Feed<'_>]) -> Result<(), Error> {
        let Some(first) = feeds.first() else { return Ok(()) };
        let model = first.session.model.clone();
        for feed in feeds.iter() {
            if !feed.session.sequence.is_of(model.loaded()) {
                let (expected, got) = ("sessions of one model".to_owned(), "one of another".to_owned());
                return Err(Error::Setting { name: "sessions", expected, got });
            }
            feed.session.check_room(feed.tokens)?;
        }
        let mut read: Vec<_> = feeds.iter_mut().map(Feed::take_ahead).collect();
        while let Some(batch) = next_batch(feeds, &read)? {
            step(&model, feeds, &batch, &mut read)?;
        }
        model.loaded().finish()
    }
}

impl Feed<'_> {
    /// Feeds what was read on trial, whose states nobody has kept. Returns how much.
    fn take_ahead(&mut self) -> usize {
        if self.pooled.is_some() {
            self.session.settle();
            return 0;
        }
        self.session.take_ahead(self.tokens)
    }
}

/// The next rows of a feed together, of each feed that has some; of those that want states, first of all, as a step gives those or logits.
/// `None` when all is read.
fn next_batch(feeds: &[Feed<'_>], read: &[usize]) -> Result<Option<Vec<Share>>, Error> {
    let mut room = MAX_ROWS;
    let mut batch = Vec::new();
    let unread = |(feed, read): (&Feed<'_>, &usize)| feed.tokens.len() - read;
    let pools = feeds.iter().zip(read).any(|all| all.0.pooled.is_some() && unread(all) > 0);
    for (index, (feed, read)) in feeds.iter().zip(read).enumerate() {
        let left = unread((feed, read));
        if left > 0 && feed.pooled.is_some() == pools {
            let n_owed = feed.session.owed_with(1)?.len();
            let n = left.min(room.saturating_sub(n_owed)).min(feed.session.sequence.most_rows() - n_owed);
            if n > 0 {
                room -= n_owed + n;
                batch.push(Share { index, n_owed, n, n_guesses: 0 });
            }
        }
    }
    for share in &mut batch {
        let Feed { session, tokens, guesses, .. } = &feeds[share.index];
        if tokens.len() == 1 && !pools {
            share.n_guesses = session.n_on_trial(guesses.len().min(room));
            room -= share.n_guesses;
        }
    }
    Ok((!batch.is_empty()).then_some(batch))
}

/// One step of a feed together.
fn step(model: &Model, feeds: &mut [Feed<'_>], batch: &[Share], read: &mut [usize]) -> Result<(), Error> {
    let (mut rows, mut entering) = (Vec::new(), Vec::new());
    let pools = batch.iter().all(|share| feeds[share.index].pooled.is_some());
    for &Share { index, n_owed, n, n_guesses } in batch {
        let Feed { session, tokens, guesses, .. } = &mut feeds[index];
        session.lent = None;
        let is_all = read[index] + n == tokens.len();
        let want = if is_all && !pools { Want::From(n_owed + n - 1) } else { Want::Nothing };
        let first = entering.len();
        entering.extend_from_slice(session.owed());
        entering.extend_from_slice(&tokens[read[index]..][..n]);
        entering.extend_from_slice(&guesses[..n_guesses]);
        session.keep_shown(&entering[first..]);
        rows.push(session.step_row(&entering[first..], want));
    }
    let mut left = Vec::new();
    let result = model.loaded().step(&rows, Entry::Tokens(&entering), pools.then_some(&mut left), None);
    let mut states = left.chunks_exact(model.config().n_embd.max(1));
    let (mut next_row, is_alone) = (0, feeds.len() == 1);
    for (&Share { index, n_owed, n, n_guesses }, row) in batch.iter().zip(&rows) {
        let Feed { session, tokens, guesses, pooled } = &mut feeds[index];
        if let Ok(logits) = &result {
            if let Some(pooled) = pooled {
                let own = states.by_ref().take(row.n).skip(n_owed);
                pooled.take(session.tokens.len(), own);
            }
            session.ahead.clear();
            session.ahead.extend_from_slice(&guesses[..n_guesses]);
            session.stepped(&tokens[read[index]..][..n]);
            if row.want != Want::Nothing {
                session.lent = logits.clone().map(|logits| (logits, next_row));
                next_row += 1 + n_guesses;
            }
            read[index] += n;
            // Several have a step's time in common, and each what drafts for it to itself.
            if is_alone && !pools {
                session.be_followed(n);
            }
        } else {
            session.tokens.truncate(session.sequence.len());
        }
    }
    result.map(|_| ())
}
