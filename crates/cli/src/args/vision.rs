//! Arguments of the vision encoder.

use clap::Args;

/// Arguments of the vision encoder.
#[derive(Args, Debug, Clone, Default)]
pub struct VisionArgs {
    /// Vision encoder file (-mm), given as for -m [default: mmproj*.gguf beside the model, or in
    /// its repository]
    #[arg(long, value_name = "FILE", env = "KVANT_MMPROJ")]
    pub mmproj: Option<String>,
    /// Ignore a vision encoder beside the model
    #[arg(long, conflicts_with = "mmproj")]
    pub no_mmproj: bool,
}
