//! Runs the inputs and prints what came of them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::case::Case;
use crate::chance::Chance;
use crate::judge::{Verdict, judge};
use crate::kinds::{Kind, Make, N_WEIGHTS};
use crate::run::run;
use crate::served::Served;
use crate::shop::Shop;

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

/// Throws the first `n_inputs`, shared out between all kinds, of `kinds` at `binary`. Whether it stood all of them.
///
/// # Errors
/// What keeps the inputs from being made, or the program from being started.
pub fn measure(binary: &Path, n_inputs: usize, kinds: &[&Kind]) -> io::Result<bool> {
    let binary = fs::canonicalize(binary)
        .map_err(|error| io::Error::other(format!("{}: {error}", binary.display())))?;
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/hostile");
    let _ = fs::remove_dir_all(&kept);
    let beside = std::env::temp_dir().join(format!("kvant-hostile-{}", std::process::id()));
    fs::create_dir_all(beside.join("home"))?;
    let result = Shop::open(&binary, &beside).and_then(|shop| {
        println!("{:10} {:>8}{}", "kind", "inputs", COLUMNS.map(|name| format!("{name:>10}")).concat());
        let mut is_sound = true;
        for kind in kinds {
            // Some of each kind, however few there are.
            let n = (n_inputs * kind.weight).div_ceil(N_WEIGHTS);
            is_sound &= match kind.make {
                Make::Case(make) => throw((kind, make), n, &shop, &beside, &kept)?,
                Make::Request(make) => send((kind, make), n, &shop, &beside, &kept)?,
            };
        }
        Ok(is_sound)
    });
    fs::remove_dir_all(&beside)?;
    result
}

/// Makes a case.
type MakeCase = fn(&mut Chance, &Shop, &Path) -> io::Result<Case>;

/// Sends `n` requests of one kind, and prints its line. Where the server is lost, the next one meets another.
fn send(
    (kind, make): (&Kind, fn(&mut Chance) -> Vec<u8>),
    n: usize,
    shop: &Shop,
    beside: &Path,
    kept: &Path,
) -> io::Result<bool> {
    let mut counts = BTreeMap::new();
    let mut served = Served::start(&shop.binary, beside)?;
    let mut note = |verdict: Verdict, name: String, request: &[u8], served: &Served| -> io::Result<bool> {
        *counts.entry(column(&verdict)).or_insert(0) += 1;
        let is_sound = matches!(verdict, Verdict::Answered | Verdict::Refused);
        if !is_sound {
            fs::create_dir_all(kept)?;
            fs::write(kept.join(&name), request)?;
            let said = served.said();
            println!(
                "{name}: {verdict:?}\n  {}\n  kept in {}",
                said.lines().last().unwrap_or_default(),
                kept.display()
            );
        }
        Ok(is_sound)
    };
    for number in 0..n {
        let request = make(&mut Chance::new(kind.name, number));
        let verdict = served.meets(&request)?;
        if !note(verdict, format!("{}-{number}", kind.name), &request, &served)? {
            drop(served);
            served = Served::start(&shop.binary, beside)?;
        }
    }
    let ended = served.end()?;
    if ended != Verdict::Answered {
        note(ended, format!("{}-end", kind.name), &[], &served)?;
    }
    Ok(print(kind, n, &counts))
}

/// Throws `n` inputs of one kind, and prints its line.
fn throw(
    (kind, make): (&Kind, MakeCase),
    n: usize,
    shop: &Shop,
    beside: &Path,
    kept: &Path,
) -> io::Result<bool> {
    let mut counts = BTreeMap::new();
    for number in 0..n {
        let folder = beside.join("case");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        let case = make(&mut Chance::new(kind.name, number), shop, &folder)?;
        let outcome = run(&case, &shop.binary, beside)?;
        let verdict = judge(&case, &outcome);
        *counts.entry(column(&verdict)).or_insert(0) += 1;
        if !matches!(verdict, Verdict::Answered | Verdict::Refused) {
            let command = case.command(&shop.binary);
            let place = keep(kept.join(format!("{}-{number}", kind.name)), &folder, beside, &command)?;
            let said = String::from_utf8_lossy(&outcome.stderr);
            let said: String = said.trim_end().chars().take(300).flat_map(char::escape_debug).collect();
            println!(
                "{}-{number}: {verdict:?}\n  {command}\n  {said}\n  kept in {}",
                kind.name,
                place.display()
            );
        }
    }
    Ok(print(kind, n, &counts))
}

/// Prints the line of a kind. Whether nothing happened that may not.
fn print(kind: &Kind, n: usize, counts: &BTreeMap<&str, usize>) -> bool {
    let line = COLUMNS.map(|name| format!("{:>10}", counts.get(name).copied().unwrap_or(0)));
    println!("{:10} {n:>8}{}", kind.name, line.concat());
    counts.keys().all(|name| ["answered", "refused"].contains(name))
}

/// Keeps what a failure needs to be seen again: files, stdin and the command.
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
