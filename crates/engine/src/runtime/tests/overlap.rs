//! Micro-batches of a split model: the bits of the whole one, the order in which its parts run, and
//! what an error leaves.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use kvant_backend::{BackendError, KernelTime};
use kvant_codec::random::Random;
use kvant_codec::{DType, Side};
use kvant_cpu::CpuDevice;
use kvant_gguf::Gguf;
use kvant_kv::KvError;
use kvant_model::LayerRange;

use super::super::*;
use crate::bundled::POCKET;

/// Only a test that fails waits for so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// What parts do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Begins { part: usize, step: usize },
    Ends { part: usize, step: usize },
}

#[derive(Default)]
struct Log {
    events: Mutex<Vec<Event>>,
    added: Condvar,
}

impl Log {
    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap()
    }

    fn add(&self, event: Event) {
        self.events().push(event);
        self.added.notify_all();
    }

    /// Waits until an event has happened.
    fn wait(&self, event: Event) {
        let lacks = |events: &mut Vec<Event>| !events.contains(&event);
        let (_events, result) = self.added.wait_timeout_while(self.events(), PATIENCE, lacks).unwrap();
        assert!(!result.timed_out(), "{event:?} never happens: {:?}", *_events);
    }
}

/// What a part does before a step, given by the index of the step.
type BeforeStep = Box<dyn Fn(usize) -> Result<(), Error> + Send + Sync>;

/// A part that logs its steps.
struct LoggedPart {
    inner: Arc<dyn LoadedModel>,
    part: usize,
    log: Arc<Log>,
    n_steps: AtomicUsize,
    before_step: BeforeStep,
}

impl LoadedModel for LoggedPart {
    fn properties(&self) -> &ModelProperties {
        self.inner.properties()
    }

    fn step(
        &self,
        batch: &[BatchEntry],
        entry: Entry<'_>,
        left: Option<&mut Vec<f32>>,
        queries: OnQueries<'_>,
    ) -> Result<Option<Arc<dyn Logits>>, Error> {
        let (part, step) = (self.part, self.n_steps.fetch_add(1, Ordering::SeqCst));
        self.log.add(Event::Begins { part, step });
        (self.before_step)(step)?;
        let result = self.inner.step(batch, entry, left, queries);
        self.log.add(Event::Ends { part, step });
        result
    }

    fn load_beside(
        &self,
        config: Config,
        gguf: &Arc<Gguf>,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Arc<dyn LoadedModel>, Error> {
        self.inner.load_beside(config, gguf, progress)
    }

    fn finish(&self) -> Result<(), Error> {
        self.inner.finish()
    }
}

impl KvCaches for LoggedPart {
    fn start(&self, id: SequenceId, plan: Plan, room: ContextSize) -> Result<(usize, Plan), Error> {
        self.inner.start(id, plan, room)
    }

    fn restore(
        &self,
        id: SequenceId,
        plan: Plan,
        n_ctx: usize,
        state: CacheState,
        next: &mut dyn FnMut(usize) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error> {
        self.inner.restore(id, plan, n_ctx, state, next)
    }

    fn fork(&self, from: SequenceId, to: SequenceId) {
        self.inner.fork(from, to);
    }

    fn release(&self, id: SequenceId) {
        self.inner.release(id);
    }

    fn visit(&self, id: SequenceId, f: &mut dyn FnMut(&mut dyn CacheOps)) {
        self.inner.visit(id, f);
    }

    fn bytes_for(&self, plan: &Plan, tokens: usize) -> usize {
        self.inner.bytes_for(plan, tokens)
    }

    fn max_sequences(&self, plan: &Plan, tokens: usize) -> Result<usize, Error> {
        self.inner.max_sequences(plan, tokens)
    }

    fn pool_bytes(&self) -> usize {
        self.inner.pool_bytes()
    }

    fn set_budget(&self, bytes: usize) {
        self.inner.set_budget(bytes);
    }
}

impl Measure for LoggedPart {
    fn append_random(&self, id: SequenceId, n: usize, random: &mut Random) -> Result<(), Error> {
        self.inner.append_random(id, n, random)
    }

    fn profile_attention(&self, id: SequenceId, repetitions: usize) -> Result<Vec<StageTime>, Error> {
        self.inner.profile_attention(id, repetitions)
    }

    fn time_kernels(&self, is_on: bool) -> Result<bool, Error> {
        self.inner.time_kernels(is_on)
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>, Error> {
        self.inner.kernel_times()
    }

    fn kv_rows(&self, id: SequenceId, layer: usize, head: usize, side: Side) -> Result<Vec<f32>, Error> {
        self.inner.kv_rows(id, layer, head, side)
    }
}

fn pocket() -> Arc<Gguf> {
    Arc::new(Gguf::from_bytes(POCKET).unwrap())
}

fn fixture(name: &str) -> Arc<Gguf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Arc::new(Gguf::open(folder.join(format!("{name}.gguf"))).unwrap())
}

/// Loads a model in parts that begin with these layers, each on a CPU device of one thread.
fn parts(gguf: &Arc<Gguf>, starts: &[usize]) -> Vec<Arc<dyn LoadedModel>> {
    let config = Config::from_gguf(gguf).unwrap();
    let n_layers = config.layers.len();
    let ends = starts[1..].iter().copied().chain([n_layers]);
    let load_part = |(&start, end)| {
        let device = CpuDevice::from_env(Some(1)).unwrap();
        let range = LayerRange::new(start..end, n_layers);
        load(device, config.clone(), &range, gguf, &mut |_| ()).unwrap()
    };
    starts.iter().zip(ends).map(load_part).collect()
}

fn pipeline(gguf: &Arc<Gguf>, starts: &[usize]) -> Arc<dyn LoadedModel> {
    Arc::new(LayerPipeline::new(parts(gguf, starts)))
}

/// Loads the bundled model in two logged parts.
fn logged(log: &Arc<Log>, before_step: [BeforeStep; 2]) -> Arc<dyn LoadedModel> {
    let parts = parts(&pocket(), &[0, 2]).into_iter().zip(before_step).enumerate();
    let part = |(part, (inner, before_step))| {
        let (log, n_steps) = (Arc::clone(log), AtomicUsize::new(0));
        Arc::new(LoggedPart { inner, part, log, n_steps, before_step }) as Arc<dyn LoadedModel>
    };
    Arc::new(LayerPipeline::new(parts.map(part).collect()))
}

fn start(model: &Arc<dyn LoadedModel>, policies: &str, n_ctx: usize) -> Sequence {
    let policies = policies.parse().unwrap();
    let plan = Plan::new(&model.properties().kv_shape, DType::Turbo3, DType::Q8_0, &policies).unwrap();
    Sequence::start(Arc::clone(model), plan, ContextSize::Exactly(n_ctx)).unwrap()
}

/// A sequence's rows in a step.
#[derive(Clone, Copy)]
struct Rows {
    n: usize,
    logits_for: LogitsFor,
}

/// Returns `n` tokens of the text with this number.
fn text(number: usize, from: usize, n: usize) -> Vec<u32> {
    (from..from + n).map(|i| ((i * 37 + number * 11) % 60) as u32).collect()
}

/// Appends rows to sequences in one step; returns the bits of the logits, row by row.
fn step(sequences: &[&Sequence], rows: &[Rows]) -> Result<Vec<Vec<u32>>, Error> {
    let model = sequences[0].loaded();
    let each = || sequences.iter().zip(rows);
    let batch: Vec<_> = each().map(|(sequence, rows)| sequence.step_row(rows.n, rows.logits_for)).collect();
    let tokens = each().enumerate().map(|(number, (sequence, rows))| text(number, sequence.len(), rows.n));
    let tokens = tokens.collect::<Vec<_>>().concat();
    let n_logits: usize = rows.iter().map(|rows| rows.logits_for.count(rows.n)).sum();
    let logits = model.step(&batch, Entry::Tokens(&tokens), None, None)?;
    assert_eq!(logits.is_some(), n_logits > 0);
    let read = |row| {
        let mut values = vec![f32::NAN; model.properties().n_vocab];
        let logits = logits.as_ref().unwrap();
        logits.read(row, &mut values).unwrap();
        let mut top = Vec::new();
        logits.top_k(&mut [TopK { row, k: 1, out: &mut top }]).unwrap();
        assert!(values.iter().all(|&logit| logit <= values[top[0].id as usize]));
        (top, values.into_iter().map(f32::to_bits).collect())
    };
    let (alone, values): (Vec<_>, _) = (0..n_logits).map(read).unzip();
    // All rows at once, in any order.
    let mut together = vec![Vec::new(); n_logits];
    let mut requests: Vec<_> =
        together.iter_mut().enumerate().rev().map(|(row, out)| TopK { row, k: 1, out }).collect();
    if let Some(logits) = &logits {
        logits.top_k(&mut requests).unwrap();
    }
    assert_eq!(together, alone);
    Ok(values)
}

fn rows(n: usize) -> Rows {
    Rows { n, logits_for: LogitsFor::Last }
}

/// Steps that are cut within sequences, between them, and not at all; logits of no row, the last,
/// and several, also across a cut.
#[test]
fn micro_batches_give_the_bits_of_the_whole_model() {
    let steps = [
        vec![rows(130), rows(3), rows(1)],
        vec![
            Rows { n: 1, logits_for: LogitsFor::None },
            rows(64),
            Rows { n: 90, logits_for: LogitsFor::From(20) },
        ],
        vec![rows(1), rows(1), rows(1)],
        vec![
            rows(33),
            Rows { n: 200, logits_for: LogitsFor::None },
            Rows { n: 5, logits_for: LogitsFor::From(2) },
        ],
        vec![Rows { n: 340, logits_for: LogitsFor::From(330) }],
    ];
    for (name, starts) in [
        ("pocket", &[0, 2][..]),
        ("pocket", &[0, 1, 2, 3, 4]),
        ("gemma2-h64-g2-window20-caps", &[0, 1]),
        ("gptoss-h64-g4-window24-sinks", &[0, 1, 2]),
        ("falconh1-h64-g2-beside", &[0, 1]),
        ("deepseek2-latent512-lite", &[0, 1]),
        ("qwen2vl-h64-g2", &[0, 1]),
    ] {
        let gguf = if name == "pocket" { pocket() } else { fixture(name) };
        let [whole, split] = [&[0][..], starts].map(|starts| pipeline(&gguf, starts));
        let [want, got] = [&whole, &split].map(|model| [(); 3].map(|()| start(model, "sink:16", 2000)));
        for (index, rows) in steps.iter().enumerate() {
            let [want, got] = [&want, &got].map(|all| step(&all.each_ref()[..rows.len()], rows).unwrap());
            assert!(got == want, "{name} from {starts:?}, step {index}");
        }
        // The layers of a window have the same tokens in all parts.
        assert_eq!(got.each_ref().map(Sequence::len), want.each_ref().map(Sequence::len));
        assert_eq!(got[0].n_bytes(), want[0].n_bytes(), "{name}");
    }
}

#[test]
fn hidden_states_of_micro_batches_are_those_of_the_whole_model() {
    let gguf = pocket();
    let left = [&[0][..], &[0, 2, 3]].map(|starts| {
        let model = pipeline(&gguf, starts);
        let sequences = [(); 2].map(|()| start(&model, "none", 400));
        let mut left = vec![f32::NAN; 3];
        let entries = [0, 1].map(|index| sequences[index].step_row([100, 70][index], LogitsFor::None));
        let tokens = [text(0, 0, 100), text(1, 0, 70)].concat();
        let logits = model.step(&entries, Entry::Tokens(&tokens), Some(&mut left), None).unwrap();
        assert!(logits.is_none());
        left
    });
    assert_eq!(left[0].len(), 170 * Config::from_gguf(&gguf).unwrap().n_embd);
    assert!(left[0] == left[1]);
}

#[test]
fn queries_are_those_of_the_whole_step() {
    let gguf = pocket();
    let queries = [&[0][..], &[0, 2]].map(|starts| {
        let model = pipeline(&gguf, starts);
        let sequence = start(&model, "none", 400);
        let (batch, mut queries) = ([sequence.step_row(200, LogitsFor::None)], Vec::new());
        let mut on_queries = |layer: usize, q: &[f32]| queries.push((layer, q.to_vec()));
        model.step(&batch, Entry::Tokens(&text(0, 0, 200)), None, Some(&mut on_queries)).unwrap();
        queries
    });
    assert_eq!(queries[0].len(), 5);
    assert!(queries[0] == queries[1]);
}

/// The second part holds the first micro-batch until the first part runs the second one.
#[test]
fn parts_run_different_micro_batches_at_once_and_in_order() {
    let log = Arc::<Log>::default();
    let waits = {
        let log = Arc::clone(&log);
        Box::new(move |step| {
            if step == 0 {
                log.wait(Event::Begins { part: 0, step: 1 });
            }
            Ok(())
        })
    };
    let model = logged(&log, [Box::new(|_| Ok(())), waits]);
    let sequences = [(); 4].map(|()| start(&model, "none", 100));
    step(&sequences.each_ref(), &[rows(64); 4]).unwrap();
    let events = log.events();
    let at = |event| events.iter().position(|other| *other == event).unwrap();
    for micro_batch in 0..4 {
        let [first, second] = [0, 1].map(|part| {
            let step = micro_batch;
            [at(Event::Begins { part, step }), at(Event::Ends { part, step })]
        });
        assert!(first[0] < first[1] && first[1] < second[0] && second[0] < second[1], "{events:?}");
        if micro_batch > 0 {
            for (part, [begins, _]) in [first, second].into_iter().enumerate() {
                assert!(at(Event::Ends { part, step: micro_batch - 1 }) < begins, "{events:?}");
            }
        }
    }
    assert_eq!(events.len(), 16, "{events:?}");
}

/// Each thread feeds a sequence, as servers of several users may.
#[test]
fn steps_of_two_threads_overlap() {
    let log = Arc::<Log>::default();
    let waits = {
        let log = Arc::clone(&log);
        Box::new(move |step| {
            if step == 0 {
                log.wait(Event::Begins { part: 0, step: 1 });
            }
            Ok(())
        })
    };
    let model = logged(&log, [Box::new(|_| Ok(())), waits]);
    let alone = pipeline(&pocket(), &[0]);
    let want = step(&[&start(&alone, "none", 100)], &[rows(1)]).unwrap();
    thread::scope(|scope| {
        let step_alone = || step(&[&start(&model, "none", 100)], &[rows(1)]).unwrap();
        let threads = [(); 2].map(|()| scope.spawn(step_alone));
        threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), want));
    });
}

fn failure() -> Error {
    BackendError::Failed { device: "cpu", problem: "a test".to_owned() }.into()
}

/// Fails step `at` of part `part`, once.
fn failing(part: usize, at: usize) -> [BeforeStep; 2] {
    [0, 1].map(|index| -> BeforeStep {
        Box::new(move |step| if (index, step) == (part, at) { Err(failure()) } else { Ok(()) })
    })
}

/// All sequences of a step that fails anywhere keep what they had or less, the same in all parts,
/// and continue with the bits of a model that never failed.
#[test]
fn a_failed_micro_batch_rolls_back_every_sequence() {
    let whole = pipeline(&pocket(), &[0]);
    let fed = [rows(600), rows(40), rows(1)];
    let after = [rows(200), rows(100), rows(4)];
    // Returns the last logits of each sequence.
    let feed = |sequences: &[Sequence; 3], until: [Rows; 3]| {
        let each = sequences.iter().zip(until).enumerate();
        let feed_one = |(number, (sequence, until)): (usize, (&Sequence, Rows))| {
            let mut last = vec![f32::NAN; sequence.loaded().properties().n_vocab];
            while sequence.len() < until.n {
                let n = (until.n - sequence.len()).min(sequence.max_step_rows());
                let (batch, tokens) =
                    ([sequence.step_row(n, LogitsFor::Last)], text(number, sequence.len(), n));
                let logits = sequence.loaded().step(&batch, Entry::Tokens(&tokens), None, None).unwrap();
                logits.unwrap().read(0, &mut last).unwrap();
            }
            last.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        each.map(feed_one).collect::<Vec<_>>()
    };
    let total = [0, 1, 2].map(|index| rows(fed[index].n + after[index].n));
    let want = feed(&[(); 3].map(|()| start(&whole, "sink:16", 1000)), total);
    // The steps of each part before the one that fails.
    let log = Arc::<Log>::default();
    let model = logged(&log, [Box::new(|_| Ok(())), Box::new(|_| Ok(()))]);
    feed(&[(); 3].map(|()| start(&model, "sink:16", 1000)), fed);
    let n_before = log.events().iter().filter(|event| matches!(event, Event::Ends { part: 0, .. })).count();
    for part in 0..2 {
        for at in [0, 1, 3] {
            let model = logged(&Arc::default(), failing(part, n_before + at));
            let sequences = [(); 3].map(|()| start(&model, "sink:16", 1000));
            feed(&sequences, fed);
            let error = step(&sequences.each_ref(), &after).unwrap_err().to_string();
            assert!(error.contains("a test"), "{error}");
            for (sequence, fed) in sequences.iter().zip(fed) {
                let mut lens = Vec::new();
                sequence.caches(|cache| lens.push(cache.state().len));
                assert!(lens[0] <= fed.n && lens[0] == lens[1], "{lens:?} of {}", fed.n);
            }
            assert!(feed(&sequences, total) == want, "part {part} fails at {at}");
        }
    }
}

/// A context that is full refuses the step of all sequences, wherever its rows are.
#[test]
fn a_full_context_refuses_the_step_of_all_sequences() {
    let model = pipeline(&pocket(), &[0, 2]);
    let short = start(&model, "none", 50);
    for order in [[0, 1], [1, 0]] {
        let long = start(&model, "none", 400);
        let sequences = order.map(|index| [&long, &short][index]);
        let rows = order.map(|index| rows([120, 60][index]));
        let error = step(&sequences, &rows).unwrap_err();
        let error = error.to_string();
        let want = KvError::Full { need: 60, n_ctx: 50 }.to_string();
        assert_eq!(error, want);
        assert_eq!([long.len(), short.len()], [0, 0]);
        assert_eq!(model.pool_bytes(), 0, "{error}");
    }
}
