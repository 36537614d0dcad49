//! The worker: runs one case of its tree for the judge. It has no clock and no opinion.

mod model;
mod ops;

use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvant_backend::Backend;
use kvant_conformance::DeviceUnderTest;

use crate::case::Case;
use crate::device::{self, Visitor};
use crate::subject::Settings;
use crate::wire::{Digest, receive, send, send_error, to_values};

/// Serves one case: receives it and its state, and then inputs until the judge ends.
///
/// # Errors
///
/// The failure, in one line, which the judge has been sent too.
pub fn serve(settings: &Settings, requests: &mut dyn Read, replies: &mut dyn Write) -> Result<(), String> {
    let mut link = Link { requests, replies };
    // The checks of a device under test panic.
    let served = catch_unwind(AssertUnwindSafe(|| serve_case(settings, &mut link)));
    let result = served.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned())
    });
    if let Err(line) = &result {
        // The judge may be gone.
        let _ = send_error(link.replies, line);
    }
    result
}

fn serve_case(settings: &Settings, link: &mut Link<'_>) -> Result<(), String> {
    let text = link.receive()?.ok_or("expected a case")?;
    let case: Case = String::from_utf8_lossy(&text).parse().map_err(|error| format!("{error}"))?;
    let state = link.receive()?.ok_or("expected the state of the case")?;
    match case {
        Case::Model(case) => model::serve(&case, &state, settings, link),
        case => device::open(settings, Op { case, state, link }),
    }
}

/// An op of a device.
struct Op<'a, 'l> {
    case: Case,
    state: Vec<u8>,
    link: &'a mut Link<'l>,
}

impl Visitor for Op<'_, '_> {
    fn visit<B: Backend>(self, device: &DeviceUnderTest<B>) -> Result<(), String> {
        match &self.case {
            Case::Attend(case) => ops::attend(device, case, &self.state, self.link),
            Case::Product(case) => ops::product(device, case, &self.state, self.link),
            Case::Append(case) => ops::append(device, case, &self.state, self.link),
            Case::Model(_) => Err("a model is no op".to_owned()),
        }
    }
}

/// The judge, as a worker sees it.
struct Link<'a> {
    requests: &'a mut dyn Read,
    replies: &'a mut dyn Write,
}

impl Link<'_> {
    fn receive(&mut self) -> Result<Option<Vec<u8>>, String> {
        let frame = receive(self.requests).map_err(|error| format!("judge: {error}"))?;
        frame.transpose()
    }

    /// Tells that the case is prepared.
    fn ready(&mut self) -> Result<(), String> {
        self.send(&[])
    }

    /// Answers inputs by `answers` until there are no more.
    fn serve(&mut self, mut answers: impl FnMut(&[f32]) -> Result<Vec<u8>, String>) -> Result<(), String> {
        self.ready()?;
        while let Some(inputs) = self.receive()? {
            let inputs = to_values(&inputs).ok_or("inputs: expected whole numbers of f32")?;
            let answers = answers(&inputs)?;
            self.send(Digest::of(&answers).bytes())?;
            self.send(&answers)?;
        }
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), String> {
        send(self.replies, bytes).map_err(|error| format!("judge: {error}"))
    }
}
