//! One hostile input: files in a folder of its own, and a command that meets them.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What has to come of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// An answer, or a refusal in one line.
    Either,
    /// A refusal: the input is surely wrong.
    Refused,
    /// An answer: what is hostile about the input must not matter.
    Answered,
    /// An answer that counts at least so many tokens of a prompt: what it says has not become special tokens.
    PromptOf(usize),
}

/// Where an end of the program leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// To a file that is looked at.
    Kept,
    /// To `/dev/full`.
    Full,
    /// Nowhere.
    Closed,
}

/// A command and what it meets. It runs in [`Case::folder`].
pub struct Case {
    /// Where its files are, made for it alone.
    pub folder: PathBuf,
    /// Arguments behind the program's name; none holds a zero byte.
    pub args: Vec<OsString>,
    /// Variables of the environment, beside a home of ours.
    pub env: Vec<(OsString, OsString)>,
    /// What it reads; `None` is a closed end.
    pub stdin: Option<Vec<u8>>,
    /// Where results go.
    pub stdout: End,
    /// Where errors go.
    pub stderr: End,
    /// What has to come of it.
    pub expect: Expect,
    /// Names in the folder that it may make or change, with what they have to be if it succeeds.
    pub outputs: Vec<String>,
    /// Whether failures are told and lived with, as in a conversation.
    pub is_talk: bool,
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl Case {
    /// A command without files, with an empty stdin.
    pub fn new<A: Into<OsString>>(folder: &Path, args: impl IntoIterator<Item = A>) -> Self {
        Self {
            folder: folder.to_owned(),
            args: args.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            stdin: Some(Vec::new()),
            stdout: End::Kept,
            stderr: End::Kept,
            expect: Expect::Either,
            outputs: Vec::new(),
            is_talk: false,
            files: Vec::new(),
        }
    }

    /// With what has to come of it.
    pub fn expect(mut self, expect: Expect) -> Self {
        self.expect = expect;
        self
    }

    /// With more arguments.
    pub fn and<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// With something to read on stdin.
    pub fn reads(mut self, stdin: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(stdin.into());
        self
    }

    /// As a conversation, which tells what failed and goes on.
    pub fn talks(mut self) -> Self {
        self.is_talk = true;
        self
    }

    /// With a file in the folder, which has to stay as it is unless it is an output.
    pub fn file(mut self, name: &str, bytes: Vec<u8>) -> io::Result<Self> {
        let path = self.folder.join(name);
        fs::write(&path, &bytes)?;
        self.files.push((path, bytes));
        Ok(self)
    }

    /// With a name that may be made or changed.
    pub fn output(mut self, name: &str) -> Self {
        self.outputs.push(name.to_owned());
        self
    }

    /// The files that were put there, with what they held.
    pub fn files(&self) -> &[(PathBuf, Vec<u8>)] {
        &self.files
    }

    /// The command as a shell takes it.
    pub fn command(&self, binary: &Path) -> String {
        let quoted = |word: &OsString| {
            let bytes = word.as_encoded_bytes();
            let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_./:=,".contains(b);
            let cut = &bytes[..bytes.len().min(400)];
            match bytes.iter().all(plain) && !bytes.is_empty() {
                true => String::from_utf8_lossy(bytes).into_owned(),
                false => format!("$'{}'", cut.escape_ascii()),
            }
        };
        let env = self.env.iter().map(|(key, value)| format!("{}={} ", key.display(), quoted(value)));
        let args = self.args.iter().map(|arg| format!(" {}", quoted(arg)));
        let ends = format!(" # stdin {:?} bytes", self.stdin.as_ref().map(Vec::len));
        let ends = format!("{ends}, stdout {:?}, stderr {:?}", self.stdout, self.stderr);
        env.collect::<String>() + &binary.display().to_string() + &args.collect::<String>() + &ends
    }
}
