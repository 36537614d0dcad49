//! Arguments as people type them, made into what clap reads.
//!
//! llama.cpp's options differ from clap's in three ways: some have one dash and several letters (`-ngl`), long ones may be
//! written with underscores (`--top_k`), and the argument after an option is its value whatever it looks like (`--temp -1`,
//! `-p "-5+3=?"`). Options that go by another name here, or by none, are looked up in `habits.rs`; what nobody
//! knows is refused with the nearest name.

use std::ffi::{OsStr, OsString};
use std::iter::Peekable;

use clap::{Arg, Command};

use crate::failure::Failure;
use crate::habits::{self, Means, Takes};
use crate::place::Place;

/// Arguments for clap, and what is to be said before they are obeyed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Argv {
    /// The program's name and its arguments.
    pub args: Vec<OsString>,
    /// Options that were left out because nothing is to be done for them, a line each.
    pub notes: Vec<String>,
}

/// Reads the arguments of `root`, a command that has been built, beginning with the program's name.
///
/// # Errors
/// A line for whoever typed them: no such command or option and what was perhaps meant, or why Kvant has none.
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
    /// The command or subcommand that is read.
    command: &'a Command,
    path: Vec<&'a str>,
    argv: &'a mut Argv,
    /// What is neither an option nor a value.
    words: Vec<OsString>,
}

/// How an option was written: with its dashes, without, and what stands behind `=`.
struct Written<'t> {
    whole: &'t str,
    name: String,
    value: Option<&'t str>,
}

impl<'t> Written<'t> {
    fn new(text: &'t str) -> Self {
        let (whole, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        Self { whole, name: whole.trim_start_matches('-').replace('_', "-"), value }
    }

    fn is_long(&self) -> bool {
        self.whole.starts_with("--")
    }
}

impl Reader<'_> {
    /// Takes an argument, with its value where it has one. `true` when clap is to have the others as they are.
    fn argument(
        &mut self,
        arg: OsString,
        rest: &mut Peekable<impl Iterator<Item = OsString>>,
    ) -> Result<bool, Failure> {
        let Some(text) = arg.to_str().filter(|_| is_dashed(&arg)).map(str::to_owned) else {
            return self.word(arg);
        };
        let written = Written::new(&text);
        if let Some(known) = self.find(&written) {
            let flag = match known.get_long().filter(|_| written.is_long()) {
                Some(_) => format!("--{}", written.name),
                None => format!("-{}", written.name),
            };
            self.push(flag, known.get_action().takes_values(), written.value, rest);
            return Ok(false);
        }
        if let Some(means) = self.habit(&written).filter(|_| !self.path.is_empty()) {
            self.obey(means, &written, rest)?;
        } else if written.is_long() || is_name(&text) {
            return Err(self.unknown(&written));
        } else if self.attached(&text) {
            self.argv.args.push(arg);
        } else {
            self.words.push(arg);
        }
        Ok(false)
    }

    /// The option of this command with this name.
    fn find(&self, written: &Written) -> Option<&Arg> {
        let mut args = self.command.get_arguments();
        if written.is_long() {
            args.find(|arg| longs(arg).any(|long| long == written.name))
        } else {
            let mut letters = written.name.chars();
            let letter = letters.next().filter(|_| letters.next().is_none())?;
            args.find(|arg| arg.get_short() == Some(letter))
        }
    }

    /// Whether this is a letter of ours with its value behind it, or several letters without values.
    fn attached(&self, text: &str) -> bool {
        let mut letters = text.chars().skip(1);
        let short = |letter| self.command.get_arguments().find(|arg| arg.get_short() == Some(letter));
        letters.next().and_then(short).is_some_and(|arg| arg.get_action().takes_values())
    }

    /// The first thing that a name means to this command.
    fn habit(&self, written: &Written) -> Option<Means> {
        let dashes = if written.is_long() { "--" } else { "-" };
        let name = format!("{dashes}{}", written.name);
        let mut means = habits::of(&name);
        means.find(|means| match means {
            Means::Is(ours) => self.find(&Written::new(ours)).is_some(),
            _ => true,
        })
    }

    fn obey(
        &mut self,
        means: Means,
        written: &Written,
        rest: &mut Peekable<impl Iterator<Item = OsString>>,
    ) -> Result<(), Failure> {
        match means {
            Means::Is(ours) => {
                let takes = !ours.contains('=')
                    && self.find(&Written::new(ours)).is_some_and(|arg| arg.get_action().takes_values());
                self.push(ours.to_owned(), takes, written.value, rest);
            }
            Means::Nothing { takes, why } => {
                let value = written.value.map(str::to_owned).or_else(|| takes.next(rest));
                if !why.is_empty() && takes.is_worth_a_note(value.as_deref()) {
                    self.argv.notes.push(format!("{}: {why}", written.whole));
                }
            }
            Means::Only(command, _) if self.path.last() == Some(&command) => {}
            Means::Only(_, why) | Means::No(why) => {
                return Err(Failure::Usage(format!("{}: {why}", written.whole)));
            }
        }
        Ok(())
    }

    /// Hands an option to clap. Its value is the next argument, even one with a dash, unless that is an option of ours.
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
            let written = Written::new(text);
            written.whole.len() > 1 && (self.find(&written).is_some() || self.habit(&written).is_some())
        })
    }

    /// A word: the command, or something for it.
    fn word(&mut self, word: OsString) -> Result<bool, Failure> {
        if !self.command.has_subcommands() {
            self.words.push(word);
            return Ok(false);
        }
        let Some(command) = self.command.find_subcommand(&word) else {
            return Err(self.no_command(&word.to_string_lossy()));
        };
        self.argv.args.push(word);
        // What `help` is asked about is no command to obey.
        if command.get_name() == "help" {
            return Ok(true);
        }
        self.command = command;
        self.path.push(command.get_name());
        Ok(false)
    }

    fn no_command(&self, word: &str) -> Failure {
        let told = if !self.path.is_empty() {
            nearest(word, self.command.get_subcommands().map(Command::get_name))
                .map(|near| format!("did you mean {near}?"))
        } else if let Some(instead) = habits::command(word) {
            Some(instead.to_owned())
        } else if word.contains(char::is_whitespace) || Place::guess(word).is_some() {
            Some(format!("a command comes first: kvant run {}", quoted(word)))
        } else {
            nearest(word, self.command.get_subcommands().map(Command::get_name))
                .map(|near| format!("did you mean kvant {near}?"))
        };
        let told = told.map_or_else(String::new, |told| format!("; {told}"));
        Failure::Usage(format!("no command '{word}'{told} (see {} --help)", self.name()))
    }

    /// An option before any command: perhaps one of the command that was left out.
    fn before_command(&self, written: &Written, run: &Command) -> Failure {
        let mut nothing = Argv::default();
        let (path, words) = (vec!["run"], Vec::new());
        let there = Reader { root: self.root, command: run, path, argv: &mut nothing, words };
        let whole = written.whole;
        Failure::Usage(match (there.find(written), there.habit(written)) {
            (None, None) => format!("no option {whole} before a command (see kvant --help)"),
            (None, Some(Means::No(why) | Means::Only(_, why))) => format!("{whole}: {why}"),
            _ => format!("a command comes before {whole}: kvant run {whole} ... (see kvant --help)"),
        })
    }

    fn unknown(&self, written: &Written) -> Failure {
        let (whole, name) = (written.whole, self.name());
        if let Some(run) = self.root.find_subcommand("run").filter(|_| self.path.is_empty()) {
            return self.before_command(written, run);
        }
        let ours = self.command.get_arguments().flat_map(longs);
        let theirs =
            habits::names().filter(|name| matches!(self.habit(&Written::new(name)), Some(Means::Is(_))));
        let names = ours.chain(theirs.filter_map(|name| name.strip_prefix("--")));
        let near = nearest(&written.name, names).map(|near| format!("; did you mean --{near}?"));
        Failure::Usage(format!("no option {whole} in {name}{} (see {name} --help)", near.unwrap_or_default()))
    }

    fn name(&self) -> String {
        [&["kvant"], &self.path[..]].concat().join(" ")
    }
}

impl Takes {
    /// The value, where there is one in what follows.
    fn next(self, rest: &mut Peekable<impl Iterator<Item = OsString>>) -> Option<String> {
        let value = match self {
            Self::Nothing => None,
            Self::Value => rest.next(),
            Self::Switch => rest.next_if(|next| next.to_str().is_some_and(is_switch)),
        };
        value.map(|value| value.to_string_lossy().into_owned())
    }

    /// Whether anyone would expect something of this value: a switch that is on does what is done anyway.
    fn is_worth_a_note(self, value: Option<&str>) -> bool {
        self != Self::Switch || value.is_some_and(|value| value.split(',').any(|one| OFF.contains(&one)))
    }
}

const ON: [&str; 6] = ["on", "auto", "1", "true", "enabled", "-1"];
const OFF: [&str; 4] = ["off", "0", "false", "disabled"];

fn is_switch(text: &str) -> bool {
    text.split(',').all(|one| ON.contains(&one) || OFF.contains(&one))
}

/// The long names of an option.
fn longs(arg: &Arg) -> impl Iterator<Item = &str> {
    arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten())
}

/// Whether an argument begins as options do.
fn is_dashed(arg: &OsStr) -> bool {
    arg.len() > 1 && arg.as_encoded_bytes().starts_with(b"-")
}

/// Whether an argument with one dash looks like the name of an option: letters, then letters, digits and dashes.
fn is_name(text: &str) -> bool {
    let name = text.split('=').next().unwrap_or_default().trim_start_matches('-');
    let mut letters = name.chars();
    letters.next().is_some_and(|c| c.is_ascii_alphabetic())
        && letters.next().is_none_or(|c| c.is_ascii_alphabetic())
        && letters.all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

/// The name that is most like `name`, if one is.
fn nearest<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let rated = names.map(|other| (strsim::jaro_winkler(name, other), other));
    let best = rated.max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(alike, _)| *alike > 0.8).map(|(_, name)| name)
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    if word.contains(char::is_whitespace) { format!("\"{word}\"") } else { word.to_owned() }
}

#[cfg(test)]
mod tests;
