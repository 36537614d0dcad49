//! One hostile input: files in its own folder, and a command that reads them.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Expected result of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// An answer, or a rejection in one line.
    Either,
    /// A rejection: the input is certainly invalid.
    Refused,
    /// An answer: the hostile part must have no effect.
    Answered,
    /// An answer with at least this many prompt tokens: the text must not become special tokens.
    PromptOf(usize),
}

/// Destination of an output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// A file that is checked.
    Kept,
    /// To `/dev/full`.
    Full,
    /// Closed.
    Closed,
}

/// A command and its input. It runs in [`Case::folder`].
pub struct Case {
    /// Folder of its files, created for it alone.
    pub folder: PathBuf,
    /// Arguments after the program's name, without zero bytes.
    pub args: Vec<OsString>,
    /// Environment variables, besides the home folder of the test.
    pub env: Vec<(OsString, OsString)>,
    /// Its stdin; `None` is closed.
    pub stdin: Option<Vec<u8>>,
    /// Destination of stdout.
    pub stdout: Stream,
    /// Destination of stderr.
    pub stderr: Stream,
    /// The expected result.
    pub expect: Expect,
    /// Names in the folder that it may create or change, with their required content on success.
    pub outputs: Vec<String>,
    /// Whether failures are reported without ending the program, as in a conversation.
    pub is_conversation: bool,
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl Case {
    /// Creates a command without files, with an empty stdin.
    pub fn new<A: Into<OsString>>(folder: &Path, args: impl IntoIterator<Item = A>) -> Self {
        Self {
            folder: folder.to_owned(),
            args: args.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            stdin: Some(Vec::new()),
            stdout: Stream::Kept,
            stderr: Stream::Kept,
            expect: Expect::Either,
            outputs: Vec::new(),
            is_conversation: false,
            files: Vec::new(),
        }
    }

    /// Sets the expected result.
    pub fn expect(mut self, expect: Expect) -> Self {
        self.expect = expect;
        self
    }

    /// Appends arguments.
    pub fn and<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets stdin.
    pub fn reads(mut self, stdin: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(stdin.into());
        self
    }

    /// Marks a conversation, which reports failures and continues.
    pub fn conversation(mut self) -> Self {
        self.is_conversation = true;
        self
    }

    /// Adds a file to the folder, which must stay unchanged unless it is an output.
    pub fn file(mut self, name: &str, bytes: Vec<u8>) -> io::Result<Self> {
        let path = self.folder.join(name);
        fs::write(&path, &bytes)?;
        self.files.push((path, bytes));
        Ok(self)
    }

    /// Adds a name that may be created or changed.
    pub fn output(mut self, name: &str) -> Self {
        self.outputs.push(name.to_owned());
        self
    }

    /// Returns the added files, with their content.
    pub fn files(&self) -> &[(PathBuf, Vec<u8>)] {
        &self.files
    }

    /// Returns the command in shell syntax.
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
