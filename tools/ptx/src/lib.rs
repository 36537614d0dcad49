//! A strict PTX interpreter on the CPU, for tests of CUDA kernels without a GPU.
//!
//! A [`Machine`] has global memory and launches the kernels of the PTX it has loaded, the same text
//! that a driver would load. It follows the PTX ISA for the instructions that NVRTC generates for
//! ordinary kernels, shuffles, votes, `dp4a`, `prmt`, `cp.async`, `ldmatrix` and `mma.sync` among
//! them, for `wgmma` of f16 and for bulk copies counted by `mbarrier`s of a block, and it is
//! stricter than a GPU. A launch fails with a [`Fault`] when a thread
//!
//! - accesses memory outside an allocation, misaligned, or before it is written;
//! - reads or overwrites in global memory bytes that another block of the launch has written, or
//!   reads with `ld.global.nc` bytes that any block has written (except with atomics, and with
//!   `ld.global.cg` after a fence of the writer and an atomic of both);
//! - accesses shared memory that another thread accesses without a barrier between (a race), or
//!   that is the target of a pending `cp.async` or bulk copy;
//! - copies in bulk what is not whole units of 16 bytes, or more than a phase expects, or to bytes
//!   in use or stored without a fence, or tries to wait for a phase without a loop around it;
//! - takes more registers than its block has (`setmaxnreg`);
//! - passes `wgmma` data that it has stored to shared memory or written to registers without a
//!   fence between, or accesses its operands before it has waited for it (a result that is read too
//!   early is NaN);
//! - reads, before `griddepcontrol.wait`, bytes that a kernel before it has written, writes any
//!   before it, or returns without it, in a kernel that has the instruction (without it a kernel
//!   begins after the end of those before it; [`Machine::finish`] waits for all of them);
//! - waits for threads that never arrive: barriers, shuffles and matrix products in divergent code;
//! - divides an integer by zero, traps, or does not end.
//!
//! An unsupported instruction or modifier is a [`ParseError`], never skipped.
//!
//! Where the ISA leaves rounding open, the interpreter uses the tolerance: `ex2.approx` has its
//! maximum error, and `mma` truncates sums as tensor cores do.
//!
//! A wait of one lane at an `mbarrier` counts for its warp.
//!
//! Not modelled: clusters; tensor maps; time; `activemask`; races within a block in global memory;
//! calls of functions that were not inlined; and the errors of the other approximate instructions
//! (`rcp.approx` and its like are exact here, so tolerances must allow 2 ulp more).
#![forbid(unsafe_code)]

mod arith;
mod block;
mod decode;
mod inst;
mod memory;
mod parse;
mod round;
mod thread;
mod warpgroup;

#[cfg(test)]
mod compiled;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use memory::{Access, Global, Shared};
use parse::Kernel;
use thread::{Block, Dims};

/// Instruction budget of a launch: far more than any test needs.
const MAX_INSTRUCTIONS: u64 = 20_000_000_000;

/// PTX that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct ParseError {
    /// Line of the text.
    pub line: usize,
    /// The unsupported text.
    pub what: String,
}

/// An error of a kernel.
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
    /// The error.
    pub what: String,
}

/// An invalid use of the machine, outside of any kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MemoryError(String);

/// Loaded PTX.
#[derive(Debug)]
pub struct Module {
    kernels: HashMap<String, Kernel>,
}

impl Module {
    /// Returns whether there is a kernel of this name.
    pub fn has(&self, kernel: &str) -> bool {
        self.kernels.contains_key(kernel)
    }

    /// Returns the shared memory of a block of `kernel` in bytes: static plus `dynamic_bytes`.
    pub fn shared_bytes(&self, kernel: &str, dynamic_bytes: usize) -> Option<usize> {
        self.kernels.get(kernel).map(|kernel| kernel.dynamic_at + dynamic_bytes)
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

/// Maximum blocks in x, y and z, maximum threads in x, y and z, and maximum threads of a block.
const MAX_BLOCKS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
const MAX_THREADS: [u32; 3] = [1024, 1024, 64];
const MAX_OF_BLOCK: u32 = 1024;
/// Maximum static shared memory of a block.
const MAX_STATIC_BYTES: usize = 48 * 1024;

impl Grid {
    /// Describes the limit of compute capability 5.0 and later that the launch exceeds, if any.
    fn beyond_limits(&self, kernel: &Kernel) -> Option<String> {
        let Self { blocks, threads, .. } = *self;
        let within = |n: [u32; 3], limits: [u32; 3]| n.iter().zip(limits).all(|(&n, max)| 0 < n && n <= max);
        if !within(blocks, MAX_BLOCKS) || !within(threads, MAX_THREADS) {
            return Some(format!("blocks {blocks:?} of threads {threads:?}"));
        }
        let n: u32 = threads.iter().product();
        let max_threads = kernel.max_threads.unwrap_or(MAX_OF_BLOCK);
        if n > max_threads {
            return Some(format!("blocks of {n} threads, compiled for {max_threads}"));
        }
        let bytes = kernel.shared_bytes;
        (bytes > MAX_STATIC_BYTES).then(|| format!("{bytes} bytes of static shared memory"))
    }

    /// Returns the index of block number `i`.
    fn index(&self, i: u64) -> [u32; 3] {
        let [x, y, _] = self.blocks.map(u64::from);
        [i % x, i / x % y, i / (x * y)].map(|i| i as u32)
    }
}

/// Global memory and an interpreter of kernels.
#[derive(Debug)]
pub struct Machine {
    global: Global,
    /// Whether the last launch ran its last block first: kernels must not rely on an order.
    reverses_blocks: bool,
    follows_paths: bool,
    path: Vec<usize>,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Machine {
    /// Creates a machine without allocations.
    pub fn new() -> Self {
        Self { global: Global::new(), reverses_blocks: true, follows_paths: false, path: Vec::new() }
    }

    /// Allocates `bytes` of memory that counts as never written, aligned to 256 bytes.
    pub fn alloc(&mut self, bytes: usize) -> u64 {
        self.global.alloc(bytes)
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// When `address` is not the start of one.
    pub fn free(&mut self, address: u64) -> Result<(), MemoryError> {
        self.global.free(address).map_err(MemoryError)
    }

    /// Returns the allocated bytes.
    pub fn used(&self) -> usize {
        self.global.used()
    }

    /// Copies bytes to the machine. They count as written by a kernel, which a kernel that may
    /// begin before others end has to wait for.
    ///
    /// # Errors
    /// When they do not lie within an allocation.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.global.store(address, bytes, Access::Plain).map_err(MemoryError)
    }

    /// Copies bytes to the machine that no kernel writes, such as weights: kernels may read them
    /// before they wait for others to end.
    ///
    /// # Errors
    /// When they do not lie within an allocation.
    pub fn write_constant(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.global.store_constant(address, bytes).map_err(MemoryError)
    }

    /// Waits for all launches so far: kernels may read what these have written at once.
    pub fn finish(&mut self) {
        self.global.settle();
    }

    /// Copies bytes from the machine.
    ///
    /// # Errors
    /// When they do not lie within an allocation, or were never written.
    pub fn read(&mut self, address: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        self.global.load(address, out, Access::Plain).map_err(MemoryError)
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

    /// Parses PTX and allocates its variables.
    ///
    /// # Errors
    /// [`ParseError`] names the first unsupported statement.
    pub fn load(&mut self, ptx: &str) -> Result<Module, ParseError> {
        let mut symbols = HashMap::new();
        for variable in parse::variables(ptx)? {
            let address = self.global.alloc(variable.bytes.len());
            self.global.store_constant(address, &variable.bytes).expect("just allocated");
            symbols.insert(variable.name, address);
        }
        Ok(Module { kernels: parse::kernels(ptx, &symbols)? })
    }

    /// From now on notes what the first thread of the first block of a launch executes.
    pub fn follow_paths(&mut self) {
        self.follows_paths = true;
    }

    /// Returns the lines of the PTX that the first thread of the first block of the last launch has
    /// executed; none without [`Machine::follow_paths`].
    pub fn path(&self) -> &[usize] {
        &self.path
    }

    /// Runs a kernel, block after block, every other launch in reverse order. `params` is its
    /// parameters, contiguous in the layout of the PTX.
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
        if let Some(what) = grid.beyond_limits(found) {
            return Err(fault(what));
        }
        self.path.clear();
        let mut budget = MAX_INSTRUCTIONS;
        let n: u64 = grid.blocks.iter().map(|&n| u64::from(n)).product();
        self.reverses_blocks = !self.reverses_blocks;
        self.global.begin_launch(found.waits);
        let blocks = (0..n).map(|i| if self.reverses_blocks { n - 1 - i } else { i });
        let ran = blocks.map(|i| grid.index(i)).try_for_each(|index| {
            self.global.begin_block();
            let dims = Dims { grid: grid.blocks, block: grid.threads, index };
            let n_threads: u32 = grid.threads.iter().product();
            let mut block = Block {
                kernel: found,
                params,
                dims,
                shared: Shared::new(found.dynamic_at + grid.shared_bytes, n_threads as usize),
                arrived: Vec::new(),
                pending_wgmma: Vec::new(),
                registers: Vec::new(),
                path: (self.follows_paths && index == [0; 3]).then(Vec::new),
            };
            let ran = block::run(&mut block, &mut self.global, &mut budget).map_err(|failed| Fault {
                kernel: kernel.to_owned(),
                block: index,
                thread: failed.thread,
                line: failed.line,
                what: failed.what,
            });
            self.path.extend(block.path.into_iter().flatten());
            ran
        });
        self.global.end_launch();
        ran
    }
}
