//! Draft model: a smaller model that proposes tokens for *speculative decoding* (Leviathan et al.,
//! arXiv 2211.17192; Chen et al., arXiv 2302.01318).
//!
//! Draft tokens never change the output, see [`Drafter`](crate::Drafter): the tokens of an answer
//! are sampled from the logits of the target model, whichever drafter proposed them.

use std::sync::Arc;

use kvant_backend::DeviceInfo;
use kvant_codec::DType;
use kvant_gguf::{Gguf, Strings, printable};
use kvant_model::Config;

use crate::error::Error;
use crate::runtime::LoadedModel;
use crate::session::KvOptions;

const TOKENS: &str = "tokenizer.ggml.tokens";

/// Tokens that may differ between the two vocabularies, such as special tokens renamed by later
/// training. A draft of such a token is rejected, which costs only time.
const MAX_OTHERS: usize = 256;

/// Characters of a token in an error.
const MAX_SHOWN: usize = 32;

/// KV-cache types of a draft model. Its cache is small, and quantization errors in it lower the
/// acceptance rate.
pub(crate) fn kv_options() -> KvOptions {
    KvOptions::symmetric(DType::Q8_0)
}

/// Loads `draft` onto the device of `loaded`, the model of `gguf`.
pub(crate) fn load(
    loaded: &dyn LoadedModel,
    draft: &Arc<Gguf>,
    progress: &mut dyn FnMut(f32),
) -> Result<Arc<dyn LoadedModel>, Error> {
    check_device(&loaded.properties().info)?;
    loaded.load_beside(Config::from_gguf(draft)?, draft, progress)
}

/// Rejects a draft model or draft head on a device where speculation could change an answer.
pub(crate) fn check_device(info: &DeviceInfo) -> Result<(), Error> {
    if info.batch_invariant_rows > 1 {
        return Ok(());
    }
    let expected =
        "no draft model where speculation could change an answer (the CPU with exact prompts and CUDA take one)"
            .to_owned();
    let got = format!("one for {} with {}", info.name, info.kernels);
    Err(Error::Setting { name: "draft", expected, got })
}

/// Rejects a draft model whose token ids differ from those of the target model.
pub(crate) fn check_vocabulary(gguf: &Gguf, draft: &Gguf) -> Result<(), Error> {
    let mut other =
        tokens(gguf)?.zip(tokens(draft)?).enumerate().filter(|(_, (ours, theirs))| ours != theirs);
    let Some((number, (ours, theirs))) = other.next() else { return Ok(()) };
    if other.count() < MAX_OTHERS {
        return Ok(());
    }
    let named = |token| printable(&String::from_utf8_lossy(token), MAX_SHOWN);
    Err(Error::Setting {
        name: "draft",
        expected: format!("a model with the same vocabulary, whose token {number} is '{}'", named(ours)),
        got: format!("'{}'", named(theirs)),
    })
}

fn tokens(gguf: &Gguf) -> Result<impl Iterator<Item = &[u8]>, Error> {
    Ok(gguf.meta().find::<Strings<'_>>(TOKENS)?.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use kvant_gguf::{GgufError, GgufWriter};

    use super::*;

    fn with_tokens(n: usize, word: impl Fn(usize) -> String) -> Gguf {
        let mut writer = GgufWriter::new();
        writer.set_array(TOKENS, (0..n).map(word).collect::<Vec<_>>().iter().map(String::as_str)).unwrap();
        let mut bytes = Vec::new();
        writer.write_to::<GgufError>(&mut bytes, |_| Ok(())).unwrap();
        Gguf::from_bytes(bytes).unwrap()
    }

    #[test]
    fn vocabularies_of_draft_models_may_differ_in_special_tokens() {
        let ours = with_tokens(3000, |i| format!("word{i}"));
        let renamed =
            |n| with_tokens(2900, move |i| if i < n { format!("<{i}>") } else { format!("word{i}") });
        for n in [0, 1, MAX_OTHERS] {
            check_vocabulary(&ours, &renamed(n)).unwrap();
            check_vocabulary(&renamed(n), &ours).unwrap();
        }
        let error = check_vocabulary(&ours, &renamed(MAX_OTHERS + 1)).unwrap_err().to_string();
        assert_eq!(
            error,
            "draft: expected a model with the same vocabulary, whose token 0 is 'word0', got '<0>'"
        );
    }
}
