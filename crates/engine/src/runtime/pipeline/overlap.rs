//! Runs the micro-batches of a step: a thread per part, each of which passes the residual stream of
//! one micro-batch on and takes the next.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::{mem, panic, thread};

use kvant_backend::{BackendError, TopK};
use kvant_model::Entry;

use super::super::{BatchEntry, LoadedModel, Logits};
use super::LayerPipeline;
use super::micro_batch::{MicroBatch, rows_of};
use crate::error::Error;

/// The error of a part, and the index of the micro-batch that it failed at.
struct Failure {
    index: usize,
    error: Error,
}

/// What enters a part.
enum Input<'a> {
    /// What enters the step.
    Step(Entry<'a>),
    /// The residual streams of the micro-batches, in order, as the previous part leaves them. They
    /// end early where that part failed.
    Part(Receiver<Vec<f32>>),
}

impl LayerPipeline {
    /// Runs the micro-batches of a step through the parts, each part in a thread, the last in this
    /// one.
    pub(super) fn overlap(
        &self,
        micro_batches: &[MicroBatch],
        entry: Entry<'_>,
        mut left: Option<&mut Vec<f32>>,
    ) -> Result<Option<Arc<dyn Logits>>, Error> {
        let (last, before) = self.parts.split_last().expect("a model has at least one part");
        let mut joined = JoinedLogits::default();
        if let Some(left) = left.as_deref_mut() {
            left.clear();
        }
        let failures = thread::scope(|scope| {
            let (mut input, mut running, mut failures) = (Input::Step(entry), Vec::new(), Vec::new());
            for part in before {
                let (sender, receiver) = channel();
                let of_part = mem::replace(&mut input, Input::Part(receiver));
                let run = move || self.run_inner(&**part, micro_batches, of_part, &sender);
                match thread::Builder::new().spawn_scoped(scope, run) {
                    Ok(thread) => running.push(thread),
                    // The parts before it stop, as nothing takes what they send.
                    Err(error) => return vec![Failure { index: 0, error: no_thread(part, &error) }],
                }
            }
            failures.extend(self.run_last(&**last, micro_batches, input, left, &mut joined).err());
            for thread in running {
                let result = thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
                failures.extend(result.err());
            }
            failures
        });
        // Which parts reach a later micro-batch depends on time.
        match failures.into_iter().min_by_key(|failure| failure.index) {
            Some(failure) => Err(failure.error),
            None => Ok(joined.into_logits()),
        }
    }

    /// Runs a part before the last on every micro-batch and sends what it leaves.
    fn run_inner(
        &self,
        part: &dyn LoadedModel,
        micro_batches: &[MicroBatch],
        input: Input<'_>,
        sender: &Sender<Vec<f32>>,
    ) -> Result<(), Failure> {
        self.run(micro_batches, input, |micro_batch, entry| {
            let entries: Vec<_> = micro_batch.entries.iter().map(BatchEntry::without_logits).collect();
            let mut leaving = self.take_buffer();
            part.step(&entries, entry, Some(&mut leaving), None)?;
            Ok(sender.send(leaving).is_ok())
        })
    }

    /// Runs the last part on every micro-batch; collects the logits, or appends the hidden states
    /// to `left`.
    fn run_last(
        &self,
        part: &dyn LoadedModel,
        micro_batches: &[MicroBatch],
        input: Input<'_>,
        mut left: Option<&mut Vec<f32>>,
        joined: &mut JoinedLogits,
    ) -> Result<(), Failure> {
        self.run(micro_batches, input, |micro_batch, entry| {
            let mut leaving = left.is_some().then(|| self.take_buffer());
            let logits = part.step(&micro_batch.entries, entry, leaving.as_mut(), None)?;
            joined.push(logits, &micro_batch.entries);
            if let (Some(left), Some(leaving)) = (left.as_deref_mut(), leaving) {
                left.extend_from_slice(&leaving);
                self.reuse(leaving);
            }
            Ok(true)
        })
    }

    /// Calls `step` with each micro-batch and what enters the part, until it returns `false` or the
    /// input ends.
    fn run(
        &self,
        micro_batches: &[MicroBatch],
        input: Input<'_>,
        mut step: impl FnMut(&MicroBatch, Entry<'_>) -> Result<bool, Error>,
    ) -> Result<(), Failure> {
        for (index, micro_batch) in micro_batches.iter().enumerate() {
            let goes_on = match &input {
                Input::Step(entry) => {
                    step(micro_batch, rows_of(*entry, &micro_batch.rows, self.properties.config.n_embd))
                }
                Input::Part(receiver) => {
                    let Ok(entering) = receiver.recv() else { return Ok(()) };
                    let goes_on = step(micro_batch, Entry::Residual(&entering));
                    self.reuse(entering);
                    goes_on
                }
            };
            if !goes_on.map_err(|error| Failure { index, error })? {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Returns the error of a thread that the system does not start.
fn no_thread(part: &Arc<dyn LoadedModel>, error: &std::io::Error) -> Error {
    let name = &part.properties().info.name;
    BackendError::Failed { device: "pipeline", problem: format!("no thread for {name}: {error}") }.into()
}

/// The logits of micro-batches.
#[derive(Default)]
struct JoinedLogits {
    /// Each with the number of rows before it.
    parts: Vec<(usize, Arc<dyn Logits>)>,
    n_rows: usize,
}

impl JoinedLogits {
    /// Adds the logits of a micro-batch, if it has any.
    fn push(&mut self, logits: Option<Arc<dyn Logits>>, entries: &[BatchEntry]) {
        self.parts.extend(logits.map(|logits| (self.n_rows, logits)));
        self.n_rows += entries.iter().map(|entry| entry.logits_for.count(entry.n)).sum::<usize>();
    }

    /// Returns the logits of all rows, if there are any.
    fn into_logits(mut self) -> Option<Arc<dyn Logits>> {
        match self.parts.len() {
            0 => None,
            1 => self.parts.pop().map(|(_, logits)| logits),
            _ => Some(Arc::new(self)),
        }
    }

    /// Returns the logits that hold row `row`, and its index there.
    fn find(&self, row: usize) -> (&dyn Logits, usize) {
        let after = self.parts.partition_point(|(first, _)| *first <= row);
        let (first, logits) = &self.parts[after - 1];
        (&**logits, row - first)
    }
}

impl Logits for JoinedLogits {
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        let (logits, row) = self.find(row);
        logits.read(row, out)
    }

    fn top_k(&self, rows: &mut [TopK<'_>]) -> Result<(), Error> {
        let ends = self.parts.iter().skip(1).map(|(first, _)| *first).chain([self.n_rows]);
        for ((first, logits), end) in self.parts.iter().zip(ends) {
            let own = rows.iter_mut().filter(|of| (*first..end).contains(&of.row));
            let own = own.map(|TopK { row, k, out }| TopK { row: *row - first, k: *k, out });
            let mut own: Vec<_> = own.collect();
            if !own.is_empty() {
                logits.top_k(&mut own)?;
            }
        }
        Ok(())
    }
}
