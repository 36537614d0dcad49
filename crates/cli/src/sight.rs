//! Options of the vision encoder, and reading of image files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use kvant::gguf::printable_path;
use kvant::{Gguf, Model, Picture, check_mmproj};

use crate::args::ModelArgs;
use crate::failure::Failure;
use crate::place::Place;
use crate::{log, progress};

/// Arguments of the vision encoder.
#[derive(Args, Debug, Clone, Default)]
pub struct SightArgs {
    /// Vision encoder file (-mm), given as for -m [default: mmproj*.gguf beside the model, or in
    /// its repository]
    #[arg(long, value_name = "FILE", env = "KVANT_MMPROJ")]
    mmproj: Option<String>,
    /// Ignore a vision encoder beside the model
    #[arg(long, conflicts_with = "mmproj")]
    no_mmproj: bool,
}

/// What a command needs of the vision encoder.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    pub args: &'a SightArgs,
    /// Whether images were given.
    pub is_needed: bool,
}

impl Sight<'_> {
    /// Opens the vision encoder of the model in `gguf`, if one exists; an unusable one that was not
    /// requested is noted and ignored.
    pub fn open(&self, model: &ModelArgs, gguf: &Gguf, quiet: bool) -> Result<Option<Arc<Gguf>>, Failure> {
        let SightArgs { mmproj, no_mmproj } = self.args;
        if let Some(name) = mmproj {
            return model.open_file(name, quiet).map(|file| Some(Arc::new(file)));
        }
        let is_wanted = !no_mmproj && (self.is_needed || may_see(gguf));
        let found = if is_wanted { self.find(model, quiet)? } else { None };
        let Some(path) = found else {
            let line = "--image: no vision encoder beside the model: expected --mmproj FILE";
            return if self.is_needed { Err(Failure::Usage(line.to_owned())) } else { Ok(None) };
        };
        let file = kvant::open_file(&path)?;
        match check_mmproj(&file, gguf) {
            Err(error) if !self.is_needed => {
                log::note(format_args!("{}: {error}; images are disabled", printable_path(&path)));
                Ok(None)
            }
            checked => checked.map(|()| Some(Arc::new(file))).map_err(Failure::from),
        }
    }

    /// Finds the vision encoder beside the model, or in its repository.
    fn find(&self, model: &ModelArgs, quiet: bool) -> Result<Option<PathBuf>, Failure> {
        let path = match model.place.place()? {
            Place::Bundled => return Ok(None),
            #[cfg(feature = "hub")]
            Place::Hub(id) => return crate::hub::fetch_sight(&id, model.place.is_offline(), quiet),
            Place::File(path) => path,
        };
        #[cfg(not(feature = "hub"))]
        let _ = quiet;
        let mut found = beside(&path);
        if found.len() < 2 {
            return Ok(found.pop());
        }
        let first = printable_path(&found[0]);
        let line = format!(
            "several vision encoders beside the model, {first} among them: --mmproj FILE selects one"
        );
        if self.is_needed {
            return Err(Failure::Usage(line));
        }
        log::note(line);
        Ok(None)
    }
}

/// Returns whether the model's family may have a supported vision encoder; nothing is downloaded
/// otherwise.
fn may_see(gguf: &Gguf) -> bool {
    let architecture = gguf.meta().find::<&str>("general.architecture").ok().flatten();
    architecture.is_some_and(|architecture| !architecture.starts_with("gemma"))
}

/// Returns the vision encoder files in the model's folder.
fn beside(model: &Path) -> Vec<PathBuf> {
    let folder = if model.is_dir() { Some(model) } else { model.parent() };
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let is_called_so =
        |path: &PathBuf| path.file_name().is_some_and(|name| is_tower(&name.to_string_lossy()));
    let mut found: Vec<_> = entries.filter(|path| is_called_so(path) && path != model).collect();
    found.sort();
    found
}

/// Returns whether a file has the name of a vision encoder.
pub fn is_tower(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.contains("mmproj") && name.ends_with(".gguf")
}

/// Encodes the images in these files.
pub fn look(model: &Model, files: &[PathBuf], quiet: bool) -> Result<Vec<Picture>, Failure> {
    let bar = progress::bar("encoding", files.len() as u64, quiet || files.is_empty());
    let look = |path: &PathBuf| {
        let bytes = fs::read(path).map_err(|error| Failure::work(printable_path(path), error))?;
        let picture = model.look(&bytes).map_err(|error| Failure::work(printable_path(path), error))?;
        bar.inc(1);
        Ok(picture)
    };
    let pictures = files.iter().map(look).collect::<Result<Vec<_>, Failure>>();
    bar.finish_and_clear();
    pictures
}
