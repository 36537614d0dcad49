//! Ctrl-C handling.

use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvant::CancelFlag;

use crate::failure::Failure;

/// Exit code of a program that Ctrl-C has ended.
pub const INTERRUPTED: i32 = 130;

/// Stops the running generation on Ctrl-C, or ends the program if none is running.
#[derive(Clone)]
pub struct Interrupt {
    /// Stops the generation.
    pub cancel: CancelFlag,
    answering: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the handler; with `edits_lines`, a line editor handles the key between generations.
    pub fn install(edits_lines: bool) -> Result<Self, Failure> {
        let interrupt = Self { cancel: CancelFlag::default(), answering: Arc::default() };
        let shared = interrupt.clone();
        let handler = move || {
            let answering = shared.answering.load(Ordering::Relaxed);
            // A second Ctrl-C ends the program at once.
            let stopping = answering && shared.cancel.is_cancelled();
            if stopping || !answering && !edits_lines {
                exit(INTERRUPTED);
            }
            shared.cancel.cancel();
        };
        ctrlc::set_handler(handler).map_err(|error| Failure::work("Ctrl-C", error))?;
        Ok(interrupt)
    }

    /// Runs `work` so that Ctrl-C cancels it.
    pub fn cancellable<T>(&self, work: impl FnOnce() -> T) -> T {
        self.cancel.reset();
        self.answering.store(true, Ordering::Relaxed);
        let done = work();
        self.answering.store(false, Ordering::Relaxed);
        done
    }
}
