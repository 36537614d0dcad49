//! Target: command-line arguments.

use std::ffi::OsString;

use kvant_cli::read_arguments;

/// Maximum length of an error line.
const LINE: usize = 1 << 16;

/// Returns whether arguments, separated by zero bytes, are accepted. They must be rejected in one
/// line, or parse to arguments that parse to themselves.
///
/// # Panics
///
/// If the property is violated.
pub fn arguments(bytes: &[u8]) -> bool {
    let args = bytes.split(|&b| b == 0).map(word);
    match read_arguments(std::iter::once("kvant".into()).chain(args)) {
        Ok(Some(read)) => {
            let again = read_arguments(read.iter().cloned());
            assert_eq!(again.as_ref(), Ok(&Some(read.clone())), "{bytes:02x?} read as {read:?}");
            true
        }
        Ok(None) => false,
        Err(line) => {
            let is_line = !line.is_empty() && line.lines().count() == 1 && line.len() < LINE;
            assert!(is_line, "{line:?}");
            false
        }
    }
}

#[cfg(unix)]
fn word(bytes: &[u8]) -> OsString {
    std::os::unix::ffi::OsStringExt::from_vec(bytes.to_vec())
}

#[cfg(not(unix))]
fn word(bytes: &[u8]) -> OsString {
    String::from_utf8_lossy(bytes).into_owned().into()
}

/// Returns a command line per command, with its own options and those of other programs.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let lines = [
        "run -m a.gguf -p hi -n 4 -c 0 -ngl 99 -fa on --temp -1 -ctk turbo3 -ctv=q8_0 --kv-policy sink:4,recent:2",
        "chat -cnv --top_k 5 --top-p=0.5 -sys x -s -1 --context-shift -- -b",
        "run -hf a/b:Q4_K_M -hff c.gguf --mlock -t 4 --no-mmap -no-cnv -p -5+3=?",
        "inspect bundled -v --json -c 4096",
        "doctor --tune -t 2",
        "bench --synthetic tiny:q4_0 -p 1,2 -n 3 -d 0,4 -r 2 -o csv -fa 0,1",
        "eval ppl -f t -c 64 --chunks 2 -ub 8 --state s --save-base b",
        "eval kld --base b -ctk q8_0,f16 -ctv turbo2 --kv-tail off --report r",
        "eval niah -c 64,128 --depths 3 --needles 1",
        "eval distortion --dim 64 --vectors 2 -o jsonl",
        "quantize -m in.gguf out.gguf q4_0 --quiet",
        "completions bash --log-level debug --log-format json",
    ];
    lines.iter().map(|line| line.replace(' ', "\0").into_bytes()).collect()
}
