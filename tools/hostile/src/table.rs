//! Runs the inputs and prints a table of outcomes.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::chance::Choices;
use crate::fixtures::Fixtures;
use crate::judge::{Verdict, judge};
use crate::kinds::{Kind, Make, MakeCase, MakeRequest, N_WEIGHTS};
use crate::run::run;
use crate::served::Served;

/// Inputs of a whole run, all kinds together.
pub const N_INPUTS: usize = 1600;

/// Columns of the table.
const COLUMNS: [&str; 7] = ["answered", "refused", "panics", "aborts", "hangs", "memory", "wrong"];

fn column(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Answered => "answered",
        Verdict::Refused => "refused",
        Verdict::Panic => "panics",
        Verdict::Abort(_) => "aborts",
        Verdict::Hang => "hangs",
        Verdict::Memory => "memory",
        Verdict::Wrong(_) => "wrong",
    }
}

/// Runs `binary` on the first `n_inputs` of `kinds`, shared between all kinds. Returns whether all
/// outcomes were permitted.
///
/// # Errors
///
/// When inputs cannot be created, or the program cannot be started.
pub fn measure(binary: &Path, n_inputs: usize, kinds: &[&Kind]) -> io::Result<bool> {
    let binary = fs::canonicalize(binary)
        .map_err(|error| io::Error::other(format!("{}: {error}", binary.display())))?;
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/hostile");
    let _ = fs::remove_dir_all(&kept);
    let beside = std::env::temp_dir().join(format!("kvant-hostile-{}", std::process::id()));
    fs::create_dir_all(beside.join("home"))?;
    let result = Fixtures::open(&binary, &beside).and_then(|fixtures| {
        println!("{:10} {:>8}{}", "kind", "inputs", COLUMNS.map(|name| format!("{name:>10}")).concat());
        let bench = Bench { fixtures: &fixtures, beside: &beside, kept: &kept };
        let mut is_sound = true;
        for kind in kinds {
            // At least some of each kind.
            let n = (n_inputs * kind.weight).div_ceil(N_WEIGHTS);
            is_sound &= match kind.make {
                Make::Case(make) => bench.run_cases(kind, make, n)?,
                Make::Request(make) => bench.send(kind, make, n)?,
            };
        }
        Ok(is_sound)
    });
    fs::remove_dir_all(&beside)?;
    result
}

/// Sources of inputs, and the folders for outputs and for failures.
struct Bench<'a> {
    fixtures: &'a Fixtures,
    beside: &'a Path,
    kept: &'a Path,
}

/// Outcomes of one kind.
struct Tally<'a> {
    kind: &'a Kind,
    counts: BTreeMap<&'static str, usize>,
    is_sound: bool,
}

impl<'a> Tally<'a> {
    fn new(kind: &'a Kind) -> Self {
        Self { kind, counts: BTreeMap::new(), is_sound: true }
    }

    /// Counts an outcome. Returns whether it is permitted.
    fn count(&mut self, verdict: &Verdict) -> bool {
        *self.counts.entry(column(verdict)).or_insert(0) += 1;
        self.is_sound &= verdict.is_sound();
        verdict.is_sound()
    }

    /// Prints the line of the kind. Returns whether all outcomes were permitted.
    fn print(&self, n: usize) -> bool {
        let line = COLUMNS.map(|name| format!("{:>10}", self.counts.get(name).copied().unwrap_or(0)));
        println!("{:10} {n:>8}{}", self.kind.name, line.concat());
        self.is_sound
    }
}

impl Bench<'_> {
    /// Sends `n` requests of one kind, and prints its line. A lost server is replaced for the next
    /// request.
    fn send(&self, kind: &Kind, make: MakeRequest, n: usize) -> io::Result<bool> {
        let mut tally = Tally::new(kind);
        let mut served = Served::start(&self.fixtures.binary, self.beside)?;
        for number in 0..n {
            let request = make(&mut Choices::new(kind.name, number));
            let verdict = served.send_hostile(&request)?;
            if !tally.count(&verdict) {
                self.keep_request(&format!("{}-{number}", kind.name), &verdict, &request, &served)?;
                drop(served);
                served = Served::start(&self.fixtures.binary, self.beside)?;
            }
        }
        let ended = served.end()?;
        if ended != Verdict::Answered {
            tally.count(&ended);
            self.keep_request(&format!("{}-end", kind.name), &ended, &[], &served)?;
        }
        Ok(tally.print(n))
    }

    /// Stores a request that caused a forbidden outcome.
    fn keep_request(&self, name: &str, verdict: &Verdict, request: &[u8], served: &Served) -> io::Result<()> {
        fs::create_dir_all(self.kept)?;
        fs::write(self.kept.join(name), request)?;
        let log = served.read_log();
        let last = log.lines().last().unwrap_or_default();
        println!("{name}: {verdict:?}\n  {last}\n  kept in {}", self.kept.display());
        Ok(())
    }

    /// Runs `n` inputs of one kind, and prints its line.
    fn run_cases(&self, kind: &Kind, make: MakeCase, n: usize) -> io::Result<bool> {
        let Self { fixtures, beside, kept } = self;
        let mut tally = Tally::new(kind);
        for number in 0..n {
            let folder = beside.join("case");
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder)?;
            let case = make(&mut Choices::new(kind.name, number), fixtures, &folder)?;
            let outcome = run(&case, &fixtures.binary, beside)?;
            let verdict = judge(&case, &outcome);
            if !tally.count(&verdict) {
                let command = case.command(&fixtures.binary);
                let place = keep(kept.join(format!("{}-{number}", kind.name)), &folder, beside, &command)?;
                let stderr = String::from_utf8_lossy(&outcome.stderr);
                let stderr: String =
                    stderr.trim_end().chars().take(300).flat_map(char::escape_debug).collect();
                println!(
                    "{}-{number}: {verdict:?}\n  {command}\n  {stderr}\n  kept in {}",
                    kind.name,
                    place.display()
                );
            }
        }
        Ok(tally.print(n))
    }
}

/// Stores what reproduces a failure: files, stdin and the command.
fn keep(place: PathBuf, folder: &Path, beside: &Path, command: &str) -> io::Result<PathBuf> {
    fs::create_dir_all(&place)?;
    for path in fs::read_dir(folder)?.flatten().map(|entry| entry.path()).filter(|path| path.is_file()) {
        fs::copy(&path, place.join(path.file_name().unwrap_or_default()))?;
    }
    let _ = fs::copy(beside.join("stdin"), place.join("given-stdin"));
    let _ = fs::copy(beside.join("stderr"), place.join("given-stderr"));
    fs::write(place.join("given-command"), command)?;
    Ok(place)
}
