//! The collective instructions of a warpgroup: `wgmma`, asynchronous f16 MMAs.
//!
//! Registers hold a result only after the wait; before, they hold NaN.

use std::collections::{BTreeMap, VecDeque};

use crate::block::{Failed, SUMMED, tensor_sum};
use crate::inst::{Left, Op, Src, Wgmma};
use crate::memory::{SHARED_BASE, Time};
use crate::thread::{Block, State, Thread};

/// Threads of a warpgroup.
const THREADS: usize = 128;
/// The reduction length of a `wgmma`, and the rows of its result.
const K: usize = 16;
const M: usize = 64;
/// Contents of a register whose result is pending.
const PENDING: u64 = 0x7fff_dead;

/// Pending `wgmma` of a warpgroup.
#[derive(Debug, Default)]
pub(crate) struct PendingWgmma {
    groups: VecDeque<Group>,
    /// The group that is not committed yet.
    open: Group,
}

#[derive(Debug, Default)]
struct Group {
    /// By thread and register.
    results: BTreeMap<(usize, u32), u64>,
    /// Left operands in registers: thread, register and contents.
    left: Vec<(usize, u32, u64)>,
    /// Addresses of the rows read from shared memory.
    rows: Vec<u64>,
}

impl PendingWgmma {
    /// Returns the last pending result of a register of a thread, if any.
    fn result(&self, thread: usize, reg: u32) -> Option<u64> {
        let groups = [&self.open].into_iter().chain(self.groups.iter().rev());
        groups.filter_map(|group| group.results.get(&(thread, reg)).copied()).next()
    }
}

/// Executes the collective instructions of warpgroups whose threads have all arrived.
pub(crate) fn barrier_sync(threads: &mut [Thread], block: &mut Block<'_>) -> Result<bool, Failed> {
    let mut moved = false;
    for first in (0..threads.len()).step_by(THREADS) {
        let kernel = block.kernel;
        let (pc, state) = (threads[first].pc, threads[first].state);
        let Some(op) = kernel.insts.get(pc).map(|inst| &inst.op) else { continue };
        if state != State::Waiting || !op.is_of_warpgroup() {
            continue;
        }
        let Some(group) = threads.get_mut(first..first + THREADS) else {
            return Err(Failed::new(threads, first, block, "a warpgroup is four whole warps".to_owned()));
        };
        if group.iter().any(|thread| thread.state != State::Waiting || thread.pc != pc) {
            continue;
        }
        block
            .pending_wgmma
            .resize_with(block.pending_wgmma.len().max(first / THREADS + 1), PendingWgmma::default);
        let mut pending = std::mem::take(&mut block.pending_wgmma[first / THREADS]);
        let done = match op {
            Op::SetRegisters { raises, count } => set_registers(block, first / THREADS, *raises, *count),
            op => execute_collective(op, group, &mut pending, block).map(|()| true),
        };
        block.pending_wgmma[first / THREADS] = pending;
        if !done.map_err(|what| Failed::new(group, 0, block, what))? {
            continue;
        }
        for thread in group {
            thread.pc += 1;
            thread.state = State::Running;
        }
        moved = true;
    }
    Ok(moved)
}

/// Registers of a multiprocessor, and the maximum of a thread.
const POOL: u32 = 64 * 1024;
const MAX_REGISTERS: u32 = 256;

/// Sets the registers per thread of a warpgroup; returns whether the block's have enough, or else
/// it waits until another has released some.
fn set_registers(block: &mut Block<'_>, number: usize, raises: bool, count: u32) -> Result<bool, String> {
    let Some(max_threads) = block.kernel.max_threads else {
        return Err("setmaxnreg without launch bounds".to_owned());
    };
    if !(24..=MAX_REGISTERS).contains(&count) || !count.is_multiple_of(8) {
        return Err(format!("{count} registers of a thread"));
    }
    // As many as the compiler may use, in units of eight.
    let at_first = (POOL / (max_threads * block.kernel.min_blocks) / 8 * 8).min(MAX_REGISTERS);
    let groups = block.dims.block.iter().product::<u32>() as usize / THREADS;
    block.registers.resize(groups, at_first);
    let before = block.registers[number];
    if if raises { count < before } else { count > before } {
        let what = if raises { "inc" } else { "dec" };
        return Err(format!("setmaxnreg.{what} from {before} to {count} registers"));
    }
    let of_all: u32 = block.registers.iter().sum::<u32>() - before + count;
    let has_enough = of_all <= at_first * groups as u32;
    if has_enough {
        block.registers[number] = count;
    }
    Ok(has_enough)
}

fn execute_collective(
    op: &Op,
    group: &mut [Thread],
    pending: &mut PendingWgmma,
    block: &mut Block<'_>,
) -> Result<(), String> {
    match op {
        Op::Wgmma(product) => multiply(product, group, pending, block)?,
        Op::WgmmaFence => group.iter_mut().for_each(Thread::fence),
        Op::WgmmaCommit => pending.groups.push_back(std::mem::take(&mut pending.open)),
        Op::WgmmaWait(left) => {
            while pending.groups.len() > *left {
                let done = pending.groups.pop_front().unwrap_or_default();
                finish(done, group, pending, block)?;
            }
        }
        op => unreachable!("{op:?} is not of a warpgroup"),
    }
    Ok(())
}

/// Writes the results of a group to their registers, except those that a later `wgmma` accumulates
/// to.
fn finish(
    done: Group,
    group: &mut [Thread],
    pending: &PendingWgmma,
    block: &mut Block<'_>,
) -> Result<(), String> {
    let now = |group: &[Thread], thread: usize, reg: u32| group[thread].get(block, Src::Reg(reg));
    for (thread, reg, value) in done.left {
        if now(group, thread, reg) != value {
            return Err(format!("thread {thread} wrote an operand of a product under way"));
        }
    }
    for ((thread, reg), value) in done.results {
        if now(group, thread, reg) != PENDING {
            return Err(format!("thread {thread} wrote a result of a product under way"));
        }
        if pending.result(thread, reg).is_none() {
            group[thread].set_fenced(reg, value);
        }
    }
    done.rows.into_iter().for_each(|address| block.shared.end_wgmma_read(address, ROW));
    Ok(())
}

/// Bytes that are contiguous under every swizzle: eight f16.
const ROW: usize = 16;

/// A matrix in shared memory whose rows are the reduction dimension: `matrix descriptor` of the PTX
/// ISA.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    start: u64,
    /// Distance between groups of eight columns, without a swizzle.
    leading: u64,
    /// Distance between groups of eight rows.
    stride: u64,
    /// Width of the swizzle in bytes: 16 for none.
    width: u64,
}

impl Matrix {
    fn new(bits: u64) -> Result<Self, String> {
        let field = |at: u32| (bits >> at & 0x3fff) << 4;
        let width = match bits >> 62 {
            0 => 16,
            1 => 128,
            2 => 64,
            _ => 32,
        };
        let matrix = Self { start: field(0), leading: field(16), stride: field(32), width };
        let unknown = bits & !(0x3fff | 0x3fff << 16 | 0x3fff << 32 | 3 << 62);
        // The first row begins where the pattern does, or within that row.
        let is_within_row =
            width == 16 || matrix.start % (8 * width) < width && matrix.start % width + 32 <= width;
        match unknown == 0 && is_within_row && matrix.stride.is_multiple_of(8 * width) {
            true => Ok(matrix),
            false => Err(format!("a matrix descriptor that is not known, {bits:#018x}: {matrix:?}")),
        }
    }

    /// Returns the address of eight f16 of a row.
    fn address(self, row: usize, eight: usize) -> u64 {
        let (row, eight) = (row as u64, eight as u64);
        let leading = if self.width == 16 { self.leading } else { 16 };
        let at = self.start + row / 8 * self.stride + row % 8 * self.width + eight * leading;
        // In 128 bytes the lowest three bits of the row are XORed to those of the 16-byte unit, in
        // 64 two, in 32 one.
        let bits = at >> 7 & (self.width / 16 - 1);
        SHARED_BASE + (at ^ bits << 4)
    }
}

/// Reads `rows` rows of a matrix in shared memory.
fn read(
    bits: u64,
    rows: usize,
    now: [Time; 4],
    open: &mut Group,
    block: &mut Block<'_>,
) -> Result<Vec<[f64; K]>, String> {
    let matrix = Matrix::new(bits)?;
    let mut halves = vec![[0.0; K]; rows];
    for (row, halves) in halves.iter_mut().enumerate() {
        for (eight, halves) in halves.chunks_exact_mut(ROW / 2).enumerate() {
            let (mut bytes, address) = ([0; ROW], matrix.address(row, eight));
            block.shared.begin_wgmma_read(address, &mut bytes, now)?;
            open.rows.push(address);
            for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
                *half = half::f16::from_le_bytes(*bytes).to_f64();
            }
        }
    }
    Ok(halves)
}

/// Multiplies; warp w of the group has rows 16 w to 16 w + 16, in each eight columns in the layout
/// of `mma.m16n8k16`.
fn multiply(
    product: &Wgmma,
    group: &mut [Thread],
    pending: &mut PendingWgmma,
    block: &mut Block<'_>,
) -> Result<(), String> {
    let now = [0, 1, 2, 3].map(|warp| group[32 * warp].moment);
    let same = |src: Src, block: &Block<'_>| {
        let first = group[0].get(block, src);
        let is_same = group.iter().all(|thread| thread.get(block, src) == first);
        is_same.then_some(first).ok_or("threads of a warpgroup disagree on an operand")
    };
    let scale_d = same(product.scale_d, block)? != 0;
    let right = same(product.b, block)?;
    let left = match product.a {
        Left::Matrix(matrix) => {
            let matrix = same(matrix, block)?;
            read(matrix, M, now, &mut pending.open, block)?
        }
        Left::Registers(registers) => left_of(registers, group, &mut pending.open)?,
    };
    let right = read(right, 2 * product.d.len(), now, &mut pending.open, block)?;
    for (index, thread) in group.iter_mut().enumerate() {
        let (row, quad) = (16 * (index / 32) + index % 32 / 4, index % 4);
        for (r, dst) in product.d.iter().enumerate() {
            let reg = dst.ok_or("a result without a register")?;
            let (row, col) = (row + 8 * (r / 2 % 2), 8 * (r / 4) + 2 * quad + r % 2);
            let before = match pending.result(index, reg) {
                Some(result) => result,
                None => thread.get_fenced(reg)?,
            };
            let mut sum = if scale_d { f32::from_bits(before as u32) } else { 0.0 };
            for first in (0..K).step_by(SUMMED) {
                sum = tensor_sum(sum, std::array::from_fn(|i| left[row][first + i] * right[col][first + i]));
            }
            pending.open.results.insert((index, reg), sum.to_bits().into());
            thread.set_fenced(reg, PENDING);
        }
    }
    Ok(())
}

/// Returns the left operand in registers, in the layout of `mma.m16n8k16` for each warp.
fn left_of(registers: [Src; 4], group: &[Thread], open: &mut Group) -> Result<Vec<[f64; K]>, String> {
    let mut halves = vec![[0.0; K]; M];
    for (index, thread) in group.iter().enumerate() {
        for (r, src) in registers.into_iter().enumerate() {
            let Src::Reg(reg) = src else { return Err("an operand that is no register".to_owned()) };
            let pair = thread.get_fenced(reg)?;
            open.left.push((index, reg, pair));
            let row = 16 * (index / 32) + index % 32 / 4 + 8 * (r % 2);
            for e in 0..2 {
                let half = half::f16::from_bits((pair >> (16 * e)) as u16);
                halves[row][2 * (index % 4) + e + 8 * (r / 2)] = half.to_f64();
            }
        }
    }
    Ok(halves)
}
