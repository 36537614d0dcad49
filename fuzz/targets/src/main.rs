//! Feeds changed seeds to the targets for a fixed time: `kvant-fuzz SECONDS [TARGET]`, `SECONDS` for each. An input that
//! fails is written to `fuzz/artifacts`, where cargo-fuzz puts its own.
#![forbid(unsafe_code)]

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kvant_fuzz_targets::{Mutator, TARGETS, Target};

/// Of the generator. Another run tries the same inputs, and as many more as it has time for.
const SEED: u64 = 0x6b76_616e;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |target: &&Target| args.get(1).is_none_or(|name| name == target.name);
    let targets: Vec<_> = TARGETS.iter().filter(wanted).collect();
    let (Some(Ok(seconds)), false) = (args.first().map(|arg| arg.parse()), targets.is_empty()) else {
        let names = TARGETS.each_ref().map(|target| target.name).join(", ");
        eprintln!("usage: kvant-fuzz SECONDS [TARGET]; the targets are {names}");
        return ExitCode::from(2);
    };
    let is_sound = targets.iter().all(|target| run(target, Duration::from_secs(seconds)));
    if is_sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether `target` held for as long as that.
fn run(target: &Target, time: Duration) -> bool {
    let mut mutator = Mutator::new(SEED, (target.seeds)());
    let (start, mut n, mut n_kept) = (Instant::now(), 0u64, 0u64);
    for seed in (target.seeds)() {
        if !holds(target, &seed).0 {
            return false;
        }
    }
    while start.elapsed() < time {
        let input = mutator.next_input();
        let (held, got_far) = holds(target, &input);
        if !held {
            return false;
        }
        n += 1;
        if got_far {
            n_kept += 1;
            mutator.keep(input);
        }
    }
    println!("{}: {n} inputs, {n_kept} of them accepted", target.name);
    // Both sides of a check have to be at work, or it shows nothing.
    n_kept > 0 || time.is_zero()
}

/// Whether `target` held for `input`, and whether the input got far. One that failed is kept in a file.
fn holds(target: &Target, input: &[u8]) -> (bool, bool) {
    let check = target.check;
    if let Ok(got_far) = catch_unwind(|| check(input)) {
        return (true, got_far);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../artifacts").join(target.name);
    let hash =
        input.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let file = folder.join(format!("crash-{hash:016x}"));
    match fs::create_dir_all(&folder).and_then(|()| fs::write(&file, input)) {
        Ok(()) => eprintln!("{} does not hold for {}", target.name, file.display()),
        Err(error) => {
            eprintln!("{} does not hold for {input:02x?} ({}: {error})", target.name, file.display())
        }
    }
    (false, false)
}
