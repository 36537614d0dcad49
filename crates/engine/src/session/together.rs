//! Several sessions that read in the same steps.

use kvant_model::{Entry, Want};

use super::Session;
use crate::runtime::{MAX_ROWS, StepRow};
use crate::{Error, Model};

/// What one of several sessions reads in a step.
pub struct Feed<'a> {
    /// The session.
    pub session: &'a mut Session,
    /// Tokens to read after what is there, at least one.
    pub tokens: &'a [u32],
}

impl Session {
    /// Reads tokens for each of several sessions of one model, as many as each likes, in one pass over its weights: together
    /// they take little longer than one of them, as long as the weights are what takes the time. Afterwards each stands, bit
    /// for bit, as if it had been fed alone.
    ///
    /// # Errors
    /// As [`Session::feed`]; sessions of several models. A session that was not fed holds what it held.
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
        let mut read = vec![0; feeds.len()];
        while let Some(batch) = next_batch(feeds, &read) {
            step(&model, feeds, &batch, &mut read)?;
        }
        model.loaded().finish()
    }
}

/// The next rows of a feed together: index of each feed that has some, and how many. `None` when all is read.
fn next_batch(feeds: &[Feed<'_>], read: &[usize]) -> Option<Vec<(usize, usize)>> {
    let mut room = MAX_ROWS;
    let left = feeds.iter().zip(read).map(|(feed, read)| (feed, feed.tokens.len() - read)).enumerate();
    let take = |(index, (feed, left)): (usize, (&Feed<'_>, usize))| {
        let n = left.min(room).min(feed.session.sequence.most_rows());
        room -= n;
        (n > 0).then_some((index, n))
    };
    let batch: Vec<_> = left.filter_map(take).collect();
    (!batch.is_empty()).then_some(batch)
}

/// One step of a feed together.
fn step(
    model: &Model,
    feeds: &mut [Feed<'_>],
    batch: &[(usize, usize)],
    read: &mut [usize],
) -> Result<(), Error> {
    let (mut rows, mut tokens) = (Vec::new(), Vec::new());
    for &(index, n) in batch {
        let Feed { session, tokens: all } = &mut feeds[index];
        session.lent = None;
        let want = if read[index] + n == all.len() { Want::Last } else { Want::Nothing };
        rows.push(StepRow { id: session.sequence.id(), n, want });
        tokens.extend_from_slice(&all[read[index]..][..n]);
    }
    let result = model.loaded().step(&rows, Entry::Tokens(&tokens), None, None);
    let mut next_row = 0;
    for (&(index, n), row) in batch.iter().zip(&rows) {
        let Feed { session, tokens: all } = &mut feeds[index];
        if let Ok(logits) = &result {
            session.stepped(&all[read[index]..][..n]);
            if row.want == Want::Last {
                session.lent = logits.clone().map(|logits| (logits, next_row));
                next_row += 1;
            }
            read[index] += n;
        } else {
            session.tokens.truncate(session.sequence.len());
        }
    }
    result.map(|_| ())
}
