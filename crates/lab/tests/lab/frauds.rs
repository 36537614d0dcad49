//! Twelve frauds, each of which the referee catches, and what is none.

use kvant_lab::case::Case;
use kvant_lab::target::Target;
use kvant_lab::{Contenders, Judgement, Options, Referee, Verdict};

use crate::fake::{Conduct, DEEP, DEPTH, FAR, Tree, VirtualMachine, target};

/// A tree that does what base does.
const SAME: Conduct = Conduct::Honest { near: 1.0, deep: 1.0 };

/// Judges a tree that behaves like this against an honest one.
fn judge_at(target: &Target, conduct: Conduct) -> Judgement {
    judge_pair(target, conduct, SAME)
}

fn judge_pair(target: &Target, candidate: Conduct, base: Conduct) -> Judgement {
    let machine = VirtualMachine::new(0.001, 5);
    let mut candidate = Tree::new(candidate, &machine, false);
    let mut base = Tree::new(base, &machine, true);
    let mut referee = Referee {
        target,
        options: Options { budget: 60.0, threads: 1, seed: 11 },
        suites: &mut || Ok(()),
        note: &mut |_| (),
    };
    let mut contenders = Contenders { candidate: &mut candidate, base: &mut base };
    referee.judge(&mut contenders, &mut machine.clone())
}

fn judge(conduct: Conduct) -> Judgement {
    judge_at(&target(), conduct)
}

/// Checks the verdict on a fraud, and that the reason has these words.
#[track_caller]
fn assert_caught(judgement: &Judgement, verdict: Verdict, words: &[&str]) {
    assert_eq!(judgement.verdict, verdict, "{judgement:?}");
    for word in words {
        assert!(judgement.reason.contains(word), "{word}: {}", judgement.reason);
    }
    assert_eq!(judgement.reason.lines().count(), 1, "{}", judgement.reason);
}

#[test]
fn an_honest_gain_is_better() {
    let judgement = judge(Conduct::Honest { near: 0.9, deep: 0.95 });
    assert_caught(&judgement, Verdict::Better, &["1.11"]);
    assert_eq!(judgement.guards.len(), 2);
    assert!(judgement.n_edges > 20, "{judgement:?}");
}

#[test]
fn the_same_tree_is_equal_and_a_slow_one_worse() {
    assert_caught(&judge(SAME), Verdict::Equal, &["within 1 %"]);
    assert_caught(&judge(Conduct::Honest { near: 1.05, deep: 1.0 }), Verdict::Worse, &["0.95"]);
}

#[test]
fn a_kernel_that_skips_work_is_wrong() {
    let depth = format!("depth={DEPTH}");
    assert_caught(&judge(Conduct::SkipsWork), Verdict::Wrong, &[&depth, "timed", "away, allowed"]);
}

#[test]
fn a_kernel_that_caches_the_answer_is_wrong() {
    assert_caught(&judge(Conduct::CachesTheAnswer), Verdict::Wrong, &["timed", "away, allowed"]);
}

#[test]
fn a_kernel_that_reads_the_clock_is_wrong() {
    assert_caught(&judge(Conduct::ReadsTheClock), Verdict::Wrong, &["attend"]);
}

#[test]
fn a_kernel_that_is_fast_on_one_size_alone_is_worse() {
    assert_caught(&judge(Conduct::FastOnOneSizeAlone), Verdict::Worse, &["x at a guard", "depth=40"]);
}

#[test]
fn a_kernel_that_is_right_on_average_only_is_wrong() {
    assert_caught(&judge(Conduct::RightOnAverageOnly), Verdict::Wrong, &["depth=1 ", "away, allowed"]);
}

#[test]
fn a_kernel_that_is_blind_to_nan_is_wrong() {
    assert_caught(&judge(Conduct::NanBlind), Verdict::Wrong, &["NaN away"]);
}

#[test]
fn a_racy_kernel_is_wrong() {
    assert_caught(&judge(Conduct::Racy), Verdict::Wrong, &["the same inputs give other bits"]);
}

#[test]
fn a_kernel_that_is_wrong_beyond_65536_tokens_is_wrong() {
    let near = target();
    let Case::Attend(attend) = near.case else { unreachable!() };
    let far = Case::Attend(kvant_lab::case::Attend { depth: FAR, ..attend });
    // Nothing else of this kernel is wrong.
    let target = Target { edges: near.edges[..1].to_vec(), far: Some(far), guards: Vec::new(), ..near };
    let judgement = judge_at(&target, Conduct::WrongBeyond65536Tokens);
    assert_caught(&judgement, Verdict::Wrong, &[&format!("depth={FAR}"), "away, allowed"]);
    let honest = judge_at(&target, Conduct::Honest { near: 0.9, deep: 1.0 });
    assert_caught(&honest, Verdict::Better, &[]);
}

#[test]
fn a_kernel_that_is_right_on_this_cpu_only_is_wrong() {
    // Every machine runs the scalar kernels; where they are its only ones there is no other CPU.
    if kvant_lab::device::kernel_sets().len() == 1 {
        return eprintln!("skipped: this CPU has scalar kernels alone");
    }
    assert_caught(&judge(Conduct::RightOnThisCpuOnly), Verdict::Wrong, &["on scalar"]);
}

#[test]
fn a_kernel_that_is_slower_at_depth_is_worse() {
    let judgement = judge(Conduct::Honest { near: 0.8, deep: 1.25 });
    assert_caught(&judgement, Verdict::Worse, &["x at a guard", &format!("depth={DEEP}")]);
    assert!(judgement.race.unwrap().is_faster());
}

#[test]
fn a_kernel_that_lowers_the_power_state_wins_nothing() {
    assert_caught(&judge(Conduct::LowersThePowerState), Verdict::Broken, &["the clock rate follows"]);
}

#[test]
fn a_kernel_that_crashes_is_wrong() {
    assert_caught(&judge(Conduct::Crashes), Verdict::Wrong, &["the candidate fails", "signal: 11"]);
}

#[test]
fn a_base_that_is_wrong_judges_no_candidate() {
    let judgement = judge_pair(&target(), SAME, Conduct::RightOnAverageOnly);
    assert_caught(&judgement, Verdict::Broken, &["base fails", "away, allowed"]);
}
