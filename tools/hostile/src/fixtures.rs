//! Valid files to modify: the bundled model, and the program's own files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvant_gguf::{Gguf, Strings, Value};

use crate::case::{Case, Expect};
use crate::judge::{Verdict, judge};
use crate::run::run;

/// The bundled model's file.
pub const MODEL: &[u8] = include_bytes!("../../../crates/engine/assets/pocket-q8_0.gguf");
/// The prompt of the context files.
pub const PROMPT: &str = "Once upon a time there was a fox who counted stars, one by one.";

/// Sources of inputs.
pub struct Fixtures {
    /// The program.
    pub binary: PathBuf,
    /// The parsed model.
    pub gguf: Gguf,
    /// Names of its control tokens.
    pub specials: Vec<String>,
    /// Context files, each with its KV type.
    pub contexts: Vec<(&'static str, Vec<u8>)>,
    /// A base-logits file.
    pub base: Vec<u8>,
    /// An importance matrix.
    pub importance: Vec<u8>,
    /// Files of finished steps, with their measurement.
    pub states: Vec<(&'static str, Vec<u8>)>,
    /// Tokens of a prompt with the message `x`.
    pub n_prompt: usize,
    /// The port of a hub with faults.
    pub hub: u16,
}

/// Options for measurements of a short text in two chunks.
pub const MEASURE: [&str; 8] = ["-t", "1", "-c", "32", "--chunks", "2", "-q", "-f"];

impl Fixtures {
    /// Creates the files with `binary` in `beside`.
    pub fn open(binary: &Path, beside: &Path) -> io::Result<Self> {
        let gguf = Gguf::from_bytes(MODEL).map_err(io::Error::other)?;
        let folder = beside.join("given");
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("text"), text())?;
        let make = |args: &[&str], file: &str| -> io::Result<Vec<u8>> {
            let case = Case::new(&folder, args).expect(Expect::Answered).output("text").output(file);
            let outcome = run(&case, binary, beside)?;
            let verdict = judge(&case, &outcome);
            if verdict != Verdict::Answered {
                let stderr = String::from_utf8_lossy(&outcome.stderr).into_owned();
                return Err(io::Error::other(format!("{}: {verdict:?}: {stderr}", case.command(binary))));
            }
            match file {
                "-" => Ok(outcome.stdout),
                _ => fs::read(folder.join(file))
                    .and_then(|bytes| fs::remove_file(folder.join(file)).map(|()| bytes)),
            }
        };
        let context_file = |kv: &'static str| {
            let cache = ["--prompt-cache", "cache", "-ctk", kv, "-ctv", kv];
            let run = ["run", "-p", PROMPT, "-n", "2", "-c", "256", "-t", "1", "--temp", "0", "--quiet"];
            Ok::<_, io::Error>((kv, make(&[&run[..], &cache].concat(), "cache")?))
        };
        let contexts = ["f16", "turbo3", "q8_0"].map(context_file).into_iter().collect::<io::Result<_>>()?;
        let measure = |command: &[&str], option: &str, file: &str| {
            make(&[&["eval"], command, &MEASURE, &["text", option, file]].concat(), file)
        };
        let base = measure(&["ppl"], "--save-base", "base")?;
        let ppl = measure(&["ppl"], "--state", "state")?;
        let kld = measure(&["kld", "-ctk", "turbo3"], "--state", "state")?;
        let importance =
            ["imatrix", "-t", "1", "-c", "32", "--chunks", "2", "-q", "-f", "text", "-o", "cache"];
        let importance = make(&importance, "cache")?;
        let output = make(&["run", "-p", "x", "-n", "1", "--json"], "-")?;
        let output = String::from_utf8_lossy(&output).into_owned();
        let n_prompt = output.split("\"n_prompt\":").nth(1).and_then(|rest| rest.split(',').next());
        let n_prompt =
            n_prompt.and_then(|n| n.parse().ok()).ok_or_else(|| io::Error::other("no n_prompt"))?;
        Ok(Self {
            binary: binary.to_owned(),
            specials: control_tokens(&gguf),
            gguf,
            contexts,
            base,
            importance,
            states: vec![("ppl", ppl), ("kld", kld)],
            n_prompt,
            hub: crate::hub::start()?,
        })
    }
}

/// Returns enough words for two chunks.
pub fn text() -> Vec<u8> {
    "The quick brown fox jumps over the lazy dog, and no one minds it at all. ".repeat(12).into_bytes()
}

fn control_tokens(gguf: &Gguf) -> Vec<String> {
    const CONTROL: i128 = 3;
    let tokens = gguf.meta().get::<Strings>("tokenizer.ggml.tokens").into_iter().flatten();
    let Some(Value::Array(kinds)) = gguf.meta().value("tokenizer.ggml.token_type") else { return Vec::new() };
    let both = tokens.zip(kinds.iter());
    let control = both.filter(|(_, kind)| kind.as_integer() == Some(CONTROL));
    control.map(|(token, _)| String::from_utf8_lossy(token).into_owned()).collect()
}
