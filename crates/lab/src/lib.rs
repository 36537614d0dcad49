//! The lab: a referee of changes to kernels that an optimizer cannot fool.
//!
//! A person or an agent edits one file of a tree; the [`Referee`] says whether the tree is
//! [better, equal, worse, wrong or broken](Verdict). It trusts neither the tree's tests nor its
//! clock: it makes every input from fresh seeds, knows the right answers from slow references with
//! derived bounds, and reads its own clock around requests whose outputs it has compared.
//!
//! | module | content |
//! |---|---|
//! | [`mod@target`] | what can be made faster, as data |
//! | [`case`] | an op and its sizes, in one line |
//! | [`exam`] | states, inputs, and what is right |
//! | [`referee`] | the order of a judgement |
//! | [`race`], [`interval`], [`machine`] | timing: rounds, the interval of the ratio, the clock |
//! | [`gate`] | what a whole model says |
//! | [`subject`], [`wire`], [`worker`], [`process`] | both trees as processes |
//! | [`judge_files`], [`tree`] | the files that no candidate may change, git and cargo |
//! | [`evidence`] | the conformance suites on this machine, as a report |
//! | [`report`] | `METRIC` lines, the table of experiments, JSON |
//!
//! Each of these frauds has a test of its name in `tests/lab/frauds.rs`:
//!
//! | a kernel that | is caught by |
//! |---|---|
//! | skips work | queries that look for one token, checked in timed requests |
//! | caches the answer | fresh inputs in each request |
//! | reads the clock | the judge's clock, and outputs of timed requests |
//! | changes the test | comparison of the judge's files |
//! | is fast on one size alone | guards at other sizes |
//! | is right on average only | bounds of each value |
//! | is blind to NaN | bounds that no NaN meets |
//! | is racy | bits of repeats, threads and starts |
//! | is wrong beyond 2^16 tokens | a case of that depth |
//! | is right on this CPU only | every kernel set that this machine runs |
//! | is slower at depth | guards at other depths |
//! | is faster by a lower power state | a loop of fixed cycles beside each request |
#![forbid(unsafe_code)]

pub mod case;
pub mod device;
pub mod evidence;
pub mod exam;
pub mod gate;
pub mod interval;
pub mod judge_files;
pub mod lane;
pub mod machine;
pub mod process;
pub mod race;
pub mod referee;
pub mod report;
pub mod subject;
pub mod target;
pub mod tree;
pub mod verdict;
pub mod wire;
pub mod worker;

pub use kvant_codec::random::Random;
pub use lane::Contenders;
pub use machine::{Machine, ThisMachine};
pub use referee::{Judgement, Options, Referee};
pub use report::Report;
pub use target::{Target, target, targets};
pub use verdict::{Fault, Verdict};
