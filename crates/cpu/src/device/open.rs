//! Opens and sets up the device.

use std::sync::{Mutex, PoisonError};

use kvant_backend::{Result, limits};

use super::CpuDevice;
use crate::host::pool::Pool;
use crate::ops::context::KernelContext;
use crate::ops::matmul;
use crate::ops::matmul::prefill_precision::PrefillPrecision;
use crate::ops::matmul::tuning::Tuning;
use crate::simd::isa::Isa;

impl CpuDevice {
    /// Opens a device that runs the kernels of `isa` on `n_threads` threads (at least one).
    ///
    /// # Errors
    /// [`Threads`](kvant_backend::BackendError::Threads) when the system does not start as many.
    pub fn new(isa: Isa, n_threads: usize) -> Result<Self> {
        Ok(Self {
            isa,
            pool: Pool::new(n_threads)?,
            is_tuned: false,
            prefill_precision: PrefillPrecision::Exact,
            matmul: Mutex::new(matmul::Scratch::of(isa)),
            append: Mutex::default(),
            attend: Mutex::default(),
            select: Mutex::default(),
            attend_selected: Mutex::default(),
            recur: Mutex::default(),
            attend_all: Mutex::default(),
        })
    }

    /// Opens a device with the fastest kernels of this CPU, or those that `KVANT_ISA` names, on
    /// `threads` threads, or on as many as the system runs at once for this process.
    ///
    /// # Errors
    /// [`Setting`](kvant_backend::BackendError::Setting) when `KVANT_ISA` cannot be honoured,
    /// [`OutOfRange`](kvant_backend::BackendError::OutOfRange) for no threads or more than
    /// [`limits::max_threads`], [`Threads`](kvant_backend::BackendError::Threads) when the system
    /// does not start as many.
    pub fn from_env(threads: Option<usize>) -> Result<Self> {
        let n_threads = threads.unwrap_or_else(limits::n_cores);
        limits::check_size("threads", n_threads, 1..=limits::max_threads())?;
        Self::new(Isa::from_env()?, n_threads)
    }

    /// Sets machine-dependent numbers other than the defaults.
    pub fn with_tuning(mut self, tuning: Tuning) -> Self {
        self.set_tuning(tuning);
        self
    }

    /// Sets the precision of prefill.
    ///
    /// # Errors
    /// [`Setting`](kvant_backend::BackendError::Setting) for a precision that the kernel set lacks.
    pub fn with_prefill_precision(mut self, math: PrefillPrecision) -> Result<Self> {
        math.check(self.isa)?;
        self.prefill_precision = math;
        self.matmul.get_mut().unwrap_or_else(PoisonError::into_inner).prefill_precision = math;
        Ok(self)
    }

    pub(crate) fn set_tuning(&mut self, tuning: Tuning) {
        self.is_tuned = tuning != Tuning::of(self.isa);
        self.matmul.get_mut().unwrap_or_else(PoisonError::into_inner).tuning = tuning;
    }

    /// Returns the thread pool.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the context of an op with this scratch memory.
    pub(super) fn context<'a, S>(&'a self, scratch: &'a mut S) -> KernelContext<'a, S> {
        KernelContext { isa: self.isa, pool: &self.pool, scratch }
    }

    /// Returns the kernel set.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}
