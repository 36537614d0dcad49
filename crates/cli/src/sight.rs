//! What looks at pictures, and the pictures.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use kvant::gguf::printable_path;
use kvant::{Gguf, Model, Picture};

use crate::args::ModelArgs;
use crate::failure::Failure;
use crate::place::Place;
use crate::{log, progress};

/// Which tower makes tokens of pictures.
#[derive(Args, Debug, Clone, Default)]
pub struct SightArgs {
    /// File that makes tokens of pictures for the model (-mm), by what -m takes [default: mmproj*.gguf beside the model, or in its
    /// repository]
    #[arg(long, value_name = "FILE", env = "KVANT_MMPROJ")]
    mmproj: Option<String>,
    /// Do without one that lies beside the model
    #[arg(long, conflicts_with = "mmproj")]
    no_mmproj: bool,
}

impl SightArgs {
    /// The file of the tower, where there is one.
    pub fn open(&self, model: &ModelArgs, quiet: bool) -> Result<Option<Arc<Gguf>>, Failure> {
        if let Some(name) = &self.mmproj {
            return model.open_file(name, quiet).map(|file| Some(Arc::new(file)));
        }
        if self.no_mmproj {
            return Ok(None);
        }
        let found = match model.place.place()? {
            Place::Bundled => None,
            Place::File(path) => beside(&path),
            #[cfg(feature = "hub")]
            Place::Hub(id) => crate::hub::fetch_sight(&id, model.place.is_offline(), quiet)?,
        };
        found.map(|path| Ok(Arc::new(kvant::open_file(path)?))).transpose()
    }

    /// The same where pictures are there to be seen.
    pub fn need(&self, model: &ModelArgs, quiet: bool) -> Result<Arc<Gguf>, Failure> {
        self.open(model, quiet)?.ok_or_else(|| {
            let line = "--image: no file beside the model makes tokens of pictures: expected --mmproj FILE";
            Failure::Usage(line.to_owned())
        })
    }
}

/// The one file of the model's folder that is called so.
fn beside(model: &Path) -> Option<PathBuf> {
    let folder = if model.is_dir() { model } else { model.parent()? };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let is_tower = |path: &PathBuf| {
        path.file_name().is_some_and(|name| is_tower(&name.to_string_lossy())) && path != model
    };
    let entries = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<_> = entries.filter(is_tower).collect();
    found.sort();
    match &found[..] {
        [] => None,
        [one] => Some(one.clone()),
        [first, ..] => {
            let (first, n) = (printable_path(first), found.len());
            log::note(format_args!(
                "{n} files beside the model make tokens of pictures, {first} among them: --mmproj takes one"
            ));
            None
        }
    }
}

/// Whether a file is called as towers are.
pub fn is_tower(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.contains("mmproj") && name.ends_with(".gguf")
}

/// The pictures in these files, for a model that sees.
pub fn look(model: &Model, files: &[PathBuf], quiet: bool) -> Result<Vec<Picture>, Failure> {
    let bar = progress::bar("looking", files.len() as u64, quiet || files.is_empty());
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
