//! Python's `%` operator on text: conversions such as `%-8s` and `%05.1f`.

use std::fmt::Write as _;
use std::iter::Peekable;
use std::rc::Rc;
use std::str::CharIndices;

use super::Fault;
use super::limits::Budget;
use super::repr;
use super::text::{Text, TextBuilder};
use super::value::{List, Map, Shape, Value};

type Result<T> = std::result::Result<T, Fault>;

/// Maximum field width and precision.
const MAX_WIDTH: usize = 4096;

/// The remaining values.
enum Values {
    /// Values of a tuple; each must be formatted.
    InOrder { list: List, n_taken: usize },
    /// Values of a mapping, by name; or the mapping itself, whose use is optional.
    Named { map: Map, is_taken: bool },
    /// One value, used once.
    One(Option<Value>),
}

impl Values {
    fn of(value: &Value) -> Self {
        match value {
            Value::List(list) if list.shape() != Shape::List => {
                Self::InOrder { list: list.clone(), n_taken: 0 }
            }
            Value::Map(map) => Self::Named { map: map.clone(), is_taken: false },
            other => Self::One(Some(other.clone())),
        }
    }

    fn next(&mut self) -> Result<Value> {
        let next = match self {
            Self::InOrder { list, n_taken } => {
                *n_taken += 1;
                list.items().get(*n_taken - 1).cloned()
            }
            Self::Named { map, is_taken } => {
                (!std::mem::replace(is_taken, true)).then(|| Value::Map(map.clone()))
            }
            Self::One(value) => value.take(),
        };
        next.ok_or_else(|| Fault::failed("not enough values for a format"))
    }

    fn named(&self, name: &str, meter: &Budget) -> Result<Value> {
        let Self::Named { map, .. } = self else {
            return Err(Fault::failed("a format with names expects a mapping"));
        };
        map.get_str(name, meter)?.ok_or_else(|| Fault::failed(format!("a format requires '{name}'")))
    }

    fn is_done(&self) -> bool {
        match self {
            Self::InOrder { list, n_taken } => *n_taken == list.items().len(),
            Self::Named { .. } => true,
            Self::One(value) => value.is_none(),
        }
    }
}

/// The conversion specification between `%` and the letter.
#[derive(Default)]
struct Spec {
    left: bool,
    plus: bool,
    blank: bool,
    zeros: bool,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
}

/// `template % value`
pub(super) fn format(template: &Text, value: &Value, meter: &Rc<Budget>) -> Result<Value> {
    let all = template.as_str();
    meter.read(all.len())?;
    let mut values = Values::of(value);
    let mut out = TextBuilder::new(meter);
    let mut chars = all.char_indices().peekable();
    let mut at = 0;
    while let Some((percent, c)) = chars.next() {
        if c != '%' {
            continue;
        }
        meter.work(1)?;
        out.push_part(template, at..percent)?;
        let name = name(all, &mut chars)?;
        let spec = spec(&mut chars, &mut values)?;
        let Some((end, letter)) = chars.next() else {
            return Err(Fault::failed("a format ends after '%'"));
        };
        at = end + letter.len_utf8();
        if letter == '%' {
            out.push_part(template, end..at)?;
            continue;
        }
        let value = match name {
            Some(name) => values.named(name, meter)?,
            None => values.next()?,
        };
        spec.write(letter, &value, &mut out, meter)?;
    }
    if !values.is_done() {
        return Err(Fault::failed("a format does not write all values"));
    }
    out.push_part(template, at..all.len())?;
    Ok(Value::Text(out.finish()?))
}

/// Parses `(name)` if present.
fn name<'t>(all: &'t str, chars: &mut Peekable<CharIndices<'_>>) -> Result<Option<&'t str>> {
    let Some((open, _)) = chars.next_if(|(_, c)| *c == '(') else { return Ok(None) };
    let mut depth = 1;
    for (at, c) in chars {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth == 0 {
            return Ok(Some(&all[open + 1..at]));
        }
    }
    Err(Fault::failed("a name in a format does not end"))
}

fn spec(chars: &mut Peekable<CharIndices<'_>>, values: &mut Values) -> Result<Spec> {
    let mut spec = Spec::default();
    while let Some((_, flag)) = chars.next_if(|(_, c)| "-+ 0#".contains(*c)) {
        match flag {
            '-' => spec.left = true,
            '+' => spec.plus = true,
            ' ' => spec.blank = true,
            '0' => spec.zeros = true,
            _ => spec.alternate = true,
        }
    }
    let width = number(chars, values)?.unwrap_or(0);
    spec.left |= width < 0;
    spec.width = within(width.unsigned_abs())?;
    if chars.next_if(|(_, c)| *c == '.').is_some() {
        spec.precision = Some(within(number(chars, values)?.unwrap_or(0).max(0).unsigned_abs())?);
    }
    // Length modifiers of C, which Python ignores.
    while chars.next_if(|(_, c)| "hlL".contains(*c)).is_some() {}
    Ok(spec)
}

/// Parses digits, or `*` for the next value.
fn number(chars: &mut Peekable<CharIndices<'_>>, values: &mut Values) -> Result<Option<i128>> {
    if chars.next_if(|(_, c)| *c == '*').is_some() {
        let width = values.next()?.as_int();
        return width.map(Some).ok_or_else(|| Fault::failed("'*' in a format expects a whole number"));
    }
    let mut number = None;
    while let Some((_, digit)) = chars.next_if(|(_, c)| c.is_ascii_digit()) {
        let digit = i128::from(u32::from(digit) - u32::from('0'));
        number = Some(number.unwrap_or(0i128).saturating_mul(10).saturating_add(digit));
    }
    Ok(number)
}

fn within(width: u128) -> Result<usize> {
    let width = usize::try_from(width).ok().filter(|&width| width <= MAX_WIDTH);
    width.ok_or_else(|| Fault::failed(format!("a format's field has {MAX_WIDTH} characters at most")))
}

impl Spec {
    fn write(&self, letter: char, value: &Value, out: &mut TextBuilder, meter: &Rc<Budget>) -> Result<()> {
        let text = match letter {
            's' => repr::str(value, meter)?,
            'r' | 'a' => {
                let text = repr::quoted(value, meter)?;
                if letter == 'a' { text.map(escaped)? } else { text }
            }
            'c' => one_character(value, meter)?,
            'd' | 'i' | 'u' | 'x' | 'X' | 'o' => return self.whole(letter, value, out),
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => return self.float(letter, value, out),
            _ => return Err(Fault::failed(format!("a format has no '%{letter}'"))),
        };
        let chars = text.as_str().char_indices();
        let end = self.precision.filter(|_| letter != 'c').and_then(|n| chars.map(|(at, _)| at).nth(n));
        let text = text.slice(0..end.unwrap_or(text.len()))?;
        meter.read(text.len())?;
        let pad = " ".repeat(self.width.saturating_sub(text.as_str().chars().count()));
        if !self.left {
            out.own(&pad)?;
        }
        out.push_text(&text)?;
        if self.left { out.own(&pad) } else { Ok(()) }
    }

    fn whole(&self, letter: char, value: &Value, out: &mut TextBuilder) -> Result<()> {
        let is_decimal = matches!(letter, 'd' | 'i' | 'u');
        let whole = match value {
            // Truncates towards zero, as `int` does.
            Value::Float(x) if is_decimal && x.is_finite() && x.abs() < 1e38 => Some(*x as i128),
            value => value.as_int(),
        };
        let whole = whole
            .ok_or_else(|| Fault::failed(format!("'%{letter}' expects a number, got {}", value.kind())))?;
        let size = whole.unsigned_abs();
        let digits = match letter {
            'x' => format!("{size:x}"),
            'X' => format!("{size:X}"),
            'o' => format!("{size:o}"),
            _ => size.to_string(),
        };
        let zeros = "0".repeat(self.precision.unwrap_or(0).saturating_sub(digits.len()));
        let prefix = match letter {
            'x' | 'X' | 'o' if self.alternate => format!("0{letter}"),
            _ => String::new(),
        };
        self.number(whole < 0, &prefix, &(zeros + &digits), true, out)
    }

    fn float(&self, letter: char, value: &Value, out: &mut TextBuilder) -> Result<()> {
        let x = value.as_float();
        let x =
            x.ok_or_else(|| Fault::failed(format!("'%{letter}' expects a number, got {}", value.kind())))?;
        let (size, precision) = (x.abs(), self.precision.unwrap_or(6));
        let mut digits = if !x.is_finite() {
            if x.is_nan() { "nan".to_owned() } else { "inf".to_owned() }
        } else {
            match letter.to_ascii_lowercase() {
                'f' => self.with_point(format!("{size:.precision$}")),
                'e' => self.exponential(size, precision),
                _ => self.general(size, precision.max(1)),
            }
        };
        if letter.is_ascii_uppercase() {
            digits.make_ascii_uppercase();
        }
        self.number(x.is_sign_negative() && !x.is_nan(), "", &digits, x.is_finite(), out)
    }

    /// Formats as `d.ddde+xx`, with an exponent of at least two digits.
    fn exponential(&self, size: f64, precision: usize) -> String {
        let written = format!("{size:.precision$e}");
        let (digits, exponent) = written.split_once('e').unwrap_or((&written, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        let mut out = self.with_point(digits.to_owned());
        _ = write!(out, "e{sign}{exponent:0>2}");
        out
    }

    /// Formats in the shorter notation with `precision` digits, without trailing zeros.
    fn general(&self, size: f64, precision: usize) -> String {
        let written = format!("{size:.*e}", precision - 1);
        let exponent =
            written.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0i64);
        let is_plain = exponent >= -4 && exponent < precision as i64;
        let written = if is_plain {
            let decimals = usize::try_from(precision as i64 - 1 - exponent).unwrap_or(0);
            format!("{size:.decimals$}")
        } else {
            self.exponential(size, precision - 1)
        };
        if self.alternate {
            return if is_plain { self.with_point(written) } else { written };
        }
        let (digits, exponent) = match written.split_once('e') {
            Some((digits, exponent)) => (digits, format!("e{exponent}")),
            None => (&*written, String::new()),
        };
        let digits =
            if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits };
        digits.to_owned() + &exponent
    }

    /// `#` forces a decimal point even without following digits.
    fn with_point(&self, digits: String) -> String {
        if self.alternate && !digits.contains('.') { digits + "." } else { digits }
    }

    fn number(
        &self,
        minus: bool,
        prefix: &str,
        digits: &str,
        may_pad: bool,
        out: &mut TextBuilder,
    ) -> Result<()> {
        let sign = match (minus, self.plus, self.blank) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (.., true) => " ",
            _ => "",
        };
        let n_pad = self.width.saturating_sub(sign.len() + prefix.len() + digits.len());
        let with_zeros = self.zeros && !self.left && may_pad;
        let (blanks, zeros) = if with_zeros { (0, n_pad) } else { (n_pad, 0) };
        if !self.left {
            out.own(&" ".repeat(blanks))?;
        }
        out.own(sign)?;
        out.own(prefix)?;
        out.own(&"0".repeat(zeros))?;
        out.own(digits)?;
        if self.left { out.own(&" ".repeat(blanks)) } else { Ok(()) }
    }
}

/// Returns a character, or the character of a code point.
fn one_character(value: &Value, meter: &Rc<Budget>) -> Result<Text> {
    let wrong = || Fault::failed("'%c' expects a character, or its number");
    if let Value::Text(text) = value {
        let mut chars = text.as_str().chars();
        return if chars.next().is_some() && chars.next().is_none() {
            Ok(text.clone())
        } else {
            Err(wrong())
        };
    }
    let c = value.as_int().and_then(|n| u32::try_from(n).ok()).and_then(char::from_u32).ok_or_else(wrong)?;
    Text::new(meter, c.encode_utf8(&mut [0; 4]), false)
}

/// Escapes non-ASCII characters like Python's `ascii`.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        match u32::from(c) {
            code @ 0..0x80 => out.push(char::from(code as u8)),
            code @ 0x80..0x100 => _ = write!(out, "\\x{code:02x}"),
            code @ 0x100..0x1_0000 => _ = write!(out, "\\u{code:04x}"),
            code => _ = write!(out, "\\U{code:08x}"),
        }
        out
    })
}
