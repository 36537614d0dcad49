//! Opens the vision or audio encoder of a model, and encodes image and audio files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant::gguf::printable_path;
use kvant::{EncodeOptions, EncodedMedia, Gguf, MediaKind, Model, check_mmproj};

use crate::args::mmproj::MmprojArgs;
use crate::args::model::ModelSourceArgs;
use crate::failure::Failure;
use crate::files::is_mmproj_name;
use crate::model_source::ModelSource;
use crate::{log, progress};

/// An image or audio file of a prompt.
#[derive(Clone)]
pub struct MediaFile {
    pub kind: MediaKind,
    pub path: PathBuf,
}

/// Returns the files of `--image` and `--audio`, images first.
pub fn media_files(images: &[PathBuf], audio: &[PathBuf]) -> Vec<MediaFile> {
    let of = |kind: MediaKind, paths: &[PathBuf]| {
        paths.iter().map(|path| MediaFile { kind, path: path.clone() }).collect::<Vec<_>>()
    };
    [of(MediaKind::Image, images), of(MediaKind::Audio, audio)].concat()
}

/// What a command needs of the encoders.
#[derive(Clone, Copy)]
pub struct MediaOptions<'a> {
    pub args: &'a MmprojArgs,
    /// Files that were given.
    pub files: &'a [MediaFile],
}

impl MediaOptions<'_> {
    /// Opens the encoder of the model in `gguf`, if one exists; an unusable one that was not
    /// requested is noted and ignored.
    pub fn open(
        &self,
        place: &ModelSourceArgs,
        gguf: &Gguf,
        quiet: bool,
    ) -> Result<Option<Arc<Gguf>>, Failure> {
        let MmprojArgs { mmproj, no_mmproj } = self.args;
        let needed = self.files.first().map(|file| file.kind);
        if let Some(name) = mmproj {
            return place.open_other(name, quiet).map(|file| Some(Arc::new(file)));
        }
        let is_searched = !no_mmproj && (needed.is_some() || may_have_encoder(gguf));
        let found = if is_searched { self.find(place, quiet)? } else { None };
        let Some(path) = found else {
            let line = match needed {
                None => return Ok(None),
                Some(MediaKind::Image) => {
                    "--image: no vision encoder beside the model: expected --mmproj FILE"
                }
                Some(MediaKind::Audio) => {
                    "--audio: no audio encoder beside the model: expected --mmproj FILE"
                }
            };
            return Err(Failure::Usage(line.to_owned()));
        };
        let file = kvant::open_file(&path)?;
        match check_mmproj(&file, gguf) {
            Err(error) if needed.is_none() => {
                let path = printable_path(&path);
                log::note(format_args!("{path}: {error}; images and audio are disabled"));
                Ok(None)
            }
            checked => checked.map(|()| Some(Arc::new(file))).map_err(Failure::from),
        }
    }

    /// Finds the encoder beside the model, or in its repository.
    fn find(&self, place: &ModelSourceArgs, quiet: bool) -> Result<Option<PathBuf>, Failure> {
        let path = match place.source()? {
            ModelSource::Bundled => return Ok(None),
            #[cfg(feature = "hub")]
            ModelSource::Hub(id) => {
                return crate::hub::fetch_mmproj(&id, place.offline, quiet);
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
        let line =
            format!("several encoders beside the model, {first} among them: --mmproj FILE selects one");
        if !self.files.is_empty() {
            return Err(Failure::Usage(line));
        }
        log::note(line);
        Ok(None)
    }
}

/// Returns whether the model's family may have a supported encoder; nothing is downloaded
/// otherwise.
fn may_have_encoder(gguf: &Gguf) -> bool {
    let architecture = gguf.meta().find::<&str>("general.architecture").ok().flatten();
    architecture.is_some_and(|architecture| !architecture.starts_with("gemma"))
}

/// Returns the encoder files in the model's folder.
fn beside(model: &Path) -> Vec<PathBuf> {
    let folder = if model.is_dir() { Some(model) } else { model.parent() };
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let has_encoder_name =
        |path: &PathBuf| path.file_name().is_some_and(|name| is_mmproj_name(&name.to_string_lossy()));
    let mut found: Vec<_> = entries.filter(|path| has_encoder_name(path) && path != model).collect();
    found.sort();
    found
}

/// Encodes these files, of at most `max_tokens` tokens each.
pub fn encode_media(
    model: &Model,
    files: &[MediaFile],
    max_tokens: usize,
    quiet: bool,
) -> Result<Vec<EncodedMedia>, Failure> {
    let options = EncodeOptions { max_tokens, ..Default::default() };
    let bar = progress::bar("encoding", files.len() as u64, quiet || files.is_empty());
    let encode = |MediaFile { kind, path }: &MediaFile| {
        let bytes = fs::read(path).map_err(|error| Failure::work(printable_path(path), error))?;
        let media = model.encode_media(*kind, &bytes, &options);
        let media = media.map_err(|error| Failure::work(printable_path(path), error))?;
        bar.inc(1);
        Ok(media)
    };
    let media = files.iter().map(encode).collect::<Result<Vec<_>, Failure>>();
    bar.finish_and_clear();
    media
}
