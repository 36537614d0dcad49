//! Runs a target on its seeds and on mutated inputs.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{Mutator, Target};

/// Seed of the generator. Another run tries the same inputs, and as many more as its time permits.
const SEED: u64 = 0x6b76_616e;

/// Counts of a run.
#[derive(Debug, Clone, Copy)]
pub struct Tried {
    /// Inputs, without seeds.
    pub n_inputs: u64,
    /// Inputs that passed the first checks.
    pub n_accepted: u64,
}

/// Runs `target` on its seeds, then on mutated inputs for `time`.
///
/// # Errors
///
/// The failing input, by the name of its file in `fuzz/artifacts`, where cargo-fuzz stores its own.
/// A run without an accepted input proves nothing, and is an error too.
pub fn run(target: &Target, time: Duration) -> Result<Tried, String> {
    let seeds = (target.seeds)();
    for seed in &seeds {
        holds(target, seed)?;
    }
    let mut mutator = Mutator::new(SEED, seeds);
    let (start, mut tried) = (Instant::now(), Tried { n_inputs: 0, n_accepted: 0 });
    while start.elapsed() < time {
        let input = mutator.next_input();
        let got_far = holds(target, &input)?;
        tried.n_inputs += 1;
        if got_far {
            tried.n_accepted += 1;
            mutator.keep(input);
        }
    }
    if tried.n_accepted == 0 && !time.is_zero() {
        return Err(format!("{}: none of {} inputs was accepted", target.name, tried.n_inputs));
    }
    Ok(tried)
}

/// Returns whether `target` accepts `input`; an error if its property is violated.
fn holds(target: &Target, input: &[u8]) -> Result<bool, String> {
    let check = target.check;
    if let Ok(got_far) = catch_unwind(|| check(input)) {
        return Ok(got_far);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../artifacts").join(target.name);
    let hash =
        input.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let file = folder.join(format!("crash-{hash:016x}"));
    Err(match fs::create_dir_all(&folder).and_then(|()| fs::write(&file, input)) {
        Ok(()) => format!("{} does not hold for {}", target.name, file.display()),
        Err(error) => {
            format!("{} does not hold for {input:02x?} ({}: {error})", target.name, file.display())
        }
    })
}
