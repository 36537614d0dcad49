//! Decoding allocates nothing per token: only new blocks (every 128 tokens) and the scratch of a
//! deeper context allocate memory. An idle session holds its cache and little else.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use kvant::{
    DeviceChoice, GenerateOptions, KvOptions, Model, OpenOptions, SamplerParams, Session, SessionOptions,
};

struct Counting;

/// Allocations so far.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Bytes allocated and not freed.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Held by a test while it counts.
static COUNTING: Mutex<()> = Mutex::new(());

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `ptr` came from `System` with this layout, as `alloc` above is the only source.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn model() -> Model {
    let options = OpenOptions { device: DeviceChoice::Cpu.into(), n_threads: Some(2), ..Default::default() };
    Model::bundled(options).unwrap()
}

fn session(model: &Model, dtype: &str, n_ctx: usize) -> Session {
    let kv = KvOptions::symmetric(dtype.parse().unwrap());
    model.session(SessionOptions { n_ctx: Some(n_ctx), kv }).unwrap()
}

#[test]
fn decoding_does_not_allocate_per_token() {
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let model = model();
    if model.device().kernels.contains("scalar") {
        eprintln!("skipped: the reference kernels are written to be read, and allocate");
        return;
    }
    for dtype in ["f16", "q8_0", "turbo3"] {
        let mut session = session(&model, dtype, 512);
        // Past the end of a block, so that the next 60 tokens need no new one.
        session.feed(&[7; 180], &mut |_| true).unwrap();
        for _ in 0..4 {
            session.feed(&[7], &mut |_| true).unwrap();
        }
        let allocating = (0..60).filter(|_| {
            let before = COUNT.load(Ordering::Relaxed);
            session.feed(&[7], &mut |_| true).unwrap();
            COUNT.load(Ordering::Relaxed) != before
        });
        // The scratch of attention grows when a deeper context has more splits.
        let allocating = allocating.count();
        assert!(allocating <= 2, "{dtype}: {allocating} of 60 tokens allocated");
    }
}

/// Prefills a prompt, generates an answer, and returns an idle session.
fn converse(session: &mut Session, prompt: &[u32]) {
    let sampler = SamplerParams::greedy();
    let options = GenerateOptions { max_tokens: Some(10), sampler, ignore_eos: true, ..Default::default() };
    assert_eq!(session.generate(prompt, options).unwrap().count(), 10);
}

#[test]
fn an_idle_session_holds_its_blocks_and_at_most_64_kb() {
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let model = model();
    let n_tokens = if model.device().kernels.contains("scalar") { 1024 } else { 8192 };
    let prompt: Vec<u32> = (0..n_tokens).map(|i| i * 37 % 500).collect();
    let mut session = session(&model, "turbo3", 8300);
    converse(&mut session, &prompt);
    let (tokens, blocks) = (session.kv().tokens, session.kv().bytes);
    assert_eq!(model.kv_bytes(), blocks);
    assert!(tokens >= prompt.len());
    // Buffers of the device that grew with the prefill stay.
    let together = LIVE.load(Ordering::Relaxed);
    drop(session);
    assert_eq!(model.kv_bytes(), 0);
    let held = together - LIVE.load(Ordering::Relaxed);
    let max = blocks + 65_536;
    assert!((blocks..=max).contains(&held), "{tokens} tokens: {held} bytes, {blocks} of them in blocks");
}
