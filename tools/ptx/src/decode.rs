//! Decodes one instruction from its dotted name and its operands.

use crate::inst::{
    Atomic, Binary, Compare, Dst, FloatMode, Left, Logic, Op, Round, Shuffle, Space, Src, Ternary, Ty, Unary,
    Vote, Wgmma,
};
use crate::memory::Access;
use crate::parse::{Body, number};

type Result<T> = std::result::Result<T, String>;

/// The operands of one instruction.
struct Operands<'a> {
    body: &'a Body,
    texts: &'a [String],
}

impl Operands<'_> {
    fn text(&self, index: usize) -> Result<&str> {
        self.texts.get(index).map(String::as_str).ok_or_else(|| format!("operand {index} is missing"))
    }
    fn dst(&self, index: usize) -> Result<Dst> {
        self.body.dst(self.text(index)?)
    }
    fn src(&self, index: usize) -> Result<Src> {
        self.body.src(self.text(index)?)
    }
    fn srcs<const N: usize>(&self, first: usize) -> Result<[Src; N]> {
        let all: Result<Vec<Src>> = (first..first + N).map(|index| self.src(index)).collect();
        Ok(all?.try_into().expect("as many as requested"))
    }
    fn addr(&self, index: usize) -> Result<crate::inst::Addr> {
        self.body.addr(self.text(index)?)
    }
    fn dsts(&self, index: usize) -> Result<Vec<Dst>> {
        self.body.parts(self.text(index)?).into_iter().map(|part| self.body.dst(part)).collect()
    }
    fn vector(&self, index: usize) -> Result<Vec<Src>> {
        self.body.parts(self.text(index)?).into_iter().map(|part| self.body.src(part)).collect()
    }
    /// `a|b`.
    fn pair(&self, index: usize) -> Result<[Dst; 2]> {
        match self.text(index)?.split_once('|') {
            Some((a, b)) => Ok([self.body.dst(a.trim())?, self.body.dst(b.trim())?]),
            None => Ok([self.dst(index)?, None]),
        }
    }
}

fn mode(mods: &[&str]) -> FloatMode {
    let has = |name| mods.contains(&name);
    let round = match () {
        () if has("rz") => Round::Zero,
        () if has("rm") => Round::Down,
        () if has("rp") => Round::Up,
        () => Round::Nearest,
    };
    FloatMode { round, ftz: has("ftz"), sat: has("sat"), nan: has("NaN") }
}

fn space(mods: &[&str]) -> Space {
    let found = mods.iter().find_map(|name| match name.split("::").next()? {
        "global" => Some(Space::Global),
        "shared" => Some(Space::Shared),
        "local" => Some(Space::Local),
        "param" => Some(Space::Param),
        "const" => Some(Space::Const),
        _ => None,
    });
    found.unwrap_or(Space::Generic)
}

fn compare(name: &str) -> Option<Compare> {
    Some(match name {
        "eq" => Compare::Eq,
        "ne" => Compare::Ne,
        "lt" | "lo" => Compare::Lt,
        "le" | "ls" => Compare::Le,
        "gt" | "hi" => Compare::Gt,
        "ge" | "hs" => Compare::Ge,
        "equ" => Compare::Equ,
        "neu" => Compare::Neu,
        "ltu" => Compare::Ltu,
        "leu" => Compare::Leu,
        "gtu" => Compare::Gtu,
        "geu" => Compare::Geu,
        "num" => Compare::Num,
        "nan" => Compare::Nan,
        _ => return None,
    })
}

fn atomic(mods: &[&str]) -> Result<Atomic> {
    let found = mods.iter().find_map(|name| {
        Some(match *name {
            "add" => Atomic::Add,
            "inc" => Atomic::Inc,
            "min" => Atomic::Min,
            "max" => Atomic::Max,
            "and" => Atomic::And,
            "or" => Atomic::Or,
            "xor" => Atomic::Xor,
            "exch" => Atomic::Exch,
            "cas" => Atomic::Cas,
            _ => return None,
        })
    });
    found.ok_or_else(|| "an operation that is not known".to_owned())
}

/// Returns the supported modifiers of an instruction, types aside. Any other is an error.
fn known_modifiers(name: &str) -> &'static str {
    match name {
        "add" | "sub" | "fma" => "rn rz rm rp ftz sat",
        "mul" => "rn rz rm rp ftz sat lo hi wide",
        "mad" => "rn rz rm rp ftz lo hi wide",
        "div" => "rn rz rm rp ftz approx full",
        "rcp" | "sqrt" => "rn rz rm rp ftz approx",
        "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => "approx ftz",
        "min" | "max" => "ftz NaN",
        "abs" | "neg" => "ftz",
        "cvt" => "rn rz rm rp rni rzi rmi rpi ftz sat",
        "setp" => "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz",
        "set" => "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan ftz",
        "shf" => "l r wrap clamp",
        "dp2a" => "lo hi",
        "bfind" => "shiftamt",
        "cvta" => "to global shared shared::cta local const param param::entry",
        "ld" | "ldu" => {
            "global shared shared::cta local param param::entry const nc ca cg cs lu cv volatile weak relaxed acquire \
             cta gpu sys v2 v4 L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate \
             L2::64B L2::128B L2::256B"
        }
        "st" => {
            "global shared shared::cta local wb cg cs wt volatile weak relaxed release cta gpu sys v2 v4 \
             L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate"
        }
        "atom" | "red" => {
            "global shared shared::cta relaxed acquire release acq_rel cta gpu sys add inc min max and or xor exch cas noftz"
        }
        "cp" => {
            "async ca cg shared shared::cta global commit_group wait_group wait_all L2::64B L2::128B L2::256B \
             bulk shared::cluster mbarrier::complete_tx::bytes L2::cache_hint prefetch L2"
        }
        "bra" | "ret" => "uni",
        "membar" => "cta gl sys",
        "fence" => "sc acq_rel cta gpu sys proxy async shared::cta mbarrier_init release cluster",
        "mbarrier" => {
            "init inval arrive expect_tx try_wait parity shared shared::cta release relaxed acquire cta"
        }
        "movmatrix" => "sync aligned m8n8 trans",
        "prefetch" => "global local L1 L2",
        "prefetchu" => "L1",
        "griddepcontrol" => "launch_dependents wait",
        "bar" | "barrier" => "sync arrive red popc cta aligned warp",
        "setmaxnreg" => "inc dec sync aligned",
        "shfl" => "sync up down bfly idx",
        "vote" => "sync all any uni ballot",
        "redux" => "sync add min max and or xor",
        "mma" => "sync aligned row col m16n8k8 m16n8k16 m16n8k32",
        "ldmatrix" => "sync aligned m8n8 x1 x2 x4 trans shared shared::cta",
        "wgmma" => "mma_async fence commit_group wait_group sync aligned",
        _ => "",
    }
}

/// Decodes `mods[0].mods[1]...`.
pub(crate) fn decode(body: &Body, mods: &[&str], texts: &[String]) -> Result<Op> {
    let o = Operands { body, texts };
    let is_known = |name: &&str| {
        let is_shape = mods[0] == "wgmma" && name.starts_with("m64n");
        is_shape
            || Ty::parse(name).is_some()
            || known_modifiers(mods[0]).split_whitespace().any(|k| k == *name)
    };
    if let Some(name) = mods[1..].iter().find(|name| !is_known(name)) {
        return Err(format!("a modifier that is not known of {}, .{name}", mods[0]));
    }
    let types: Vec<Ty> = mods.iter().skip(1).filter_map(|name| Ty::parse(name)).collect();
    let ty = types.last().copied();
    let need = || ty.ok_or_else(|| "no type".to_owned());
    let float = mode(mods);
    if ty == Some(Ty::F64) && types.len() == 1 && float.round != Round::Nearest {
        return Err("f64 is rounded to nearest only".to_owned());
    }
    let unary = |op| Ok(Op::Unary(op, need()?, float, o.dst(0)?, o.src(1)?));
    let binary = |op| Ok(Op::Binary(op, need()?, float, o.dst(0)?, o.srcs(1)?));
    let ternary = |op| Ok(Op::Ternary(op, need()?, float, o.dst(0)?, o.srcs(1)?));
    let has = |name| mods.contains(&name);
    if has("cc") || mods[0] == "addc" || mods[0] == "subc" {
        return Err("carries are not known".to_owned());
    }
    match mods[0] {
        "mov" => moved(&o, need()?, float),
        "cvta" => Ok(Op::Unary(Unary::Mov, Ty::U64, float, o.dst(0)?, o.src(1)?)),
        "add" => binary(Binary::Add),
        "sub" => binary(Binary::Sub),
        "mul" if has("hi") => binary(Binary::MulHi),
        "mul" if has("wide") => binary(Binary::MulWide),
        "mul" => binary(Binary::MulLo),
        "div" => binary(Binary::Div),
        "rem" => binary(Binary::Rem),
        "min" => binary(Binary::Min),
        "max" => binary(Binary::Max),
        "and" => binary(Binary::And),
        "or" => binary(Binary::Or),
        "xor" => binary(Binary::Xor),
        "shl" => binary(Binary::Shl),
        "shr" => binary(Binary::Shr),
        "copysign" => binary(Binary::CopySign),
        "mad" if need()?.is_float() => ternary(Ternary::Fma),
        "mad" if has("hi") => ternary(Ternary::MadHi),
        "mad" if has("wide") => ternary(Ternary::MadWide),
        "mad" => ternary(Ternary::MadLo),
        "fma" => ternary(Ternary::Fma),
        "sad" => ternary(Ternary::Sad),
        "bfe" if need()?.is_signed() => ternary(Ternary::BfeSigned),
        "bfe" => ternary(Ternary::BfeUnsigned),
        "prmt" if mods.len() == 2 => ternary(Ternary::Prmt),
        "shf" => {
            let clamp = has("clamp");
            ternary(if has("l") { Ternary::ShfLeft { clamp } } else { Ternary::ShfRight { clamp } })
        }
        "lop3" => {
            let table = number(o.text(4)?).ok_or("no table")? as u8;
            ternary(Ternary::Lop3(table))
        }
        "dp4a" => match types[..] {
            [a, b] => ternary(Ternary::Dp4a { a_signed: a.is_signed(), b_signed: b.is_signed() }),
            _ => Err("two types".to_owned()),
        },
        "dp2a" => match types[..] {
            [a, b] => {
                ternary(Ternary::Dp2a { a_signed: a.is_signed(), b_signed: b.is_signed(), upper: has("hi") })
            }
            _ => Err("two types".to_owned()),
        },
        "bfi" => Ok(Op::Bfi(need()?, o.dst(0)?, o.srcs(1)?)),
        "abs" => unary(Unary::Abs),
        "neg" => unary(Unary::Neg),
        "not" => unary(Unary::Not),
        "clz" => unary(Unary::Clz),
        "popc" => unary(Unary::Popc),
        "brev" => unary(Unary::Brev),
        "bfind" => unary(Unary::Bfind { shift: has("shiftamt") }),
        "rcp" => unary(Unary::Rcp),
        "sqrt" => unary(Unary::Sqrt),
        "rsqrt" => unary(Unary::Rsqrt),
        "ex2" => unary(Unary::Ex2),
        "lg2" => unary(Unary::Lg2),
        "sin" => unary(Unary::Sin),
        "cos" => unary(Unary::Cos),
        "tanh" => unary(Unary::Tanh),
        "cvt" => convert(&o, mods, &types, float),
        "setp" => setp(&o, mods, need()?, float.ftz),
        "set" => match types[..] {
            [to, ty] => {
                let compare = mods.iter().find_map(|name| compare(name)).ok_or("no comparison")?;
                Ok(Op::Set { compare, ty, ftz: float.ftz, to, dst: o.dst(0)?, src: o.srcs(1)? })
            }
            _ => Err("two types".to_owned()),
        },
        "selp" => Ok(Op::Selp(need()?, o.dst(0)?, o.srcs(1)?, o.src(3)?)),
        "ld" | "ldu" => {
            let access = match () {
                _ if has("nc") || mods[0] == "ldu" => Access::Constant,
                _ if has("cg") => Access::Coherent,
                _ => Access::Plain,
            };
            Ok(Op::Ld { space: space(mods), access, ty: need()?, dst: o.dsts(0)?, addr: o.addr(1)? })
        }
        "st" => Ok(Op::St { space: space(mods), ty: need()?, addr: o.addr(0)?, src: o.vector(1)? }),
        "atom" | "red" => {
            let (op, at) = (atomic(mods)?, usize::from(mods[0] == "atom"));
            let first = o.src(at + 1)?;
            let second = if op == Atomic::Cas { o.src(at + 2)? } else { first };
            let dst = if at == 1 { o.dst(0)? } else { None };
            Ok(Op::Atom { space: space(mods), op, ty: need()?, dst, addr: o.addr(at)?, src: [first, second] })
        }
        "cp" if has("async") => copy(&o, mods),
        "bra" => Ok(Op::Bra(usize::MAX)),
        "ret" | "exit" => Ok(Op::Exit),
        "trap" => Ok(Op::Trap),
        "fence" if has("proxy") || has("mbarrier_init") => Ok(Op::FenceProxy),
        "mbarrier" => mbarrier(&o, mods),
        "membar" | "fence" => Ok(if has("cta") { Op::Nop } else { Op::Fence }),
        "griddepcontrol" if has("wait") => Ok(Op::WaitForKernels),
        "prefetch" | "prefetchu" | "nanosleep" | "griddepcontrol" => Ok(Op::Nop),
        "setmaxnreg" => {
            let count = number(o.text(0)?).ok_or("no number")? as u32;
            Ok(Op::SetRegisters { raises: has("inc"), count })
        }
        "bar" | "barrier" => barrier(&o, mods),
        "shfl" => {
            let [dst, valid] = o.pair(0)?;
            let mode = match mods {
                [.., "up", _] => Shuffle::Up,
                [.., "down", _] => Shuffle::Down,
                [.., "bfly", _] => Shuffle::Butterfly,
                [.., "idx", _] => Shuffle::Index,
                _ => return Err("a shuffle that is not known".to_owned()),
            };
            Ok(Op::Shfl { mode, dst, valid, src: o.srcs(1)?, mask: o.src(4)? })
        }
        "vote" => {
            let mode = match mods {
                [.., "all", _] => Vote::All,
                [.., "any", _] => Vote::Any,
                [.., "uni", _] => Vote::Uni,
                [.., "ballot", _] => Vote::Ballot,
                _ => return Err("a vote that is not known".to_owned()),
            };
            Ok(Op::Vote { mode, dst: o.dst(0)?, pred: o.src(1)?, mask: o.src(2)? })
        }
        "redux" => {
            let op = atomic(mods)?;
            Ok(Op::Redux { op, ty: need()?, dst: o.dst(0)?, src: o.src(1)?, mask: o.src(2)? })
        }
        "mma" => matrix(&o, mods, &types),
        "wgmma" => match mods[1] {
            "fence" => Ok(Op::WgmmaFence),
            "commit_group" => Ok(Op::WgmmaCommit),
            "wait_group" => Ok(Op::WgmmaWait(number(o.text(0)?).ok_or("no number")? as usize)),
            _ => warpgroup_matrix(&o, mods, &types),
        },
        "movmatrix" => Ok(Op::MoveMatrix { dst: o.dst(0)?, src: o.src(1)? }),
        "ldmatrix" if has("m8n8") && has("b16") => {
            Ok(Op::Ldmatrix { transposed: has("trans"), dst: o.dsts(0)?, addr: o.addr(1)? })
        }
        _ => Err("an instruction that is not known".to_owned()),
    }
}

fn moved(o: &Operands<'_>, ty: Ty, mode: FloatMode) -> Result<Op> {
    if o.text(0)?.starts_with('{') {
        let dst = o.dsts(0)?;
        let part = part_of(ty, dst.len())?;
        return Ok(Op::Unpack(part, dst, o.src(1)?));
    }
    if o.text(1)?.starts_with('{') {
        let src = o.vector(1)?;
        let part = part_of(ty, src.len())?;
        return Ok(Op::Pack(part, o.dst(0)?, src));
    }
    Ok(Op::Unary(Unary::Mov, ty, mode, o.dst(0)?, o.src(1)?))
}

fn part_of(ty: Ty, parts: usize) -> Result<Ty> {
    match ty.bytes() / parts {
        1 => Ok(Ty::U8),
        2 => Ok(Ty::U16),
        4 => Ok(Ty::U32),
        _ => Err("parts of this size".to_owned()),
    }
}

fn convert(o: &Operands<'_>, mods: &[&str], types: &[Ty], mode: FloatMode) -> Result<Op> {
    let [to, from] = types[..] else { return Err("two types".to_owned()) };
    if matches!(to, Ty::F16x2 | Ty::BF16x2) {
        return match from {
            Ty::F32 => Ok(Op::CvtPack { to, mode, dst: o.dst(0)?, src: o.srcs(1)? }),
            _ => Err("halves of f32 only".to_owned()),
        };
    }
    if to == Ty::F64 && mode.round != Round::Nearest {
        return Err("f64 is rounded to nearest only".to_owned());
    }
    let to_integer = mods.iter().find_map(|name| {
        Some(match *name {
            "rni" => Round::Nearest,
            "rzi" => Round::Zero,
            "rmi" => Round::Down,
            "rpi" => Round::Up,
            _ => return None,
        })
    });
    Ok(Op::Cvt { to, from, mode, to_integer, dst: o.dst(0)?, src: o.src(1)? })
}

fn setp(o: &Operands<'_>, mods: &[&str], ty: Ty, ftz: bool) -> Result<Op> {
    if matches!(ty, Ty::F16x2 | Ty::BF16x2) {
        return Err("a comparison of pairs".to_owned());
    }
    let compare = compare(mods[1]).ok_or("no comparison")?;
    let logic = match mods[2] {
        "and" => Some(Logic::And),
        "or" => Some(Logic::Or),
        "xor" => Some(Logic::Xor),
        _ => None,
    };
    let with = logic.map(|logic| Ok::<_, String>((logic, o.src(3)?))).transpose()?;
    let [dst, not] = o.pair(0)?;
    Ok(Op::Setp { compare, ty, ftz, with, dst, not, src: o.srcs(1)? })
}

fn copy(o: &Operands<'_>, mods: &[&str]) -> Result<Op> {
    match mods[2] {
        "commit_group" => Ok(Op::CpCommit),
        "wait_all" => Ok(Op::CpWaitAll),
        "wait_group" => Ok(Op::CpWait(number(o.text(0)?).ok_or("no number")? as usize)),
        "ca" | "cg" => {
            let bytes = number(o.text(2)?).ok_or("no size")? as usize;
            let read = o.texts.get(3).map(|_| o.src(3)).transpose()?;
            Ok(Op::CpAsync { to: o.addr(0)?, from: o.addr(1)?, bytes, read })
        }
        "bulk" if mods.contains(&"prefetch") => Ok(Op::Nop),
        "bulk" if mods.contains(&"mbarrier::complete_tx::bytes") => {
            Ok(Op::BulkCopy { to: o.addr(0)?, from: o.addr(1)?, bytes: o.src(2)?, mbarrier: o.addr(3)? })
        }
        _ => Err("a copy that is not known".to_owned()),
    }
}

fn mbarrier(o: &Operands<'_>, mods: &[&str]) -> Result<Op> {
    let has = |name| mods.contains(&name);
    match mods[1] {
        "init" => Ok(Op::MbarrierInit { addr: o.addr(0)?, count: o.src(1)? }),
        "inval" => Ok(Op::MbarrierInval(o.addr(0)?)),
        "expect_tx" => Ok(Op::MbarrierExpect { addr: o.addr(0)?, bytes: o.src(1)? }),
        "arrive" => {
            let last = o.texts.get(2).map(|_| o.src(2)).transpose()?;
            let (count, bytes) = if has("expect_tx") { (None, last) } else { (last, None) };
            Ok(Op::MbarrierArrive { dst: o.dst(0)?, addr: o.addr(1)?, count, bytes })
        }
        "try_wait" if has("parity") => {
            Ok(Op::MbarrierWait { dst: o.dst(0)?, addr: o.addr(1)?, parity: o.src(2)? })
        }
        _ => Err("a use of an mbarrier that is not known".to_owned()),
    }
}

fn barrier(o: &Operands<'_>, mods: &[&str]) -> Result<Op> {
    if mods.contains(&"warp") {
        return Ok(Op::WarpBarrier(o.src(0)?));
    }
    if mods.contains(&"arrive") {
        return Ok(Op::Arrive { id: o.src(0)?, count: o.src(1)? });
    }
    if mods.contains(&"popc") {
        let last = o.texts.len() - 1;
        let count = (last == 3).then(|| o.src(2)).transpose()?;
        return Ok(Op::Barrier { id: o.src(1)?, count, popc: Some((o.dst(0)?, o.src(last)?)) });
    }
    if !mods.contains(&"sync") {
        return Err("a barrier that is not known".to_owned());
    }
    let count = o.texts.get(1).map(|_| o.src(1)).transpose()?;
    Ok(Op::Barrier { id: o.src(0)?, count, popc: None })
}

fn matrix(o: &Operands<'_>, mods: &[&str], types: &[Ty]) -> Result<Op> {
    let [acc, a, b, c] = types[..] else { return Err("four types".to_owned()) };
    if acc != c || !mods.contains(&"row") || !mods.contains(&"col") {
        return Err("a matrix product that is not known".to_owned());
    }
    let k = match mods.iter().find_map(|name| name.strip_prefix("m16n8k")) {
        Some(k) => k.parse::<usize>().map_err(|_| "no shape".to_owned())?,
        None => return Err("a shape that is not known".to_owned()),
    };
    let op = Op::Mma { ty: [a, b], acc, d: o.dsts(0)?, a: o.vector(1)?, b: o.vector(2)?, c: o.vector(3)? };
    let Op::Mma { d, a: a_regs, b: b_regs, c: c_regs, .. } = &op else { unreachable!() };
    let per_reg = 4 / a.bytes();
    let is_known = matches!((a, b, acc), (Ty::F16, Ty::F16, Ty::F32) | (Ty::BF16, Ty::BF16, Ty::F32))
        || (matches!(a, Ty::S8 | Ty::U8) && matches!(b, Ty::S8 | Ty::U8) && acc == Ty::S32);
    let sized = a_regs.len() == k / (2 * per_reg) && 2 * b_regs.len() == a_regs.len();
    if is_known && sized && d.len() == 4 && c_regs.len() == 4 {
        Ok(op)
    } else {
        Err("a matrix product that is not known".to_owned())
    }
}

/// Decodes `wgmma` of f16, with untransposed, non-negated operands only.
fn warpgroup_matrix(o: &Operands<'_>, mods: &[&str], types: &[Ty]) -> Result<Op> {
    let n =
        mods.iter().find_map(|name| name.strip_prefix("m64n")?.strip_suffix("k16")?.parse::<usize>().ok());
    let n = n.filter(|n| (8..=256).contains(n) && n.is_multiple_of(8)).ok_or("a shape that is not known")?;
    let a = match o.vector(1)?[..] {
        [matrix] => Left::Matrix(matrix),
        [a, b, c, d] => Left::Registers([a, b, c, d]),
        _ => return Err("a left operand that is not known".to_owned()),
    };
    let is_transposed = if matches!(a, Left::Matrix(_)) { &["0", "0"][..] } else { &["0"] };
    let expected = ["1", "1"].iter().chain(is_transposed);
    let product = Wgmma { d: o.dsts(0)?, a, b: o.src(2)?, scale_d: o.src(3)? };
    match types {
        [Ty::F32, Ty::F16, Ty::F16] if product.d.len() == n / 2 && o.texts[4..].iter().eq(expected) => {
            Ok(Op::Wgmma(product))
        }
        _ => Err("a matrix product that is not known".to_owned()),
    }
}
