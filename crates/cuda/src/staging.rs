//! Pinned host memory that the device copies from and to asynchronously, and the driver calls that
//! a queue of work needs.
//!
//! The driver implements [`Calls`] with a CUDA stream of its own; the tests use a fake that defers
//! all work as long as possible.

use std::ops::Range;

use crate::{CudaError, DevicePtr};

/// Size of one piece of memory for recorded copies.
const STAGING_BYTES: usize = 256 * 1024;
/// Size of one piece of an upload.
const UPLOAD_BYTES: usize = 16 << 20;
/// Alignment of staged data: the device's longest load.
const ALIGN: usize = 16;

/// One CUDA stream and its resources.
///
/// Queued work executes in order; no method waits unless its documentation states so. All but
/// [`Calls::bind`] require the context to be current in this thread.
pub(crate) trait Calls {
    /// A point in the work of the stream.
    type Event;
    /// Host memory that the device copies from and to asynchronously.
    type Pinned;
    /// A recorded graph.
    type Graph;
    /// An executable graph.
    type Runnable;

    /// Makes the context current in this thread.
    fn bind(&self) -> Result<(), CudaError>;

    /// Queues a copy to the device; `src` may be changed as soon as this returns.
    fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError>;
    /// Queues a copy from the device.
    ///
    /// # Safety
    /// `dst` stays live and untouched until the stream has passed this copy.
    unsafe fn read(&self, src: DevicePtr, dst: &mut [u8]) -> Result<(), CudaError>;
    /// Frees device memory once the queued work is done.
    fn free(&self, ptr: DevicePtr);

    /// Allocates `bytes` of pinned host memory.
    fn pin(&self, bytes: usize) -> Result<Self::Pinned, CudaError>;
    /// Calls `fill` on a range of host memory.
    ///
    /// # Safety
    /// The stream has passed every queued copy from and to that range.
    unsafe fn fill(&self, memory: &mut Self::Pinned, part: Range<usize>, fill: &mut dyn FnMut(&mut [u8]));
    /// Queues a copy of a range of host memory to the device.
    ///
    /// # Safety
    /// The memory stays live, and that range unchanged, until the stream has passed this copy.
    unsafe fn copy(&self, dst: DevicePtr, memory: &Self::Pinned, part: Range<usize>)
    -> Result<(), CudaError>;

    /// Queues a copy from the device to a range of host memory.
    ///
    /// # Safety
    /// The memory stays live, and that range untouched, until the stream has passed this copy.
    unsafe fn fetch(
        &self,
        memory: &Self::Pinned,
        part: Range<usize>,
        src: DevicePtr,
    ) -> Result<(), CudaError>;

    /// Creates an event that is not yet recorded.
    fn event(&self) -> Result<Self::Event, CudaError>;
    /// Records `event` at the current end of the stream.
    fn record(&self, event: &Self::Event) -> Result<(), CudaError>;
    /// Waits for an event; returns at once if it was never recorded.
    fn wait(&self, event: &Self::Event) -> Result<(), CudaError>;
    /// Lets work that is queued later wait for an event of another stream of the context.
    fn wait_for(&self, event: &Self::Event) -> Result<(), CudaError>;
    /// Returns the seconds between two events that have been reached.
    fn seconds(&self, from: &Self::Event, to: &Self::Event) -> Result<f64, CudaError>;
    /// Waits for all queued work.
    fn synchronize(&self) -> Result<(), CudaError>;

    /// Starts a recording: queued work is recorded and not executed. No recording is in progress.
    fn begin(&self) -> Result<(), CudaError>;
    /// Ends the recording that [`Calls::begin`] started.
    fn end(&self) -> Result<Self::Graph, CudaError>;
    /// Instantiates a recorded graph.
    fn make(&self, graph: &Self::Graph) -> Result<Self::Runnable, CudaError>;
    /// Updates `runnable` to `graph`; returns false if the kernels differ, so that a new one is
    /// needed.
    fn update(&self, runnable: &mut Self::Runnable, graph: &Self::Graph) -> Result<bool, CudaError>;
    /// Queues an executable graph.
    fn run(&self, runnable: &Self::Runnable) -> Result<(), CudaError>;
}

/// Memory that recorded copies read from.
pub(crate) struct Staging<C: Calls> {
    pieces: Vec<Piece<C>>,
    /// Number of full pieces, and bytes used of the next.
    full: usize,
    filled: usize,
}

struct Piece<C: Calls> {
    memory: C::Pinned,
    bytes: usize,
}

impl<C: Calls> Default for Staging<C> {
    fn default() -> Self {
        Self { pieces: Vec::new(), full: 0, filled: 0 }
    }
}

impl<C: Calls> Staging<C> {
    /// Returns whether there is anything to [`Staging::clear`].
    pub fn is_used(&self) -> bool {
        self.full + self.filled > 0
    }

    /// Releases all staged data; the stream has passed every copy from here.
    pub fn clear(&mut self) {
        (self.full, self.filled) = (0, 0);
    }

    /// Queues a copy of the current contents of `src` to the device, through memory that does not
    /// change until `clear`.
    pub fn copy(&mut self, calls: &C, dst: DevicePtr, src: &[u8]) -> Result<(), CudaError> {
        while self.pieces.get(self.full).is_some_and(|piece| piece.bytes - self.filled < src.len()) {
            (self.full, self.filled) = (self.full + 1, 0);
        }
        if self.full == self.pieces.len() {
            let bytes = src.len().max(STAGING_BYTES);
            self.pieces.push(Piece { memory: calls.pin(bytes)?, bytes });
        }
        let piece = &mut self.pieces[self.full];
        let part = self.filled..self.filled + src.len();
        self.filled = part.end.next_multiple_of(ALIGN).min(piece.bytes);
        // SAFETY: nothing has been copied from beyond `filled` since the last `clear`.
        unsafe { calls.fill(&mut piece.memory, part.clone(), &mut |to| to.copy_from_slice(src)) };
        // SAFETY: until `clear` that range is not written again, and pieces live as long as `self`,
        // which outlives the stream's work (the recorder waits for it before it drops `self`).
        unsafe { calls.copy(dst, &piece.memory, part) }
    }
}

/// Pinned memory that the device copies results to: the copy is queued behind the work that
/// computes them, and there is one wait for both.
pub(crate) struct Readback<C: Calls> {
    memory: C::Pinned,
    /// Reached when the results are there.
    arrived: C::Event,
}

impl<C: Calls> Readback<C> {
    /// Maximum bytes; more are worth a copy of their own to pageable memory.
    pub const MAX_BYTES: usize = STAGING_BYTES;

    pub fn new(calls: &C) -> Result<Self, CudaError> {
        Ok(Self { memory: calls.pin(Self::MAX_BYTES)?, arrived: calls.event()? })
    }

    /// Queues a copy of at most [`Readback::MAX_BYTES`].
    pub fn queue(&mut self, calls: &C, src: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: before the memory is read, queued again or dropped, `take` waits for the copy, or
        // the recorder for all of the stream; after a failed call the context is lost.
        unsafe { calls.fetch(&self.memory, 0..bytes, src) }?;
        calls.record(&self.arrived)
    }

    /// Waits for the copy that was queued and moves it to `dst`.
    pub fn take(&mut self, calls: &C, dst: &mut [u8]) -> Result<(), CudaError> {
        calls.wait(&self.arrived)?;
        // SAFETY: the stream has passed the copy.
        unsafe { calls.fill(&mut self.memory, 0..dst.len(), &mut |bytes| dst.copy_from_slice(bytes)) };
        Ok(())
    }
}

/// Two pieces of pinned memory that alternate: while the device copies one, the host fills the
/// other.
pub(crate) struct Uploads<C: Calls> {
    buffers: [Option<UploadBuffer<C>>; 2],
}

struct UploadBuffer<C: Calls> {
    piece: Piece<C>,
    /// Reached when the device has copied the last contents.
    copied: C::Event,
}

impl<C: Calls> Default for Uploads<C> {
    fn default() -> Self {
        Self { buffers: [None, None] }
    }
}

impl<C: Calls> Uploads<C> {
    /// See [`Gpu::upload`](crate::Gpu::upload).
    pub fn copy(
        &mut self,
        calls: &C,
        dst: DevicePtr,
        n_bytes: usize,
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<(), CudaError> {
        let step = piece_bytes(unit);
        for (i, offset) in (0..n_bytes).step_by(step).enumerate() {
            let len = step.min(n_bytes - offset);
            let UploadBuffer { piece, copied } = UploadBuffer::of(&mut self.buffers[i % 2], calls, len)?;
            calls.wait(copied)?;
            // SAFETY: the device has copied the last contents.
            unsafe { calls.fill(&mut piece.memory, 0..len, &mut |bytes| fill(offset, bytes)) };
            // SAFETY: before the piece is filled again or dropped, the host waits for `copied`, or
            // for all of the stream.
            unsafe { calls.copy(dst + offset as u64, &piece.memory, 0..len) }?;
            calls.record(copied)?;
        }
        Ok(())
    }
}

/// Returns the bytes of a piece: as many whole units as fit, at least one.
fn piece_bytes(unit: usize) -> usize {
    (UPLOAD_BYTES / unit.max(1)).max(1) * unit.max(1)
}

impl<C: Calls> UploadBuffer<C> {
    /// Returns the piece in `slot`, allocated or reallocated where it is smaller than `bytes`.
    fn of<'a>(slot: &'a mut Option<Self>, calls: &C, bytes: usize) -> Result<&'a mut Self, CudaError> {
        if slot.as_ref().is_none_or(|buffer| buffer.piece.bytes < bytes) {
            if let Some(old) = slot.take() {
                calls.wait(&old.copied)?;
            }
            let bytes = bytes.max(UPLOAD_BYTES);
            let copied = calls.event()?;
            *slot = Some(Self { piece: Piece { memory: calls.pin(bytes)?, bytes }, copied });
        }
        Ok(slot.as_mut().expect("made above"))
    }
}

#[cfg(test)]
pub(crate) mod fake {
    //! A CUDA stream for tests that defers all work as long as possible: it detects changes of
    //! memory that queued work still needs, and waits that a driver rejects.

    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

    use super::{Calls, CudaError, DevicePtr};

    /// Shared with the test that inspects it.
    pub(crate) type Fake = Arc<FakeStream>;

    #[derive(Default)]
    pub(crate) struct FakeStream {
        state: Mutex<State>,
    }

    #[derive(Default)]
    struct State {
        /// The device memory, as far as it has been written.
        memory: Arc<Mutex<Vec<u8>>>,
        queue: Vec<Work>,
        /// The current recording, if any.
        recording: Option<Vec<Work>>,
        freed: Vec<DevicePtr>,
        pinned: Vec<Weak<Mutex<Vec<u8>>>>,
        runnables: Vec<Weak<()>>,
        updates: usize,
        fails_to_end: bool,
        fails_to_copy: bool,
    }

    #[derive(Clone)]
    enum Work {
        Write { dst: DevicePtr, bytes: Vec<u8> },
        Copy { dst: DevicePtr, from: Pinned, part: Range<usize> },
        Fetch { src: DevicePtr, to: Pinned, part: Range<usize> },
        Reach(Arc<Point>),
        Await(Arc<Point>),
    }

    pub(crate) type Pinned = Arc<Mutex<Vec<u8>>>;
    /// The point that was recorded last; what waits for an earlier one keeps that.
    pub(crate) type Event = Mutex<Arc<Point>>;

    pub(crate) struct Point {
        is_reached: AtomicBool,
        /// The stream that reaches it.
        stream: Weak<FakeStream>,
    }

    impl Point {
        /// Waits until the point is reached: its stream executes what precedes it.
        fn reach(self: &Arc<Self>) {
            if !self.is_reached.load(Ordering::Relaxed) {
                let stream = self.stream.upgrade().expect("a live stream");
                locked(&stream.state).advance(Some(self));
            }
            assert!(self.is_reached.load(Ordering::Relaxed), "the awaited event was recorded, not queued");
        }
    }

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
        /// Returns another stream of the same device.
        pub fn beside(&self) -> Fake {
            let memory = Arc::clone(&locked(&self.state).memory);
            Arc::new(Self { state: Mutex::new(State { memory, ..State::default() }) })
        }

        /// Returns the bytes of the device that completed work has written.
        pub fn memory(&self, part: Range<usize>) -> Vec<u8> {
            let memory = Arc::clone(&locked(&self.state).memory);
            locked(&memory).get(part).unwrap_or_default().to_vec()
        }

        /// Returns the freed addresses, in order.
        pub fn freed(&self) -> Vec<DevicePtr> {
            locked(&self.state).freed.clone()
        }

        /// Returns whether all queued work is done.
        pub fn is_idle(&self) -> bool {
            locked(&self.state).queue.is_empty()
        }

        /// Returns the number of live pieces of host memory.
        pub fn n_pinned(&self) -> usize {
            locked(&self.state).pinned.iter().filter(|memory| memory.strong_count() > 0).count()
        }

        /// Returns the number of runnables created, of live ones, and of updates.
        pub fn n_runnables(&self) -> (usize, usize, usize) {
            let state = locked(&self.state);
            let live = state.runnables.iter().filter(|live| live.strong_count() > 0).count();
            (state.runnables.len(), live, state.updates)
        }

        /// Returns the number of work items recorded so far.
        pub fn n_recorded(&self) -> usize {
            locked(&self.state).recording.as_ref().map_or(0, Vec::len)
        }

        /// Makes the next copy from or to host memory fail.
        pub fn fail_to_copy(&self) {
            locked(&self.state).fails_to_copy = true;
        }

        /// Makes the next recording fail.
        pub fn fail_to_end(&self) {
            locked(&self.state).fails_to_end = true;
        }
    }

    impl State {
        fn put(&mut self, work: Work) {
            self.recording.as_mut().unwrap_or(&mut self.queue).push(work);
        }

        /// Executes the queued work, up to `point` if given.
        fn advance(&mut self, point: Option<&Arc<Point>>) {
            let is_last =
                |work: &Work| matches!((work, point), (Work::Reach(a), Some(b)) if Arc::ptr_eq(a, b));
            let end = self.queue.iter().position(is_last).map_or(self.queue.len(), |index| index + 1);
            for work in self.queue.drain(..end).collect::<Vec<_>>() {
                match work {
                    Work::Write { dst, bytes } => self.store(dst, &bytes),
                    Work::Copy { dst, from, part } => {
                        let bytes = locked(&from)[part].to_vec();
                        self.store(dst, &bytes);
                    }
                    Work::Fetch { src, to, part } => {
                        let bytes = locked(&self.memory)[src as usize..][..part.len()].to_vec();
                        locked(&to)[part].copy_from_slice(&bytes);
                    }
                    Work::Reach(point) => point.is_reached.store(true, Ordering::Relaxed),
                    Work::Await(point) => point.reach(),
                }
            }
        }

        fn store(&mut self, dst: DevicePtr, bytes: &[u8]) {
            let mut memory = locked(&self.memory);
            let part = dst as usize..dst as usize + bytes.len();
            let len = memory.len().max(part.end);
            memory.resize(len, 0);
            memory[part].copy_from_slice(bytes);
        }

        fn check_copy(&mut self) -> Result<(), CudaError> {
            match std::mem::take(&mut self.fails_to_copy) {
                true => Err(CudaError::call("copy", "as the test wishes")),
                false => Ok(()),
            }
        }

        /// Returns whether pending work copies from or to this range.
        fn is_needed(&self, memory: &Pinned, part: &Range<usize>) -> bool {
            let copies = self.queue.iter().chain(self.recording.iter().flatten());
            copies.into_iter().any(|work| match work {
                Work::Copy { from: of, part: other, .. } | Work::Fetch { to: of, part: other, .. } => {
                    Arc::ptr_eq(of, memory) && other.start < part.end && part.start < other.end
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
            dst.copy_from_slice(&locked(&state.memory)[src as usize..][..dst.len()]);
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
            let mut state = locked(&self.state);
            state.check_copy()?;
            state.put(Work::Copy { dst, from: Arc::clone(memory), part });
            Ok(())
        }

        unsafe fn fetch(&self, memory: &Pinned, part: Range<usize>, src: DevicePtr) -> Result<(), CudaError> {
            assert!(part.end <= locked(memory).len());
            let mut state = locked(&self.state);
            assert!(state.recording.is_none(), "a fetch is recorded");
            state.check_copy()?;
            state.put(Work::Fetch { src, to: Arc::clone(memory), part });
            Ok(())
        }

        fn event(&self) -> Result<Event, CudaError> {
            // Nothing to wait for yet.
            Ok(Mutex::new(Arc::new(Point { is_reached: AtomicBool::new(true), stream: Weak::new() })))
        }

        fn record(&self, event: &Event) -> Result<(), CudaError> {
            let point = Arc::new(Point { is_reached: AtomicBool::new(false), stream: Arc::downgrade(self) });
            *locked(event) = Arc::clone(&point);
            locked(&self.state).put(Work::Reach(point));
            Ok(())
        }

        fn wait(&self, event: &Event) -> Result<(), CudaError> {
            let point = Arc::clone(&locked(event));
            point.reach();
            Ok(())
        }

        fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
            let point = Arc::clone(&locked(event));
            locked(&self.state).put(Work::Await(point));
            Ok(())
        }

        fn seconds(&self, from: &Event, to: &Event) -> Result<f64, CudaError> {
            assert!([from, to].iter().all(|event| locked(event).is_reached.load(Ordering::Relaxed)));
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
}

#[cfg(test)]
mod tests;
