//! Sequences that the batch runs without: their client applies backpressure, or their token mask is
//! not ready.

use std::time::{Duration, Instant};

use super::{EVENTS_OF_ANSWER, Worker};
use crate::scheduler::Id;

/// A client whose channel stays full for this long counts as disconnected.
const BACKPRESSURE_TIMEOUT: Duration = Duration::from_secs(60);

impl Worker {
    /// Cancels the sequences of disconnected clients and pauses those whose channel is full.
    pub(super) fn drop_disconnected(&mut self) {
        let mut gone = Vec::new();
        for (&id, sequence) in &mut self.sequences {
            // Each answer of the channel may emit all its events before the next check.
            let has_capacity = sequence.job.events.capacity() >= EVENTS_OF_ANSWER * sequence.job.n_answers;
            if has_capacity != sequence.backpressure_since.is_none() {
                sequence.backpressure_since = (!has_capacity).then(Instant::now);
                self.scheduler.pause(id, sequence.is_paused());
            }
            if sequence.job.events.is_closed()
                || sequence.backpressure_since.is_some_and(|since| since.elapsed() > BACKPRESSURE_TIMEOUT)
            {
                gone.push(id);
            }
        }
        for id in gone {
            self.metrics.cancelled.inc();
            self.retire(id);
        }
    }

    /// Resumes the sequences whose token masks are ready. Reports whether others still wait.
    pub(super) fn resume_ready(&mut self) -> bool {
        let mut awaits = false;
        let mut ready = Vec::new();
        for (&id, sequence) in self.sequences.iter_mut().filter(|(_, sequence)| sequence.awaits_mask) {
            if sequence.text.decoder_mut().is_ready(Duration::ZERO) {
                ready.push(id);
            } else {
                awaits = true;
            }
        }
        for id in ready {
            self.await_mask(id, false);
            self.advance(id, 0, Instant::now());
        }
        awaits
    }

    /// Pauses a sequence until its token mask is ready, or resumes it.
    pub(super) fn await_mask(&mut self, id: Id, awaits: bool) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.awaits_mask = awaits;
            self.scheduler.pause(id, sequence.is_paused());
        }
    }
}
