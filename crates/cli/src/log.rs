//! Messages besides results and errors: notes and, on request, the log. As text or as JSON lines,
//! always to stderr.

use std::fmt;
use std::io::{self, Write};

use clap::{Args, ValueEnum};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

use crate::console;

/// Level and format of the log.
#[derive(Args, Debug, Clone)]
pub struct LogArgs {
    /// Log level on stderr: notes (warn), progress of the work (info), details (debug)
    #[arg(long, global = true, value_name = "LEVEL", env = "KVANT_LOG_LEVEL", default_value = "warn", help_heading = LOG)]
    log_level: LogLevel,
    /// Log format
    #[arg(long, global = true, value_name = "FORMAT", env = "KVANT_LOG_FORMAT", default_value = "text", help_heading = LOG)]
    log_format: LogFormat,
}

const LOG: &str = "Log";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Plain text
    Text,
    /// An object per line: timestamp, level, fields
    Json,
}

/// A layer that receives spans of every level.
pub type Spans = Box<dyn Layer<Registry> + Send + Sync>;

/// Starts logging, and passes spans to the layer where one is given.
pub fn start(args: &LogArgs, spans: Option<Spans>) {
    let level = match args.log_level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let (log, lines) = (tracing_subscriber::registry().with(spans), tracing_subscriber::fmt::layer());
    match args.log_format {
        LogFormat::Text => {
            let lines = lines.with_writer(|| Lines(LogFormat::Text)).event_format(PlainFormat);
            log.with(lines.with_filter(level)).init();
        }
        LogFormat::Json => {
            log.with(lines.with_writer(|| Lines(LogFormat::Json)).json().with_filter(level)).init();
        }
    }
}

/// Writes the lines of the log; the subscriber writes each whole. A note stays on one line,
/// even if it quotes others.
struct Lines(LogFormat);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line).trim_end_matches('\n').to_owned();
        match self.0 {
            LogFormat::Text => console::eprint_line(text.replace('\n', "\\n")),
            LogFormat::Json => console::eprint_json(text),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Notes a deviation from the request: an unrequested action, or a requested one that is skipped.
pub fn note(text: impl fmt::Display) {
    tracing::warn!("{text}");
}

/// A line of text: `note: ...`.
struct PlainFormat;

impl<S, N> FormatEvent<S, N> for PlainFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let word = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "note",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let mut fields = Fields::default();
        event.record(&mut fields);
        writeln!(out, "{word}: {}{}", fields.message, fields.others)
    }
}

/// The fields of an event: its message, and the others as ` name=value`.
#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => self.others += &format!(" {name}={value:?}"),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
