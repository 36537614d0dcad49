//! `kvant lab eval`.

use std::env;
use std::path::{Path, PathBuf};

use clap::Args;
use kvant_lab::device::unavailable;
use kvant_lab::judge_files::compare;
use kvant_lab::process::Program;
use kvant_lab::report::{append_row, fresh_seed};
use kvant_lab::tree::Trees;
use kvant_lab::{
    Contenders, Fault, Judgement, Options, Referee, Report, Target, ThisMachine, Verdict, target,
};

use crate::args::value::positive;
use crate::console;
use crate::failure::Failure;

/// Arguments of `kvant lab eval`.
#[derive(Args, Debug)]
#[command(after_help = HELP)]
pub struct EvalArgs {
    /// What to judge: a name of `kvant lab targets`
    #[arg(long, value_name = "NAME", value_parser = target)]
    target: Target,
    /// Commit to compare with [default: HEAD for a changed checkout, HEAD~1 for a clean one]
    #[arg(long, value_name = "REF")]
    base: Option<String>,
    /// Maximum seconds of timing at the target's size; a quarter for each guard
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = positive)]
    budget: usize,
    /// Threads of a CPU; several wait for each other, which multiplies noise
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = positive)]
    threads: usize,
    /// What the change does, for the table of experiments
    #[arg(long, value_name = "TEXT", default_value = "")]
    description: String,
    /// Table of experiments, to which a row is added [default: results.tsv of the checkout]
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
    /// Print one JSON document instead of METRIC lines
    #[arg(long)]
    json: bool,
    /// Hide what is being done
    #[arg(short, long)]
    quiet: bool,
}

const HELP: &str = "Exit codes: 0 better, 3 equal, 4 worse, 5 wrong, 1 broken (no judgement), 2 wrong usage

Example (in a checkout, with cargo and git):
  kvant lab eval --target attend-turbo3-128 --description \"two tiles per step\"";

/// Runs the command.
pub fn eval(args: EvalArgs) -> Result<(), Failure> {
    let here = env::current_dir().map_err(|error| Failure::work("the current folder", error))?;
    let broken = |fault: Fault| Failure::Work(fault.to_string());
    let trees = Trees::open(&here, args.base.as_deref()).map_err(broken)?;
    let report = args.report(&trees);
    let table = args.results.clone().unwrap_or_else(|| trees.candidate.root.join("results.tsv"));
    append_row(&table, &report.row()).map_err(|error| Failure::work(printable(&table), error))?;
    if args.json {
        console::print_json(&report.json())?;
    } else {
        report.lines().into_iter().try_for_each(console::print)?;
    }
    match report.judgement.verdict {
        Verdict::Better => Ok(()),
        verdict => Err(Failure::Verdict(verdict.exit_code())),
    }
}

fn printable(path: &Path) -> String {
    kvant::gguf::printable_path(path)
}

impl EvalArgs {
    /// Judges the candidate, and says what was judged.
    fn report(&self, trees: &Trees) -> Report {
        let judged = compare(&trees.candidate.root, &trees.base.root)
            .and_then(|judge| Ok((judge, self.judge(trees)?)));
        let (judge, judgement) = judged.unwrap_or_else(|fault| (String::new(), Judgement::of_fault(&fault)));
        Report {
            target: self.target.name.clone(),
            commit: trees.candidate.commit.clone(),
            base: trees.base.commit.clone(),
            judge,
            description: self.description.clone(),
            judgement,
        }
    }

    fn judge(&self, trees: &Trees) -> Result<Judgement, Fault> {
        if let Some(reason) = unavailable(self.target.device) {
            return Err(Fault::Broken(format!("{} is unavailable: {reason}", self.target.device)));
        }
        self.note(&format!("build of base, {}", trees.base.commit));
        let mut base = Program { path: trees.base.build(self.target.device)? };
        self.note(&format!("build of the candidate, {}", trees.candidate.commit));
        let mut candidate = Program { path: trees.candidate.build(self.target.device)? };
        let options = Options { budget: self.budget as f64, threads: self.threads, seed: fresh_seed() };
        let mut referee = Referee {
            target: &self.target,
            options,
            suites: &mut || trees.candidate.run_suites(&self.target),
            note: &mut |what| self.note(what),
        };
        let mut contenders = Contenders { candidate: &mut candidate, base: &mut base };
        Ok(referee.judge(&mut contenders, &mut ThisMachine::default()))
    }

    fn note(&self, what: &str) {
        if !self.quiet {
            console::eprint_line(what);
        }
    }
}
