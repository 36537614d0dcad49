//! Filters and methods that pad, truncate, partition and format text, or count its words.

use super::Fault;
use super::eval::{CallArgs, Interpreter};
use super::text::{Text, TextBuilder};
use super::value::{List, Value};

type Result<T> = std::result::Result<T, Fault>;

/// Maximum width of padded text.
const MAX_WIDTH: usize = 1 << 20;

/// `center`, `ljust`, `rjust`: pads with `fill` to at least `width` characters.
pub(super) fn justify(how: &str, text: &Text, width: &Value, fill: Option<&Text>) -> Result<Text> {
    let meter = text.meter();
    let blank = Text::new(meter, " ", false)?;
    let fill = fill.unwrap_or(&blank);
    if fill.as_str().chars().count() != 1 {
        return Err(Fault::failed(format!("'{how}' pads with one character")));
    }
    let (width, n) = (self::width(width, how)?, n_chars(text)?);
    let pad = width.saturating_sub(n);
    let before = match how {
        "ljust" => 0,
        "rjust" => pad,
        // Python puts the odd fill character on the left in fields of odd width.
        _ => pad / 2 + (pad & width & 1),
    };
    let mut out = TextBuilder::new(meter);
    for _ in 0..before {
        out.push_text(fill)?;
    }
    out.push_text(text)?;
    for _ in before..pad {
        out.push_text(fill)?;
    }
    out.finish()
}

/// `zfill`: inserts zeros after the sign.
pub(super) fn fill_zeros(text: &Text, width: &Value) -> Result<Text> {
    let pad = self::width(width, "zfill")?.saturating_sub(n_chars(text)?);
    let sign = usize::from(text.as_str().starts_with(['-', '+']));
    let mut out = TextBuilder::new(text.meter());
    out.push_part(text, 0..sign)?;
    for _ in 0..pad {
        out.own("0")?;
    }
    out.push_part(text, sign..text.len())?;
    out.finish()
}

/// `partition` and `rpartition`: the text before the first or last `by`, `by` itself, and the text
/// after it.
pub(super) fn partition(text: &Text, by: &str, from_end: bool) -> Result<Value> {
    if by.is_empty() {
        return Err(Fault::failed("cannot split by an empty text"));
    }
    let all = text.as_str();
    let found = if from_end { all.rfind(by) } else { all.find(by) };
    let ends = match (found, from_end) {
        (Some(at), _) => (at, at + by.len()),
        (None, true) => (0, 0),
        (None, false) => (all.len(), all.len()),
    };
    let parts = [0..ends.0, ends.0..ends.1, ends.1..all.len()];
    List::tuple(text.meter(), parts.map(|part| Ok(Value::Text(text.slice(part)?))))
}

/// Counts words: runs of letters, digits and `_`.
pub(super) fn n_words(text: &Text) -> Result<Value> {
    text.meter().read(text.len())?;
    let words = text.as_str().split(|c: char| !c.is_alphanumeric() && c != '_');
    Ok(Value::Int(words.filter(|word| !word.is_empty()).count() as i128))
}

/// `'{} {name}'.format(...)`; fields with more than a name are rejected.
pub(super) fn format(text: &Text, mut args: CallArgs, me: &Interpreter) -> Result<Value> {
    let (all, meter) = (text.as_str(), text.meter());
    let (mut out, mut at, mut n_unnamed) = (TextBuilder::new(meter), 0, 0);
    while let Some(brace) = all[at..].find(['{', '}']).map(|found| at + found) {
        meter.work(1)?;
        out.push_part(text, at..brace)?;
        let (brace_char, behind) = all[brace..].split_at(1);
        if behind.starts_with(brace_char) {
            out.push_part(text, brace..brace + 1)?;
            at = brace + 2;
            continue;
        }
        let end = behind.find('}').filter(|_| brace_char == "{");
        let end = end.ok_or_else(|| Fault::failed(format!("a single '{brace_char}' in a format")))?;
        let name = &behind[..end];
        let position = if name.is_empty() { Ok(n_unnamed) } else { name.parse::<usize>() };
        n_unnamed += usize::from(name.is_empty());
        let value = match position {
            Ok(position) => args.positional.get(position).cloned(),
            Err(_) => {
                args.take(usize::MAX, name).inspect(|value| args.named.push((name.to_owned(), value.clone())))
            }
        };
        let value = value.ok_or_else(|| Fault::failed(format!("a format has no value for '{{{name}}}'")))?;
        out.push_text(&me.text(&value)?)?;
        at = brace + end + 2;
    }
    out.push_part(text, at..all.len())?;
    Ok(Value::Text(out.finish()?))
}

impl Interpreter {
    /// `truncate(length, killwords, end, leeway)`
    pub(super) fn truncate(&self, text: &Text, mut args: CallArgs) -> Result<Text> {
        let length = args.take(0, "length").unwrap_or(Value::Int(255));
        let cuts_words = args.take(1, "killwords").is_some_and(|kill| kill.is_true());
        let end = args
            .take(2, "end")
            .map_or_else(|| Text::new(&self.meter, "...", false), |end| self.text(&end))?;
        let leeway = args.take(3, "leeway").filter(|leeway| !matches!(leeway, Value::None));
        args.finish(4)?;
        let leeway = leeway.map_or(Ok(5), |leeway| width(&leeway, "truncate"))?;
        let (length, n_end) = (width(&length, "truncate")?, n_chars(&end)?);
        if length < n_end {
            return Err(Fault::failed(format!(
                "'truncate' expects a length of {n_end} or more, got {length}"
            )));
        }
        let all = text.as_str();
        if n_chars(text)? <= length.saturating_add(leeway) {
            return Ok(text.clone());
        }
        let cut = all.char_indices().nth(length - n_end).map_or(all.len(), |(at, _)| at);
        let kept = if cuts_words { cut } else { all[..cut].rfind(' ').unwrap_or(cut) };
        let mut out = TextBuilder::new(&self.meter);
        out.push_part(text, 0..kept)?;
        out.push_text(&end)?;
        out.finish()
    }
}

fn n_chars(text: &Text) -> Result<usize> {
    text.meter().read(text.len())?;
    Ok(text.as_str().chars().count())
}

/// Parses a number of characters; negative values become 0.
fn width(value: &Value, who: &str) -> Result<usize> {
    let n = value
        .as_int()
        .ok_or_else(|| Fault::failed(format!("'{who}' expects a number, got {}", value.kind())))?;
    let n = usize::try_from(n.max(0)).ok().filter(|&n| n <= MAX_WIDTH);
    n.ok_or_else(|| Fault::failed(format!("'{who}' expects {MAX_WIDTH} at most")))
}
