//! Two streams that defer all work as long as possible: a wait that is missing shows as bytes that
//! have not arrived, or memory that is used too soon.

use super::*;
use crate::staging::fake::Fake;

const PIECE: usize = 1000;

/// The streams of a device.
struct Streams {
    steps: Fake,
    copies: Fake,
    queue: Recorder<Fake>,
    transfers: Transfers<Fake>,
}

impl Streams {
    fn new() -> Self {
        let steps = Fake::default();
        let copies = steps.beside();
        let (queue, transfers) =
            (Recorder::new(Fake::clone(&steps)), Transfers::with_pieces(Fake::clone(&copies), PIECE));
        Self { steps, copies, queue, transfers }
    }
}

fn bytes(len: usize, first: usize) -> Vec<u8> {
    (first..first + len).map(|at| (at / 1000 * 31 + at) as u8).collect()
}

#[test]
fn pages_come_back_whatever_their_size() {
    let streams = Streams::new();
    for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, PIECES * PIECE, 2 * PIECES * PIECE + 5] {
        let (page, mut back) = (bytes(len, len), vec![0; len]);
        streams.transfers.write(&streams.queue, 64, &page).unwrap();
        streams.transfers.read(&streams.queue, 64, &mut back).unwrap();
        assert!(page == back, "{len} bytes");
    }
    assert_eq!(streams.copies.n_pinned(), PIECES, "pieces are used again");
    assert_eq!(streams.steps.n_pinned(), 0);
}

#[test]
fn a_copy_to_the_device_waits_for_no_step_on_the_host() {
    let Streams { steps, copies, queue, transfers } = Streams::new();
    queue.write(0, &[1; 8]).unwrap();
    transfers.write(&queue, 4, &[2; 8]).unwrap();
    queue.write(8, &[3; 8]).unwrap();
    assert!(!steps.is_idle() && !copies.is_idle());
    assert!(steps.memory(0..1).is_empty(), "nothing has run");
    queue.finish().unwrap();
    let want = [[1; 4], [2; 4], [3; 4], [3; 4]].concat();
    assert_eq!(steps.memory(0..16), want, "each after the one before it");
}

/// The memory of a page goes to another one, whose bytes are on their way when it is read.
#[test]
fn a_page_is_used_again_behind_its_copies() {
    let Streams { queue, transfers, .. } = Streams::new();
    let mut back = [0; 8];
    for round in 0..9 {
        transfers.write(&queue, 0, &[round; 8]).unwrap();
        queue.write(0, &[round + 100; 4]).unwrap();
        transfers.read(&queue, 0, &mut back).unwrap();
        assert_eq!(back, [round + 100, round + 100, round + 100, round + 100, round, round, round, round]);
    }
}

#[test]
fn a_copy_to_the_host_leaves_later_steps_alone() {
    let Streams { steps, queue, transfers, .. } = Streams::new();
    queue.write(0, &[1; 8]).unwrap();
    let mut page = [0; 4];
    transfers.read(&queue, 0, &mut page).unwrap();
    assert_eq!(page, [1; 4]);
    queue.write(0, &[2; 8]).unwrap();
    assert!(!steps.is_idle(), "the step after it has not run");
    assert_eq!(page, [1; 4]);
}

#[test]
fn failed_copies_leave_nothing_behind() {
    let Streams { steps, copies, queue, transfers } = Streams::new();
    queue.write(0, &[1; 8]).unwrap();
    copies.fail_to_copy();
    assert!(transfers.write(&queue, 0, &[2; 8]).is_err());
    assert!(copies.is_idle());
    copies.fail_to_copy();
    assert!(transfers.read(&queue, 0, &mut [0; 8]).is_err());
    let mut page = [0; 8];
    transfers.read(&queue, 0, &mut page).unwrap();
    assert_eq!(page, [1; 8]);
    transfers.write(&queue, 0, &[3; 8]).unwrap();
    queue.finish().unwrap();
    assert_eq!(steps.memory(0..8), [3; 8]);
}

/// In a recorded step the copies of pages would be recorded with it.
#[test]
fn copies_are_refused_while_a_step_is_recorded() {
    let Streams { steps, copies, queue, transfers } = Streams::new();
    queue.begin().unwrap();
    for refused in [transfers.read(&queue, 0, &mut [0]), transfers.write(&queue, 0, &[7])] {
        let error = refused.unwrap_err().to_string();
        assert!(error.ends_with("a step is being recorded"), "{error}");
    }
    queue.end().unwrap();
    queue.finish().unwrap();
    assert!(copies.is_idle());
    assert!(steps.memory(0..1).is_empty());
}

#[test]
fn pieces_outlive_their_copies() {
    let Streams { steps, copies, queue, transfers } = Streams::new();
    transfers.write(&queue, 0, &bytes(100, 3)).unwrap();
    assert!(!copies.is_idle());
    drop(transfers);
    assert!(copies.is_idle());
    assert_eq!(copies.n_pinned(), 0);
    queue.finish().unwrap();
    assert_eq!(steps.memory(0..100), bytes(100, 3));
}
