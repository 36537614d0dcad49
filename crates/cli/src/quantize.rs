//! `kvant quantize`: the same model with its weight matrices in another type.

use std::path::Path;

use clap::Args;
use kvant::gguf::{TensorInfo, printable_path};
use kvant::{DType, quantize};

use crate::args::check_target;
use crate::failure::Failure;
use crate::place::PlaceArgs;
use crate::{console, output, progress};

/// Arguments of `kvant quantize`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  kvant quantize bundled pocket-q4_0.gguf q4_0")]
pub struct QuantizeArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// GGUF file to write, replaced whole or not at all; and the type of its weight matrices: f32 f16 bf16 q8_0 q4_0 q4_1
    /// q5_0 q5_1 q2_K q3_K q4_K q5_K q6_K tq3_1s tq4_1s
    #[arg(value_names = ["OUT", "TYPE"], num_args = 1..)]
    words: Vec<String>,
    /// No progress and no summary
    #[arg(long)]
    quiet: bool,
}

/// Runs the command.
pub fn quantize(mut args: QuantizeArgs) -> Result<(), Failure> {
    args.place.leave_word(&mut args.words);
    let [out, dtype] = &args.words[..] else {
        let line = "expected a model, a file to write and a type, and nothing else".to_owned();
        return Err(Failure::Usage(line));
    };
    let dtype = weight_type(dtype).map_err(|error| Failure::Usage(format!("{dtype}: {error}")))?;
    let (place, out) = (args.place.place()?, Path::new(out));
    check_target(Some(out))?;
    let gguf = place.open(&args.place, args.quiet)?;
    let bar = progress::bar("quantising", gguf.tensors().len() as u64, args.quiet);
    let written = quantize::quantize(&gguf, out, dtype, &mut |_: &TensorInfo| bar.inc(1))?;
    bar.finish_and_clear();
    if !args.quiet {
        let [before, after] =
            [gguf.file_bytes(), written.n_bytes].map(|n_bytes| output::bytes(n_bytes as usize));
        console::say(format_args!("{place}: {before} -> {}: {after}", printable_path(out)));
        for (used, n) in written.types {
            let why = if used == dtype { String::new() } else { instead_of(dtype) };
            console::say(format_args!("{used}: {n} matrices{why}"));
        }
    }
    Ok(())
}

/// Why a type stands in for `dtype`.
fn instead_of(dtype: DType) -> String {
    format!(" instead of {dtype}, as their rows are no multiple of its blocks of {}", dtype.block_len())
}

fn weight_type(text: &str) -> Result<DType, String> {
    let weights = || DType::ALL.into_iter().filter(|dtype| dtype.ggml_id().is_some());
    match text.parse::<DType>() {
        Ok(dtype) if dtype.ggml_id().is_some() => Ok(dtype),
        _ => Err(format!(
            "not a weight type{}; known: {}",
            mix_of(text)
                .map_or_else(String::new, |dtype| format!(" (of llama.cpp's mixes there is {dtype} alone)")),
            weights().map(DType::name).collect::<Vec<_>>().join(" ")
        )),
    }
}

/// The type that most matrices have in a mix of llama.cpp's, such as `Q4_K_M`.
fn mix_of(text: &str) -> Option<DType> {
    let (name, _) = text.rsplit_once('_').filter(|(_, size)| ["S", "M", "L"].contains(size))?;
    name.parse().ok().filter(|dtype: &DType| dtype.ggml_id().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mix_is_refused_with_the_type_that_there_is() {
        assert_eq!(weight_type("Q4_K"), Ok(DType::Q4K));
        let told = |text: &str| weight_type(text).unwrap_err();
        assert!(
            told("Q4_K_M")
                .starts_with("not a weight type (of llama.cpp's mixes there is q4_K alone); known: ")
        );
        for other in ["COPY", "_M", "q4_K_XL", "turbo3_M"] {
            assert!(told(other).starts_with("not a weight type; known: f32 "), "{}", told(other));
        }
    }
}
