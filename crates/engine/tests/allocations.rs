//! Decoding allocates nothing per token: only new pages (every 128 tokens) and a deeper context's scratch ask for memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvant::{DeviceChoice, KvOptions, Model, OpenOptions, SessionOptions};

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` with this layout, as `alloc` above is the only source.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decoding_does_not_allocate_per_token() {
    let model =
        Model::bundled(OpenOptions { device: DeviceChoice::Cpu, n_threads: Some(2), ..Default::default() })
            .unwrap();
    if model.device().kernels.contains("scalar") {
        eprintln!("skipped: the reference kernels are written to be read, and allocate");
        return;
    }
    for dtype in ["f16", "q8_0", "turbo3"] {
        let kv = KvOptions::symmetric(dtype.parse().unwrap());
        let mut session = model.session(SessionOptions { n_ctx: Some(512), kv }).unwrap();
        // Past the end of a page of the main part, so that the next 60 tokens need no new one.
        session.feed(&[7; 180], &mut |_| true).unwrap();
        for _ in 0..4 {
            session.feed(&[7], &mut |_| true).unwrap();
        }
        let allocating = (0..60).filter(|_| {
            let before = COUNT.load(Ordering::Relaxed);
            session.feed(&[7], &mut |_| true).unwrap();
            COUNT.load(Ordering::Relaxed) != before
        });
        // The scratch of attention grows when a deeper context is cut into more parts.
        let allocating = allocating.count();
        assert!(allocating <= 2, "{dtype}: {allocating} of 60 tokens allocated");
    }
}
