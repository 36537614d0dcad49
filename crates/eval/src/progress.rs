//! Progress reports of measurements.

/// Progress of a measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Steps done.
    pub done: usize,
    /// Steps in all.
    pub total: usize,
    /// Steps done in an earlier run, which are excluded from the estimate of the time left.
    pub resumed: usize,
    /// The result so far, as text.
    pub note: String,
}

/// Called at the start and after every step.
pub type OnProgress<'a> = &'a mut dyn FnMut(&Progress);
