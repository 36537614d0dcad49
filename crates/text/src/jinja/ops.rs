//! Operators, items and slices.

use std::rc::Rc;

use super::Fault;
use super::ast::{Cmp, Op};
use super::eval::CallArgs;
use super::limits::Budget;
use super::text::{Text, TextBuilder};
use super::value::{Items, List, Loop, Value};
use super::{printf, repr};

type Result<T> = std::result::Result<T, Fault>;

/// Returns the items of an iterable: items, keys or characters. `none` and undefined values are
/// empty.
pub(super) fn list(value: &Value, meter: &Rc<Budget>) -> Result<List> {
    let made = match value {
        Value::List(list) => return Ok(list.clone()),
        Value::Undefined | Value::None => Items::new(meter).finish()?,
        Value::Map(map) => List::collect(meter, map.entries().iter().map(|(key, _)| Ok(key.clone())))?,
        Value::Text(text) => {
            List::collect(meter, text.chars().map(|(c, is_input)| char_text(meter, c, is_input)))?
        }
        _ => return Err(Fault::failed(format!("{} cannot be iterated", value.kind()))),
    };
    match made {
        Value::List(list) => Ok(list),
        _ => Err(Fault::failed("not a list")),
    }
}

fn char_text(meter: &Rc<Budget>, c: char, is_input: bool) -> Result<Value> {
    Ok(Value::Text(Text::new(meter, c.encode_utf8(&mut [0; 4]), is_input)?))
}

/// Returns the parts of `text` as a list.
pub(super) fn parts<'a>(text: &Text, parts: impl IntoIterator<Item = &'a str>) -> Result<Value> {
    text.meter().read(text.len())?;
    List::collect(text.meter(), parts.into_iter().map(|part| Ok(Value::Text(text.part(part)?))))
}

/// `left op right`
pub(super) fn binary(op: Op, left: Value, right: &Value, meter: &Rc<Budget>) -> Result<Value> {
    meter.work(1)?;
    match (op, left, right) {
        (Op::Concat, left, _) => concat(left, right, meter),
        (Op::Add, left @ Value::Text(_), Value::Text(_)) => concat(left, right, meter),
        (Op::Add, Value::List(a), Value::List(b)) => {
            List::collect(meter, a.items().iter().chain(b.items()).map(|item| Ok(item.clone())))
        }
        (Op::Rem, Value::Text(text), value) => printf::format(&text, value, meter),
        (Op::Mul, Value::Text(text), n) => repeat_text(&text, n, meter),
        (Op::Mul, n, Value::Text(text)) => repeat_text(text, &n, meter),
        (Op::Mul, Value::List(list), n) => repeat_list(&list, n, meter),
        (Op::Mul, n, Value::List(list)) => repeat_list(list, &n, meter),
        (_, left, _) => number(op, &left, right),
    }
}

/// Concatenates both as text. Appends in place if the left text is not shared.
fn concat(left: Value, right: &Value, meter: &Rc<Budget>) -> Result<Value> {
    let mut out = match left {
        Value::Text(text) => TextBuilder::of(text)?,
        left => {
            let mut out = TextBuilder::new(meter);
            repr::print(&left, &mut out, meter)?;
            out
        }
    };
    repr::print(right, &mut out, meter)?;
    Ok(Value::Text(out.finish()?))
}

fn repeat_text(text: &Text, n: &Value, meter: &Rc<Budget>) -> Result<Value> {
    let mut out = TextBuilder::new(meter);
    for _ in 0..times(n, text.len())? {
        out.push_text(text)?;
    }
    Ok(Value::Text(out.finish()?))
}

fn repeat_list(list: &List, n: &Value, meter: &Rc<Budget>) -> Result<Value> {
    let times = times(n, list.items().len())?;
    let all = (0..times).flat_map(|_| list.items());
    List::collect(meter, all.map(|item| Ok(item.clone())))
}

/// Returns the number of repetitions of an object of length `len`: 0 if it is empty.
fn times(n: &Value, len: usize) -> Result<u128> {
    let n = n.as_int().ok_or_else(|| Fault::failed(format!("cannot repeat something by {}", n.kind())))?;
    Ok(if len == 0 { 0 } else { u128::try_from(n).unwrap_or(0) })
}

fn number(op: Op, left: &Value, right: &Value) -> Result<Value> {
    let sign = match op {
        Op::Add => "+",
        Op::Sub => "-",
        Op::Concat => "~",
        Op::Mul => "*",
        Op::Div => "/",
        Op::FloorDiv => "//",
        Op::Rem => "%",
        Op::Pow => "**",
    };
    let beyond = || Fault::failed(format!("'{sign}' overflows"));
    let (Some(x), Some(y)) = (left.as_float(), right.as_float()) else {
        return Err(Fault::failed(format!("cannot do {} {sign} {}", left.kind(), right.kind())));
    };
    if matches!(op, Op::Div | Op::FloorDiv | Op::Rem) && y == 0.0 {
        return Err(Fault::failed("division by zero"));
    }
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        let whole = match op {
            Op::Add => Some(a.checked_add(b)),
            Op::Sub => Some(a.checked_sub(b)),
            Op::Mul => Some(a.checked_mul(b)),
            Op::FloorDiv => Some(a.checked_div_euclid(b).map(|q| q - i128::from(b < 0 && a % b != 0))),
            Op::Rem => Some(a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r })),
            Op::Pow => u32::try_from(b).ok().map(|b| a.checked_pow(b)),
            Op::Div | Op::Concat => None,
        };
        if let Some(whole) = whole {
            return whole.map(Value::Int).ok_or_else(beyond);
        }
    }
    Ok(Value::Float(match op {
        Op::Add => x + y,
        Op::Sub => x - y,
        Op::Mul => x * y,
        Op::Div | Op::Concat => x / y,
        Op::FloorDiv => floor_div(x, y).0,
        Op::Rem => floor_div(x, y).1,
        Op::Pow => x.powf(y),
    }))
}

/// Quotient and remainder as in Python: the remainder is exact and has the sign of `y`.
fn floor_div(x: f64, y: f64) -> (f64, f64) {
    let rem = x % y;
    let goes_below = rem != 0.0 && (y < 0.0) != (rem < 0.0);
    let quotient = (x - rem) / y - f64::from(u8::from(goes_below));
    let whole = quotient.floor();
    let whole = if quotient - whole > 0.5 { whole + 1.0 } else { whole };
    let signed = |value: f64, of: f64| if value == 0.0 { 0f64.copysign(of) } else { value };
    (signed(whole, x / y), signed(if goes_below { rem + y } else { rem }, y))
}

/// `-value`
pub(super) fn minus(value: &Value) -> Result<Value> {
    match (value.as_int(), value) {
        (Some(n), _) => {
            let n = n.checked_neg().ok_or_else(|| Fault::failed("'-' overflows"))?;
            Ok(Value::Int(n))
        }
        (None, Value::Float(x)) => Ok(Value::Float(-x)),
        _ => Err(Fault::failed(format!("{} has no negative", value.kind()))),
    }
}

/// Whether `left cmp right` holds.
pub(super) fn compare(cmp: Cmp, left: &Value, right: &Value, meter: &Rc<Budget>) -> Result<bool> {
    Ok(match cmp {
        Cmp::Eq => left.equals(right, meter)?,
        Cmp::Ne => !left.equals(right, meter)?,
        Cmp::Lt => left.compare(right, meter)?.is_lt(),
        Cmp::Le => left.compare(right, meter)?.is_le(),
        Cmp::Gt => left.compare(right, meter)?.is_gt(),
        Cmp::Ge => left.compare(right, meter)?.is_ge(),
        Cmp::In => contains(right, left, meter)?,
        Cmp::NotIn => !contains(right, left, meter)?,
    })
}

/// Whether `item in all`.
pub(super) fn contains(all: &Value, item: &Value, meter: &Rc<Budget>) -> Result<bool> {
    Ok(match (all, item) {
        (Value::Text(all), Value::Text(item)) => {
            meter.read(all.len())?;
            all.as_str().contains(item.as_str())
        }
        (Value::Map(map), key) => map.get(key, meter)?.is_some(),
        (Value::List(list), item) => {
            for other in list.items() {
                if other.equals(item, meter)? {
                    return Ok(true);
                }
            }
            false
        }
        (Value::Undefined | Value::None, _) => false,
        _ => return Err(Fault::failed(format!("{} cannot be in {}", item.kind(), all.kind()))),
    })
}

/// `value[key]`; undefined if absent.
pub(super) fn item(value: &Value, key: &Value, meter: &Rc<Budget>) -> Result<Value> {
    let found = match (value, key.as_int()) {
        (Value::Undefined, _) => return Err(Fault::failed("cannot read an item of an undefined value")),
        (Value::Map(map), _) => map.get(key, meter)?,
        (Value::List(list), Some(at)) => place(at, list.items().len()).map(|at| list.items()[at].clone()),
        (Value::Text(text), Some(at)) => {
            meter.read(text.len())?;
            let n = text.as_str().chars().count();
            let at = place(at, n).and_then(|at| text.chars().nth(at));
            at.map(|(c, is_input)| char_text(meter, c, is_input)).transpose()?
        }
        _ => None,
    };
    Ok(found.unwrap_or(Value::Undefined))
}

/// Returns position `at` of `n`, counted from the end if negative.
pub(super) fn place(at: i128, n: usize) -> Option<usize> {
    let at = if at < 0 { at.checked_add(n as i128)? } else { at };
    usize::try_from(at).ok().filter(|&at| at < n)
}

/// `value[start:stop:step]`
pub(super) fn slice(value: &Value, parts: [Option<Value>; 3], meter: &Rc<Budget>) -> Result<Value> {
    let number = |part: &Option<Value>| match part {
        None | Some(Value::None) => Ok(None),
        Some(value) => value
            .as_int()
            .and_then(|n| i64::try_from(n).ok())
            .map(Some)
            .ok_or_else(|| Fault::failed(format!("cannot slice by {}", value.kind()))),
    };
    let [start, stop, step] = &parts;
    let (start, stop, step) = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    if step == 0 {
        return Err(Fault::failed("cannot slice by steps of 0"));
    }
    match value {
        Value::Text(text) => {
            meter.read(text.len())?;
            let n = text.as_str().chars().count();
            if step == 1 {
                let Some((first, last)) = bounds(start, stop, 1, n) else { return Value::own(meter, "") };
                let byte = |at: usize| text.as_str().char_indices().nth(at).map_or(text.len(), |(i, _)| i);
                return Ok(Value::Text(text.slice(byte(first)..byte(last + 1))?));
            }
            meter.work(n)?;
            let chars: Vec<(char, bool)> = text.chars().collect();
            let mut out = TextBuilder::new(meter);
            for at in steps(start, stop, step, n) {
                out.push(chars[at].0.encode_utf8(&mut [0; 4]), chars[at].1)?;
            }
            Ok(Value::Text(out.finish()?))
        }
        Value::List(list) => {
            let items = list.items();
            List::collect(meter, steps(start, stop, step, items.len()).map(|at| Ok(items[at].clone())))
        }
        Value::Undefined | Value::None => Items::new(meter).finish(),
        _ => Err(Fault::failed(format!("{} cannot be sliced", value.kind()))),
    }
}

/// Returns the first and last position of a slice of `n` items; `None` if it is empty.
fn bounds(start: Option<i64>, stop: Option<i64>, step: i64, n: usize) -> Option<(usize, usize)> {
    let n = n as i64;
    // Python clips to 0..=n for positive steps, to -1..n for negative ones.
    let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
    let clip = |at: i64| if at < 0 { at.saturating_add(n) } else { at }.clamp(low, high);
    let start = start.map_or(if step > 0 { low } else { high }, clip);
    let stop = stop.map_or(if step > 0 { high } else { low }, clip);
    let last = if step > 0 { stop - 1 } else { stop + 1 };
    let is_empty = if step > 0 { start >= stop } else { start <= stop };
    if is_empty { None } else { Some((start as usize, last as usize)) }
}

/// Returns the positions of a slice of `n` items.
fn steps(start: Option<i64>, stop: Option<i64>, step: i64, n: usize) -> impl Iterator<Item = usize> {
    let stride = step.unsigned_abs() as usize;
    let (first, last) = bounds(start, stop, step, n).unwrap_or((1, 0));
    let len =
        if step > 0 { last.wrapping_add(1).saturating_sub(first) } else { (first + 1).saturating_sub(last) };
    let len = if bounds(start, stop, step, n).is_some() { len } else { 0 };
    (0..len).step_by(stride).map(move |i| if step > 0 { first + i } else { first - i })
}

/// `range(stop)`, `range(start, stop)` or `range(start, stop, step)`.
pub(super) fn range(args: CallArgs, meter: &Rc<Budget>) -> Result<Value> {
    let mut numbers = Vec::new();
    for value in &args.positional {
        let n = value.as_int().and_then(|n| i64::try_from(n).ok());
        numbers.push(n.ok_or_else(|| Fault::failed(format!("range of {}", value.kind())))?);
    }
    let (start, stop, step) = match numbers[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] if step != 0 => (start, stop, step),
        _ => return Err(Fault::failed("range expects one to three numbers, of which the last is not 0")),
    };
    let mut at = Some(start);
    let numbers = std::iter::from_fn(|| {
        let n = at.filter(|&n| if step > 0 { n < stop } else { n > stop })?;
        at = n.checked_add(step);
        Some(Ok(Value::Int(i128::from(n))))
    });
    List::collect(meter, numbers)
}

/// An attribute of `loop`.
pub(super) fn loop_attr(round: &Loop, name: &str) -> Option<Value> {
    let Loop { list, at, depth, .. } = round;
    let at = *at;
    let n = list.items().len();
    let number = |n: usize| Some(Value::Int(n as i128));
    match name {
        "index" => number(at + 1),
        "index0" => number(at),
        "revindex" => number(n - at),
        "revindex0" => number(n - at - 1),
        "length" => number(n),
        "first" => Some(Value::Bool(at == 0)),
        "last" => Some(Value::Bool(at + 1 == n)),
        "previtem" => at.checked_sub(1).map(|at| list.items()[at].clone()),
        "nextitem" => list.items().get(at + 1).cloned(),
        "depth" => number(*depth),
        "depth0" => number(depth - 1),
        _ => None,
    }
}
