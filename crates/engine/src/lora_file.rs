//! LoRA adapters of a model, as files.

use std::path::Path;
use std::sync::Arc;

use kvant_gguf::{Gguf, printable_path};

use crate::error::Error;

/// A low-rank adapter (LoRA, arXiv 2106.09685): trained updates of some of the model's matrices.
#[derive(Clone)]
pub struct LoraFile {
    /// Name of the adapter.
    pub name: String,
    /// The adapter (see [`open_lora`]): GGUF as `convert_lora_to_gguf.py` writes it, or a PEFT
    /// folder.
    pub file: Arc<Gguf>,
    /// LoRA scale: 1 is the scale of training.
    pub strength: f32,
}

impl LoraFile {
    /// Creates an adapter with this scale. Its name is the file name without `.gguf`, or the folder
    /// name; empty for a file in memory.
    pub fn new(file: impl Into<Arc<Gguf>>, strength: f32) -> Self {
        let file = file.into();
        let is_gguf =
            |path: &Path| path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
        let name =
            file.path().and_then(|path| if is_gguf(path) { path.file_stem() } else { path.file_name() });
        let name = name.map_or_else(String::new, |name| printable_path(Path::new(name)));
        Self { name, file, strength }
    }
}

/// Opens a LoRA adapter of the model in `base` without loading it: a GGUF file, or a PEFT folder,
/// presented as GGUF.
///
/// # Errors
/// A malformed GGUF file, or a folder that cannot be converted.
pub fn open_lora(path: impl AsRef<Path>, base: &Gguf) -> Result<Gguf, Error> {
    let path = path.as_ref();
    if path.is_dir() { Ok(kvant_hf::open_adapter(path, base)?) } else { Ok(Gguf::open(path)?) }
}
