//! A stream that does nothing before it must, for tests: whoever changes memory that queued work still needs, or waits
//! where a driver refuses to, is found out.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::Calls;
use crate::{CudaError, DevicePtr};

/// Shared with the test that looks inside.
pub(crate) type Fake = Arc<FakeStream>;

#[derive(Default)]
pub(crate) struct FakeStream {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The device's memory, as far as it has been written.
    memory: Vec<u8>,
    queue: Vec<Work>,
    /// What has been recorded so far, while something is.
    recording: Option<Vec<Work>>,
    freed: Vec<DevicePtr>,
    pinned: Vec<Weak<Mutex<Vec<u8>>>>,
    runnables: Vec<Weak<()>>,
    updates: usize,
    fails_to_end: bool,
}

#[derive(Clone)]
enum Work {
    Write { dst: DevicePtr, bytes: Vec<u8> },
    Copy { dst: DevicePtr, from: Pinned, part: Range<usize> },
    Reach(Event),
}

pub(crate) type Pinned = Arc<Mutex<Vec<u8>>>;
pub(crate) type Event = Arc<AtomicBool>;

#[derive(Clone)]
pub(crate) struct Graph(Vec<Work>);

pub(crate) struct Runnable {
    work: Vec<Work>,
    _live: Arc<()>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeStream {
    /// Bytes of the device that work done so far has written.
    pub fn memory(&self, part: Range<usize>) -> Vec<u8> {
        locked(&self.state).memory.get(part).unwrap_or_default().to_vec()
    }

    /// What has been freed, in order.
    pub fn freed(&self) -> Vec<DevicePtr> {
        locked(&self.state).freed.clone()
    }

    /// Whether all that was queued is done.
    pub fn is_idle(&self) -> bool {
        locked(&self.state).queue.is_empty()
    }

    /// Pieces of host memory that live.
    pub fn n_pinned(&self) -> usize {
        locked(&self.state).pinned.iter().filter(|memory| memory.strong_count() > 0).count()
    }

    /// Runnables that were made, that live, and updates that one took.
    pub fn n_runnables(&self) -> (usize, usize, usize) {
        let state = locked(&self.state);
        let live = state.runnables.iter().filter(|live| live.strong_count() > 0).count();
        (state.runnables.len(), live, state.updates)
    }

    /// Pieces of work recorded so far.
    pub fn n_recorded(&self) -> usize {
        locked(&self.state).recording.as_ref().map_or(0, Vec::len)
    }

    /// The next recording fails.
    pub fn fail_to_end(&self) {
        locked(&self.state).fails_to_end = true;
    }
}

impl State {
    fn put(&mut self, work: Work) {
        self.recording.as_mut().unwrap_or(&mut self.queue).push(work);
    }

    /// Does what is queued, up to `event` where there is one.
    fn advance(&mut self, event: Option<&Event>) {
        let is_last = |work: &Work| matches!((work, event), (Work::Reach(a), Some(b)) if Arc::ptr_eq(a, b));
        let end = self.queue.iter().position(is_last).map_or(self.queue.len(), |index| index + 1);
        for work in self.queue.drain(..end).collect::<Vec<_>>() {
            match work {
                Work::Write { dst, bytes } => self.store(dst, &bytes),
                Work::Copy { dst, from, part } => {
                    let bytes = locked(&from)[part].to_vec();
                    self.store(dst, &bytes);
                }
                Work::Reach(event) => event.store(true, Ordering::Relaxed),
            }
        }
    }

    fn store(&mut self, dst: DevicePtr, bytes: &[u8]) {
        let part = dst as usize..dst as usize + bytes.len();
        self.memory.resize(self.memory.len().max(part.end), 0);
        self.memory[part].copy_from_slice(bytes);
    }

    /// Whether work that is not done yet copies from this part.
    fn is_needed(&self, memory: &Pinned, part: &Range<usize>) -> bool {
        let copies = self.queue.iter().chain(self.recording.iter().flatten());
        copies.into_iter().any(|work| match work {
            Work::Copy { from, part: other, .. } => {
                Arc::ptr_eq(from, memory) && other.start < part.end && part.start < other.end
            }
            _ => false,
        })
    }
}

impl Calls for Fake {
    type Event = Event;
    type Pinned = Pinned;
    type Graph = Graph;
    type Runnable = Runnable;

    fn bind(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        locked(&self.state).put(Work::Write { dst, bytes: src.to_vec() });
        Ok(())
    }

    unsafe fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError> {
        let mut state = locked(&self.state);
        assert!(state.recording.is_none(), "a read is recorded");
        state.advance(None);
        dst.copy_from_slice(&state.memory[src as usize..][..dst.len()]);
        Ok(())
    }

    fn free(&self, ptr: DevicePtr) {
        let mut state = locked(&self.state);
        state.advance(None);
        state.freed.push(ptr);
    }

    fn pin(&self, bytes: usize) -> Result<Pinned, CudaError> {
        let memory = Arc::new(Mutex::new(vec![0xa5; bytes]));
        locked(&self.state).pinned.push(Arc::downgrade(&memory));
        Ok(memory)
    }

    unsafe fn fill(&self, memory: &mut Pinned, part: Range<usize>, fill: &mut dyn FnMut(&mut [u8])) {
        assert!(!locked(&self.state).is_needed(memory, &part), "{part:?} is still to be copied");
        fill(&mut locked(memory)[part]);
    }

    unsafe fn copy(&self, dst: DevicePtr, memory: &Pinned, part: Range<usize>) -> Result<(), CudaError> {
        assert!(part.end <= locked(memory).len());
        locked(&self.state).put(Work::Copy { dst, from: Arc::clone(memory), part });
        Ok(())
    }

    fn event(&self) -> Result<Event, CudaError> {
        // Nothing to wait for yet.
        Ok(Arc::new(AtomicBool::new(true)))
    }

    fn record(&self, event: &Event) -> Result<(), CudaError> {
        event.store(false, Ordering::Relaxed);
        locked(&self.state).put(Work::Reach(Arc::clone(event)));
        Ok(())
    }

    fn wait(&self, event: &Event) -> Result<(), CudaError> {
        if !event.load(Ordering::Relaxed) {
            locked(&self.state).advance(Some(event));
        }
        assert!(event.load(Ordering::Relaxed), "what is waited for was recorded, not queued");
        Ok(())
    }

    fn seconds(&self, from: &Event, to: &Event) -> Result<f64, CudaError> {
        assert!(from.load(Ordering::Relaxed) && to.load(Ordering::Relaxed));
        Ok(0.5)
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        let mut state = locked(&self.state);
        if state.recording.is_some() {
            return Err(CudaError::call("synchronize", "the stream is being recorded"));
        }
        state.advance(None);
        Ok(())
    }

    fn begin(&self) -> Result<(), CudaError> {
        let before = locked(&self.state).recording.replace(Vec::new());
        assert!(before.is_none(), "two recordings at once");
        Ok(())
    }

    fn end(&self) -> Result<Graph, CudaError> {
        let mut state = locked(&self.state);
        let recorded = state.recording.take().expect("a recording");
        if std::mem::take(&mut state.fails_to_end) {
            return Err(CudaError::call("end", "as the test wishes"));
        }
        Ok(Graph(recorded))
    }

    fn make(&self, graph: &Graph) -> Result<Runnable, CudaError> {
        let live = Arc::new(());
        locked(&self.state).runnables.push(Arc::downgrade(&live));
        Ok(Runnable { work: graph.0.clone(), _live: live })
    }

    fn update(&self, runnable: &mut Runnable, graph: &Graph) -> Result<bool, CudaError> {
        if runnable.work.len() != graph.0.len() {
            return Ok(false);
        }
        runnable.work.clone_from(&graph.0);
        locked(&self.state).updates += 1;
        Ok(true)
    }

    fn run(&self, runnable: &Runnable) -> Result<(), CudaError> {
        locked(&self.state).queue.extend(runnable.work.iter().cloned());
        Ok(())
    }
}
