//! Sequences that do not go on with the others: nobody listens to them, or what they may say next is not known yet.

use std::time::{Duration, Instant};

use super::{EVENTS_OF_ANSWER, Worker};
use crate::scheduler::Id;

/// Whoever does not listen for so long has gone.
const PATIENCE: Duration = Duration::from_secs(60);

impl Worker {
    /// Lets go of those whom nobody waits for, and holds those back whom nobody listens to.
    pub(super) fn look_who_listens(&mut self) {
        let mut gone = Vec::new();
        for (&id, course) in &mut self.courses {
            // All of them may have something to tell before it is looked again.
            let is_heard = course.job.events.capacity() >= EVENTS_OF_ANSWER * course.job.n_together;
            if is_heard != course.unheard.is_none() {
                course.unheard = (!is_heard).then(Instant::now);
                self.scheduler.pause(id, course.is_held_back());
            }
            if course.job.events.is_closed() || course.unheard.is_some_and(|since| since.elapsed() > PATIENCE)
            {
                gone.push(id);
            }
        }
        for id in gone {
            self.metrics.cancelled.inc();
            self.leave(id);
        }
    }

    /// Goes on with those whose next tokens have become known. Whether any are not.
    pub(super) fn look_for_masks(&mut self) -> bool {
        let mut awaits = false;
        let mut ready = Vec::new();
        for (&id, course) in self.courses.iter_mut().filter(|(_, course)| course.awaits_mask) {
            if course.voice.is_ready(Duration::ZERO) {
                ready.push(id);
            } else {
                awaits = true;
            }
        }
        for id in ready {
            self.await_mask(id, false);
            self.go_on(id, 0, Instant::now());
        }
        awaits
    }

    /// Holds a sequence back until its next tokens are known, or no longer.
    pub(super) fn await_mask(&mut self, id: Id, awaits: bool) {
        if let Some(course) = self.courses.get_mut(&id) {
            course.awaits_mask = awaits;
            self.scheduler.pause(id, course.is_held_back());
        }
    }
}
