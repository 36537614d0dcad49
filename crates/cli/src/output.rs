//! Tables in the formats that every command offers, and human-readable sizes.

use std::io::{self, Write};

use clap::ValueEnum;
use kvant::gguf::{LoadOnlyType, printable};
use kvant::{DType, Gguf};
use serde_json::{Map, Value};

use crate::console;

/// `-o`: output format of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Markdown
    Md,
    /// Comma-separated values with a header
    Csv,
    /// A JSON array
    Json,
    /// One JSON object per line
    Jsonl,
}

/// Maximum characters of a cell, in tables other than JSON.
const CELL: usize = 256;

/// Parses a human-readable number of bytes: 8G, 512M, 1.5GiB, 4096.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let expected = || "expected a number of bytes such as 8G, 512M or 1.5GiB".to_owned();
    let at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let unit = unit.to_ascii_uppercase();
    let unit = unit.trim_end_matches('B').trim_end_matches('I');
    let power = ["", "K", "M", "G", "T"].iter().position(|name| *name == unit).ok_or_else(expected)?;
    let number: f64 = number.trim().parse().map_err(|_| expected())?;
    let bytes = number * 1024f64.powi(power as i32);
    if bytes >= 1.0 && bytes < isize::MAX as f64 { Ok(bytes as usize) } else { Err(expected()) }
}

/// One row: column names and values, in order.
pub type Row = Map<String, Value>;

/// Prints rows that all have the same columns.
pub fn print_rows(rows: &[Row], format: Format) -> io::Result<()> {
    let mut out = console::results();
    match format {
        Format::Json => {
            let json = serde_json::to_string_pretty(rows).expect("rows are plain JSON");
            writeln!(out, "{}", console::escaped(json))
        }
        Format::Jsonl => rows.iter().try_for_each(|row| {
            let json = serde_json::to_string(row).expect("rows are plain JSON");
            writeln!(out, "{}", console::escaped(json))
        }),
        Format::Csv => {
            let lines = header(rows).into_iter().chain(rows.iter().map(cells));
            lines.into_iter().try_for_each(|line| {
                writeln!(out, "{}", line.iter().map(|cell| quoted(cell)).collect::<Vec<_>>().join(","))
            })
        }
        Format::Md => print_markdown(&mut out, rows),
    }
}

fn print_markdown(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    let lines: Vec<Vec<String>> = header(rows).into_iter().chain(rows.iter().map(cells)).collect();
    let Some(first) = lines.first() else { return Ok(()) };
    let widths: Vec<usize> = (0..first.len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    for (i, line) in lines.iter().enumerate() {
        let cells = line.iter().zip(&widths).map(|(cell, &width)| format!(" {cell:<width$} |"));
        writeln!(out, "|{}", cells.collect::<String>())?;
        if i == 0 {
            let rules = widths.iter().map(|&width| format!("{}|", "-".repeat(width + 2)));
            writeln!(out, "|{}", rules.collect::<String>())?;
        }
    }
    Ok(())
}

fn header(rows: &[Row]) -> Option<Vec<String>> {
    rows.first().map(|row| row.keys().cloned().collect())
}

fn cells(row: &Row) -> Vec<String> {
    let cell = |value: &Value| match value {
        Value::String(text) => printable(text, CELL),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    row.values().map(cell).collect()
}

fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n']) {
        format!("\"{}\"", cell.replace('"', "\"\""))
    } else {
        cell.to_owned()
    }
}

/// Returns the model's types without kernels and the types that they are unpacked to on load;
/// `None` if all have kernels.
pub fn packed(gguf: &Gguf) -> Option<String> {
    let mut types: Vec<(LoadOnlyType, DType)> = Vec::new();
    for packed in LoadOnlyType::ALL {
        for info in gguf.tensors().iter().filter(|info| info.packed == Some(packed)) {
            if !types.contains(&(packed, info.dtype)) {
                types.push((packed, info.dtype));
            }
        }
    }
    (!types.is_empty()).then(|| unpacked(&types))
}

/// Formats such types and what they become: `iq2_xs, iq2_s as iq2; iq3_s as iq3`.
pub fn unpacked(types: &[(LoadOnlyType, DType)]) -> String {
    let runs = types.chunk_by(|a, b| a.1 == b.1);
    let describe = |run: &[(LoadOnlyType, DType)]| {
        let names: Vec<&str> = run.iter().map(|(packed, _)| packed.name()).collect();
        format!("{} as {}", names.join(", "), run[0].1)
    };
    runs.map(describe).collect::<Vec<_>>().join("; ")
}

/// Formats a number of bytes: `800 B`, `12.5 KiB`, `1.2 GiB`.
pub fn bytes(n: usize) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut size = n as f64;
    let mut unit = "B";
    for next in units {
        if size < 1024.0 {
            break;
        }
        (size, unit) = (size / 1024.0, next);
    }
    if unit == "B" { format!("{n} B") } else { format!("{size:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_with_one_unpacked_type_are_grouped() {
        use LoadOnlyType::{Iq2S, Iq2Xs, Iq3S};
        let types = [Iq2Xs, Iq2S, Iq3S].map(|packed| (packed, packed.loaded_type()));
        assert_eq!(unpacked(&types), "iq2_xs, iq2_s as iq2; iq3_s as iq3");
        assert_eq!(unpacked(&types[2..]), "iq3_s as iq3");
    }

    #[test]
    fn byte_counts_are_formatted_with_units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 30), "5.0 GiB");
        assert_eq!(bytes(usize::MAX), "16.0 EiB");
    }

    #[test]
    fn csv_cells_are_quoted_where_needed() {
        assert_eq!(quoted("a"), "a");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }

    #[test]
    fn byte_counts_with_units_are_parsed() {
        let cases =
            [("4096", 4096), ("8G", 8 << 30), ("512m", 512 << 20), ("1.5GiB", 3 << 29), ("2kb", 2048)];
        for (text, want) in cases {
            assert_eq!(parse_bytes(text), Ok(want), "{text}");
        }
        for text in ["", "G", "-1G", "0", "8X", "1e99T", "nan", "8GG"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
