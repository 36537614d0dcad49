//! Converts arguments as users type them into arguments that clap parses.
//!
//! llama.cpp's options differ from clap's in three ways: some have one dash and several letters
//! (`-ngl`), long ones may be written with underscores (`--top_k`), and the argument after an
//! option is its value even if it begins with a dash (`--temp -1`, `-p "-5+3=?"`). Options with
//! another name here, or without a counterpart, are resolved in `habits.rs`; unknown options are
//! rejected with the nearest name.

use std::ffi::{OsStr, OsString};
use std::iter::Peekable;

use clap::{Arg, Command};

use crate::failure::Failure;
use crate::foreign_flags::{self, Arity, Meaning};
use crate::model_source::ModelSource;

/// Holds the arguments for clap and the notes to print first.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Argv {
    /// The program's name and its arguments.
    pub args: Vec<OsString>,
    /// One line for each option that was dropped because it has no effect here.
    pub notes: Vec<String>,
}

/// Reads the arguments of `root`, a built command, beginning with the program's name.
///
/// # Errors
///
/// One line for the user: an unknown command or option with the nearest name, or the reason why
/// Kvant lacks the option.
pub fn read(root: &Command, args: impl Iterator<Item = OsString>) -> Result<Argv, Failure> {
    let mut args = args.peekable();
    let mut argv = Argv { args: args.next().into_iter().collect(), notes: Vec::new() };
    let mut reader = Reader { root, command: root, path: Vec::new(), argv: &mut argv, words: Vec::new() };
    while let Some(arg) = args.next() {
        if arg == "--" {
            reader.words.extend(args.by_ref());
        } else if reader.argument(arg, &mut args)? {
            reader.argv.args.extend(args.by_ref());
        }
    }
    let words = reader.words;
    if words.iter().any(|word| is_dashed(word)) {
        argv.args.push("--".into());
    }
    argv.args.extend(words);
    Ok(argv)
}

struct Reader<'a> {
    root: &'a Command,
    /// The command or subcommand being read.
    command: &'a Command,
    path: Vec<&'a str>,
    argv: &'a mut Argv,
    /// Positional arguments: neither options nor values.
    words: Vec<OsString>,
}

/// An option as written: with its dashes, without them, and the value after `=`.
struct WrittenOption<'t> {
    flag: &'t str,
    name: String,
    value: Option<&'t str>,
}

impl<'t> WrittenOption<'t> {
    fn new(text: &'t str) -> Self {
        let (flag, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        Self { flag, name: flag.trim_start_matches('-').replace('_', "-"), value }
    }

    fn is_long(&self) -> bool {
        self.flag.starts_with("--")
    }
}

impl Reader<'_> {
    /// Consumes an argument, with its value where it has one. Returns `true` when the remaining
    /// arguments go to clap unchanged.
    fn argument(
        &mut self,
        arg: OsString,
        rest: &mut Peekable<impl Iterator<Item = OsString>>,
    ) -> Result<bool, Failure> {
        let Some(text) = arg.to_str().filter(|_| is_dashed(&arg)).map(str::to_owned) else {
            return self.word(arg);
        };
        let written = WrittenOption::new(&text);
        if let Some(option) = self.find(&written) {
            let flag = match option.get_long().filter(|_| written.is_long()) {
                Some(_) => format!("--{}", written.name),
                None => format!("-{}", written.name),
            };
            self.push(flag, option.get_action().takes_values(), written.value, rest);
            return Ok(false);
        }
        if let Some(meaning) = self.foreign_option(&written).filter(|_| !self.path.is_empty()) {
            self.apply(meaning, &written, rest)?;
        } else if written.is_long() || is_name(&text) {
            return Err(self.unknown(&written));
        } else if self.attached(&text) {
            self.argv.args.push(arg);
        } else {
            self.words.push(arg);
        }
        Ok(false)
    }

    /// Returns the option of this command with this name.
    fn find(&self, written: &WrittenOption) -> Option<&Arg> {
        let mut args = self.command.get_arguments();
        if written.is_long() {
            args.find(|arg| long_names(arg).any(|long| long == written.name))
        } else {
            let mut letters = written.name.chars();
            let letter = letters.next().filter(|_| letters.next().is_none())?;
            args.find(|arg| arg.get_short() == Some(letter))
        }
    }

    /// Returns whether `text` is a short option with its value attached.
    fn attached(&self, text: &str) -> bool {
        let mut letters = text.chars().skip(1);
        let short = |letter| self.command.get_arguments().find(|arg| arg.get_short() == Some(letter));
        letters.next().and_then(short).is_some_and(|arg| arg.get_action().takes_values())
    }

    /// Returns the first meaning of a name that applies to this command.
    fn foreign_option(&self, written: &WrittenOption) -> Option<Meaning> {
        let dashes = if written.is_long() { "--" } else { "-" };
        let name = format!("{dashes}{}", written.name);
        let mut meanings = foreign_flags::of(&name);
        meanings.find(|meaning| match meaning {
            Meaning::Is(ours) => self.find(&WrittenOption::new(ours)).is_some(),
            _ => true,
        })
    }

    fn apply(
        &mut self,
        meaning: Meaning,
        written: &WrittenOption,
        rest: &mut Peekable<impl Iterator<Item = OsString>>,
    ) -> Result<(), Failure> {
        match meaning {
            Meaning::Is(ours) => {
                let takes = !ours.contains('=')
                    && self
                        .find(&WrittenOption::new(ours))
                        .is_some_and(|arg| arg.get_action().takes_values());
                self.push(ours.to_owned(), takes, written.value, rest);
            }
            Meaning::Nothing { takes, why } => {
                let value = written.value.map(str::to_owned).or_else(|| takes.next(rest));
                if !why.is_empty() && takes.needs_note(value.as_deref()) {
                    self.argv.notes.push(format!("{}: {why}", written.flag));
                }
            }
            Meaning::Only(command, _) if self.path.last() == Some(&command) => {}
            Meaning::Only(_, why) | Meaning::No(why) => {
                return Err(Failure::Usage(format!("{}: {why}", written.flag)));
            }
        }
        Ok(())
    }

    /// Passes an option to clap. Its value is the next argument, even one with a dash, unless that
    /// is an option of this program.
    fn push(
        &mut self,
        flag: String,
        takes: bool,
        value: Option<&str>,
        rest: &mut Peekable<impl Iterator<Item = OsString>>,
    ) {
        if let Some(value) = value {
            return self.argv.args.push(format!("{flag}={value}").into());
        }
        let next = rest.next_if(|next| takes && !self.is_ours(next));
        match next.as_deref().map(|next| next.to_str().filter(|_| is_dashed(next))) {
            Some(Some(dashed)) => self.argv.args.push(format!("{flag}={dashed}").into()),
            _ => {
                self.argv.args.push(flag.into());
                self.argv.args.extend(next);
            }
        }
    }

    fn is_ours(&self, arg: &OsStr) -> bool {
        arg.to_str().filter(|_| is_dashed(arg)).is_some_and(|text| {
            let written = WrittenOption::new(text);
            written.flag.len() > 1
                && (self.find(&written).is_some() || self.foreign_option(&written).is_some())
        })
    }

    /// Consumes a positional argument: the command, or one of the command's own.
    fn word(&mut self, word: OsString) -> Result<bool, Failure> {
        if !self.command.has_subcommands() {
            self.words.push(word);
            return Ok(false);
        }
        let Some(command) = self.command.find_subcommand(&word) else {
            return Err(self.unknown_command(&word.to_string_lossy()));
        };
        self.argv.args.push(word);
        // The argument of `help` names a topic, not a command to run.
        if command.get_name() == "help" {
            return Ok(true);
        }
        self.command = command;
        self.path.push(command.get_name());
        Ok(false)
    }

    fn unknown_command(&self, word: &str) -> Failure {
        let advice = if !self.path.is_empty() {
            nearest(word, self.command.get_subcommands().map(Command::get_name))
                .map(|near| format!("did you mean {near}?"))
        } else if let Some(instead) = foreign_flags::command(word) {
            Some(instead.to_owned())
        } else if word.contains(char::is_whitespace) || ModelSource::infer(word).is_some() {
            Some(format!("a command comes first: kvant run {}", quoted(word)))
        } else {
            nearest(word, self.command.get_subcommands().map(Command::get_name))
                .map(|near| format!("did you mean kvant {near}?"))
        };
        let advice = advice.map_or_else(String::new, |advice| format!("; {advice}"));
        Failure::Usage(format!("no command '{word}'{advice} (see {} --help)", self.name()))
    }

    /// Returns the error of an option before any command, naming a command that has it.
    fn before_command(&self, written: &WrittenOption, run: &Command) -> Failure {
        let mut nothing = Argv::default();
        let (path, words) = (vec!["run"], Vec::new());
        let reader = Reader { root: self.root, command: run, path, argv: &mut nothing, words };
        let flag = written.flag;
        Failure::Usage(match (reader.find(written), reader.foreign_option(written)) {
            (None, None) => format!("no option {flag} before a command (see kvant --help)"),
            (None, Some(Meaning::No(why) | Meaning::Only(_, why))) => format!("{flag}: {why}"),
            _ => format!("a command comes before {flag}: kvant run {flag} ... (see kvant --help)"),
        })
    }

    fn unknown(&self, written: &WrittenOption) -> Failure {
        let (flag, name) = (written.flag, self.name());
        if let Some(run) = self.root.find_subcommand("run").filter(|_| self.path.is_empty()) {
            return self.before_command(written, run);
        }
        let ours = self.command.get_arguments().flat_map(long_names);
        let theirs = foreign_flags::names()
            .filter(|name| matches!(self.foreign_option(&WrittenOption::new(name)), Some(Meaning::Is(_))));
        let names = ours.chain(theirs.filter_map(|name| name.strip_prefix("--")));
        let near = nearest(&written.name, names).map(|near| format!("; did you mean --{near}?"));
        Failure::Usage(format!("no option {flag} in {name}{} (see {name} --help)", near.unwrap_or_default()))
    }

    fn name(&self) -> String {
        [&["kvant"], &self.path[..]].concat().join(" ")
    }
}

impl Arity {
    /// Takes the value from the following arguments, where one follows.
    fn next(self, rest: &mut Peekable<impl Iterator<Item = OsString>>) -> Option<String> {
        let value = match self {
            Self::Nothing => None,
            Self::Value => rest.next(),
            Self::Switch => rest.next_if(|next| next.to_str().is_some_and(is_switch)),
        };
        value.map(|value| value.to_string_lossy().into_owned())
    }

    /// Returns whether a dropped value deserves a note: a switch that is on requests the default
    /// behaviour.
    fn needs_note(self, value: Option<&str>) -> bool {
        self != Self::Switch || value.is_some_and(|value| value.split(',').any(|one| OFF.contains(&one)))
    }
}

const ON: [&str; 6] = ["on", "auto", "1", "true", "enabled", "-1"];
const OFF: [&str; 4] = ["off", "0", "false", "disabled"];

fn is_switch(text: &str) -> bool {
    text.split(',').all(|one| ON.contains(&one) || OFF.contains(&one))
}

/// Returns the long names of an option.
fn long_names(arg: &Arg) -> impl Iterator<Item = &str> {
    arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten())
}

/// Returns whether an argument begins like an option.
fn is_dashed(arg: &OsStr) -> bool {
    arg.len() > 1 && arg.as_encoded_bytes().starts_with(b"-")
}

/// Returns whether an argument with one dash has the form of an option name: letters, then letters,
/// digits and dashes.
fn is_name(text: &str) -> bool {
    let name = text.split('=').next().unwrap_or_default().trim_start_matches('-');
    let mut letters = name.chars();
    letters.next().is_some_and(|c| c.is_ascii_alphabetic())
        && letters.next().is_none_or(|c| c.is_ascii_alphabetic())
        && letters.all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

/// Returns the name most similar to `name`, if any is similar enough.
fn nearest<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let rated = names.map(|other| (strsim::jaro_winkler(name, other), other));
    let best = rated.max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(alike, _)| *alike > 0.8).map(|(_, name)| name)
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    if word.contains(char::is_whitespace) { format!("\"{word}\"") } else { word.to_owned() }
}

#[cfg(test)]
mod tests;
