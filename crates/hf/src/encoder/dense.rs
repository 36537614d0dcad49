//! Products behind pooling (`Dense` of sentence-transformers), each in a folder of its own.

use kvant_gguf::GgufWriter;

use crate::error::HfError;
use crate::folder::Folder;
use crate::pooling;
use crate::safetensors::{Shards, Stored};

/// Their names in GGUF, in order.
pub(super) const NAMES: [&str; 2] = ["dense_2", "dense_3"];
/// The activation of a product without one.
const IDENTITY: &str = "torch.nn.modules.linear.Identity";
/// Its only tensor: GGUF has no bias.
pub(super) const WEIGHT: &str = "linear.weight";

/// A product behind pooling.
pub(super) struct Dense {
    pub weight: Stored,
    n_in: u32,
    n_out: u32,
}

/// Reads the products of a folder, whose files join `shards`.
///
/// # Errors
/// An activation, a bias, too many products, or a file that is missing or invalid.
pub(super) fn read(folder: &mut Folder, shards: &mut Shards) -> Result<Vec<Dense>, HfError> {
    let paths = pooling::dense_modules(folder)?;
    if let Some(path) = paths.get(NAMES.len()) {
        let what = format!("more than {} products behind pooling ({path})", NAMES.len());
        return Err(HfError::Unsupported { path: folder.path().to_owned(), what });
    }
    paths.iter().map(|path| read_one(folder, shards, path)).collect()
}

fn read_one(folder: &mut Folder, shards: &mut Shards, path: &str) -> Result<Dense, HfError> {
    const ACTIVATION: &str = "activation_function";
    let name = format!("{path}/config.json");
    let Some(json) = folder.json(&name)? else {
        return Err(HfError::Missing { name, of: Some("modules.json lists it".to_owned()) });
    };
    let config = json.object()?;
    let activation = config.find_str(ACTIVATION)?.unwrap_or("nothing");
    if activation != IDENTITY {
        return Err(config.bad(ACTIVATION, IDENTITY, activation));
    }
    let mut stored = shards.add_file(folder, &format!("{path}/model.safetensors"))?;
    let weight = stored.remove(WEIGHT);
    if let Some(name) = stored.into_keys().next() {
        return Err(HfError::Unknown { name, family: "Dense" });
    }
    let missing = || HfError::Missing { name: WEIGHT.to_owned(), of: Some(path.to_owned()) };
    let weight = weight.ok_or_else(missing)?;
    let (n_in, n_out) = (config.size("in_features")?, config.size("out_features")?);
    if weight.shape != [n_out as usize, n_in as usize] {
        let (name, expected) = (WEIGHT.to_owned(), format!("{n_out} x {n_in}"));
        return Err(HfError::Shape { name, expected, got: weight.shape });
    }
    Ok(Dense { weight, n_in, n_out })
}

/// Writes their sizes.
pub(super) fn write_sizes(writer: &mut GgufWriter, arch: &str, all: &[Dense]) -> Result<(), HfError> {
    for (dense, name) in all.iter().zip(NAMES) {
        writer.set(&format!("{arch}.{name}_feat_in"), dense.n_in)?;
        writer.set(&format!("{arch}.{name}_feat_out"), dense.n_out)?;
    }
    Ok(())
}
