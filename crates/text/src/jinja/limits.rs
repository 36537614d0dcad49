//! Resource limits of templates: steps of work and bytes of memory.

use std::cell::Cell;
use std::rc::Rc;

use super::Fault;

/// Maximum steps of a template, besides one for each byte of input: well below a second. A
/// conversation of ten thousand messages takes about a million, unless a template rescans all
/// previous messages for each.
pub(crate) const MAX_STEPS: u64 = 10_000_000;
/// Maximum bytes that a template may hold at once, including its output, besides four times the
/// conversation.
pub(crate) const MAX_BYTES: usize = 64 << 20;
/// Bytes scanned character by character in the time of one step.
const BYTES_PER_STEP: usize = 32;
/// Bytes written in bulk to fresh memory in the time of one step.
const WRITTEN_PER_STEP: usize = 256;

/// The remaining budget. Every value of a render holds its share and returns it when dropped.
#[derive(Debug)]
pub(super) struct Budget {
    steps: Cell<u64>,
    bytes: Cell<usize>,
}

impl Budget {
    /// Creates a meter without a byte limit, for loading the inputs.
    pub(super) fn new() -> Rc<Self> {
        Rc::new(Budget { steps: Cell::new(MAX_STEPS), bytes: Cell::new(usize::MAX / 2) })
    }

    /// Starts the limits. The bytes held until now are the conversation: they do not count against
    /// the template, and the allowance scales with them so that a template may scan and write them
    /// several times.
    pub(super) fn begin(&self) {
        let input_bytes = (usize::MAX / 2).saturating_sub(self.bytes.get());
        self.bytes.set(MAX_BYTES.saturating_add(input_bytes.saturating_mul(4)));
        self.steps.set(MAX_STEPS.saturating_add(input_bytes as u64));
    }

    /// Spends steps.
    ///
    /// # Errors
    /// [`Fault::Steps`] if too few are left.
    pub(super) fn work(&self, steps: usize) -> Result<(), Fault> {
        let left = self.steps.get().checked_sub(steps as u64).ok_or(Fault::Steps)?;
        self.steps.set(left);
        Ok(())
    }

    /// Spends the steps of scanning `bytes`.
    ///
    /// # Errors
    /// As [`Budget::work`].
    pub(super) fn read(&self, bytes: usize) -> Result<(), Fault> {
        self.work(1 + bytes / BYTES_PER_STEP)
    }
}

/// A share of a meter's bytes.
#[derive(Debug)]
pub(super) struct ByteReservation {
    meter: Rc<Budget>,
    bytes: usize,
}

impl ByteReservation {
    /// Creates a share of no bytes.
    pub(super) fn none(meter: &Rc<Budget>) -> Self {
        ByteReservation { meter: Rc::clone(meter), bytes: 0 }
    }

    /// Reserves `bytes` more, about to be written.
    ///
    /// # Errors
    /// [`Fault::Bytes`] if too few are left; [`Fault::Steps`] if too few steps are left to write
    /// them.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Fault> {
        let left = self.meter.bytes.get().checked_sub(bytes).ok_or(Fault::Bytes)?;
        self.meter.work(1 + bytes / WRITTEN_PER_STEP)?;
        self.meter.bytes.set(left);
        self.bytes += bytes;
        Ok(())
    }

    /// Returns `bytes` to the meter.
    pub(super) fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.meter.bytes.set(self.meter.bytes.get().saturating_add(bytes));
        self.bytes -= bytes;
    }

    /// Returns the meter of this share.
    pub(super) fn meter(&self) -> &Rc<Budget> {
        &self.meter
    }
}

impl Drop for ByteReservation {
    fn drop(&mut self) {
        self.meter.bytes.set(self.meter.bytes.get().saturating_add(self.bytes));
    }
}
