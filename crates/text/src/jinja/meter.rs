//! What a template may spend: steps of work and bytes of memory.

use std::cell::Cell;
use std::rc::Rc;

use super::Fault;

/// Steps after which a template is stopped, besides one for each byte that it was given: well below a second. A
/// conversation of ten thousand messages takes about a million, unless a template looks back at all that came before each.
pub(crate) const MAX_STEPS: u64 = 10_000_000;
/// Bytes that a template may hold at once, its output included, besides four times the
/// conversation that it was given.
pub(crate) const MAX_BYTES: usize = 64 << 20;
/// Bytes that are gone through, character by character, in the time of one step.
const BYTES_PER_STEP: usize = 32;
/// Bytes that are written in that time, as a whole and to fresh memory.
const WRITTEN_PER_STEP: usize = 256;

/// What is left. Every value of a render holds its share and gives it back when it is dropped.
#[derive(Debug)]
pub(super) struct Meter {
    steps: Cell<u64>,
    bytes: Cell<usize>,
}

impl Meter {
    /// The full allowance.
    pub(super) fn new() -> Rc<Self> {
        Rc::new(Meter { steps: Cell::new(MAX_STEPS), bytes: Cell::new(usize::MAX / 2) })
    }

    /// Begins to count. What is held until now is the conversation: that is not the template's doing, and a template may
    /// go through it and write it some times.
    pub(super) fn begin(&self) {
        let given = (usize::MAX / 2).saturating_sub(self.bytes.get());
        self.bytes.set(MAX_BYTES.saturating_add(given.saturating_mul(4)));
        self.steps.set(MAX_STEPS.saturating_add(given as u64));
    }

    /// Spends steps.
    ///
    /// # Errors
    /// [`Fault::Steps`] when there are not as many.
    pub(super) fn work(&self, steps: usize) -> Result<(), Fault> {
        let left = self.steps.get().checked_sub(steps as u64).ok_or(Fault::Steps)?;
        self.steps.set(left);
        Ok(())
    }

    /// Spends the steps of going through `bytes`.
    ///
    /// # Errors
    /// As [`Meter::work`].
    pub(super) fn read(&self, bytes: usize) -> Result<(), Fault> {
        self.work(1 + bytes / BYTES_PER_STEP)
    }
}

/// A share of a meter's bytes.
#[derive(Debug)]
pub(super) struct Held {
    meter: Rc<Meter>,
    bytes: usize,
}

impl Held {
    /// A share of no bytes.
    pub(super) fn none(meter: &Rc<Meter>) -> Self {
        Held { meter: Rc::clone(meter), bytes: 0 }
    }

    /// Takes `bytes` more, about to be written.
    ///
    /// # Errors
    /// [`Fault::Bytes`] when there are not as many; [`Fault::Steps`] when there is no time to write them.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Fault> {
        let left = self.meter.bytes.get().checked_sub(bytes).ok_or(Fault::Bytes)?;
        self.meter.work(1 + bytes / WRITTEN_PER_STEP)?;
        self.meter.bytes.set(left);
        self.bytes += bytes;
        Ok(())
    }

    /// Gives `bytes` back.
    pub(super) fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.meter.bytes.set(self.meter.bytes.get().saturating_add(bytes));
        self.bytes -= bytes;
    }

    /// Whom it was taken from.
    pub(super) fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.meter.bytes.set(self.meter.bytes.get().saturating_add(self.bytes));
    }
}
