//! Opens the vision encoder of a model, and encodes image files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant::gguf::printable_path;
use kvant::{EncodedImage, Gguf, Model, check_mmproj};

use crate::args::model::ModelSourceArgs;
use crate::args::vision::VisionArgs;
use crate::failure::Failure;
use crate::files::is_vision_encoder_name;
use crate::model_source::ModelSource;
use crate::{log, progress};

/// What a command needs of the vision encoder.
#[derive(Clone, Copy)]
pub struct VisionOptions<'a> {
    pub args: &'a VisionArgs,
    /// Whether images were given.
    pub is_needed: bool,
}

impl VisionOptions<'_> {
    /// Opens the vision encoder of the model in `gguf`, if one exists; an unusable one that was not
    /// requested is noted and ignored.
    pub fn open(
        &self,
        place: &ModelSourceArgs,
        gguf: &Gguf,
        quiet: bool,
    ) -> Result<Option<Arc<Gguf>>, Failure> {
        let VisionArgs { mmproj, no_mmproj } = self.args;
        if let Some(name) = mmproj {
            return place.open_other(name, quiet).map(|file| Some(Arc::new(file)));
        }
        let is_searched = !no_mmproj && (self.is_needed || may_have_vision(gguf));
        let found = if is_searched { self.find(place, quiet)? } else { None };
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
    fn find(&self, place: &ModelSourceArgs, quiet: bool) -> Result<Option<PathBuf>, Failure> {
        let path = match place.source()? {
            ModelSource::Bundled => return Ok(None),
            #[cfg(feature = "hub")]
            ModelSource::Hub(id) => {
                return crate::hub::fetch_vision_encoder(&id, place.offline, quiet);
            }
            ModelSource::File(path) => path,
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
fn may_have_vision(gguf: &Gguf) -> bool {
    let architecture = gguf.meta().find::<&str>("general.architecture").ok().flatten();
    architecture.is_some_and(|architecture| !architecture.starts_with("gemma"))
}

/// Returns the vision encoder files in the model's folder.
fn beside(model: &Path) -> Vec<PathBuf> {
    let folder = if model.is_dir() { Some(model) } else { model.parent() };
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let has_encoder_name =
        |path: &PathBuf| path.file_name().is_some_and(|name| is_vision_encoder_name(&name.to_string_lossy()));
    let mut found: Vec<_> = entries.filter(|path| has_encoder_name(path) && path != model).collect();
    found.sort();
    found
}

/// Encodes the images in these files.
pub fn encode_images(model: &Model, files: &[PathBuf], quiet: bool) -> Result<Vec<EncodedImage>, Failure> {
    let bar = progress::bar("encoding", files.len() as u64, quiet || files.is_empty());
    let encode = |path: &PathBuf| {
        let bytes = fs::read(path).map_err(|error| Failure::work(printable_path(path), error))?;
        let image = model.encode_image(&bytes).map_err(|error| Failure::work(printable_path(path), error))?;
        bar.inc(1);
        Ok(image)
    };
    let images = files.iter().map(encode).collect::<Result<Vec<_>, Failure>>();
    bar.finish_and_clear();
    images
}
