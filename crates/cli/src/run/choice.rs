//! `kvant run` on a terminal without a prompt: asks which model, and for the prompt.

use std::fs;
use std::path::Path;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::console;
use crate::failure::Failure;
use crate::files::is_language_model;
use crate::model_source::BUNDLED;

/// Models listed at most, so that the list fits a screen.
const MAX_LISTED: usize = 15;

/// The answers of the user.
#[derive(Debug, PartialEq)]
pub struct Choice {
    /// The model, as for `-m`; `None` if it was given.
    pub model: Option<String>,
    pub prompt: String,
}

/// Asks on the terminal, for a model unless one is `given`; `None` when the user leaves with
/// Ctrl-C or Ctrl-D.
pub fn ask(given: bool) -> Result<Option<Choice>, Failure> {
    let mut editor = DefaultEditor::new().map_err(|error| Failure::work("terminal", error))?;
    let models = if given { Vec::new() } else { models(Path::new("."), downloaded()) };
    choose(&models, &mut |question| match editor.readline(question) {
        Ok(line) => Ok(Some(line.trim().to_owned())),
        Err(ReadlineError::Interrupted | ReadlineError::Eof) => Ok(None),
        Err(error) => Err(Failure::work("terminal", error)),
    })
}

/// Asks for one of `models`, if there is a choice, and for a prompt; repeats what got no usable
/// answer.
fn choose(
    models: &[String],
    read: &mut dyn FnMut(&str) -> Result<Option<String>, Failure>,
) -> Result<Option<Choice>, Failure> {
    let mut model = models.first().cloned();
    if models.len() > 1 {
        for (index, name) in models.iter().enumerate() {
            console::eprint_line(format_args!("{:>3}  {name}", index + 1));
        }
        model = loop {
            let Some(line) = read("model [1]: ")? else { return Ok(None) };
            let number = if line.is_empty() { Some(1) } else { line.parse::<usize>().ok() };
            // Another model by its name: a file, a folder, an id of the hub.
            let Some(number) = number else { break Some(line) };
            if let Some(model) = models.get(number.wrapping_sub(1)) {
                break Some(model.clone());
            }
            console::eprint_line(format_args!("expected 1 to {}, or a model", models.len()));
        };
    }
    loop {
        match read("prompt: ")? {
            Some(prompt) if prompt.is_empty() => {}
            prompt => return Ok(prompt.map(|prompt| Choice { model, prompt })),
        }
    }
}

/// Returns the bundled model, those in `folder`, and the downloaded ones.
fn models(folder: &Path, downloaded: Vec<String>) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<String> = entries
        .filter(|entry| is_language_model(&entry.path()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    files.sort();
    let all = [BUNDLED.to_owned()].into_iter().chain(files).chain(downloaded);
    all.take(MAX_LISTED).collect()
}

#[cfg(feature = "hub")]
fn downloaded() -> Vec<String> {
    crate::hub::downloaded()
}

#[cfg(not(feature = "hub"))]
fn downloaded() -> Vec<String> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chooses with these answers, of which the last ends the input.
    fn answered(models: &[&str], answers: &[&str]) -> Option<Choice> {
        let models: Vec<String> = models.iter().map(|&name| name.to_owned()).collect();
        let mut answers = answers.iter();
        choose(&models, &mut |_| Ok(answers.next().map(|&answer| answer.to_owned()))).unwrap()
    }

    #[test]
    fn a_model_is_chosen_by_number_or_name() {
        let models = ["bundled", "a.gguf"];
        let choice = |model: &str| Some(Choice { model: Some(model.to_owned()), prompt: "Hello".to_owned() });
        assert_eq!(answered(&models, &["", "Hello"]), choice("bundled"));
        assert_eq!(answered(&models, &["2", "", "Hello"]), choice("a.gguf"));
        assert_eq!(answered(&models, &["0", "3", "2", "Hello"]), choice("a.gguf"));
        assert_eq!(answered(&models, &["user/name:Q4_K_M", "Hello"]), choice("user/name:Q4_K_M"));
        assert_eq!(answered(&models[..1], &["Hello"]), choice("bundled"));
        assert_eq!(answered(&[], &["Hello"]), Some(Choice { model: None, prompt: "Hello".to_owned() }));
        for left in [&[][..], &["2"], &["2", ""]] {
            assert_eq!(answered(&models, left), None);
        }
    }

    #[test]
    fn the_list_has_the_models_of_the_folder() {
        let dir = std::env::temp_dir().join(format!("kvant-choice-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        for (name, bytes) in
            [("b.gguf", "GGUF"), ("a.gguf", "GGUF"), ("mmproj-a.gguf", "GGUF"), ("c.txt", "x")]
        {
            fs::write(dir.join(name), bytes).unwrap();
        }
        let downloaded = vec!["user/name".to_owned()];
        assert_eq!(models(&dir, downloaded), ["bundled", "a.gguf", "b.gguf", "user/name"]);
        assert_eq!(models(&dir.join("absent"), Vec::new()), ["bundled"]);
        fs::remove_dir_all(&dir).unwrap();
    }
}
