//! Workers of every op answer what the judge's reference expects.

use kvant_codec::random::Random;
use kvant_lab::case::Case;
use kvant_lab::device::arithmetic;
use kvant_lab::exam::{Answers, exam};
use kvant_lab::subject::{Settings, answers_of};
use kvant_lab::{Target, targets};

use crate::fake::Worker;

fn settings() -> Settings {
    Settings { device: "cpu".to_owned(), isa: None, threads: 2 }
}

/// Runs a case twice on this build, and returns the faults of the answers.
fn fault(case: &Case, change: impl Fn(&mut Vec<u8>)) -> Result<(), String> {
    let (exam, mut random) = (exam(case, 3).unwrap(), Random::new(4));
    let mut worker = Worker::start(case, exam.state(), &settings())?;
    let inputs = exam.inputs(2, &mut random);
    let base = answers_of(&mut worker, &inputs)?;
    let mut got = answers_of(&mut worker, &inputs)?;
    assert!(got == base, "{case}");
    change(&mut got);
    let arithmetic = arithmetic(&settings()).unwrap();
    exam.check(&arithmetic, &inputs, Answers { got: &got, base: None }, &mut random)?;
    exam.check(&arithmetic, &inputs, Answers { got: &got, base: Some(&base) }, &mut random)
}

#[test]
fn workers_are_right_at_the_edges_of_every_target() {
    let mut n = 0;
    // A model of 1.5 billion parameters takes a gigabyte.
    let is_small = |target: &Target| target.device == "cpu" && !target.name.ends_with("1.5b");
    for target in targets().into_iter().filter(is_small) {
        // Two cases of each: suites and judgements run all.
        for case in target.edges.iter().take(2) {
            if let Err(line) = fault(case, |_| ()) {
                panic!("{case}: {line}");
            }
            n += 1;
        }
    }
    assert!(n > 100, "{n}");
}

#[test]
fn a_changed_value_of_every_op_is_found() {
    for text in [
        "attend k=turbo3 v=turbo3 kv_heads=1 group=2 dim=64 depth=40 rows=2",
        "product type=q4_K out=5 in=256 rows=2 copies=2",
        "append type=turbo3t kv_heads=1 dim=64 start=20 rows=40 read=rows",
        "append type=turbo3t kv_heads=1 dim=64 start=0 rows=40 read=bytes",
        "model name=bundled kv=turbo3 depth=4 rows=2",
    ] {
        let case = text.parse().unwrap();
        assert_eq!(fault(&case, |_| ()), Ok(()), "{text}");
        // The exponents of some numbers, or bytes of codes.
        let flip = |got: &mut Vec<u8>| got.iter_mut().skip(3).step_by(4).take(50).for_each(|b| *b ^= 0x40);
        assert!(fault(&case, flip).is_err(), "{text}");
        assert!(fault(&case, |got| got.truncate(8)).is_err(), "{text}");
    }
}

#[test]
fn workers_refuse_invalid_cases_in_one_line() {
    for (case, state) in [
        ("attend k=turbo3 v=turbo3 kv_heads=1 group=2 dim=64 depth=40 rows=2", 12),
        ("attend k=turbo3 v=turbo3 kv_heads=1 group=2 dim=64 depth=1 rows=2", 512),
        ("product type=q4_K out=5 in=256 rows=2 copies=2", 7),
        ("model name=bundled kv=turbo3 depth=4 rows=2", 3),
        ("model name=none:q4_0 kv=turbo3 depth=4 rows=2", 0),
    ] {
        let error = Worker::start(&case.parse().unwrap(), &vec![0; state], &settings()).err().unwrap();
        assert_eq!(error.lines().count(), 1, "{case}: {error}");
    }
    let elsewhere = Settings { device: "tpu".to_owned(), ..settings() };
    let case = "product type=q4_K out=5 in=256 rows=2 copies=2".parse().unwrap();
    let error = Worker::start(&case, &[], &elsewhere).err().unwrap();
    assert!(error.contains("expected cpu, wgpu:N or cuda:N, got 'tpu'"), "{error}");
}
