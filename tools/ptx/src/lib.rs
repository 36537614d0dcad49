//! Runs PTX on the CPU, strictly, so that CUDA kernels can be tested where no GPU is.
//!
//! A [`Machine`] has global memory and launches the kernels of the PTX it has loaded, the very text that a driver would
//! get. It follows the PTX ISA for the instructions that NVRTC makes of ordinary kernels, shuffles, votes, `dp4a`,
//! `prmt`, `cp.async`, `ldmatrix` and `mma.sync` among them, and it is stricter than a GPU. A launch fails with a
//! [`Fault`] when a thread
//!
//! - touches memory outside an allocation, out of alignment, or bytes that nobody has written;
//! - touches shared memory that another thread touches with no barrier between (a race), or where `cp.async` is
//!   bringing something that has not been waited for;
//! - waits for threads that never come: barriers, shuffles and matrix products in divergent code;
//! - divides an integer by zero, traps, or does not end.
//!
//! An instruction, or a modifier of one, that it does not know is a [`ParseError`], never skipped.
//!
//! What it does not model: time; `activemask`; races in global memory; calls of functions that were not inlined; the approximate
//! instructions' own errors (`ex2.approx` and its like are exact here, so tolerances must leave room for 2 ulp more);
//! and the order in which `mma` adds, which is exact here.
#![forbid(unsafe_code)]

mod arith;
mod block;
mod decode;
mod inst;
mod memory;
mod parse;
mod round;
mod thread;

#[cfg(test)]
mod compiled;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use memory::{Global, Shared};
use parse::Kernel;
use thread::{Block, Dims};

/// Instructions that a launch may take in all: far more than any test wants.
const MOST_INSTRUCTIONS: u64 = 20_000_000_000;

/// PTX that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct ParseError {
    /// Line of the text.
    pub line: usize,
    /// What was found there.
    pub what: String,
}

/// A kernel that did something wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kernel}, block {block:?}, thread {thread}, line {line}: {what}")]
pub struct Fault {
    /// The kernel.
    pub kernel: String,
    /// The block's index in the grid.
    pub block: [u32; 3],
    /// The thread's number in its block.
    pub thread: usize,
    /// Line of the PTX.
    pub line: usize,
    /// What it did.
    pub what: String,
}

/// A use of the machine that no kernel is to blame for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MemoryError(String);

/// Loaded PTX.
#[derive(Debug)]
pub struct Module {
    kernels: HashMap<String, Kernel>,
}

impl Module {
    /// Whether there is a kernel of this name.
    pub fn has(&self, kernel: &str) -> bool {
        self.kernels.contains_key(kernel)
    }
}

/// The geometry of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block in x, y and z.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: usize,
}

/// Global memory and what runs on it.
#[derive(Debug)]
pub struct Machine {
    global: Global,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Machine {
    /// A machine with nothing allocated.
    pub fn new() -> Self {
        Self { global: Global::new() }
    }

    /// `bytes` of memory that counts as never written, aligned to 256 bytes.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        self.global.alloc(bytes)
    }

    /// Gives an allocation back.
    ///
    /// # Errors
    /// When `address` is none.
    pub fn free(&mut self, address: u64) -> Result<(), MemoryError> {
        self.global.free(address).map_err(MemoryError)
    }

    /// Bytes allocated.
    pub fn used(&self) -> usize {
        self.global.used()
    }

    /// Copies bytes to the machine.
    ///
    /// # Errors
    /// When they do not lie within an allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.global.store(address, bytes).map_err(MemoryError)
    }

    /// Copies bytes from the machine.
    ///
    /// # Errors
    /// When they do not lie within an allocation, or were never written.
    pub fn read(&mut self, address: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        self.global.load(address, out).map_err(MemoryError)
    }

    /// Copies bytes within the machine, written or not.
    ///
    /// # Errors
    /// When they do not lie within allocations.
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), MemoryError> {
        self.global.copy(to, from, bytes).map_err(MemoryError)
    }

    /// Sets bytes to zero.
    ///
    /// # Errors
    /// When they do not lie within an allocation.
    pub fn zero(&mut self, address: u64, bytes: usize) -> Result<(), MemoryError> {
        self.write(address, &vec![0; bytes])
    }

    /// Reads PTX and places its variables.
    ///
    /// # Errors
    /// [`ParseError`] names the first statement that is not known.
    pub fn load(&mut self, ptx: &str) -> Result<Module, ParseError> {
        let mut symbols = HashMap::new();
        for variable in parse::variables(ptx)? {
            let address = self.global.alloc(variable.bytes.len());
            self.global.store(address, &variable.bytes).expect("just allocated");
            symbols.insert(variable.name, address);
        }
        Ok(Module { kernels: parse::kernels(ptx, &symbols)? })
    }

    /// Runs a kernel, block after block. `params` is its parameters, one after the other as the PTX lays them out.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn launch(&mut self, module: &Module, kernel: &str, grid: Grid, params: &[u8]) -> Result<(), Fault> {
        let fault =
            |what: String| Fault { kernel: kernel.to_owned(), block: [0; 3], thread: 0, line: 0, what };
        let Some(found) = module.kernels.get(kernel) else { return Err(fault("no such kernel".to_owned())) };
        if params.len() != found.param_bytes {
            return Err(fault(format!("{} bytes of parameters, not {}", params.len(), found.param_bytes)));
        }
        let threads: u32 = grid.threads.iter().product();
        if threads == 0 || threads > 1024 || grid.blocks.contains(&0) {
            return Err(fault(format!("blocks {:?} of threads {:?}", grid.blocks, grid.threads)));
        }
        let mut budget = MOST_INSTRUCTIONS;
        let [nx, ny, nz] = grid.blocks;
        for index in (0..nz).flat_map(|z| (0..ny).flat_map(move |y| (0..nx).map(move |x| [x, y, z]))) {
            let dims = Dims { grid: grid.blocks, block: grid.threads, index };
            let shared = Shared::new(found.shared_bytes.next_multiple_of(16) + grid.shared_bytes);
            let mut block = Block { kernel: found, params, dims, shared };
            block::run(&mut block, &mut self.global, &mut budget).map_err(|failed| Fault {
                kernel: kernel.to_owned(),
                block: index,
                thread: failed.thread,
                line: failed.line,
                what: failed.what,
            })?;
        }
        Ok(())
    }
}
