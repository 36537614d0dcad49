//! Python's `strftime` in the C locale, for a time without a zone.

use jiff::civil::DateTime;
use jiff::fmt::strtime;

use super::Fault;
use super::text::TextBuilder;

/// Directives that jiff and Python format alike.
const COMMON: &str = "aAbBhCdDeFgGHIjklmMnpPRStTuUVwWyY%";

/// Appends `now` formatted by `format`. Unknown directives are written literally.
pub(super) fn strftime(format: &str, now: DateTime, out: &mut TextBuilder) -> Result<(), Fault> {
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.own(&rest[..at])?;
        let directive = directive(&rest[at..]);
        rest = &rest[at + directive.len()..];
        match written(directive, now) {
            Some(text) => out.own(&text)?,
            None => out.own(directive)?,
        }
    }
    out.own(rest)
}

/// Returns the directive at the start of `text`: a percent sign, optional flags and width, and a
/// letter.
fn directive(text: &str) -> &str {
    let is_flag = |c: char| "-_^#".contains(c) || c.is_ascii_digit();
    let letter = text[1..].trim_start_matches(is_flag).chars().next();
    let flags = text[1..].find(|c: char| !is_flag(c)).unwrap_or(text.len() - 1);
    &text[..1 + flags + letter.map_or(0, char::len_utf8)]
}

/// Formats a directive, if it is valid.
fn written(directive: &str, now: DateTime) -> Option<String> {
    let formatted = |format: &str| strtime::format(format, now).ok();
    match directive {
        "%c" => formatted("%a %b %e %H:%M:%S %Y"),
        "%x" => formatted("%m/%d/%y"),
        "%X" => formatted("%H:%M:%S"),
        "%r" => formatted("%I:%M:%S %p"),
        "%f" => Some(format!("{:06}", now.subsec_nanosecond() / 1000)),
        "%s" => now.to_zoned(jiff::tz::TimeZone::UTC).ok().map(|now| now.timestamp().as_second().to_string()),
        "%z" | "%Z" => Some(String::new()),
        _ if directive.len() > 1 && directive.ends_with(|c| COMMON.contains(c)) => formatted(directive),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_as_in_python() {
        let now = jiff::civil::date(2026, 1, 2).at(15, 4, 5, 6_007_008);
        for (format, want) in [
            ("%Y-%m-%d %H:%M:%S", "2026-01-02 15:04:05"),
            ("%d %B %Y, %A %j", "02 January 2026, Friday 002"),
            ("%c|%x|%X|%r", "Fri Jan  2 15:04:05 2026|01/02/26|15:04:05|03:04:05 PM"),
            ("%f %s [%Z%z]", "006007 1767366245 []"),
            ("%-d %e %-I%p %y %% %D %T", "2  2 3PM 26 % 01/02/26 15:04:05"),
            ("100%", "100%"),
            ("%Q %é %!% %", "%Q %é %!% %"),
            ("%", "%"),
            ("é%-", "é%-"),
        ] {
            let mut out = TextBuilder::new(&crate::jinja::limits::Budget::new());
            strftime(format, now, &mut out).unwrap();
            assert_eq!(out.finish().unwrap().as_str(), want, "{format}");
        }
    }
}
