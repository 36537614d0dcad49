//! The queue on a stream that defers all work as long as possible.

use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::staging::fake::Fake;

fn recorder() -> (Fake, Recorder<Fake>) {
    let fake = Fake::default();
    (Fake::clone(&fake), Recorder::new(fake))
}

#[test]
fn recorded_work_runs_at_the_end_with_its_original_bytes() {
    let (fake, recorder) = recorder();
    recorder.begin().unwrap();
    let mut bytes = [1, 2, 3];
    recorder.write(0, &bytes).unwrap();
    bytes = [7, 8, 9];
    recorder.write(3, &bytes).unwrap();
    assert_eq!(fake.n_recorded(), 2);
    recorder.end().unwrap();
    let mut got = [0; 6];
    recorder.read(0, &mut got).unwrap();
    assert_eq!(got, [1, 2, 3, 7, 8, 9]);
}

/// The host is steps ahead of the device, and each step stages more than a piece holds.
#[test]
fn a_step_does_not_disturb_the_one_before_it() {
    const BYTES: usize = 200_000;
    let (fake, recorder) = recorder();
    let mut pinned = None;
    for step in 0..5 {
        recorder.begin().unwrap();
        for part in 0..3 {
            let bytes = vec![10 * step + part; BYTES];
            recorder.write((3 * step as usize + part as usize) as u64 * BYTES as u64, &bytes).unwrap();
        }
        recorder.end().unwrap();
        assert_eq!(*pinned.get_or_insert(fake.n_pinned()), fake.n_pinned(), "pieces are used again");
    }
    recorder.finish().unwrap();
    for (i, part) in fake.memory(0..15 * BYTES).chunks(BYTES).enumerate() {
        let want = (10 * (i / 3) + i % 3) as u8;
        assert!(part.iter().all(|&byte| byte == want), "step {}, part {}", i / 3, i % 3);
    }
}

#[test]
fn reads_wait_for_work_before_them_and_share_pinned_memory() {
    let (fake, recorder) = recorder();
    let large = vec![7; Readback::<Fake>::MAX_BYTES + 1];
    for (i, bytes) in [&[1, 2, 3][..], &[4], &large, &[5, 6]].into_iter().enumerate() {
        recorder.write(2, bytes).unwrap();
        assert!(!fake.is_idle());
        let mut got = vec![0; bytes.len()];
        recorder.read(2, &mut got).unwrap();
        assert!(got == bytes, "read {i}");
    }
    assert_eq!(fake.n_pinned(), 1);
    thread::scope(|scope| {
        let read = || {
            let mut got = [0; 2];
            (0..50).for_each(|_| recorder.read(2, &mut got).unwrap());
            assert_eq!(got, [5, 6]);
        };
        (0..3).for_each(|_| _ = scope.spawn(read));
    });
    assert!(fake.n_pinned() <= 3, "{} pieces for three threads", fake.n_pinned());
}

#[test]
fn memory_that_recorded_work_may_use_is_freed_after_it() {
    let (fake, recorder) = recorder();
    recorder.free(5);
    recorder.begin().unwrap();
    recorder.write(64, &[1]).unwrap();
    recorder.free(64);
    assert_eq!(fake.freed(), [5]);
    recorder.end().unwrap();
    assert_eq!(fake.freed(), [5, 64]);
    assert_eq!(fake.memory(64..65), [1], "the recorded work ran first");
}

#[test]
fn unrecordable_calls_are_rejected_without_harm() {
    let (fake, recorder) = recorder();
    recorder.begin().unwrap();
    recorder.write(0, &[4]).unwrap();
    let refused = [
        recorder.read(0, &mut [0]),
        recorder.finish(),
        recorder.upload(0, 8, 4, &mut |_, _| ()),
        recorder.begin(),
    ];
    for refused in refused {
        let error = refused.unwrap_err().to_string();
        assert!(error.ends_with("a step is being recorded"), "{error}");
    }
    recorder.end().unwrap();
    recorder.finish().unwrap();
    assert_eq!(fake.memory(0..1), [4]);
}

#[test]
fn other_threads_wait_until_a_recording_has_ended() {
    let (fake, recorder) = recorder();
    let (about_to, is_about_to) = mpsc::channel();
    thread::scope(|scope| {
        recorder.begin().unwrap();
        recorder.write(0, &[1]).unwrap();
        scope.spawn(|| {
            about_to.send(()).unwrap();
            recorder.write(0, &[2]).unwrap();
        });
        is_about_to.recv().unwrap();
        // Gives a thread that fails to wait time to be detected; a correct one passes whatever the
        // time.
        thread::sleep(Duration::from_millis(30));
        assert_eq!(fake.n_recorded(), 1);
        recorder.end().unwrap();
    });
    recorder.finish().unwrap();
    assert_eq!(fake.memory(0..1), [2], "the other thread's write comes last");
}

#[test]
fn equal_steps_update_their_graph_and_others_get_a_new_one() {
    let (fake, recorder) = recorder();
    // With one write beside, as of one more sequence, and back.
    let counts = [2, 2, 3, 3, 2, 3].map(|writes: u8| {
        recorder.begin().unwrap();
        for i in 0..writes {
            recorder.write(i.into(), &[writes]).unwrap();
        }
        recorder.end().unwrap();
        recorder.finish().unwrap();
        assert_eq!(fake.memory(0..writes.into()), vec![writes; writes.into()]);
        fake.n_runnables()
    });
    assert_eq!(counts, [(1, 1, 0), (1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 3), (2, 2, 4)]);
}

#[test]
fn few_graphs_are_kept_of_a_piece_the_last_used_ones() {
    let (fake, recorder) = recorder();
    let step = |writes: usize| {
        recorder.begin().unwrap();
        (0..writes).for_each(|i| recorder.write(i as u64, &[1]).unwrap());
        recorder.end().unwrap();
        recorder.finish().unwrap();
    };
    (1..=MAX_GRAPHS).for_each(step);
    step(1);
    step(MAX_GRAPHS + 1);
    assert_eq!(fake.n_runnables(), (MAX_GRAPHS + 1, MAX_GRAPHS, 1));
    step(1);
    assert_eq!(fake.n_runnables(), (MAX_GRAPHS + 1, MAX_GRAPHS, 2), "the first is still there");
    step(2);
    assert_eq!(fake.n_runnables(), (MAX_GRAPHS + 2, MAX_GRAPHS, 2), "the second is not");
}

/// The host is never ahead of the device by more than a piece, and each piece has a graph of its
/// own.
#[test]
fn a_long_step_runs_while_it_is_recorded() {
    let (fake, recorder) = recorder();
    let n = FIRST_PIECE + PIECE + 5;
    let of_piece = |i: usize| i.checked_sub(FIRST_PIECE).map_or(i, |i| i % PIECE);
    let bytes = |step: u8| (0..n).map(|i| (i as u8).wrapping_add(3 * step)).collect::<Vec<_>>();
    for step in 0..3 {
        recorder.begin().unwrap();
        for (i, byte) in bytes(step).into_iter().enumerate() {
            recorder.write(i as u64, &[byte]).unwrap();
            assert_eq!(fake.n_recorded(), of_piece(i) + 1);
        }
        recorder.free(7);
        assert_eq!(fake.freed().len(), usize::from(step), "not before the step has ended");
        recorder.end().unwrap();
        recorder.finish().unwrap();
        assert_eq!(fake.memory(0..n), bytes(step));
        assert_eq!(fake.n_runnables(), (3, 3, 3 * usize::from(step)));
    }
}

#[test]
fn nothing_ends_that_has_not_begun() {
    let (_, recorder) = recorder();
    recorder.begin().unwrap();
    recorder.end().unwrap();
    assert!(recorder.end().is_err());
}

#[test]
fn failed_recordings_free_memory_and_release_other_threads() {
    let (fake, recorder) = recorder();
    recorder.begin().unwrap();
    recorder.write(0, &[1]).unwrap();
    recorder.free(9);
    fake.fail_to_end();
    recorder.end().unwrap_err();
    assert_eq!(fake.freed(), [9]);
    thread::scope(|scope| scope.spawn(|| recorder.write(0, &[3]).unwrap()).join()).unwrap();
    recorder.finish().unwrap();
    assert_eq!(fake.memory(0..1), [3]);
}

#[test]
fn work_is_timed_from_the_first_to_the_last_of_it() {
    let (fake, recorder) = recorder();
    assert_eq!(recorder.timed(&mut || recorder.write(0, &[1])).unwrap(), 0.5);
    assert_eq!(fake.memory(0..1), [1]);
    let failed = recorder.timed(&mut || Err(CudaError::call("op", "failed"))).unwrap_err();
    assert_eq!(failed.to_string(), "op: failed");
}

#[test]
fn everything_goes_back_once_the_work_is_done() {
    let (fake, recorder) = recorder();
    recorder.upload(0, 100, 1, &mut |_, piece| piece.fill(6)).unwrap();
    recorder.begin().unwrap();
    recorder.write(100, &[7]).unwrap();
    recorder.end().unwrap();
    assert!(!fake.is_idle());
    drop(recorder);
    assert!(fake.is_idle());
    assert_eq!(fake.memory(98..101), [6, 6, 7]);
    assert_eq!((fake.n_pinned(), fake.n_runnables().1), (0, 0));
}
