//! Arguments of decoding: the answer's length and speculative decoding.

use clap::Args;
use kvant::{GenerateOptions, SamplerParams};

use crate::failure::Failure;

/// Bounds the answer's length and configures speculative decoding.
#[derive(Args, Debug, Clone)]
pub struct DecodeArgs {
    /// Maximum number of tokens to generate; -1: until the model stops or the context is full
    #[arg(short = 'n', long, value_name = "N", env = "KVANT_PREDICT", default_value_t = -1, allow_negative_numbers = true)]
    predict: i64,
    #[command(flatten)]
    pub draft: DraftArgs,
}

/// Configures speculative decoding.
#[derive(Args, Debug, Clone)]
pub struct DraftArgs {
    /// Maximum number of draft tokens per step (speculative decoding). They come from earlier text
    /// (prompt lookup) and, where available, from the model's MTP layers or a draft model (-md); 0
    /// disables. The output is the same either way [default: adapts to the acceptance rate]
    #[arg(long, value_name = "N", env = "KVANT_DRAFT_MAX")]
    pub draft_max: Option<usize>,
    /// Draft model for speculative decoding (-md): a smaller model with the same vocabulary, or an
    /// EAGLE-3 or DFlash head of this model, given as for -m; on the CPU and on CUDA. The output is
    /// the same with it
    #[arg(long, value_name = "MODEL", env = "KVANT_MODEL_DRAFT")]
    pub model_draft: Option<String>,
}

impl DecodeArgs {
    /// Returns the options of a generation that samples with `sampler`.
    pub fn options(&self, sampler: SamplerParams) -> Result<GenerateOptions, Failure> {
        let max_tokens = self.max_tokens()?;
        let draft_max = self.draft.draft_max;
        Ok(GenerateOptions { max_tokens, sampler, draft_max, ..GenerateOptions::default() })
    }

    /// Returns the maximum number of tokens to generate; `None` is unlimited. llama.cpp's -2 is the
    /// same as -1 here.
    fn max_tokens(&self) -> Result<Option<usize>, Failure> {
        match self.predict {
            -1 | -2 => Ok(None),
            n => usize::try_from(n)
                .map(Some)
                .map_err(|_| Failure::Usage(format!("-n: expected -1 or more, got {n}"))),
        }
    }
}
