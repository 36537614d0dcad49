//! Counts calls and the time spent in them.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
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

/// What was counted up to a wait of the host.
#[derive(Debug, Clone, Copy)]
struct Snapshot {
    cpu_ns: u64,
    calls: [u64; KINDS.len()],
}

/// One for each wait, which ends a step.
static SNAPSHOTS: Mutex<Vec<Snapshot>> = Mutex::new(Vec::new());

/// Ends a step: the host waits for its work.
pub(crate) fn end_step() {
    let calls = std::array::from_fn(|kind| COUNTS[kind].calls.load(Ordering::Relaxed));
    let snapshot = Snapshot { cpu_ns: cpu_ns(), calls };
    SNAPSHOTS.lock().unwrap_or_else(PoisonError::into_inner).push(snapshot);
}

/// Returns the CPU time of this process: unlike the clock, it stands still while others run.
fn cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is live.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the medians over the second half of the steps, those with a kernel, as a JSON object:
/// nanoseconds of the host's CPU, the least of them too, and calls by kind.
pub(crate) fn steps_json() -> String {
    let snapshots = SNAPSHOTS.lock().unwrap_or_else(PoisonError::into_inner);
    let launches = |snapshot: &Snapshot| snapshot.calls[Kind::Launch as usize];
    let pairs = snapshots.windows(2).map(|pair| [pair[0], pair[1]]);
    let steps: Vec<_> = pairs.filter(|[from, to]| launches(to) > launches(from)).collect();
    let steps = &steps[steps.len() / 2..];
    let sorted = |of: &dyn Fn(&Snapshot) -> u64| {
        let mut all: Vec<u64> = steps.iter().map(|[from, to]| of(to) - of(from)).collect();
        all.sort_unstable();
        all
    };
    let median = |all: &[u64]| all.get(all.len() / 2).copied().unwrap_or(0);
    let cpu = sorted(&|snapshot| snapshot.cpu_ns);
    let (least, cpu_ns) = (cpu.first().copied().unwrap_or(0), median(&cpu));
    let calls = (0..KINDS.len()).map(|kind| {
        let n = median(&sorted(&|snapshot| snapshot.calls[kind]));
        format!(r#""{}": {n}"#, KINDS[kind].1)
    });
    let (n, calls) = (steps.len(), calls.collect::<Vec<_>>().join(", "));
    format!(r#"{{"n": {n}, "cpu_ns": {cpu_ns}, "least_cpu_ns": {least}, "calls": {{{calls}}}}}"#)
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
    fn steps_are_what_lies_between_waits() {
        // An upload, and a step before that settles.
        for (launches, modules) in [(1, 9), (0, 8), (1, 7), (1, 6), (0, 8), (1, 3), (2, 3)] {
            (0..launches).for_each(|_| _ = counted(Kind::Launch, || CUresult::CUDA_SUCCESS));
            (0..modules).for_each(|_| _ = counted(Kind::Module, || CUresult::CUDA_SUCCESS));
            end_step();
        }
        let text = steps_json();
        assert!(text.starts_with(r#"{"n": 2, "cpu_ns": "#) && text.contains(r#""module": 3"#), "{text}");
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
