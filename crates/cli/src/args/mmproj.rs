//! Arguments of the vision and audio encoders.

use clap::Args;

/// Arguments of the vision and audio encoders.
#[derive(Args, Debug, Clone, Default)]
pub struct MmprojArgs {
    /// Vision or audio encoder file (-mm), given as for -m [default: mmproj*.gguf beside the model,
    /// or in its repository]
    #[arg(long, value_name = "FILE", env = "KVANT_MMPROJ")]
    pub mmproj: Option<String>,
    /// Ignore an encoder beside the model
    #[arg(long, conflicts_with = "mmproj")]
    pub no_mmproj: bool,
}
