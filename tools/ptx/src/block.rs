//! Runs a block of threads: barriers, and the instructions that threads execute together.

use std::collections::BTreeMap;

use crate::arith;
use crate::inst::{Addr, Atomic, Dst, Op, Shuffle, Src, Ty, Vote};
use crate::memory::Global;
use crate::thread::{Block, State, Thread};
use crate::warpgroup;

/// A fault, with its thread and line.
pub(crate) struct Failed {
    pub thread: usize,
    pub line: usize,
    pub what: String,
}

/// Threads of a warp that have arrived at a barrier without waiting.
pub(crate) struct BarrierArrivals {
    id: u64,
    count: u64,
    threads: usize,
    /// Earlier accesses, as [`Clocks`](crate::memory::Clocks) count them.
    clock: Vec<u32>,
}

impl Failed {
    pub fn new(threads: &[Thread], index: usize, block: &Block<'_>, what: String) -> Self {
        let thread = &threads[index];
        let line = block.kernel.insts.get(thread.pc).map_or(0, |inst| inst.line);
        Self { thread: thread.moment.thread as usize, line, what }
    }
}

/// Runs a block to its end.
pub(crate) fn run(block: &mut Block<'_>, global: &mut Global, budget: &mut u64) -> Result<(), Failed> {
    let n: u32 = block.dims.block.iter().product();
    let mut threads: Vec<Thread> = (0..n).map(|index| Thread::new(block.kernel, index)).collect();
    loop {
        let mut progressed = false;
        for first in (0..threads.len()).step_by(32) {
            let warp = first..threads.len().min(first + 32);
            for index in warp.clone() {
                if threads[index].state == State::Running {
                    let ran = threads[index].run(block, global, budget);
                    ran.map_err(|what| Failed::new(&threads, index, block, what))?;
                    progressed = true;
                }
            }
            progressed |= run_collectives(&mut threads[warp], block)?;
        }
        progressed |= warpgroup::barrier_sync(&mut threads, block)?;
        if threads.iter().all(|thread| thread.state == State::Done) {
            return block.shared.check_end().map_err(|what| Failed::new(&threads, 0, block, what));
        }
        progressed |= release_barrier(&mut threads, block)?;
        if !progressed {
            let copied = block.shared.complete_bulk_copies();
            progressed = copied.map_err(|what| Failed::new(&threads, 0, block, what))?;
        }
        if !progressed {
            return Err(deadlock_fault(&threads, block));
        }
    }
}

/// Returns the fault of threads that wait for others that never arrive.
fn deadlock_fault(threads: &[Thread], block: &Block<'_>) -> Failed {
    let waits = |thread: &&Thread| thread.state == State::Waiting;
    let index = threads.iter().position(|thread| waits(&thread)).expect("not all are done");
    let lines = |state| threads.iter().filter(|thread| thread.state == state).count();
    let elsewhere = threads.iter().filter(waits).find(|thread| thread.pc != threads[index].pc);
    let line = elsewhere.map(|thread| block.kernel.insts[thread.pc].line);
    let missing = match &block.kernel.insts[threads[index].pc].op {
        Op::MbarrierWait { addr, .. } => block.shared.missing(threads[index].address(block, *addr)),
        Op::SetRegisters { .. } => format!("; warpgroups have {:?} registers", block.registers),
        _ => String::new(),
    };
    let what = format!(
        "divergence: {} threads wait, {} have ended; another waits at line {line:?}{missing}",
        lines(State::Waiting),
        lines(State::Done)
    );
    Failed::new(threads, index, block, what)
}

/// Executes the collective instruction of a warp whose threads have arrived.
fn run_collectives(warp: &mut [Thread], block: &mut Block<'_>) -> Result<bool, Failed> {
    let mut progressed = false;
    for index in 0..warp.len() {
        if warp[index].state != State::Waiting {
            continue;
        }
        let pc = warp[index].pc;
        let kernel = block.kernel;
        let op = &kernel.insts[pc].op;
        let mask = match op {
            Op::Barrier { id, count, .. } => {
                let id = warp[index].get(block, *id);
                let count = count.map_or(32, |count| warp[index].get(block, count));
                check_barrier(id, count).map_err(|what| Failed::new(warp, index, block, what))?;
                continue;
            }
            Op::MbarrierWait { dst, addr, parity } => {
                let moved = wait_for_phase(*dst, *addr, *parity, &mut warp[index], block);
                progressed |= moved.map_err(|what| Failed::new(warp, index, block, what))?;
                continue;
            }
            Op::MbarrierArrive { .. } => 1 << warp[index].lane(),
            op if op.is_of_warpgroup() => continue,
            Op::Shfl { mask, .. }
            | Op::Vote { mask, .. }
            | Op::Redux { mask, .. }
            | Op::WarpBarrier(mask) => warp[index].get(block, *mask) as u32,
            _ => u32::MAX,
        };
        if mask >> warp[index].lane() & 1 == 0 {
            let what = "the mask leaves out the thread itself".to_owned();
            return Err(Failed::new(warp, index, block, what));
        }
        let lanes: Vec<usize> = (0..32).filter(|lane| mask >> lane & 1 == 1).collect();
        // A block may end within a warp: nothing can wait for the missing lanes.
        let is_matrix = matches!(op, Op::Mma { .. } | Op::Ldmatrix { .. } | Op::MoveMatrix { .. });
        let lanes: Vec<usize> = lanes.into_iter().filter(|&lane| lane < warp.len()).collect();
        if is_matrix && lanes.len() != 32 {
            return Err(Failed::new(warp, index, block, "a matrix instruction needs whole warps".to_owned()));
        }
        if lanes.iter().any(|&lane| warp[lane].state != State::Waiting || warp[lane].pc != pc) {
            continue;
        }
        if let Err(what) = execute_collective(op, warp, &lanes, block) {
            return Err(Failed::new(warp, index, block, what));
        }
        for &lane in &lanes {
            warp[lane].pc += 1;
            warp[lane].state = State::Running;
        }
        progressed = true;
    }
    Ok(progressed)
}

/// Lets a thread pass the phase of an `mbarrier`; returns whether it moves. A wait times out once
/// before it holds the thread, so that a program without a loop around it is found out.
fn wait_for_phase(
    dst: Dst,
    addr: Addr,
    parity: Src,
    thread: &mut Thread,
    block: &mut Block<'_>,
) -> Result<bool, String> {
    let (address, parity) = (thread.address(block, addr), thread.get(block, parity));
    let is_over = block.shared.has_completed(address, parity, thread.moment)?;
    if !is_over && thread.has_timed_out {
        return Ok(false);
    }
    thread.has_timed_out = !is_over;
    thread.set(dst, is_over.into());
    thread.pc += 1;
    thread.state = State::Running;
    Ok(true)
}

/// Barriers of a block.
const BARRIERS: u64 = 16;

/// Rejects a number that is no barrier's, and a count that is not of whole warps.
fn check_barrier(id: u64, count: u64) -> Result<(), String> {
    match id < BARRIERS && count > 0 && count.is_multiple_of(32) {
        true => Ok(()),
        false => Err(format!("barrier {id} of {count} threads: one of {BARRIERS}, of whole warps")),
    }
}

/// Releases the threads at a barrier of the block once all that have not ended are there.
fn release_barrier(threads: &mut [Thread], block: &mut Block<'_>) -> Result<bool, Failed> {
    let Some(index) = threads.iter().position(|thread| thread.state == State::Waiting) else {
        return Ok(false);
    };
    let at = |thread: &Thread| match &block.kernel.insts[thread.pc].op {
        Op::Barrier { id, count, .. } if thread.state == State::Waiting => {
            Some((thread.get(block, *id), count.map(|count| thread.get(block, count))))
        }
        _ => None,
    };
    let at: Vec<_> = threads.iter().map(at).collect();
    for index in index..threads.len() {
        let Some((id, count)) = at[index] else { continue };
        let waiting_here: Vec<usize> =
            (0..threads.len()).filter(|&i| at[i].is_some_and(|(other, _)| other == id)).collect();
        let alive = threads.iter().filter(|thread| thread.state != State::Done).count();
        let required = count.map_or(alive, |count| count as usize);
        let n_arrived: usize = block.arrived.iter().filter(|a| a.id == id).map(|a| a.threads).sum();
        if waiting_here.len() + n_arrived < required {
            continue;
        }
        let is_agreed = waiting_here.iter().all(|&i| at[i] == Some((id, count)))
            && block.arrived.iter().all(|a| a.id != id || Some(a.count) == count);
        if waiting_here.len() + n_arrived > required || !is_agreed {
            let what = format!(
                "{} threads at barrier {id}, which disagree on how many",
                waiting_here.len() + n_arrived
            );
            return Err(Failed::new(threads, index, block, what));
        }
        // Threads of one warp must arrive at the same instruction.
        for pair in waiting_here.windows(2) {
            if pair[0] / 32 == pair[1] / 32 && threads[pair[0]].pc != threads[pair[1]].pc {
                let what = "threads of one warp at different barriers".to_owned();
                return Err(Failed::new(threads, pair[1], block, what));
            }
        }
        let clocks = &mut block.shared.clocks;
        let waiting: BTreeMap<_, _> = waiting_here.iter().map(|&i| (i / 32, threads[i].moment)).collect();
        let arrived_clocks =
            block.arrived.extract_if(.., |arrived| arrived.id == id).map(|arrived| arrived.clock);
        let before: Vec<_> =
            waiting.values().map(|&moment| clocks.before(moment)).chain(arrived_clocks).collect();
        for &warp in waiting.keys() {
            before.iter().for_each(|clock| clocks.merge(warp, clock));
        }
        let count_and_predicate = |thread: &Thread| match &block.kernel.insts[thread.pc].op {
            Op::Barrier { popc: Some((dst, predicate)), .. } => {
                Some((*dst, thread.get(block, *predicate) != 0))
            }
            _ => None,
        };
        let counted: Vec<_> = waiting_here.iter().map(|&i| count_and_predicate(&threads[i])).collect();
        let n_true = counted.iter().flatten().filter(|(_, holds)| *holds).count() as u64;
        for (index, counted) in waiting_here.into_iter().zip(counted) {
            let thread = &mut threads[index];
            if let Some((dst, _)) = counted {
                thread.set(dst, n_true);
            }
            thread.moment.block += 1;
            thread.moment.warp += 1;
            thread.pc += 1;
            thread.state = State::Running;
        }
        return Ok(true);
    }
    Ok(false)
}

fn execute_collective(
    op: &Op,
    warp: &mut [Thread],
    lanes: &[usize],
    block: &mut Block<'_>,
) -> Result<(), String> {
    match op {
        Op::Shfl { mode, dst, valid, src, .. } => shuffle(*mode, *dst, *valid, *src, warp, lanes, block)?,
        Op::Vote { mode, dst, pred, .. } => {
            let holds = |lane: &usize| warp[*lane].get(block, *pred) != 0;
            let ballot: u64 = lanes.iter().filter(|lane| holds(lane)).map(|lane| 1 << lane).sum();
            let n = ballot.count_ones() as usize;
            let value = match mode {
                Vote::All => u64::from(n == lanes.len()),
                Vote::Any => u64::from(n > 0),
                Vote::Uni => u64::from(n == 0 || n == lanes.len()),
                Vote::Ballot => ballot,
            };
            lanes.iter().for_each(|&lane| warp[lane].set(*dst, value));
        }
        Op::Redux { op, ty, dst, src, .. } => {
            let mut values = lanes.iter().map(|&lane| warp[lane].get(block, *src));
            let first = values.next().unwrap_or(0);
            let joined = values.fold(first, |joined, value| reduce(*op, *ty, joined, value));
            lanes.iter().for_each(|&lane| warp[lane].set(*dst, joined));
        }
        Op::Arrive { id, count } => {
            let [id, count] = [*id, *count].map(|src| warp[lanes[0]].get(block, src));
            check_barrier(id, count)?;
            let clock = block.shared.clocks.before(warp[lanes[0]].moment);
            block.arrived.push(BarrierArrivals { id, count, threads: lanes.len(), clock });
            lanes.iter().for_each(|&lane| warp[lane].moment.block += 1);
        }
        Op::MbarrierArrive { dst, addr, count, bytes } => {
            let thread = &warp[lanes[0]];
            let (address, now) = (thread.address(block, *addr), thread.moment);
            let of = |src: &Option<Src>| src.map(|src| thread.get(block, src) & 0xffff_ffff);
            let (count, bytes) = (of(count).unwrap_or(1), of(bytes));
            if let Some(bytes) = bytes {
                block.shared.expect_bytes(address, bytes, now)?;
            }
            let phase = block.shared.arrive(address, count, now)?;
            warp[lanes[0]].set(*dst, phase);
            warp.iter_mut().for_each(|thread| thread.moment.block += 1);
        }
        Op::MoveMatrix { dst, src } => {
            let rows: Vec<u64> = warp.iter().map(|thread| thread.get(block, *src)).collect();
            let half = |row: usize, col: usize| rows[4 * row + col / 2] >> (16 * (col % 2)) & 0xffff;
            for (lane, thread) in warp.iter_mut().enumerate() {
                let (row, col) = (lane / 4, lane % 4 * 2);
                thread.set(*dst, half(col + 1, row) << 16 | half(col, row));
            }
        }
        Op::WarpBarrier(_) => lanes.iter().for_each(|&lane| warp[lane].moment.warp += 1),
        Op::Mma { ty, acc, d, a, b, c } => multiply(*ty, *acc, d, [a, b, c], warp, block),
        Op::Ldmatrix { transposed, dst, addr } => {
            for (matrix, &dst) in dst.iter().enumerate() {
                let mut rows = [[0; 16]; 8];
                for (row, bytes) in rows.iter_mut().enumerate() {
                    let thread = &warp[8 * matrix + row];
                    let address = thread.address(block, *addr);
                    if !address.is_multiple_of(16) {
                        return Err(format!("a row of a matrix at {address:#x}: not aligned to 16"));
                    }
                    block.shared.load(address, bytes, thread.moment)?;
                }
                let half = |row: usize, col: usize| {
                    u64::from(u16::from_le_bytes([rows[row][2 * col], rows[row][2 * col + 1]]))
                };
                for (lane, thread) in warp.iter_mut().enumerate() {
                    let (row, col) = (lane / 4, lane % 4 * 2);
                    let [low, high] = match transposed {
                        false => [half(row, col), half(row, col + 1)],
                        true => [half(col, row), half(col + 1, row)],
                    };
                    thread.set(dst, high << 16 | low);
                }
            }
        }
        op => unreachable!("{op:?} is done alone"),
    }
    Ok(())
}

fn reduce(op: Atomic, ty: Ty, joined: u64, value: u64) -> u64 {
    arith::atomic(op, ty, joined, value, 0)
}

fn shuffle(
    mode: Shuffle,
    dst: Dst,
    valid: Dst,
    [a, b, c]: [Src; 3],
    warp: &mut [Thread],
    lanes: &[usize],
    block: &Block<'_>,
) -> Result<(), String> {
    let mut results = Vec::with_capacity(lanes.len());
    for &lane in lanes {
        let (b, c) = (warp[lane].get(block, b) as i64 & 31, warp[lane].get(block, c) as i64);
        let (clamp, segment, at) = (c & 31, c >> 8 & 31, lane as i64);
        let (max, min) = (at & segment | clamp & !segment, at & segment);
        let (from, holds) = match mode {
            Shuffle::Up => (at - b, at - b >= max),
            Shuffle::Down => (at + b, at + b <= max),
            Shuffle::Butterfly => (at ^ b, at ^ b <= max),
            Shuffle::Index => (min | b & !segment, (min | b & !segment) <= max),
        };
        let from = if holds { from as usize } else { lane };
        if !lanes.contains(&from) {
            return Err(format!("lane {lane} reads lane {from}, which does not take part"));
        }
        results.push((warp[from].get(block, a) & 0xffff_ffff, holds));
    }
    for (&lane, (value, holds)) in lanes.iter().zip(results) {
        warp[lane].set(dst, value);
        warp[lane].set(valid, holds.into());
    }
    Ok(())
}

/// `d = a b + c`, a `[16, k]`, b `[k, 8]`. Fragments as in the PTX ISA: with e elements of a
/// register, lane l has
///
/// ```text
/// a   register r: row l / 4 + 8 (r mod 2), columns e (l mod 4) + 0..e + 4e (r / 2)
/// b   register r: rows e (l mod 4) + 0..e + 4e r, column l / 4
/// c   register r: row l / 4 + 8 (r / 2), column 2 (l mod 4) + r mod 2
/// ```
fn multiply(
    [a_ty, b_ty]: [Ty; 2],
    acc: Ty,
    d: &[Dst],
    [a, b, c]: [&[Src]; 3],
    warp: &mut [Thread],
    block: &Block<'_>,
) {
    let per = 4 / a_ty.bytes();
    let k = 4 * per * b.len();
    let value = |ty: Ty, register: u64, element: usize| -> f64 {
        let part = ty.truncate(register >> (element as u32 * ty.bits()));
        if ty.is_float() { as_float(ty, part) } else { ty.int(part) as f64 }
    };
    let (mut left, mut right) = (vec![[0.0; 64]; 16], vec![[0.0; 8]; k]);
    for (lane, thread) in warp.iter().enumerate() {
        let (group, quad) = (lane / 4, lane % 4);
        for (r, &src) in a.iter().enumerate() {
            for e in 0..per {
                let col = per * quad + e + 4 * per * (r / 2);
                left[group + 8 * (r % 2)][col] = value(a_ty, thread.get(block, src), e);
            }
        }
        for (r, &src) in b.iter().enumerate() {
            for e in 0..per {
                right[per * quad + e + 4 * per * r][group] = value(b_ty, thread.get(block, src), e);
            }
        }
    }
    for (lane, thread) in warp.iter_mut().enumerate() {
        let (group, quad) = (lane / 4, lane % 4);
        for (r, (&src, &dst)) in c.iter().zip(d).enumerate() {
            let (row, col) = (group + 8 * (r / 2), 2 * quad + r % 2);
            // Exact for f16 and for bytes.
            let product = |i: usize| left[row][i] * right[i][col];
            let before = thread.get(block, src);
            let sum = match acc {
                Ty::F32 => {
                    let mut sum = f32::from_bits(before as u32);
                    for first in (0..k).step_by(SUMMED) {
                        sum = tensor_sum(sum, std::array::from_fn(|i| product(first + i)));
                    }
                    sum.to_bits().into()
                }
                _ => acc.truncate((Ty::S32.int(before) + (0..k).map(product).sum::<f64>() as i128) as u64),
            };
            thread.set(dst, sum);
        }
    }
}

/// Products that a tensor core adds at once.
pub(crate) const SUMMED: usize = 8;

/// Adds eight products to `before` as tensor cores of compute capability 8.0 do according to
/// measurements (doi 10.7717/peerj-cs.330), the coarsest supported ones: all terms are truncated
/// below one bit beyond the last that the largest has in f32, added, and the sum is truncated to
/// f32.
pub(crate) fn tensor_sum(before: f32, products: [f64; SUMMED]) -> f32 {
    let before = f64::from(before);
    let largest = products.iter().fold(before.abs(), |max, product| max.max(product.abs()));
    let plain = before + products.iter().sum::<f64>();
    if largest == 0.0 || !(plain as f32).is_finite() {
        return plain as f32;
    }
    // A power of two; 24 bits below that of the largest is one beyond its last.
    let unit = f64::from_bits(largest.to_bits() & !((1 << 52) - 1)) / f64::from(1 << 24);
    let units = products.iter().fold((before / unit) as i64, |sum, product| sum + (product / unit) as i64);
    let sum = units as f64 * unit;
    let nearest = sum as f32;
    match f64::from(nearest).abs() > sum.abs() {
        true if nearest > 0.0 => nearest.next_down(),
        true => nearest.next_up(),
        false => nearest,
    }
}

fn as_float(ty: Ty, bits: u64) -> f64 {
    match ty {
        Ty::F16 => half::f16::from_bits(bits as u16).to_f64(),
        _ => half::bf16::from_bits(bits as u16).to_f64(),
    }
}
