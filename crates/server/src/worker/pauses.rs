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
        for (&id, course) in &mut self.courses {
            // Each answer of the channel may emit all its events before the next check.
            let is_heard = course.job.events.capacity() >= EVENTS_OF_ANSWER * course.job.n_answers;
            if is_heard != course.backpressure_since.is_none() {
                course.backpressure_since = (!is_heard).then(Instant::now);
                self.scheduler.pause(id, course.is_paused());
            }
            if course.job.events.is_closed()
                || course.backpressure_since.is_some_and(|since| since.elapsed() > BACKPRESSURE_TIMEOUT)
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
    pub(super) fn look_for_masks(&mut self) -> bool {
        let mut awaits = false;
        let mut ready = Vec::new();
        for (&id, course) in self.courses.iter_mut().filter(|(_, course)| course.awaits_mask) {
            if course.text.decoder().is_ready(Duration::ZERO) {
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
        if let Some(course) = self.courses.get_mut(&id) {
            course.awaits_mask = awaits;
            self.scheduler.pause(id, course.is_paused());
        }
    }
}
