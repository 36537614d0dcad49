//! Two trees in this process: their answers are those of workers on the CPU, their times those of a
//! virtual machine. A fraud changes either.

use std::cell::RefCell;
use std::io::{PipeReader, PipeWriter, pipe};
use std::rc::Rc;
use std::thread::{JoinHandle, spawn};

use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_lab::Machine;
use kvant_lab::case::{Attend, Case};
use kvant_lab::subject::{Contender, Settings, Subject};
use kvant_lab::target::Target;
use kvant_lab::wire::{Digest, receive, send, to_bytes, to_values};
use kvant_lab::worker::serve;

/// A machine whose clock moves only where work is done, at a rate that changes.
#[derive(Clone)]
pub struct VirtualMachine {
    state: Rc<RefCell<State>>,
}

struct State {
    now: f64,
    /// Clock rate: 1, or less in a lower power state.
    rate: f64,
    /// Standard deviation of the logarithm of each time.
    noise: f64,
    random: Random,
}

/// Seconds of the judge's loop.
const LOOP: f64 = 0.0002;

impl VirtualMachine {
    pub fn new(noise: f64, seed: u64) -> Self {
        let state = State { now: 0.0, rate: 1.0, noise, random: Random::new(seed) };
        Self { state: Rc::new(RefCell::new(state)) }
    }

    /// Works for these seconds at full rate, and returns those that pass.
    pub fn work(&self, seconds: f64) -> f64 {
        let mut state = self.state.borrow_mut();
        let noise = (state.noise * state.random.gaussian()).exp();
        let seconds = seconds * noise / state.rate;
        state.now += seconds;
        seconds
    }

    pub fn set_rate(&self, rate: f64) {
        self.state.borrow_mut().rate = rate;
    }

    pub fn rate(&self) -> f64 {
        self.state.borrow().rate
    }
}

impl Machine for VirtualMachine {
    fn now(&self) -> f64 {
        self.state.borrow().now
    }

    fn calibrate(&mut self) -> f64 {
        self.work(LOOP)
    }
}

/// Depth at which the target of these tests is timed, and its deepest guard.
pub const DEPTH: usize = 300;
pub const DEEP: usize = 900;
/// First depth beyond 2^16 tokens that is checked.
pub const FAR: usize = (1 << 16) + 170;

/// Returns a small target: attention over q8_0.
pub fn target() -> Target {
    let at = |depth| {
        let (k, v) = (DType::Q8_0, DType::Q8_0);
        Case::Attend(Attend { k, v, kv_heads: 1, group: 2, dim: 32, depth, rows: 1 })
    };
    Target {
        name: "attend-test".to_owned(),
        device: "cpu",
        case: at(DEPTH),
        guards: vec![at(40), at(DEEP)],
        edges: vec![at(1), at(17), at(150)],
        far: None,
        suites: &[],
        files: "none",
    }
}

/// What a tree does that an honest one does not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Conduct {
    /// Nothing; it takes these shares of base's time at the target's size or less, and beyond.
    Honest {
        near: f64,
        deep: f64,
    },
    SkipsWork,
    CachesTheAnswer,
    ReadsTheClock,
    FastOnOneSizeAlone,
    RightOnAverageOnly,
    NanBlind,
    Racy,
    WrongBeyond65536Tokens,
    RightOnThisCpuOnly,
    LowersThePowerState,
    Crashes,
}

/// A tree.
pub struct Tree {
    pub conduct: Conduct,
    pub machine: VirtualMachine,
    /// Requests that it has run.
    pub n_runs: Rc<RefCell<usize>>,
    /// Whether it is base, after which the rate of the machine recovers.
    pub is_base: bool,
}

impl Tree {
    pub fn new(conduct: Conduct, machine: &VirtualMachine, is_base: bool) -> Self {
        Self { conduct, machine: machine.clone(), n_runs: Rc::default(), is_base }
    }
}

impl Contender for Tree {
    fn start(&mut self, case: &Case, state: &[u8], settings: &Settings) -> Result<Box<dyn Subject>, String> {
        let Case::Attend(attend) = *case else { panic!("{case}") };
        let mut run = attend;
        let mut run_state = state.to_vec();
        match self.conduct {
            // Without the tokens 16 to 31 of a deep cache.
            Conduct::SkipsWork if attend.depth >= DEPTH => {
                (run, run_state) = without(attend, state, 16..32);
            }
            // Where a token's number has 16 bits.
            Conduct::WrongBeyond65536Tokens if attend.depth > 1 << 16 => {
                (run, run_state) = without(attend, state, 1 << 16..attend.depth);
            }
            _ => {}
        }
        let worker = Worker::start(&Case::Attend(run), &run_state, settings)?;
        Ok(Box::new(Run {
            worker,
            conduct: self.conduct,
            machine: self.machine.clone(),
            n_runs: Rc::clone(&self.n_runs),
            is_base: self.is_base,
            depth: attend.depth,
            width: attend.kv_heads * attend.group * attend.dim,
            is_fastest: settings.isa.is_none_or(|isa| Some(&isa) == kvant_lab::device::kernel_sets().last()),
            first: None,
            answers: Vec::new(),
        }))
    }
}

/// Returns a case without some of its tokens, and its state. Attention does not depend on
/// positions.
fn without(case: Attend, state: &[u8], tokens: std::ops::Range<usize>) -> (Attend, Vec<u8>) {
    let values = to_values(state).unwrap();
    let width = case.kv_heads * case.dim;
    let kept = |side: &[f32]| -> Vec<f32> {
        let rows = side.chunks_exact(width).enumerate();
        rows.filter(|(token, _)| !tokens.contains(token)).flat_map(|(_, row)| row.to_vec()).collect()
    };
    let (k, v) = values.split_at(values.len() / 2);
    let depth = case.depth - tokens.len();
    (Attend { depth, ..case }, to_bytes(&[kept(k), kept(v)].concat()))
}

/// A case of a tree.
struct Run {
    worker: Worker,
    conduct: Conduct,
    machine: VirtualMachine,
    n_runs: Rc<RefCell<usize>>,
    is_base: bool,
    depth: usize,
    width: usize,
    is_fastest: bool,
    first: Option<Vec<u8>>,
    answers: Vec<u8>,
}

/// Seconds of a step for each token.
const TOKEN: f64 = 0.02 / DEPTH as f64;

impl Subject for Run {
    fn run(&mut self, inputs: &[f32]) -> Result<Digest, String> {
        *self.n_runs.borrow_mut() += 1;
        let n_steps = inputs.len() / self.width;
        let base_time = (n_steps * self.depth) as f64 * TOKEN;
        self.machine.work(base_time * self.share());
        if self.conduct == Conduct::LowersThePowerState {
            self.machine.set_rate(0.85);
        }
        if self.is_base {
            self.machine.set_rate(1.0);
        }
        let digest = self.worker.run(inputs)?;
        let honest = self.worker.answers()?;
        assert_eq!(Digest::of(&honest), digest);
        self.answers = self.changed(honest)?;
        Ok(Digest::of(&self.answers))
    }

    fn answers(&mut self) -> Result<Vec<u8>, String> {
        Ok(self.answers.clone())
    }
}

impl Run {
    /// Returns the time in shares of base's.
    fn share(&self) -> f64 {
        match self.conduct {
            _ if self.is_base => 1.0,
            Conduct::Honest { near, .. } if self.depth <= DEPTH => near,
            Conduct::Honest { deep, .. } => deep,
            Conduct::FastOnOneSizeAlone if self.depth == DEPTH => 0.5,
            Conduct::FastOnOneSizeAlone => 1.1,
            Conduct::LowersThePowerState => 1.0,
            _ => 0.5,
        }
    }

    /// Returns the answers that the tree gives instead of the right ones.
    fn changed(&mut self, honest: Vec<u8>) -> Result<Vec<u8>, String> {
        let mut values = to_values(&honest).unwrap();
        match self.conduct {
            Conduct::CachesTheAnswer => return Ok(self.first.get_or_insert(honest).clone()),
            // Long after the start no test runs any more.
            Conduct::ReadsTheClock if self.machine.now() > 1.0 => values.iter_mut().for_each(|v| *v *= 0.5),
            Conduct::RightOnAverageOnly => {
                values.iter_mut().zip([0.05, -0.05].into_iter().cycle()).for_each(|(v, off)| *v += off);
            }
            Conduct::NanBlind => *values.last_mut().unwrap() = f32::NAN,
            Conduct::Racy if self.n_runs.borrow().is_multiple_of(7) => {
                values[0] = f32::from_bits(values[0].to_bits() ^ 1);
            }
            Conduct::RightOnThisCpuOnly if !self.is_fastest => values.fill(0.0),
            Conduct::Crashes => return Err("the worker ended (signal: 11)".to_owned()),
            _ => {}
        }
        Ok(to_bytes(&values))
    }
}

/// A worker of this build in a thread.
pub struct Worker {
    requests: Option<PipeWriter>,
    replies: PipeReader,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub fn start(case: &Case, state: &[u8], settings: &Settings) -> Result<Self, String> {
        let (mut from_judge, requests) = pipe().unwrap();
        let (replies, mut to_judge) = pipe().unwrap();
        let settings = settings.clone();
        let thread = spawn(move || {
            // The judge receives what fails.
            let _ = serve(&settings, &mut from_judge, &mut to_judge);
        });
        let mut worker = Self { requests: Some(requests), replies, thread: Some(thread) };
        worker.send(case.to_string().as_bytes());
        worker.send(state);
        worker.receive()?;
        Ok(worker)
    }

    fn send(&mut self, bytes: &[u8]) {
        // A worker that has failed reads no more; its error says why.
        let _ = send(self.requests.as_mut().unwrap(), bytes);
    }

    fn receive(&mut self) -> Result<Vec<u8>, String> {
        receive(&mut self.replies).unwrap().ok_or("the worker ended")?
    }
}

impl Subject for Worker {
    fn run(&mut self, inputs: &[f32]) -> Result<Digest, String> {
        self.send(&to_bytes(inputs));
        Ok(Digest::from_bytes(&self.receive()?).unwrap())
    }

    fn answers(&mut self) -> Result<Vec<u8>, String> {
        self.receive()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.requests = None;
        self.thread.take().unwrap().join().unwrap();
    }
}
