//! Claims about the scheduler, with an engine that only counts: it shares and holds blocks like the
//! real one, and retains idle caches.

use std::collections::{HashMap, HashSet};

use kvant_codec::random::Random;

use super::step_times::{MAX_STEP, MIN_ROWS};
use super::*;

const BLOCK: usize = 4;
/// Bytes of a block, and of a cache besides its blocks.
const COST: Cost = Cost { fixed: 3, block: 10 };

/// Cache of a sequence.
#[derive(Clone)]
struct Cache {
    tokens: Vec<u64>,
    /// Hashes of its whole blocks; shared blocks take no memory of their own.
    blocks: Vec<u64>,
}

impl Cache {
    fn push(&mut self, token: u64) {
        self.tokens.push(token);
        if self.tokens.len().is_multiple_of(BLOCK) {
            let before = self.blocks.last().copied().unwrap_or(NO_BLOCK);
            self.blocks.push(name(before, &self.tokens[self.tokens.len() - BLOCK..]));
        }
    }
}

/// Stands for the hash of the block before the first one.
const NO_BLOCK: u64 = 7;

/// Hashes a block with those before it.
fn name(before: u64, block: &[u64]) -> u64 {
    block.iter().fold(before, |hash, token| (hash ^ token).wrapping_mul(0x100_0000_01b3).rotate_left(17))
}

fn names(tokens: &[u64]) -> Vec<u64> {
    let mut last = NO_BLOCK;
    let next = |block: &[u64]| {
        last = name(last, block);
        last
    };
    tokens.chunks_exact(BLOCK).map(next).collect()
}

/// Returns the successor of tokens: a value that depends on all of them.
fn next_token(tokens: &[u64]) -> u64 {
    tokens.iter().fold(1, |hash, token| (hash ^ token).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23))
        % 1000
}

struct Job {
    owner: u64,
    prompt: Vec<u64>,
    /// Prompt and generated tokens.
    tokens: Vec<u64>,
    max_tokens: usize,
    cache: Option<Cache>,
    submitted: usize,
    paused: bool,
}

struct Engine {
    scheduler: Scheduler,
    jobs: BTreeMap<Id, Job>,
    idle: Vec<Cache>,
    now: Duration,
    /// Time per batch token, and constant time per step.
    row: Duration,
    step: Duration,
    n_steps: usize,
    /// Prompt tokens that were read, not taken from the prefix cache.
    n_read: usize,
    finished: Vec<(Vec<u64>, Vec<u64>)>,
}

impl Engine {
    fn new(budget: usize, n_running: usize) -> Self {
        let limits = Limits {
            n_running,
            n_waiting: 1000,
            n_owners: 3,
            n_rows: 32,
            block: BLOCK,
            min_shared_tokens: BLOCK / 2,
            budget,
        };
        Self {
            scheduler: Scheduler::new(limits),
            jobs: BTreeMap::new(),
            idle: Vec::new(),
            now: Duration::ZERO,
            row: Duration::from_millis(1),
            step: Duration::from_millis(5),
            n_steps: 0,
            n_read: 0,
            finished: Vec::new(),
        }
    }

    fn submit(&mut self, owner: u64, prompt: &[u64], max_tokens: usize) -> Result<Id, Refusal> {
        let shared = &prompt[..prompt.len() - 1];
        let (blocks, tokens) = (names(shared).into(), prompt.iter().map(|&token| token as u32).collect());
        let (n_prompt, n_shared) = (prompt.len(), shared.len());
        let request = Request { owner, n_prompt, prompt: tokens, n_shared, blocks, cost: COST };
        let id = self.scheduler.submit(request)?;
        let (prompt, submitted) = (prompt.to_vec(), self.n_steps);
        let tokens = prompt.clone();
        self.jobs
            .insert(id, Job { owner, prompt, tokens, max_tokens, cache: None, submitted, paused: false });
        Ok(id)
    }

    fn caches(&self) -> impl Iterator<Item = &Cache> {
        self.jobs.values().filter_map(|job| job.cache.as_ref()).chain(&self.idle)
    }

    fn used(&self) -> usize {
        // Unlimited memory is not counted, to save time.
        if self.scheduler.limits().budget == usize::MAX {
            return 0;
        }
        let shared: HashSet<u64> = self.caches().flat_map(|cache| cache.blocks.iter().copied()).collect();
        let own = self.caches().map(|cache| match cache.tokens.len() {
            0 => 0,
            n => COST.fixed + COST.block * (n.div_ceil(BLOCK) - n / BLOCK),
        });
        COST.block * shared.len() + own.sum::<usize>()
    }

    fn memory(&self) -> Memory {
        let free = self.scheduler.limits().budget - self.used();
        Memory { free, can_evict: !self.idle.is_empty(), is_short: false }
    }

    fn attach(&self, tokens: &[u64]) -> Cache {
        let (blocks, max_blocks) = (names(tokens), (tokens.len() - 1) / BLOCK);
        let common = |cache: &Cache| {
            blocks.iter().zip(&cache.blocks).take_while(|(a, b)| a == b).count().min(max_blocks)
        };
        let n = BLOCK * self.caches().map(common).max().unwrap_or(0);
        // Blocks can be reused from every cache, the rest only from a snapshot.
        let copies = self.idle.iter().map(|cache| &cache.tokens);
        let whole = copies.filter(|copy| tokens[..tokens.len() - 1].starts_with(copy)).map(Vec::len).max();
        let n = n.max(whole.unwrap_or(0));
        Cache { tokens: tokens[..n].to_vec(), blocks: blocks[..n / BLOCK].to_vec() }
    }

    fn leave(&mut self, id: Id) {
        self.scheduler.remove(id);
        let job = self.jobs.remove(&id).expect("a job");
        self.idle.extend(job.cache);
    }

    /// Executes one action. Returns `false` when there is nothing to do.
    fn act(&mut self) -> bool {
        let act = self.scheduler.next(self.memory());
        match act {
            Action::Wait => return false,
            Action::Evict => _ = self.idle.remove(0),
            Action::Admit(id) | Action::Resume(id) => {
                let job = &self.jobs[&id];
                let has_output = job.tokens.len() > job.prompt.len();
                // In decode, the last token is not fed yet.
                let known = &job.tokens[..job.tokens.len() - usize::from(has_output)];
                let cache = self.attach(known);
                let n = cache.tokens.len();
                match act {
                    Action::Admit(_) => self.scheduler.began(id, n),
                    _ => self.scheduler.resumed(id, n),
                }
                self.jobs.get_mut(&id).expect("a job").cache = Some(cache);
            }
            Action::Preempt(id) => self.jobs.get_mut(&id).expect("a job").cache = None,
            Action::End(id) => {
                let job = self.jobs.remove(&id).expect("a job");
                assert!(job.tokens.len() > 1);
            }
            Action::Run(rows) => self.run(&rows),
        }
        assert!(self.used() <= self.scheduler.limits().budget, "{} bytes", self.used());
        true
    }

    fn run(&mut self, rows: &[(Id, usize)]) {
        assert!(
            !rows.is_empty() && rows.iter().map(|(_, n)| n).sum::<usize>() <= self.scheduler.limits().n_rows
        );
        self.n_steps += 1;
        let took = self.step + self.row * rows.iter().map(|&(_, n)| n as u32).sum::<u32>();
        self.now += took;
        self.scheduler.ran(rows, took);
        let decoding = self.jobs.values().filter(|job| job.tokens.len() > job.prompt.len());
        let ready = decoding.filter(|job| {
            !job.paused && job.cache.as_ref().is_some_and(|c| c.tokens.len() + 1 == job.tokens.len())
        });
        let n_ready = ready.count();
        let mut n_decoded = 0;
        let mut done = Vec::new();
        for &(id, n) in rows {
            let job = self.jobs.get_mut(&id).expect("a job");
            let cache = job.cache.as_mut().expect("a cache");
            let at = cache.tokens.len();
            n_decoded += usize::from(job.tokens.len() > job.prompt.len() && at + 1 == job.tokens.len());
            assert!(!job.paused || job.tokens.len() == job.prompt.len() || at + 1 < job.tokens.len());
            job.tokens[at..at + n].iter().for_each(|&token| cache.push(token));
            self.n_read += if at < job.prompt.len() { n } else { 0 };
            if cache.tokens.len() == job.tokens.len() {
                job.tokens.push(next_token(&job.tokens));
                if job.tokens.len() - job.prompt.len() == job.max_tokens {
                    done.push(id);
                }
            }
        }
        assert_eq!(n_decoded, n_ready, "a decoding sequence runs in every step");
        for &(id, _) in rows {
            if self.scheduler.takes_snapshot(id, self.memory()) {
                self.idle.extend(self.jobs[&id].cache.clone());
            }
        }
        for id in done {
            let job = &self.jobs[&id];
            self.finished.push((job.prompt.clone(), job.tokens.clone()));
            self.leave(id);
        }
    }

    fn run_all(&mut self) {
        let mut acts = 0;
        while self.act() {
            acts += 1;
            assert!(acts < 200_000, "it goes on for ever: {:?}", self.scheduler.counts());
        }
        assert!(self.jobs.is_empty(), "{:?}", self.scheduler.counts());
    }
}

/// Returns a prompt with a prefix that others share.
fn prompt(random: &mut Random, longest: usize) -> Vec<u64> {
    let family = random.bits() % 3;
    let shared = (random.bits() % 4) as usize * 2 * BLOCK + (random.bits() % 3) as usize;
    let own = 1 + random.bits() as usize % (longest - shared.min(longest - 1));
    let begins = (0..shared.min(longest - 1) as u64).map(|i| family * 100 + i);
    begins.chain((0..own).map(|_| random.bits() % 50)).collect()
}

#[test]
fn random_loads_give_the_tokens_of_lone_runs_within_budget() {
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let budget = 150 + random.bits() as usize % 1500;
        let mut engine = Engine::new(budget, 1 + random.bits() as usize % 9);
        let mut n_refused = 0;
        for _ in 0..400 {
            match random.bits() % 10 {
                0 | 1 => {
                    // Each sequence fits alone.
                    let (prompt, max_tokens) = (prompt(&mut random, 30), 1 + random.bits() as usize % 12);
                    let largest = COST.fixed + COST.block * (prompt.len() + max_tokens).div_ceil(BLOCK);
                    let result = engine.submit(random.bits() % 3, &prompt, max_tokens);
                    match result {
                        Err(_) => n_refused += 1,
                        Ok(id) if largest > budget => {
                            engine.scheduler.remove(id);
                            engine.jobs.remove(&id);
                        }
                        Ok(_) => {}
                    }
                }
                2 if random.bits().is_multiple_of(4) => {
                    if let Some(&id) = engine.jobs.keys().next_back() {
                        let held = engine.jobs[&id].cache.is_some();
                        engine.leave(id);
                        assert!(!held || !engine.idle.is_empty(), "what it had can be let go of at once");
                    }
                }
                3 => {
                    let id =
                        engine.jobs.keys().copied().nth(random.bits() as usize % engine.jobs.len().max(1));
                    if let Some(id) = id {
                        let paused = random.bits().is_multiple_of(2);
                        engine.scheduler.pause(id, paused);
                        engine.jobs.get_mut(&id).unwrap().paused = paused;
                    }
                }
                _ => _ = engine.act(),
            }
        }
        for (&id, job) in &mut engine.jobs {
            job.paused = false;
            engine.scheduler.pause(id, false);
        }
        engine.run_all();
        assert!(n_refused < 100 && !engine.finished.is_empty(), "seed {seed}");
        for (prompt, tokens) in &engine.finished {
            let mut alone = prompt.clone();
            while alone.len() < tokens.len() {
                alone.push(next_token(&alone));
            }
            assert_eq!(*tokens, alone, "seed {seed}");
        }
        assert_eq!(engine.scheduler.counts(), Counts::default());
        engine.idle.clear();
        assert_eq!(engine.used(), 0);
    }
}

#[test]
fn a_shared_prefix_is_read_once() {
    let mut engine = Engine::new(100_000, 64);
    // The prefix does not end at a block.
    let shared: Vec<u64> = (0..100 * BLOCK as u64 + 3).collect();
    for own in 0..16 {
        let prompt = [&shared[..], &[1000 + own, 5, 6]].concat();
        engine.submit(own % 4, &prompt, 3).unwrap();
    }
    engine.run_all();
    assert_eq!(engine.finished.len(), 16);
    assert_eq!(engine.n_read, shared.len() + 16 * 3);
}

#[test]
fn forks_of_a_prompt_respect_the_running_slots() {
    let mut engine = Engine::new(10_000, 3);
    let first = engine.submit(1, &[1, 2, 3, 4, 5, 6], 20).unwrap();
    while engine.scheduler.counts().decode == 0 {
        engine.act();
    }
    let forks: Vec<Id> = (0..5).map(|_| engine.scheduler.fork(first).unwrap()).collect();
    let counts = engine.scheduler.counts();
    assert_eq!((counts.decode, counts.preempted), (3, 3));
    assert_eq!(forks.iter().filter(|&&id| engine.scheduler.is_preempted(id)).count(), 3);
    // When a sequence ends, the oldest waiting one resumes.
    engine.scheduler.remove(forks[0]);
    assert_eq!(engine.scheduler.next(engine.memory()), Action::Resume(forks[2]));
}

#[test]
fn owners_share_batch_tokens_and_short_prompts_come_first() {
    let mut engine = Engine::new(1_000_000, 64);
    // The first owner submits a lot of work; the second a little, later.
    for i in 0..20 {
        engine.submit(1, &(0..400).map(|t| t * 31 + i).collect::<Vec<_>>(), 4).unwrap();
    }
    for _ in 0..30 {
        engine.act();
    }
    let before = engine.n_steps;
    let short: Vec<u64> = (0..40).map(|t| 9000 + t).collect();
    engine.submit(2, &short, 1).unwrap();
    while !engine.finished.iter().any(|(prompt, _)| *prompt == short) {
        assert!(engine.act());
        assert!(engine.n_steps < before + 8, "{} steps", engine.n_steps - before);
    }
    // A long prompt among a steady supply of short ones does not starve.
    let mut engine = Engine::new(1_000_000, 64);
    let long: Vec<u64> = (0..300).map(|t| 70_000 + t).collect();
    engine.submit(1, &long, 1).unwrap();
    let mut next = 0;
    while !engine.finished.iter().any(|(prompt, _)| *prompt == long) {
        if engine.jobs.len() < 4 {
            engine.submit(1, &(0..30).map(|t| 1_000_000 + next * 50 + t).collect::<Vec<_>>(), 1).unwrap();
            next += 1;
        }
        assert!(engine.act());
        assert!(engine.n_steps < 500, "the long one starves");
    }
    assert!(next > 5);
}

#[test]
fn a_full_queue_refuses_with_a_retry_time() {
    let mut engine = Engine::new(1_000, 1);
    (engine.scheduler.limits.n_waiting, engine.scheduler.limits.n_owners) = (2, 1);
    for _ in 0..2 {
        engine.submit(0, &[1, 2, 3], 1).unwrap();
    }
    let refused = engine.submit(0, &[1, 2, 3], 1).unwrap_err();
    assert!(matches!(refused, Refusal::Full { waiting: 2, retry_after: 1.. }), "{refused:?}");
    let refused = engine.submit(0, &(0..1000).collect::<Vec<_>>(), 1).unwrap_err();
    assert_eq!(refused, Refusal::TooLarge { needed: 3 + 10 * 251, budget: 1000 });
    engine.run_all();
    engine.submit(0, &[1, 2, 3], 1).unwrap();
}

#[test]
fn each_owner_has_a_reserved_part_of_the_queue() {
    let mut engine = Engine::new(100_000, 1);
    (engine.scheduler.limits.n_waiting, engine.scheduler.limits.n_owners) = (64, 2);
    let mut wait = |owner: u64| {
        let all = (0..100).map(|i| engine.submit(owner, &[owner, i, 3], 1));
        all.filter(Result::is_ok).count()
    };
    // Half of the queue is reserved in even parts; the rest is first come, first served.
    assert_eq!((wait(1), wait(2)), (48, 16));
    engine.run_all();
    assert_eq!(engine.finished.len(), 64);
}

#[test]
fn an_owner_starts_at_once_within_its_fair_share() {
    // The first owner occupies all slots, or all memory, with long answers.
    for (budget, n_running) in [(100_000, 8), (2_000, 64)] {
        let mut engine = Engine::new(budget, n_running);
        for i in 0..64 {
            engine.submit(1, &(0..20).map(|t| 100 * i + t).collect::<Vec<_>>(), 200).unwrap();
        }
        let began = |engine: &Engine, owner: u64| {
            engine.jobs.values().filter(|job| job.owner == owner && job.cache.is_some()).count()
        };
        (0..200).for_each(|_| assert!(engine.act()));
        let before = began(&engine, 1);
        assert!(before > 4);
        let first_step = engine.n_steps;
        let short: Vec<Vec<u64>> = (0..2).map(|i| (0..12).map(|t| 90_000 + 50 * i + t).collect()).collect();
        for prompt in &short {
            engine.submit(2, prompt, 4).unwrap();
        }
        while short.iter().any(|short| !engine.finished.iter().any(|(prompt, _)| prompt == short)) {
            assert!(engine.act());
            assert!(engine.n_steps < first_step + 20, "{budget}: {} steps", engine.n_steps - first_step);
        }
        assert!(engine.finished.len() < 2 + 64, "no sequence had to end for it");
        // A preempted sequence resumes with the same tokens.
        engine.run_all();
        assert_eq!(engine.finished.len(), 66);
        for (prompt, tokens) in &engine.finished {
            let mut alone = prompt.clone();
            (prompt.len()..tokens.len()).for_each(|_| alone.push(next_token(&alone)));
            assert_eq!(*tokens, alone);
        }
    }
}

/// Compares the service of both owners while both have work.
#[test]
fn two_busy_owners_get_equal_service_for_any_prompt_length() {
    let mut engine = Engine::new(10_000_000, 64);
    for i in 0..200u64 {
        engine.submit(1, &(0..40).map(|t| i * 1000 + t).collect::<Vec<_>>(), 1).unwrap();
        engine.submit(2, &(0..160).map(|t| 500_000 + i * 1000 + t).collect::<Vec<_>>(), 1).unwrap();
    }
    while engine.n_steps < 200 {
        assert!(engine.act());
    }
    let mut left: HashMap<u64, usize> = HashMap::new();
    for job in engine.jobs.values() {
        *left.entry(job.owner).or_default() +=
            job.prompt.len() - job.cache.as_ref().map_or(0, |c| c.tokens.len());
        assert!(job.submitted <= engine.n_steps);
    }
    let given = [200 * 40 - left[&1], 200 * 160 - left[&2]];
    let max = given[0].max(given[1]);
    assert!(given[0].abs_diff(given[1]) * 10 <= max, "{given:?}");
}

/// Returns an engine with this throughput; the constant time of a step equals that of three batch
/// tokens, as on a CPU.
fn paced(rows_per_second: u32) -> Engine {
    let mut engine = Engine::new(usize::MAX, 64);
    engine.scheduler.limits.n_rows = 512;
    engine.row = Duration::from_secs(1) / rows_per_second;
    engine.step = 3 * engine.row;
    engine
}

/// Returns a prompt of `n_tokens` tokens with a unique prefix.
fn distinct(random: &mut Random, n_tokens: usize) -> Vec<u64> {
    let seed = random.bits();
    (0..n_tokens as u64).map(|i| seed.wrapping_add(i) % 1_000_003).collect()
}

/// Returns the longest step: a new prompt waits for the end of one, and its last tokens share one
/// with others.
fn longest_step(engine: &Engine) -> Duration {
    Duration::from_secs_f64(MAX_STEP).max(engine.step + engine.row * MIN_ROWS as u32)
}

/// Acts until `prompt` has been answered. Returns the duration.
fn time_of(engine: &mut Engine, prompt: &[u64]) -> Duration {
    let began = engine.now;
    while !engine.finished.iter().any(|(finished, _)| finished == prompt) {
        assert!(engine.act());
    }
    engine.now - began
}

#[test]
fn a_short_prompt_waits_at_most_three_times_its_own_time() {
    let mut random = Random::new(1);
    println!("rows/s | alone | behind 12,000 tokens, at most | the long one's throughput");
    for rows_per_second in [20, 75, 300, 2_000, 20_000] {
        let (long, short) = (distinct(&mut random, 12_000), distinct(&mut random, 50));
        let mut engine = paced(rows_per_second);
        engine.submit(0, &long, 1).unwrap();
        let long_alone = time_of(&mut engine, &long);
        engine.submit(0, &short, 1).unwrap();
        let alone = time_of(&mut engine, &short);

        let (mut slowest, mut throughput) = (Duration::ZERO, 1.0f64);
        for share in [0.02, 0.3, 0.6, 0.95] {
            let mut engine = paced(rows_per_second);
            engine.submit(0, &long, 1).unwrap();
            while engine.now < long_alone.mul_f64(share) {
                assert!(engine.act());
            }
            engine.submit(0, &short, 1).unwrap();
            slowest = slowest.max(time_of(&mut engine, &short));
            time_of(&mut engine, &long);
            throughput = throughput.min(long_alone.as_secs_f64() / engine.now.as_secs_f64());
        }
        println!("{rows_per_second} | {alone:.2?} | {slowest:.2?} | {throughput:.3}");
        assert!(slowest <= (3 * alone).max(2 * longest_step(&engine)), "{rows_per_second}: {slowest:?}");
        assert!(throughput >= 0.9, "{rows_per_second}: {throughput}");
    }
}

#[test]
fn short_prompts_beside_an_agent_are_fast_and_waste_no_step() {
    println!("rows/s | titles alone | median | 9 of 10 | rows/s beside them");
    for rows_per_second in [20, 75, 300, 2_000, 20_000] {
        let mut random = Random::new(u64::from(rows_per_second));
        let agent = distinct(&mut random, 12_000);
        let mut engine = paced(rows_per_second);
        engine.submit(0, &agent, 1).unwrap();
        let alone = time_of(&mut engine, &agent);
        let title = distinct(&mut random, 50);
        engine.submit(0, &title, 1).unwrap();
        let title_alone = time_of(&mut engine, &title);

        let mut engine = paced(rows_per_second);
        engine.submit(0, &agent, 1).unwrap();
        // The load of the titles is a third of the throughput.
        let (mut next, mut titles, mut seen) = (Duration::ZERO, HashMap::new(), 0);
        let mut waits = Vec::new();
        while !engine.finished.iter().any(|(prompt, _)| *prompt == agent) {
            if engine.now >= next {
                let is_title = !random.bits().is_multiple_of(3);
                let n_tokens = if is_title { 50 } else { 200 + random.bits() as usize % 1_000 };
                let prompt = distinct(&mut random, n_tokens);
                engine.submit(0, &prompt, 1).unwrap();
                if is_title {
                    titles.insert(prompt, engine.now);
                }
                next += engine.row * (300 + random.bits() % 1_200) as u32;
            }
            assert!(engine.act());
            for (prompt, _) in &engine.finished[seen..] {
                waits.extend(titles.get(prompt).map(|&submitted| engine.now - submitted));
            }
            seen = engine.finished.len();
        }
        waits.sort_unstable();
        let (median, p90) = (waits[waits.len() / 2], waits[waits.len() * 9 / 10]);
        let pace = engine.n_read as f64 / engine.now.as_secs_f64();
        println!("{rows_per_second} | {title_alone:.2?} | {median:.2?} | {p90:.2?} | {pace:.0}");
        assert!(p90 <= (3 * title_alone).max(2 * longest_step(&engine)), "{rows_per_second}: {p90:?}");
        assert!(pace >= 0.9 * 12_000.0 / alone.as_secs_f64(), "{rows_per_second}: {pace}");
    }
}
