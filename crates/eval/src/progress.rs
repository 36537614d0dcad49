//! What a measurement tells while it runs.

/// How far a measurement is.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Steps done.
    pub done: usize,
    /// Steps in all.
    pub total: usize,
    /// Steps done that were taken from an earlier run, not measured now: they say nothing about the time left.
    pub resumed: usize,
    /// The result so far, in words.
    pub note: String,
}

/// Told at the start and after every step.
pub type OnProgress<'a> = &'a mut dyn FnMut(&Progress);
