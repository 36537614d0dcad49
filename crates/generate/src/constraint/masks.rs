//! Token masks, computed on separate threads while the model processes the previous token.
//!
//! Most masks take microseconds; those of an ambiguous grammar take minutes. Each has a time limit,
//! beyond which its answer ends, and an owner uses one thread at a time, so that no owner delays
//! the masks of another. After a slow mask, the next one of that answer is computed by low-priority
//! threads.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use llguidance::toktrie::SimpleVob;
use llguidance::{CancellationHandle, Matcher};

use super::compiler::in_a_line;
use super::priority::lower_priority;
use super::{ConstraintError, MASK_TIME, Owner};

/// After a mask slower than this, the next one is computed at low priority.
const QUICK: Duration = Duration::from_millis(20);
/// Threads of each priority; each serves a different owner.
const THREADS: usize = 2;
/// Stack of a mask thread.
const STACK: usize = 16 << 20;

/// Mask to be computed, and its receiver.
struct MaskJob {
    matcher: Box<Matcher>,
    owner: Owner,
    /// Start of the computation.
    began: Arc<OnceLock<Instant>>,
    to: SyncSender<ComputedMask>,
}

/// Computed mask.
pub(super) struct ComputedMask {
    matcher: Box<Matcher>,
    mask: Result<SimpleVob, ConstraintError>,
    took: Duration,
}

impl ComputedMask {
    /// Computes the token mask.
    pub fn of(mut matcher: Box<Matcher>) -> Self {
        let began = Instant::now();
        let mask = matcher.compute_mask_or_eos();
        let mask = mask.map_err(|error| ConstraintError::Invalid(in_a_line(&error.to_string())));
        Self { matcher, mask, took: began.elapsed() }
    }
}

/// Masks waiting for a thread.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<MaskJob>,
    /// Owners whose masks are being computed.
    busy: Vec<Owner>,
    is_closed: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the first mask of an owner without a busy thread.
    fn take(&self) -> Option<MaskJob> {
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
        while let Some(MaskJob { matcher, owner, began, to }) = self.take() {
            _ = began.set(Instant::now());
            // The receiver may have been dropped.
            _ = to.send(ComputedMask::of(matcher));
            self.state().busy.retain(|busy| *busy != owner);
            self.changed.notify_all();
        }
    }
}

/// Mask threads; they end when this is dropped.
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
                lower_priority();
                slow.work();
            })?;
        }
        Ok(threads)
    }

    /// Queues work by the duration of the previous mask.
    fn send(&self, work: MaskJob, took: Duration) {
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

/// Constraint state of an answer.
pub struct Constraint {
    mask: Mask,
    /// Duration of the last mask.
    took: Duration,
    owner: Owner,
    threads: Arc<MaskThreads>,
}

enum Mask {
    Ready(Box<Matcher>, SimpleVob),
    /// The lock is never taken: it only makes a shared job with this guide `Sync`.
    Pending {
        done: Mutex<Receiver<ComputedMask>>,
        began: Arc<OnceLock<Instant>>,
        cancels: Option<CancellationHandle>,
    },
    Failed(ConstraintError),
}

impl Constraint {
    /// Creates a guide in its initial state, with its first mask.
    pub(super) fn new(
        first: ComputedMask,
        owner: Owner,
        threads: Arc<MaskThreads>,
    ) -> Result<Self, ConstraintError> {
        let mask = Mask::Ready(first.matcher, first.mask?);
        Ok(Self { mask, took: first.took, owner, threads })
    }

    /// Returns a guide in the same state, if its mask is available.
    pub fn fork(&self) -> Option<Self> {
        let Mask::Ready(matcher, mask) = &self.mask else { return None };
        let (owner, threads) = (self.owner.clone(), Arc::clone(&self.threads));
        let mask = Mask::Ready(Box::new(matcher.deep_clone()), mask.clone());
        Some(Self { mask, took: self.took, owner, threads })
    }

    /// Reports whether the mask, or its failure, is available after at most `patience`. A mask
    /// beyond its time limit is cancelled.
    pub fn is_ready(&mut self, patience: Duration) -> bool {
        let Mask::Pending { done, began, cancels } = &mut self.mask else { return true };
        let done = done.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.mask = match done.recv_timeout(patience) {
            Ok(ComputedMask { matcher, mask, took }) => {
                self.took = took;
                mask.map_or_else(Mask::Failed, |mask| Mask::Ready(matcher, mask))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Mask::Failed(ConstraintError::Invalid(THREADS_ENDED.to_owned()))
            }
            Err(RecvTimeoutError::Timeout) => {
                if began.get().is_none_or(|began| began.elapsed() < MASK_TIME) {
                    return false;
                }
                cancels.iter().for_each(CancellationHandle::cancel);
                Mask::Failed(ConstraintError::SlowMask)
            }
        };
        true
    }

    /// Excludes the tokens that the constraint forbids.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        while !self.is_ready(MASK_TIME) {}
        let mask = match &self.mask {
            Mask::Ready(_, mask) => mask,
            Mask::Failed(error) => return Err(error.clone()),
            Mask::Pending { .. } => return Err(ConstraintError::Invalid(THREADS_ENDED.to_owned())),
        };
        for (id, logit) in logits.iter_mut().enumerate() {
            if id >= mask.len() || !mask.is_allowed(id as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Records a token and starts the computation of the next mask. Returns whether the answer is
    /// complete, so that nothing can follow.
    ///
    /// This takes a small part of the time of the previous mask, which covered this token and all
    /// others.
    pub fn consume(&mut self, token: u32) -> Result<bool, ConstraintError> {
        let away = Mask::Failed(ConstraintError::Invalid(THREADS_ENDED.to_owned()));
        let mut matcher = match std::mem::replace(&mut self.mask, away) {
            Mask::Ready(matcher, _) => matcher,
            _ => return Err(ConstraintError::Invalid(THREADS_ENDED.to_owned())),
        };
        matcher
            .consume_token(token)
            .map_err(|error| ConstraintError::Invalid(in_a_line(&error.to_string())))?;
        if matcher.is_stopped() {
            return Ok(true);
        }
        let ((to, done), began) = (sync_channel(1), Arc::default());
        let cancels = matcher.cancellation_handle();
        self.mask = Mask::Pending { done: Mutex::new(done), began: Arc::clone(&began), cancels };
        self.threads.send(MaskJob { matcher, owner: self.owner.clone(), began, to }, self.took);
        Ok(false)
    }

    /// Consumes tokens that were generated before the guide became active.
    pub fn catch_up(&mut self, tokens: &[u32]) -> Result<(), ConstraintError> {
        let Mask::Ready(matcher, _) = &mut self.mask else {
            return Err(ConstraintError::Invalid(THREADS_ENDED.to_owned()));
        };
        let Some((&last, before)) = tokens.split_last() else { return Ok(()) };
        matcher
            .consume_tokens(before)
            .map_err(|error| ConstraintError::Invalid(in_a_line(&error.to_string())))?;
        self.consume(last).map(|_| ())
    }

    /// Reports whether these tokens are a complete answer.
    pub fn accepts(mut self, tokens: &[u32]) -> bool {
        while !self.is_ready(MASK_TIME) {}
        let Mask::Ready(matcher, _) = &mut self.mask else { return false };
        let mut is_allowed = |token| {
            matcher.compute_mask().is_ok_and(|mask| mask.is_allowed(token))
                && matcher.consume_token(token).is_ok()
        };
        tokens.iter().all(|&token| is_allowed(token)) && matcher.is_accepting().is_ok_and(|accepts| accepts)
    }
}

impl Drop for Constraint {
    fn drop(&mut self) {
        if let Mask::Pending { cancels, .. } = &self.mask {
            cancels.iter().for_each(CancellationHandle::cancel);
        }
    }
}

const THREADS_ENDED: &str = "the thread of the masks has ended";
