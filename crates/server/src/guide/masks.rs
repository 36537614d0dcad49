//! Which tokens may come next, worked out by threads of their own while the model reads the token before.
//!
//! Most masks take microseconds; those of an ambiguous grammar take minutes. Each has a bound of time, beyond which its answer ends, and
//! an owner has one thread at a time, so that nobody waits for the masks of another. After a mask that took long the next one of that
//! answer is left to threads that give way to the model.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use llguidance::toktrie::SimpleVob;
use llguidance::{CancellationHandle, Matcher};

use super::{FormError, in_a_line};
use crate::lanes::Owner;
use crate::priority::give_way;

/// The longest that a mask may take.
pub(super) const MASK_TIME: Duration = Duration::from_secs(2);
/// After a mask that took longer the next one is for threads that give way.
const QUICK: Duration = Duration::from_millis(20);
/// Masks that are worked out at once by each kind of thread, each of another owner.
const THREADS: usize = 2;
/// The stack of a thread that works masks out.
const STACK: usize = 16 << 20;

/// A mask to be worked out, and where it goes.
struct Work {
    matcher: Box<Matcher>,
    owner: Owner,
    /// When it was begun.
    began: Arc<OnceLock<Instant>>,
    to: SyncSender<Done>,
}

/// What comes of it.
pub(super) struct Done {
    matcher: Box<Matcher>,
    mask: Result<SimpleVob, FormError>,
    took: Duration,
}

impl Done {
    /// Works out which tokens may come next.
    pub fn of(mut matcher: Box<Matcher>) -> Self {
        let began = Instant::now();
        let mask = matcher.compute_mask_or_eos();
        let mask = mask.map_err(|error| FormError::Wrong(in_a_line(&error.to_string())));
        Self { matcher, mask, took: began.elapsed() }
    }
}

/// Masks that nobody works out yet.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Work>,
    /// Owners whose masks are being worked out.
    busy: Vec<Owner>,
    is_closed: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first one of an owner who has no thread.
    fn take(&self) -> Option<Work> {
        let mut state = self.state();
        loop {
            if state.is_closed {
                return None;
            }
            let next = state.waiting.iter().position(|work| !state.busy.contains(&work.owner));
            if let Some(work) = next.and_then(|at| state.waiting.remove(at)) {
                state.busy.push(work.owner.clone());
                return Some(work);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self) {
        while let Some(Work { matcher, owner, began, to }) = self.take() {
            _ = began.set(Instant::now());
            // Whoever asked may have gone.
            _ = to.send(Done::of(matcher));
            self.state().busy.retain(|busy| *busy != owner);
            self.changed.notify_all();
        }
    }
}

/// The threads; they end with this.
pub(super) struct MaskThreads {
    quick: Arc<Queue>,
    slow: Arc<Queue>,
}

impl MaskThreads {
    pub fn start() -> std::io::Result<Self> {
        let threads = Self { quick: Arc::default(), slow: Arc::default() };
        for _ in 0..THREADS {
            let thread = || std::thread::Builder::new().name("masks".to_owned()).stack_size(STACK);
            let (quick, slow) = (Arc::clone(&threads.quick), Arc::clone(&threads.slow));
            thread().spawn(move || quick.work())?;
            thread().spawn(move || {
                give_way();
                slow.work();
            })?;
        }
        Ok(threads)
    }

    /// Leaves work to the threads for what took so long before.
    fn send(&self, work: Work, took: Duration) {
        let queue = if took > QUICK { &self.slow } else { &self.quick };
        queue.state().waiting.push_back(work);
        queue.changed.notify_one();
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        for queue in [&self.quick, &self.slow] {
            queue.state().is_closed = true;
            queue.changed.notify_all();
        }
    }
}

/// Where an answer stands in its form.
pub(crate) struct Guide {
    mask: Mask,
    /// What the last mask took.
    took: Duration,
    owner: Owner,
    threads: Arc<MaskThreads>,
}

enum Mask {
    There(Box<Matcher>, SimpleVob),
    /// The lock is never taken: a job that holds this is shared.
    Coming {
        done: Mutex<Receiver<Done>>,
        began: Arc<OnceLock<Instant>>,
        cancels: Option<CancellationHandle>,
    },
    Failed(FormError),
}

impl Guide {
    /// One at the beginning, with its first mask.
    pub(super) fn new(first: Done, owner: Owner, threads: Arc<MaskThreads>) -> Result<Self, FormError> {
        let mask = Mask::There(first.matcher, first.mask?);
        Ok(Self { mask, took: first.took, owner, threads })
    }

    /// A guide at the same place, where its mask is there.
    pub fn fork(&self) -> Option<Self> {
        let Mask::There(matcher, mask) = &self.mask else { return None };
        let (owner, threads) = (self.owner.clone(), Arc::clone(&self.threads));
        let mask = Mask::There(Box::new(matcher.deep_clone()), mask.clone());
        Some(Self { mask, took: self.took, owner, threads })
    }

    /// Whether a token can be chosen, or is known why not, after `patience` at the latest. A mask that takes too long is given up.
    pub fn is_ready(&mut self, patience: Duration) -> bool {
        let Mask::Coming { done, began, cancels } = &mut self.mask else { return true };
        let done = done.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.mask = match done.recv_timeout(patience) {
            Ok(Done { matcher, mask, took }) => {
                self.took = took;
                mask.map_or_else(Mask::Failed, |mask| Mask::There(matcher, mask))
            }
            Err(RecvTimeoutError::Disconnected) => Mask::Failed(FormError::Wrong(AWAY.to_owned())),
            Err(RecvTimeoutError::Timeout) => {
                if began.get().is_none_or(|began| began.elapsed() < MASK_TIME) {
                    return false;
                }
                cancels.iter().for_each(CancellationHandle::cancel);
                Mask::Failed(FormError::SlowMask)
            }
        };
        true
    }

    /// Rules out what may not come next.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), FormError> {
        while !self.is_ready(MASK_TIME) {}
        let mask = match &self.mask {
            Mask::There(_, mask) => mask,
            Mask::Failed(error) => return Err(error.clone()),
            Mask::Coming { .. } => return Err(FormError::Wrong(AWAY.to_owned())),
        };
        for (id, logit) in logits.iter_mut().enumerate() {
            if id >= mask.len() || !mask.is_allowed(id as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Takes note of a token, and begins to work out what may come next. Whether the answer is complete with it, and nothing can follow.
    ///
    /// This takes a small part of what the mask before took, which looked along this token and all others.
    pub fn said(&mut self, token: u32) -> Result<bool, FormError> {
        let away = Mask::Failed(FormError::Wrong(AWAY.to_owned()));
        let mut matcher = match std::mem::replace(&mut self.mask, away) {
            Mask::There(matcher, _) => matcher,
            _ => return Err(FormError::Wrong(AWAY.to_owned())),
        };
        matcher.consume_token(token).map_err(|error| FormError::Wrong(in_a_line(&error.to_string())))?;
        if matcher.is_stopped() {
            return Ok(true);
        }
        let ((to, done), began) = (sync_channel(1), Arc::default());
        let cancels = matcher.cancellation_handle();
        self.mask = Mask::Coming { done: Mutex::new(done), began: Arc::clone(&began), cancels };
        self.threads.send(Work { matcher, owner: self.owner.clone(), began, to }, self.took);
        Ok(false)
    }

    /// Goes on behind tokens that were said before this held.
    pub fn catch_up(&mut self, tokens: &[u32]) -> Result<(), FormError> {
        let Mask::There(matcher, _) = &mut self.mask else { return Err(FormError::Wrong(AWAY.to_owned())) };
        let Some((&last, before)) = tokens.split_last() else { return Ok(()) };
        matcher.consume_tokens(before).map_err(|error| FormError::Wrong(in_a_line(&error.to_string())))?;
        self.said(last).map(|_| ())
    }

    /// Whether these tokens are a whole answer.
    #[cfg(test)]
    pub fn takes(mut self, tokens: &[u32]) -> bool {
        while !self.is_ready(MASK_TIME) {}
        let Mask::There(matcher, _) = &mut self.mask else { panic!("something has been asked for") };
        tokens.iter().all(|&token| {
            matcher.compute_mask().is_ok_and(|mask| mask.is_allowed(token))
                && matcher.consume_token(token).is_ok()
        }) && matcher.is_accepting().is_ok_and(|accepts| accepts)
    }
}

impl Drop for Guide {
    fn drop(&mut self) {
        if let Mask::Coming { cancels, .. } = &self.mask {
            cancels.iter().for_each(CancellationHandle::cancel);
        }
    }
}

const AWAY: &str = "the thread of the masks has ended";
