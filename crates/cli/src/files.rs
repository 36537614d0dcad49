//! Files: texts, paths to write, and which files are models.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use kvant::gguf::printable_path;

use crate::failure::Failure;
use crate::output;

/// Maximum size of a text file, in bytes; bounds endless inputs such as devices.
const MAX_TEXT: u64 = 256 << 20;

/// Reads a prompt from a file or stdin as llama.cpp does: strips the last line break and a leading
/// byte order mark, which editors write.
pub fn read_prompt(path: &Path) -> Result<String, Failure> {
    let mut text = strip_bom(read_text(path)?);
    if text.ends_with('\n') {
        text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
    }
    Ok(text)
}

/// Returns `text` without its byte order mark.
pub fn strip_bom(text: String) -> String {
    text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text)
}

/// Reads a text file completely; `-` is stdin.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let read = |from: &mut dyn Read| {
        let mut bytes = Vec::new();
        from.take(MAX_TEXT + 1).read_to_end(&mut bytes).map(|_| bytes)
    };
    let bytes = match path == Path::new("-") {
        true => read(&mut std::io::stdin().lock()),
        // A pipe is accepted: shells pass process substitution as one.
        false => File::open(path).and_then(|mut file| read(&mut file)),
    };
    let bytes = bytes.map_err(|error| Failure::work(printable_path(path), error))?;
    if bytes.len() as u64 > MAX_TEXT {
        let message = format!("expected at most {} of text, got more", output::bytes(MAX_TEXT as usize));
        return Err(Failure::work(printable_path(path), message));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::work(printable_path(path), format!("expected UTF-8 text, got another byte at offset {at}"))
    })
}

/// Checks that the file at `path` can be written, before the work whose result it receives.
pub fn check_output_path(path: Option<&Path>) -> Result<(), Failure> {
    let Some(path) = path else { return Ok(()) };
    if is_model(path) {
        return Err(Failure::work(
            printable_path(path),
            "is a model, which would be replaced: choose another name",
        ));
    }
    check_writable(path)
}

fn check_writable(path: &Path) -> Result<(), Failure> {
    kvant::files::check_target(path).map_err(|error| Failure::work(printable_path(path), error))
}

/// Rejects an output path that is the source model at `from` or the weights of another folder.
pub fn check_model_output_path(path: &Path, from: Option<&Path>) -> Result<(), Failure> {
    let real = |path: &Path| path.canonicalize().ok();
    let is_same = from.is_some_and(|from| real(from).is_some_and(|from| real(path) == Some(from)));
    let refusal = |why: &str| Failure::work(printable_path(path), why);
    if is_same {
        return Err(refusal("is the source model: choose another name"));
    }
    if is_safetensors(path) {
        return Err(refusal("holds weights of a folder, which would be replaced: choose another name"));
    }
    check_writable(path)
}

/// Returns whether `path` is a model or a part of one.
pub fn is_model(path: &Path) -> bool {
    is_safetensors(path) || has_gguf_magic(path)
}

/// Returns whether `path` is a GGUF file of a language model: the first shard of a split one, and
/// no vision or audio encoder.
pub fn is_language_model(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let is_later_shard = name.contains("-of-") && !name.contains("-00001-of-");
    has_gguf_magic(path) && !name.starts_with("mmproj") && !is_later_shard
}

/// Returns whether `path` is a weight file of a Hugging Face folder.
pub fn is_safetensors(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("safetensors"))
}

/// Returns whether `path` is a file with the first bytes of GGUF.
pub fn has_gguf_magic(path: &Path) -> bool {
    let mut magic = [0; 4];
    // Reads only from a regular file: reading from a pipe would consume its data.
    path.is_file()
        && File::open(path).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok())
        && magic == *b"GGUF"
}

/// Returns whether a file has the name of a vision or audio encoder.
pub fn is_mmproj_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.contains("mmproj") && name.ends_with(".gguf")
}
