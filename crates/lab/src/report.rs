//! Forms of a judgement: `METRIC` lines, a row of a table of experiments, JSON.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use kvant_codec::random::Random;
use serde_json::{Value, json};

use crate::race::Race;
use crate::referee::{Guard, Judgement, MIN_GUARD};

/// A judgement, and what was judged.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The target's name.
    pub target: String,
    /// Commit of the candidate, with `+` where its tree has changes beyond it.
    pub commit: String,
    /// Commit of base.
    pub base: String,
    /// Digest of the judge's files: results of one digest compare.
    pub judge: String,
    /// What the candidate changes.
    pub description: String,
    /// The judgement.
    pub judgement: Judgement,
}

impl Report {
    /// Returns the lines `METRIC name=value`, and the verdict's.
    pub fn lines(&self) -> Vec<String> {
        let Judgement { verdict, reason, n_edges, race, guards } = &self.judgement;
        let mut lines = vec![format!("METRIC verdict={verdict}"), format!("METRIC edges={n_edges}")];
        if let Some(race) = race {
            let [low, high] = ends(race).map(|end| format!("{end:.4}"));
            lines.push(format!("METRIC ratio={:.4}", race.factor()));
            lines.push(format!("METRIC ratio_low={low}"));
            lines.push(format!("METRIC ratio_high={high}"));
            lines.push(format!("METRIC rounds={}", race.n_rounds));
            lines.push(format!("METRIC rounds_discarded={}", race.n_discarded));
            lines.push(format!("METRIC seconds={:.1}", race.seconds));
        }
        if let Some(worst) = worst(guards) {
            lines.push(format!("METRIC worst_guard={worst:.4}"));
        }
        lines.push(format!("{verdict}: {reason}"));
        lines
    }

    /// Returns the row of the table of experiments, without a line end.
    pub fn row(&self) -> String {
        let metric =
            self.judgement.race.as_ref().map_or_else(String::new, |race| format!("{:.4}", race.factor()));
        let cells = [
            &self.commit,
            &self.target,
            &metric,
            self.judgement.verdict.name(),
            &self.description,
            &self.judgement.reason,
        ];
        // A tab or a line end in a text would end its cell.
        let cells = cells.map(|cell| cell.split_whitespace().collect::<Vec<_>>().join(" "));
        cells.join("\t")
    }

    /// Returns all of it.
    pub fn json(&self) -> Value {
        let race_json = |race: &Race| {
            let [low, high] = ends(race);
            json!({
                "ratio": race.factor(), "low": low, "high": high, "rounds": race.n_rounds,
                "discarded": race.n_discarded, "resolved": race.is_resolved, "seconds": race.seconds,
            })
        };
        let Judgement { verdict, reason, n_edges, race, guards } = &self.judgement;
        let guard_json = |Guard { case, race }: &Guard| json!({ "case": case.to_string(), "min": MIN_GUARD, "race": race_json(race) });
        json!({
            "target": self.target, "verdict": verdict.name(), "reason": reason, "commit": self.commit,
            "base": self.base, "description": self.description, "judge": self.judge,
            "edges": n_edges, "race": race.as_ref().map(race_json),
            "guards": guards.iter().map(guard_json).collect::<Vec<_>>(),
        })
    }
}

/// Returns the ends of a ratio's interval.
fn ends(race: &Race) -> [f64; 2] {
    [race.ratio.low.exp(), race.ratio.high.exp()]
}

/// Returns the lowest ratio of the guards.
fn worst(guards: &[Guard]) -> Option<f64> {
    guards.iter().map(|guard| guard.race.factor()).reduce(f64::min)
}

/// The first line of a table of experiments.
pub const HEADER: &str = "commit\ttarget\tratio\tverdict\tdescription\treason";

/// Adds a row to a table of experiments in one write, which several judges may do at once.
///
/// # Errors
///
/// Those of the system.
pub fn append_row(table: &Path, row: &str) -> io::Result<()> {
    let created = OpenOptions::new().append(true).create_new(true).open(table);
    let (mut file, text) = match created {
        Ok(file) => (file, format!("{HEADER}\n{row}\n")),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            (OpenOptions::new().append(true).open(table)?, format!("{row}\n"))
        }
        Err(error) => return Err(error),
    };
    file.write_all(text.as_bytes())
}

/// Returns a seed that no candidate can foretell: the system's, which seeds hash tables too.
pub fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    Random::new(RandomState::new().hash_one(std::process::id())).bits()
}
