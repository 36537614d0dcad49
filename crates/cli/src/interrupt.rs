//! What Ctrl-C does.

use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvant::CancelFlag;

use crate::failure::Failure;

/// Exit code of a program that Ctrl-C has ended.
pub const INTERRUPTED: i32 = 130;

/// What Ctrl-C stops: the answer that is being written, or, where nothing is, the program.
#[derive(Clone)]
pub struct Interrupt {
    /// Stops the answer.
    pub cancel: CancelFlag,
    answering: Arc<AtomicBool>,
}

impl Interrupt {
    /// Begins to listen; `edits_lines` where a line editor reads the key when nothing is being written.
    pub fn listen(edits_lines: bool) -> Result<Self, Failure> {
        let interrupt = Self { cancel: CancelFlag::default(), answering: Arc::default() };
        let heard = interrupt.clone();
        let handler = move || {
            let answering = heard.answering.load(Ordering::Relaxed);
            // A second time, nobody wants to wait for the answer to stop.
            let stopping = answering && heard.cancel.is_cancelled();
            if stopping || !answering && !edits_lines {
                exit(INTERRUPTED);
            }
            heard.cancel.cancel();
        };
        ctrlc::set_handler(handler).map_err(|error| Failure::work("Ctrl-C", error))?;
        Ok(interrupt)
    }

    /// Runs what Ctrl-C is to stop.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.cancel.reset();
        self.answering.store(true, Ordering::Relaxed);
        let done = work();
        self.answering.store(false, Ordering::Relaxed);
        done
    }
}
