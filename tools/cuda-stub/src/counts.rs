//! Counts calls and the time spent in them.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cudarc::driver::sys::CUresult;

/// Kinds of calls that are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuCtxSetCurrent`.
    Bind,
    /// Device memory.
    Alloc,
    Free,
    /// Pinned host memory.
    Pin,
    /// Copies to the device, to the host and within the device.
    Write,
    Read,
    Copy,
    Zero,
    Launch,
    /// Creation, recording and destruction of events.
    Event,
    /// Waits for an event or a stream.
    Wait,
    /// Begin and end of a recording.
    Capture,
    GraphInstantiate,
    GraphUpdate,
    GraphLaunch,
    /// Modules and kernels: loading, finding, attributes.
    Module,
}

/// Every kind with its name in the report.
const KINDS: [(Kind, &str); 16] = [
    (Kind::Bind, "bind"),
    (Kind::Alloc, "alloc"),
    (Kind::Free, "free"),
    (Kind::Pin, "pin"),
    (Kind::Write, "write"),
    (Kind::Read, "read"),
    (Kind::Copy, "copy"),
    (Kind::Zero, "zero"),
    (Kind::Launch, "launch"),
    (Kind::Event, "event"),
    (Kind::Wait, "wait"),
    (Kind::Capture, "capture"),
    (Kind::GraphInstantiate, "graph_instantiate"),
    (Kind::GraphUpdate, "graph_update"),
    (Kind::GraphLaunch, "graph_launch"),
    (Kind::Module, "module"),
];

/// Calls of one kind.
struct Count {
    calls: AtomicU64,
    nanoseconds: AtomicU64,
    /// Bytes that copies moved.
    bytes: AtomicU64,
}

static COUNTS: [Count; KINDS.len()] =
    [const { Count { calls: AtomicU64::new(0), nanoseconds: AtomicU64::new(0), bytes: AtomicU64::new(0) } };
        KINDS.len()];

/// Makes and counts one call.
pub(crate) fn counted(kind: Kind, call: impl FnOnce() -> CUresult) -> CUresult {
    let started = Instant::now();
    let result = call();
    COUNTS[kind as usize].calls.fetch_add(1, Ordering::Relaxed);
    add_time(kind, started);
    result
}

/// Counts the time since `started`.
pub(crate) fn add_time(kind: Kind, started: Instant) {
    let nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    COUNTS[kind as usize].nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
}

/// Counts the bytes of a copy.
pub(crate) fn add_bytes(kind: Kind, bytes: usize) {
    COUNTS[kind as usize].bytes.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Returns `"KIND": {"calls": .., "ns": .., "bytes": ..}` of each kind, as a JSON object.
pub(crate) fn json() -> String {
    let mut text = String::from("{");
    for (kind, name) in KINDS {
        let Count { calls, nanoseconds, bytes } = &COUNTS[kind as usize];
        let [calls, ns, bytes] = [calls, nanoseconds, bytes].map(|n| n.load(Ordering::Relaxed));
        let comma = if text.len() > 1 { ", " } else { "" };
        let _ = write!(text, r#"{comma}"{name}": {{"calls": {calls}, "ns": {ns}, "bytes": {bytes}}}"#);
    }
    text + "}"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_listed_in_order() {
        assert!(KINDS.iter().enumerate().all(|(index, (kind, _))| *kind as usize == index));
    }

    #[test]
    fn calls_and_bytes_are_counted() {
        counted(Kind::Pin, || {
            add_bytes(Kind::Pin, 7);
            CUresult::CUDA_SUCCESS
        });
        let text = json();
        let pin = text.split(r#""pin": "#).nth(1).unwrap().split('}').next().unwrap();
        assert!(pin.starts_with(r#"{"calls": 1, "ns": "#) && pin.ends_with(r#""bytes": 7"#), "{pin}");
    }
}
