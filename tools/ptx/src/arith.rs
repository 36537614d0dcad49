//! Arithmetic of one lane: integers and floats of every width, as the PTX ISA defines them.

use half::{bf16, f16};

use crate::inst::{Atomic, Binary, Compare, FloatMode, Round, Ternary, Ty, Unary};
use crate::round;

/// Returns the value of the bits `value` as a float of type `ty`.
fn float(ty: Ty, value: u64) -> f64 {
    match ty {
        Ty::F16 => f64::from(f16::from_bits(value as u16).to_f32()),
        Ty::BF16 => f64::from(bf16::from_bits(value as u16).to_f32()),
        Ty::F32 => f64::from(f32::from_bits(value as u32)),
        _ => f64::from_bits(value),
    }
}

/// Returns the bits of `value`, rounded once to the float type.
fn bits(ty: Ty, value: f64, mode: FloatMode) -> u64 {
    let value = match mode.sat {
        true if value.is_nan() => 0.0,
        // Adding 0 makes a negative zero positive.
        true => value.clamp(0.0, 1.0) + 0.0,
        false => value,
    };
    match ty {
        Ty::F64 => value.to_bits(),
        // NaN results are always the same one.
        Ty::F32 if value.is_nan() => 0x7fff_ffff,
        _ if value.is_nan() => 0x7fff,
        Ty::F16 => f16::from_f64(round::to(round::F16, value, mode.round)).to_bits().into(),
        Ty::BF16 => bf16::from_f64(round::to(round::BF16, value, mode.round)).to_bits().into(),
        _ => {
            let value = match mode.round {
                Round::Nearest => value as f32,
                direction => round::to(round::F32, value, direction) as f32,
            };
            let flushed = if mode.ftz && value.is_subnormal() { 0.0_f32.copysign(value) } else { value };
            flushed.to_bits().into()
        }
    }
}

fn operand(ty: Ty, value: u64, mode: FloatMode) -> f64 {
    let value = float(ty, value);
    let is_small = mode.ftz && ty == Ty::F32 && (value as f32).is_subnormal();
    if is_small { 0.0_f64.copysign(value) } else { value }
}

/// Applies `op` to both halves of packed types, else to the value.
fn by_halves<const N: usize>(ty: Ty, values: [u64; N], op: impl Fn(Ty, [u64; N]) -> u64) -> u64 {
    let half = match ty {
        Ty::F16x2 => Ty::F16,
        Ty::BF16x2 => Ty::BF16,
        ty => return op(ty, values),
    };
    let part = |shift: u32| op(half, values.map(|value| value >> shift & 0xffff));
    part(0) | part(16) << 16
}

/// Returns `2^x` with the maximum error of `ex2.approx`, its sign chosen by the bits of `x`;
/// integer powers are exact.
fn approximate_exp2(x: f64) -> f64 {
    const ERROR: f64 = 1.69e-7; // 2^-22.5
    let exact = x.exp2();
    match x.fract() == 0.0 || !x.is_finite() {
        true => exact,
        false if x.to_bits().count_ones().is_multiple_of(2) => exact * (1.0 + ERROR),
        false => exact * (1.0 - ERROR),
    }
}

pub(crate) fn unary(op: Unary, ty: Ty, mode: FloatMode, a: u64) -> u64 {
    if op == Unary::Mov {
        return ty.truncate(a);
    }
    if ty.is_float() {
        return by_halves(ty, [a], |ty, [a]| match op {
            // Sign bits change even of NaN.
            Unary::Abs => a & !(1 << (ty.bits() - 1)),
            Unary::Neg => a ^ 1 << (ty.bits() - 1),
            _ => {
                let x = operand(ty, a, mode);
                let y = match op {
                    Unary::Rcp => round::divide(1.0, x),
                    Unary::Sqrt => round::root(x),
                    Unary::Rsqrt => 1.0 / x.sqrt(),
                    Unary::Ex2 => approximate_exp2(x),
                    Unary::Lg2 => x.log2(),
                    Unary::Sin => x.sin(),
                    Unary::Cos => x.cos(),
                    Unary::Tanh => x.tanh(),
                    op => unreachable!("{op:?} of a float"),
                };
                bits(ty, y, mode)
            }
        });
    }
    let value = ty.truncate(a);
    let bits = ty.bits();
    ty.truncate(match op {
        Unary::Abs => ty.int(a).unsigned_abs() as u64,
        Unary::Neg => value.wrapping_neg(),
        Unary::Not if ty == Ty::Pred => u64::from(value == 0),
        Unary::Not => !value,
        Unary::Clz => u64::from(value.leading_zeros() - (64 - bits)),
        Unary::Popc => u64::from(value.count_ones()),
        Unary::Brev => value.reverse_bits() >> (64 - bits),
        Unary::Bfind { shift } => {
            // The highest bit that differs from the sign.
            let value = if ty.is_signed() && ty.int(a) < 0 { ty.truncate(!value) } else { value };
            match value {
                0 => u64::from(u32::MAX),
                value if shift => u64::from(value.leading_zeros() - (64 - bits)),
                value => u64::from(63 - value.leading_zeros()),
            }
        }
        op => unreachable!("{op:?} of an integer"),
    })
}

pub(crate) fn binary(op: Binary, ty: Ty, mode: FloatMode, a: u64, b: u64) -> Result<u64, String> {
    if ty.is_float() {
        return Ok(by_halves(ty, [a, b], |ty, [a, b]| {
            let (x, y) = (operand(ty, a, mode), operand(ty, b, mode));
            let sign = 1 << (ty.bits() - 1);
            let value = match op {
                Binary::Add | Binary::Sub | Binary::Div if ty == Ty::F64 => match op {
                    Binary::Add => x + y,
                    Binary::Sub => x - y,
                    _ => x / y,
                },
                Binary::Add => round::add(x, y),
                Binary::Sub => round::add(x, -y),
                // Exact, except for f64.
                Binary::MulLo => x * y,
                Binary::Div => round::divide(x, y),
                // The second operand gets the sign of the first.
                Binary::CopySign => return a & sign | b & !sign,
                Binary::Min | Binary::Max if x.is_nan() || y.is_nan() => match (x.is_nan(), y.is_nan()) {
                    (true, false) if !mode.nan => y,
                    (false, true) if !mode.nan => x,
                    _ => f64::NAN,
                },
                // -0 is below +0.
                Binary::Min if x == y => {
                    if x.is_sign_negative() {
                        x
                    } else {
                        y
                    }
                }
                Binary::Max if x == y => {
                    if x.is_sign_negative() {
                        y
                    } else {
                        x
                    }
                }
                Binary::Min => x.min(y),
                Binary::Max => x.max(y),
                op => unreachable!("{op:?} of floats"),
            };
            bits(ty, value, mode)
        }));
    }
    // Fast path: frequent operations without sign need no wide integers.
    match op {
        Binary::Add if !mode.sat => return Ok(ty.truncate(a.wrapping_add(b))),
        Binary::Sub if !mode.sat => return Ok(ty.truncate(a.wrapping_sub(b))),
        Binary::MulLo => return Ok(ty.truncate(a.wrapping_mul(b))),
        Binary::And => return Ok(ty.truncate(a & b)),
        Binary::Or => return Ok(ty.truncate(a | b)),
        Binary::Xor => return Ok(ty.truncate(a ^ b)),
        _ => {}
    }
    let (x, y) = (ty.int(a), ty.int(b));
    let (min, max) = limits(ty);
    let distance = (b & 0xffff_ffff) as u32;
    let value = match op {
        Binary::Add => (x + y).clamp(min, max),
        Binary::Sub => (x - y).clamp(min, max),
        Binary::MulHi => high(ty, x, y),
        Binary::MulWide => x * y,
        Binary::Div | Binary::Rem if y == 0 => return Err("division by zero".to_owned()),
        Binary::Div => x / y,
        Binary::Rem => x % y,
        Binary::Min => x.min(y),
        Binary::Max => x.max(y),
        // A shift beyond the width shifts everything out.
        Binary::Shl => {
            if distance >= ty.bits() {
                0
            } else {
                x << distance
            }
        }
        Binary::Shr => x >> distance.min(ty.bits()),
        op => unreachable!("{op:?} of integers"),
    };
    Ok(if op == Binary::MulWide { wide(ty).truncate(value as u64) } else { ty.truncate(value as u64) })
}

/// Returns the upper half of a product. Only that of two unsigned 64-bit integers needs all of 128
/// bits.
fn high(ty: Ty, x: i128, y: i128) -> i128 {
    if ty == Ty::U64 { ((x as u128 * y as u128) >> 64) as i128 } else { (x * y) >> ty.bits() }
}

/// Returns the type of an exact product.
pub(crate) fn wide(ty: Ty) -> Ty {
    match ty {
        Ty::U16 => Ty::U32,
        Ty::S16 => Ty::S32,
        Ty::U32 => Ty::U64,
        Ty::S32 => Ty::S64,
        ty => ty,
    }
}

pub(crate) fn ternary(op: Ternary, ty: Ty, mode: FloatMode, [a, b, c]: [u64; 3]) -> u64 {
    if op == Ternary::Fma {
        return by_halves(ty, [a, b, c], |ty, [a, b, c]| {
            let [x, y, z] = [a, b, c].map(|value| operand(ty, value, mode));
            match (ty, mode.round) {
                (Ty::F32, Round::Nearest) => {
                    let exact = (x as f32).mul_add(y as f32, z as f32);
                    bits(ty, f64::from(exact), mode)
                }
                (Ty::F64, _) => bits(ty, x.mul_add(y, z), mode),
                // The product of two floats of at most 32 bits is exact in 64.
                _ => bits(ty, round::add(x * y, z), mode),
            }
        });
    }
    let (x, y, z) = (ty.int(a), ty.int(b), ty.int(c));
    let low = |value: u64| value & 0xffff_ffff;
    match op {
        Ternary::MadLo => ty.truncate(a.wrapping_mul(b).wrapping_add(c)),
        Ternary::MadHi => ty.truncate((high(ty, x, y) + z) as u64),
        Ternary::MadWide => wide(ty).truncate((x * y + wide(ty).int(c)) as u64),
        Ternary::Sad => ty.truncate(((x - y).abs() + z) as u64),
        Ternary::BfeUnsigned | Ternary::BfeSigned => extract(ty, a, b, c),
        Ternary::Prmt => permute(a, b, c),
        Ternary::ShfLeft { clamp } | Ternary::ShfRight { clamp } => {
            let distance = if clamp { low(c).min(32) } else { c & 31 };
            let joined = low(b) << 32 | low(a);
            match op {
                Ternary::ShfLeft { .. } => low(((u128::from(joined) << distance) >> 32) as u64),
                _ => low(joined >> distance),
            }
        }
        Ternary::Lop3(table) => {
            // A set row of the table selects the bits where a, b and c are the binary digits of its
            // number.
            let spelt = |row: u32| {
                [a, b, c].iter().zip([4, 2, 1]).fold(u64::MAX, |spelt, (value, bit)| {
                    spelt & if row & bit != 0 { *value } else { !value }
                })
            };
            low((0..8).filter(|row| table >> row & 1 == 1).fold(0, |set, row| set | spelt(row)))
        }
        Ternary::Dp2a { a_signed, b_signed, upper } => {
            let half = |i: u32| if a_signed { Ty::S16 } else { Ty::U16 }.int(a >> (16 * i));
            let byte = |i: u32| {
                let ty = if b_signed { Ty::S8 } else { Ty::U8 };
                ty.int(b >> (8 * i + if upper { 16 } else { 0 }))
            };
            low((half(0) * byte(0) + half(1) * byte(1) + Ty::U32.int(c)) as u64)
        }
        Ternary::Dp4a { a_signed, b_signed } => {
            let byte = |value: u64, i: u32, signed: bool| {
                let ty = if signed { Ty::S8 } else { Ty::U8 };
                ty.int(value >> (8 * i))
            };
            let dot: i128 = (0..4).map(|i| byte(a, i, a_signed) * byte(b, i, b_signed)).sum();
            low((dot + Ty::U32.int(c)) as u64)
        }
        Ternary::Fma => unreachable!("done above"),
    }
}

fn extract(ty: Ty, a: u64, pos: u64, len: u64) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    let value = ty.truncate(a);
    if len == 0 {
        return 0;
    }
    let sign_at = (pos + len - 1).min(u64::from(ty.bits()) - 1);
    let field = if pos >= 64 { 0 } else { value >> pos };
    let field = if len >= 64 { field } else { field & ((1 << len) - 1) };
    let negative = ty.is_signed() && value >> sign_at & 1 == 1;
    // The field ends with the value: the bits beyond are copies of the sign.
    let have = (sign_at + 1).saturating_sub(pos).min(len);
    ty.truncate(if negative && have < 64 { field | !0 << have } else { field })
}

pub(crate) fn insert(ty: Ty, [a, b, pos, len]: [u64; 4]) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if pos >= u64::from(ty.bits()) || len == 0 {
        return ty.truncate(b);
    }
    let mask = if len >= 64 { u64::MAX } else { (1 << len) - 1 } << pos;
    ty.truncate(b & !mask | a << pos & mask)
}

fn permute(a: u64, b: u64, selectors: u64) -> u64 {
    let bytes = (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
    let pick = |i: u64| {
        let selector = selectors >> (4 * i) & 15;
        let byte = bytes >> (8 * (selector & 7)) & 0xff;
        // The top bit of a selector replicates the byte's sign.
        let byte = if selector & 8 != 0 { 0xff * (byte >> 7) } else { byte };
        byte << (8 * i)
    };
    (0..4).map(pick).sum()
}

pub(crate) fn convert(to: Ty, from: Ty, mode: FloatMode, to_integer: Option<Round>, a: u64) -> u64 {
    let rounded = |x: f64, round: Option<Round>| match round {
        None => x,
        Some(Round::Nearest) => x.round_ties_even(),
        Some(Round::Zero) => x.trunc(),
        Some(Round::Down) => x.floor(),
        Some(Round::Up) => x.ceil(),
    };
    match (from.is_float(), to.is_float()) {
        (true, true) => bits(to, rounded(operand(from, a, mode), to_integer), mode),
        (true, false) => {
            let x = rounded(operand(from, a, mode), Some(to_integer.unwrap_or(Round::Zero)));
            let (min, max) = limits(to);
            // NaN becomes 0; the conversion saturates.
            let value = if x.is_nan() { 0 } else { (x as i128).clamp(min, max) };
            to.truncate(value as u64)
        }
        (false, true) => {
            let x = from.int(a);
            bits(to, if to == Ty::F64 { x as f64 } else { round::integer(x) }, mode)
        }
        (false, false) => {
            let (min, max) = limits(to);
            let x = from.int(a);
            to.truncate(if mode.sat { x.clamp(min, max) } else { x } as u64)
        }
    }
}

fn limits(ty: Ty) -> (i128, i128) {
    let bits = ty.bits();
    if ty.is_signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// Returns `[a, b]` as f16, `a` the upper one.
pub(crate) fn pack_halves(to: Ty, mode: FloatMode, [a, b]: [u64; 2]) -> u64 {
    let half = if to == Ty::F16x2 { Ty::F16 } else { Ty::BF16 };
    let [upper, lower] = [a, b].map(|value| bits(half, operand(Ty::F32, value, mode), mode));
    upper << 16 | lower
}

pub(crate) fn compare(compare: Compare, ty: Ty, ftz: bool, a: u64, b: u64) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let mode = FloatMode { round: Round::Nearest, ftz, sat: false, nan: false };
    let order = match ty.is_float() {
        true => operand(ty, a, mode).partial_cmp(&operand(ty, b, mode)),
        false => Some(ty.int(a).cmp(&ty.int(b))),
    };
    match (compare, order) {
        (Compare::Num, order) => order.is_some(),
        (Compare::Nan, order) => order.is_none(),
        (Compare::Equ | Compare::Neu | Compare::Ltu | Compare::Leu | Compare::Gtu | Compare::Geu, None) => {
            true
        }
        (_, None) => false,
        (Compare::Eq | Compare::Equ, Some(order)) => order == Equal,
        (Compare::Ne | Compare::Neu, Some(order)) => order != Equal,
        (Compare::Lt | Compare::Ltu, Some(order)) => order == Less,
        (Compare::Le | Compare::Leu, Some(order)) => order != Greater,
        (Compare::Gt | Compare::Gtu, Some(order)) => order == Greater,
        (Compare::Ge | Compare::Geu, Some(order)) => order != Less,
    }
}

pub(crate) fn atomic(op: Atomic, ty: Ty, before: u64, a: u64, b: u64) -> u64 {
    let mode = FloatMode { round: Round::Nearest, ftz: false, sat: false, nan: false };
    let by = |op| binary(op, ty, mode, before, a).expect("not a division");
    match op {
        Atomic::Add => by(Binary::Add),
        Atomic::Inc if ty.truncate(before) >= ty.truncate(a) => 0,
        Atomic::Inc => ty.truncate(before) + 1,
        Atomic::Min => by(Binary::Min),
        Atomic::Max => by(Binary::Max),
        Atomic::And => by(Binary::And),
        Atomic::Or => by(Binary::Or),
        Atomic::Xor => by(Binary::Xor),
        Atomic::Exch => ty.truncate(a),
        Atomic::Cas => {
            if ty.truncate(before) == ty.truncate(a) {
                ty.truncate(b)
            } else {
                before
            }
        }
    }
}
