//! One thread: its registers, its local memory, and the instructions of a thread alone.

use std::collections::VecDeque;

use crate::arith;
use crate::block::BarrierArrivals;
use crate::inst::{Addr, Dst, Logic, Op, Space, Special, Src, Ty};
use crate::memory::{Access, Global, LOCAL_BASE, PARAM_BASE, SHARED_BASE, Shared, Time, check_bulk};
use crate::parse::Kernel;
use crate::warpgroup::PendingWgmma;

/// The state that the threads of a block share.
pub(crate) struct Block<'a> {
    pub kernel: &'a Kernel,
    pub params: &'a [u8],
    pub dims: Dims,
    pub shared: Shared,
    /// Threads that have arrived at a barrier without waiting.
    pub arrived: Vec<BarrierArrivals>,
    /// Pending `wgmma` of each warpgroup.
    pub pending_wgmma: Vec<PendingWgmma>,
    /// Registers per thread of each warpgroup.
    pub registers: Vec<u32>,
    /// The lines that the first thread executes, if they are asked for.
    pub path: Option<Vec<usize>>,
}

/// Geometry of a launch, and the index of the block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dims {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub index: [u32; 3],
}

/// Execution state of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    /// At a collective instruction.
    Waiting,
    Done,
}

/// A pending copy to shared memory.
#[derive(Debug, Clone)]
struct Copy {
    to: u64,
    bytes: usize,
    data: [u8; 16],
}

/// Contents of an uninitialized register.
const UNSET: u64 = 0xcdcd_cdcd_cdcd_cdcd;

/// One thread.
pub(crate) struct Thread {
    pub state: State,
    pub pc: usize,
    pub moment: Time,
    /// Whether the kernels before this one have ended for this thread.
    has_waited: bool,
    /// Whether its wait at an `mbarrier` has timed out.
    pub has_timed_out: bool,
    regs: Vec<u64>,
    /// Registers at the last fence for `wgmma`.
    fenced: Vec<u64>,
    local: Vec<u8>,
    initialized: Vec<bool>,
    /// Groups of copies, oldest first.
    groups: VecDeque<Vec<Copy>>,
    copies: Vec<Copy>,
}

impl Thread {
    pub fn new(kernel: &Kernel, index: u32) -> Self {
        Self {
            state: State::Running,
            pc: 0,
            moment: Time { thread: index, ..Time::default() },
            has_waited: !kernel.waits,
            has_timed_out: false,
            regs: vec![UNSET; kernel.n_regs],
            fenced: Vec::new(),
            local: vec![0; kernel.local_bytes],
            initialized: vec![false; kernel.local_bytes],
            groups: VecDeque::new(),
            copies: Vec::new(),
        }
    }

    pub fn lane(&self) -> u32 {
        self.moment.thread % 32
    }

    #[inline(always)]
    pub fn get(&self, block: &Block<'_>, src: Src) -> u64 {
        match src {
            Src::Reg(reg) => self.regs[reg as usize],
            Src::Not(reg) => u64::from(self.regs[reg as usize] == 0),
            Src::Imm(value) => value,
            Src::Special(special) => self.special(block, special),
        }
    }

    pub fn set(&mut self, dst: Dst, value: u64) {
        if let Some(reg) = dst {
            self.regs[reg as usize] = value;
        }
    }

    /// Makes the current registers visible to `wgmma`.
    pub fn fence(&mut self) {
        self.fenced.clone_from(&self.regs);
    }

    /// Returns a register as `wgmma` sees it.
    pub fn get_fenced(&self, reg: u32) -> Result<u64, String> {
        let now = self.regs[reg as usize];
        match self.fenced.get(reg as usize) {
            Some(&fenced) if fenced == now => Ok(now),
            _ => Err(format!("thread {} has written an operand since wgmma.fence", self.moment.thread)),
        }
    }

    /// Writes a register as `wgmma` does.
    pub fn set_fenced(&mut self, reg: u32, value: u64) {
        self.regs[reg as usize] = value;
        self.fenced[reg as usize] = value;
    }

    fn special(&self, block: &Block<'_>, special: Special) -> u64 {
        let (dims, thread, lane) = (&block.dims, self.moment.thread, self.lane());
        let [x, y, _] = dims.block;
        let ones = |n: u32| (1_u64 << n) - 1;
        let tid = [thread % x, thread / x % y, thread / (x * y)];
        match special {
            Special::Tid(axis) => tid[axis].into(),
            Special::Ntid(axis) => dims.block[axis].into(),
            Special::Ctaid(axis) => dims.index[axis].into(),
            Special::Nctaid(axis) => dims.grid[axis].into(),
            Special::Lane => lane.into(),
            Special::Warp => (thread / 32).into(),
            Special::LanemaskLt => ones(lane),
            Special::LanemaskLe => ones(lane + 1),
            Special::LanemaskEq => 1 << lane,
            Special::LanemaskGe => ones(32) & !ones(lane),
            Special::LanemaskGt => ones(32) & !ones(lane + 1),
            Special::Clock => 0,
            Special::DynamicShared => SHARED_BASE + block.kernel.dynamic_at as u64,
        }
    }

    pub fn address(&self, block: &Block<'_>, addr: Addr) -> u64 {
        self.get(block, addr.base).wrapping_add(addr.offset as u64)
    }

    /// Runs until the thread ends or must wait; counts instructions down from `budget`.
    pub fn run(
        &mut self,
        block: &mut Block<'_>,
        global: &mut Global,
        budget: &mut u64,
    ) -> Result<(), String> {
        let kernel = block.kernel;
        global.begin_thread(self.has_waited);
        loop {
            let inst = &kernel.insts[self.pc];
            if self.moment.thread == 0
                && let Some(path) = &mut block.path
            {
                path.push(inst.line);
            }
            if *budget == 0 {
                return Err("it does not end: too many instructions".to_owned());
            }
            *budget -= 1;
            if let Some((reg, negated)) = inst.guard
                && (self.regs[reg as usize] != 0) == negated
            {
                self.pc += 1;
                continue;
            }
            match &inst.op {
                Op::Bra(target) => self.pc = *target,
                Op::Exit if !self.has_waited => {
                    return Err(
                        "it returns before griddepcontrol.wait: a later kernel could begin while one before \
                                this still runs"
                            .to_owned(),
                    );
                }
                Op::Exit => {
                    self.state = State::Done;
                    return Ok(());
                }
                op if op.is_collective() => {
                    self.state = State::Waiting;
                    return Ok(());
                }
                op => {
                    self.execute(op, block, global)?;
                    self.pc += 1;
                }
            }
        }
    }

    fn execute(&mut self, op: &Op, block: &mut Block<'_>, global: &mut Global) -> Result<(), String> {
        match op {
            Op::Unary(op, ty, mode, dst, src) => {
                let value = arith::unary(*op, *ty, *mode, self.get(block, *src));
                self.set(*dst, value);
            }
            Op::Binary(op, ty, mode, dst, [a, b]) => {
                let value = arith::binary(*op, *ty, *mode, self.get(block, *a), self.get(block, *b))?;
                self.set(*dst, value);
            }
            Op::Ternary(op, ty, mode, dst, src) => {
                let value = arith::ternary(*op, *ty, *mode, src.map(|src| self.get(block, src)));
                self.set(*dst, value);
            }
            Op::Bfi(ty, dst, src) => self.set(*dst, arith::insert(*ty, src.map(|src| self.get(block, src)))),
            Op::Cvt { to, from, mode, to_integer, dst, src } => {
                let value = arith::convert(*to, *from, *mode, *to_integer, self.get(block, *src));
                self.set(*dst, value);
            }
            Op::CvtPack { to, mode, dst, src } => {
                self.set(*dst, arith::pack_halves(*to, *mode, src.map(|src| self.get(block, src))));
            }
            Op::Pack(ty, dst, src) => {
                let parts = src.iter().rev().map(|&src| ty.truncate(self.get(block, src)));
                self.set(*dst, parts.fold(0, |joined, part| joined << ty.bits() | part));
            }
            Op::Unpack(ty, dst, src) => {
                let value = self.get(block, *src);
                for (i, &dst) in dst.iter().enumerate() {
                    self.set(dst, ty.truncate(value >> (i as u32 * ty.bits())));
                }
            }
            Op::Setp { compare, ty, ftz, with, dst, not, src: [a, b] } => {
                let holds = arith::compare(*compare, *ty, *ftz, self.get(block, *a), self.get(block, *b));
                let join = |holds: bool| match *with {
                    None => holds,
                    Some((logic, with)) => {
                        let with = self.get(block, with) != 0;
                        match logic {
                            Logic::And => holds & with,
                            Logic::Or => holds | with,
                            Logic::Xor => holds ^ with,
                        }
                    }
                };
                let (yes, no) = (join(holds), join(!holds));
                self.set(*dst, yes.into());
                self.set(*not, no.into());
            }
            Op::Set { compare, ty, ftz, to, dst, src: [a, b] } => {
                let holds = arith::compare(*compare, *ty, *ftz, self.get(block, *a), self.get(block, *b));
                let one = if *to == Ty::F32 { u64::from(1.0_f32.to_bits()) } else { to.truncate(u64::MAX) };
                self.set(*dst, if holds { one } else { 0 });
            }
            Op::Selp(ty, dst, [a, b], pred) => {
                let chosen = if self.get(block, *pred) != 0 { a } else { b };
                self.set(*dst, ty.truncate(self.get(block, *chosen)));
            }
            Op::Ld { space, access, ty, dst, addr } => {
                let address = self.address(block, *addr);
                let mut bytes = [0; 32];
                let bytes = &mut bytes[..dst.len() * ty.bytes()];
                self.load(*space, *access, address, bytes, block, global)?;
                for (&dst, part) in dst.iter().zip(bytes.chunks_exact(ty.bytes())) {
                    let mut value = [0; 8];
                    value[..part.len()].copy_from_slice(part);
                    let value = u64::from_le_bytes(value);
                    // A register wider than the type is sign-extended.
                    self.set(dst, if ty.is_signed() { ty.int(value) as u64 } else { value });
                }
            }
            Op::St { space, ty, addr, src } => {
                let address = self.address(block, *addr);
                let bytes = src
                    .iter()
                    .flat_map(|&src| self.get(block, src).to_le_bytes().into_iter().take(ty.bytes()));
                let bytes: Vec<u8> = bytes.collect();
                self.store(*space, address, &bytes, block, global)?;
            }
            Op::Atom { space, op, ty, dst, addr, src: [a, b] } => {
                let (address, a, b) = (self.address(block, *addr), self.get(block, *a), self.get(block, *b));
                aligned(address, ty.bytes())?;
                let change = |before| arith::atomic(*op, *ty, before, a, b);
                let before = if where_is(*space, address) == Space::Shared {
                    block.shared.update(address, ty.bytes(), self.moment, change)?
                } else {
                    let mut bytes = [0; 8];
                    global.load(address, &mut bytes[..ty.bytes()], Access::Atomic)?;
                    let before = u64::from_le_bytes(bytes);
                    let after = change(before).to_le_bytes();
                    global.store(address, &after[..ty.bytes()], Access::Atomic)?;
                    global.synchronize_with(address);
                    before
                };
                self.set(*dst, before);
            }
            Op::CpAsync { to, from, bytes, read } => {
                let read = read.map_or(*bytes, |read| self.get(block, read) as usize);
                let (to, from) = (self.address(block, *to), self.address(block, *from));
                aligned(to, *bytes)?;
                if read > 0 {
                    aligned(from, *bytes)?;
                }
                if read > *bytes {
                    return Err(format!("a copy of {bytes} bytes that reads {read}"));
                }
                let mut data = [0; 16];
                global.load(from, &mut data[..read], Access::Plain)?;
                block.shared.begin_copy(to, *bytes, self.moment)?;
                self.copies.push(Copy { to, bytes: *bytes, data });
            }
            Op::BulkCopy { to, from, bytes, mbarrier } => {
                let [to, from, mbarrier] = [to, from, mbarrier].map(|&addr| self.address(block, addr));
                let bytes = self.get(block, *bytes) & 0xffff_ffff;
                check_bulk([to, from], bytes)?;
                let mut data = vec![0; bytes as usize];
                global.load(from, &mut data, Access::Plain)?;
                block.shared.begin_bulk_copy(to, data, mbarrier, self.moment)?;
            }
            Op::MbarrierInit { addr, count } => {
                let (address, count) = (self.address(block, *addr), self.get(block, *count));
                block.shared.init_mbarrier(address, count & 0xffff_ffff, self.moment)?;
            }
            Op::MbarrierInval(addr) => {
                let address = self.address(block, *addr);
                block.shared.invalidate_mbarrier(address, self.moment)?;
            }
            Op::MbarrierExpect { addr, bytes } => {
                let (address, bytes) = (self.address(block, *addr), self.get(block, *bytes));
                block.shared.expect_bytes(address, bytes & 0xffff_ffff, self.moment)?;
            }
            Op::CpCommit => self.groups.push_back(std::mem::take(&mut self.copies)),
            Op::CpWait(left) => self.wait_all_copies(*left, block)?,
            Op::CpWaitAll => {
                self.groups.push_back(std::mem::take(&mut self.copies));
                self.wait_all_copies(0, block)?;
            }
            Op::Fence => global.fence(),
            Op::WaitForKernels => {
                self.has_waited = true;
                global.begin_thread(true);
            }
            Op::FenceProxy => block.shared.fence_proxy(self.moment.thread),
            Op::Nop => {}
            Op::Trap => return Err("trap".to_owned()),
            op => unreachable!("{op:?} is not done alone"),
        }
        Ok(())
    }

    /// Copies become visible only here, so that a missing wait is detected.
    fn wait_all_copies(&mut self, left: usize, block: &mut Block<'_>) -> Result<(), String> {
        while self.groups.len() > left {
            for Copy { to, bytes, data } in self.groups.pop_front().unwrap_or_default() {
                block.shared.end_copy(to, &data[..bytes], self.moment)?;
            }
        }
        Ok(())
    }

    fn load(
        &self,
        space: Space,
        access: Access,
        address: u64,
        out: &mut [u8],
        block: &mut Block<'_>,
        global: &mut Global,
    ) -> Result<(), String> {
        aligned(address, out.len())?;
        let size = out.len();
        match where_is(space, address) {
            Space::Shared => block.shared.load(address, out, self.moment),
            Space::Local => {
                let at = within(address, LOCAL_BASE, size, self.local.len(), "local memory")?;
                if self.initialized[at..at + size].contains(&false) {
                    return Err(format!("byte {at} of local memory was never written"));
                }
                out.copy_from_slice(&self.local[at..at + size]);
                Ok(())
            }
            Space::Param => {
                let at = within(address, PARAM_BASE, size, block.params.len(), "the parameters")?;
                out.copy_from_slice(&block.params[at..at + size]);
                Ok(())
            }
            _ => global.load(address, out, access),
        }
    }

    fn store(
        &mut self,
        space: Space,
        address: u64,
        bytes: &[u8],
        block: &mut Block<'_>,
        global: &mut Global,
    ) -> Result<(), String> {
        aligned(address, bytes.len())?;
        match where_is(space, address) {
            Space::Shared => block.shared.store(address, bytes, self.moment),
            Space::Local => {
                let at = within(address, LOCAL_BASE, bytes.len(), self.local.len(), "local memory")?;
                self.local[at..at + bytes.len()].copy_from_slice(bytes);
                self.initialized[at..at + bytes.len()].fill(true);
                Ok(())
            }
            Space::Param => Err("a store to the parameters".to_owned()),
            _ => global.store(address, bytes, Access::Plain),
        }
    }
}

/// Returns the space of a generic address.
fn where_is(space: Space, address: u64) -> Space {
    match space {
        Space::Generic if address >= 1 << 32 => Space::Global,
        Space::Generic if address >= PARAM_BASE => Space::Param,
        Space::Generic if address >= LOCAL_BASE => Space::Local,
        Space::Generic if address >= SHARED_BASE => Space::Shared,
        Space::Const | Space::Generic => Space::Global,
        space => space,
    }
}

fn aligned(address: u64, size: usize) -> Result<(), String> {
    match size.is_power_of_two() && !address.is_multiple_of(size as u64) {
        true => Err(format!("{size} bytes at {address:#x}: not aligned")),
        false => Ok(()),
    }
}

fn within(address: u64, base: u64, size: usize, len: usize, what: &str) -> Result<usize, String> {
    let at = address.wrapping_sub(base);
    match at.checked_add(size as u64) {
        Some(end) if end <= len as u64 => Ok(at as usize),
        _ => Err(format!("{size} bytes at byte {} of {what}, which has {len}", at as i64)),
    }
}
