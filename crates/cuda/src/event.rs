//! Moments in the work of a stream.

use std::ptr;

use cudarc::driver::sys;

use crate::CudaError;
use crate::driver::check;

/// A moment in the work of a stream.
pub(crate) struct Event(pub sys::CUevent);

impl Event {
    /// The context is current.
    pub fn new() -> Result<Self, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: `event` is live.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, 0) })?;
        Ok(Self(event))
    }

    pub fn record(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: event and stream are live and of the same context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.0, stream) })
    }

    /// Waits until the stream has come to where the event was recorded; not at all when it never was.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is live.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
