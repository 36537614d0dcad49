//! Decoded instructions: registers are numbers, branches are indices, modifiers are values.

use crate::memory::Access;

/// A scalar type of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ty {
    Pred,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    BF16,
    F16x2,
    BF16x2,
    F32,
    F64,
}

impl Ty {
    /// Parses the type of a modifier; untyped bits are unsigned integers.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "pred" => Self::Pred,
            "u8" | "b8" => Self::U8,
            "u16" | "b16" => Self::U16,
            "u32" | "b32" => Self::U32,
            "u64" | "b64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "bf16" => Self::BF16,
            "f16x2" => Self::F16x2,
            "bf16x2" => Self::BF16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::Pred | Self::U8 | Self::S8 => 1,
            Self::U16 | Self::S16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::S32 | Self::F32 | Self::F16x2 | Self::BF16x2 => 4,
            Self::U64 | Self::S64 | Self::F64 => 8,
        }
    }

    pub fn bits(self) -> u32 {
        8 * self.bytes() as u32
    }

    pub fn is_signed(self) -> bool {
        matches!(self, Self::S8 | Self::S16 | Self::S32 | Self::S64)
    }

    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::BF16 | Self::F16x2 | Self::BF16x2 | Self::F32 | Self::F64)
    }

    /// Returns the low bits of `value`.
    pub fn truncate(self, value: u64) -> u64 {
        match self.bytes() {
            8 => value,
            n => value & ((1 << (8 * n)) - 1),
        }
    }

    /// Returns `value` as an integer of this type.
    pub fn int(self, value: u64) -> i128 {
        let value = self.truncate(value);
        let shift = 64 - self.bits();
        if self.is_signed() { i128::from(((value << shift) as i64) >> shift) } else { i128::from(value) }
    }
}

/// A value to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Src {
    Reg(u32),
    /// A predicate, negated.
    Not(u32),
    Imm(u64),
    Special(Special),
}

/// A special register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Lane,
    Warp,
    LanemaskLt,
    LanemaskLe,
    LanemaskEq,
    LanemaskGe,
    LanemaskGt,
    Clock,
    DynamicShared,
}

/// A register to write; `None` is the sink `_`.
pub(crate) type Dst = Option<u32>;

/// A memory space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// `[base + offset]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addr {
    pub base: Src,
    pub offset: i64,
}

/// A rounding mode; `N` to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Modes of float arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FloatMode {
    pub round: Round,
    /// Subnormal operands and results count as zero.
    pub ftz: bool,
    /// Results are clamped to 0..=1.
    pub sat: bool,
    /// min and max return NaN when an operand is NaN.
    pub nan: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Sub,
    MulLo,
    MulHi,
    MulWide,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    CopySign,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unary {
    Mov,
    Abs,
    Neg,
    Not,
    Clz,
    Popc,
    Brev,
    Bfind { shift: bool },
    Rcp,
    Sqrt,
    Rsqrt,
    Ex2,
    Lg2,
    Sin,
    Cos,
    Tanh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ternary {
    MadLo,
    MadHi,
    MadWide,
    Fma,
    /// Sum of absolute differences.
    Sad,
    BfeUnsigned,
    BfeSigned,
    Prmt,
    /// `shf.l` and `shf.r`; the distance is clamped to 32, else wrapped.
    ShfLeft {
        clamp: bool,
    },
    ShfRight {
        clamp: bool,
    },
    Lop3(u8),
    Dp4a {
        a_signed: bool,
        b_signed: bool,
    },
    /// Two 16-bit halves by the lower or the upper two bytes.
    Dp2a {
        a_signed: bool,
        b_signed: bool,
        upper: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// As the five above and `Ne`, or unordered.
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uni,
    Ballot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Atomic {
    Add,
    /// Increments, and wraps to 0 at the limit.
    Inc,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
}

/// Instructions of a lane alone, and (from `Shfl` on) those of threads together.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Unary(Unary, Ty, FloatMode, Dst, Src),
    Binary(Binary, Ty, FloatMode, Dst, [Src; 2]),
    Ternary(Ternary, Ty, FloatMode, Dst, [Src; 3]),
    /// `bfi d, a, b, pos, len`.
    Bfi(Ty, Dst, [Src; 4]),
    /// `to.from`, to an integer by `round` when the source is a float.
    Cvt {
        to: Ty,
        from: Ty,
        mode: FloatMode,
        to_integer: Option<Round>,
        dst: Dst,
        src: Src,
    },
    /// Two f32 to a pair of f16; the first operand is the upper half.
    CvtPack {
        to: Ty,
        mode: FloatMode,
        dst: Dst,
        src: [Src; 2],
    },
    /// Joins values, lowest first, each of `ty`.
    Pack(Ty, Dst, Vec<Src>),
    /// Splits a value into parts, lowest first, each of `ty`.
    Unpack(Ty, Vec<Dst>, Src),
    Setp {
        compare: Compare,
        ty: Ty,
        ftz: bool,
        with: Option<(Logic, Src)>,
        dst: Dst,
        not: Dst,
        src: [Src; 2],
    },
    /// As `Setp`, to all ones or 1.0 of `to`.
    Set {
        compare: Compare,
        ty: Ty,
        ftz: bool,
        to: Ty,
        dst: Dst,
        src: [Src; 2],
    },
    Selp(Ty, Dst, [Src; 2], Src),
    Ld {
        space: Space,
        access: Access,
        ty: Ty,
        dst: Vec<Dst>,
        addr: Addr,
    },
    St {
        space: Space,
        ty: Ty,
        addr: Addr,
        src: Vec<Src>,
    },
    Atom {
        space: Space,
        op: Atomic,
        ty: Ty,
        dst: Dst,
        addr: Addr,
        src: [Src; 2],
    },
    /// `cp.async [shared], [global], bytes, bytes read`: the rest is zero.
    CpAsync {
        to: Addr,
        from: Addr,
        bytes: usize,
        read: Option<Src>,
    },
    /// `cp.async.bulk [shared], [global], bytes, [mbarrier]`.
    BulkCopy {
        to: Addr,
        from: Addr,
        bytes: Src,
        mbarrier: Addr,
    },
    MbarrierInit {
        addr: Addr,
        count: Src,
    },
    MbarrierInval(Addr),
    /// Adds to the bytes that the phase expects.
    MbarrierExpect {
        addr: Addr,
        bytes: Src,
    },
    CpCommit,
    /// Waits until at most this many groups are in flight.
    CpWait(usize),
    /// Waits for every copy, in a group or not.
    CpWaitAll,
    Bra(usize),
    Exit,
    Trap,
    /// Orders the block's writes before its later accesses, for other blocks.
    Fence,
    /// `griddepcontrol.wait`: waits for the kernels before this one to end.
    WaitForKernels,
    /// Instructions without observable effect here: prefetches, fences within a block.
    Nop,
    Shfl {
        mode: Shuffle,
        dst: Dst,
        valid: Dst,
        src: [Src; 3],
        mask: Src,
    },
    Vote {
        mode: Vote,
        dst: Dst,
        pred: Src,
        mask: Src,
    },
    Redux {
        op: Atomic,
        ty: Ty,
        dst: Dst,
        src: Src,
        mask: Src,
    },
    WarpBarrier(Src),
    Barrier {
        id: Src,
        count: Option<Src>,
        /// Receives the number of threads whose predicate holds.
        popc: Option<(Dst, Src)>,
    },
    /// Arrives at a barrier that others wait at, without waiting.
    Arrive {
        id: Src,
        count: Src,
    },
    /// Arrives at an `mbarrier`, which first expects `bytes` more.
    MbarrierArrive {
        dst: Dst,
        addr: Addr,
        count: Option<Src>,
        bytes: Option<Src>,
    },
    /// Waits for the end of the phase of a parity, or for some time.
    MbarrierWait {
        dst: Dst,
        addr: Addr,
        parity: Src,
    },
    /// Transposes a matrix `[8, 8]` of 16-bit values.
    MoveMatrix {
        dst: Dst,
        src: Src,
    },
    /// Makes stores to shared memory visible to `wgmma` and bulk copies.
    FenceProxy,
    /// Raises or lowers the registers per thread of a warpgroup.
    SetRegisters {
        raises: bool,
        count: u32,
    },
    Wgmma(Wgmma),
    /// Makes registers visible to `wgmma`.
    WgmmaFence,
    WgmmaCommit,
    /// Waits until at most this many groups of `wgmma` are in flight.
    WgmmaWait(usize),
    /// `[16, k] x [k, 8]`: `ty` of a and b; accumulates in `acc`.
    Mma {
        ty: [Ty; 2],
        acc: Ty,
        d: Vec<Dst>,
        a: Vec<Src>,
        b: Vec<Src>,
        c: Vec<Src>,
    },
    Ldmatrix {
        transposed: bool,
        dst: Vec<Dst>,
        addr: Addr,
    },
}

/// The left operand of `wgmma`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Left {
    Registers([Src; 4]),
    /// A matrix in shared memory, by its descriptor.
    Matrix(Src),
}

/// `d = a b + d`, or `d = a b` without `scale_d`: `[64, 16] x [16, n]`, f16 accumulated in f32.
#[derive(Debug, Clone)]
pub(crate) struct Wgmma {
    pub d: Vec<Dst>,
    pub a: Left,
    /// A descriptor.
    pub b: Src,
    pub scale_d: Src,
}

impl Op {
    /// Returns whether four warps must arrive together.
    pub fn is_of_warpgroup(&self) -> bool {
        matches!(
            self,
            Self::Wgmma(_)
                | Self::WgmmaFence
                | Self::WgmmaCommit
                | Self::WgmmaWait(_)
                | Self::SetRegisters { .. }
        )
    }

    /// Returns whether threads of a warp or block must arrive together.
    pub fn is_collective(&self) -> bool {
        matches!(
            self,
            Self::Shfl { .. }
                | Self::Vote { .. }
                | Self::Redux { .. }
                | Self::WarpBarrier(_)
                | Self::Barrier { .. }
                | Self::Arrive { .. }
                | Self::MbarrierArrive { .. }
                | Self::MbarrierWait { .. }
                | Self::Mma { .. }
                | Self::MoveMatrix { .. }
                | Self::Ldmatrix { .. }
        ) || self.is_of_warpgroup()
    }
}

/// An instruction of a kernel.
#[derive(Debug, Clone)]
pub(crate) struct Inst {
    /// Executed only where this predicate, or its negation, holds.
    pub guard: Option<(u32, bool)>,
    pub op: Op,
    /// Line of the PTX.
    pub line: usize,
}
