//! Adds command-line flags to the errors of the libraries, which name settings and limits.

use kvant::gguf::Problem;
use kvant::{BackendError, Error, HfError, KvError, ModelError};
use kvant_eval::EvalError;

use crate::args::template::names;

/// Returns the line of an engine error.
pub fn of_engine(error: &Error) -> String {
    match error {
        Error::Setting { name: "tuning", .. } => format!("{error} (see kvant doctor --tune)"),
        Error::Setting { name, expected, got } => setting(name, expected, got),
        Error::Device(size @ BackendError::OutOfRange { .. })
        | Error::Kv(KvError::Device(size @ BackendError::OutOfRange { .. })) => of_size(size),
        Error::PromptTooLong { .. } | Error::TextTooLong { .. } | Error::Kv(KvError::Full { .. }) => {
            format!("{error} (raise it with -c)")
        }
        Error::Template(kvant::TemplateError::Refused(_)) => error.to_string(),
        Error::Template(_) => {
            format!(
                "{error} (--chat-template with {} or a file; kvant run --raw continues a text as it is)",
                names().join(", ")
            )
        }
        Error::Model(ModelError::Adapter) | Error::Hf(HfError::Adapter { .. }) => {
            format!("{error} (--lora takes it, beside the model)")
        }
        Error::Model(ModelError::Encoder) => format!("{error} (--mmproj takes it, beside the model)"),
        Error::WeightMemory { fitting: 0, .. } => format!("{error} (-ngl 0 runs all layers on the CPU)"),
        Error::WeightMemory { fitting, .. } => {
            format!("{error} (-ngl {fitting}, or fewer, which leaves more memory for the cache)")
        }
        Error::Gguf(gguf) if matches!(gguf.problem(), Problem::TensorType { .. }) => {
            format!(
                "{error} (use the model in one of these types, or convert its f16 file with kvant quantize)"
            )
        }
        Error::CacheMemory { .. } => format!("{error} (-c, -ctk, -ctv)"),
        _ => error.to_string(),
    }
}

/// Returns the line of an evaluation error.
pub fn of_eval(error: &EvalError) -> String {
    match error {
        // Evaluation has no option for another template.
        EvalError::Engine(error @ Error::Template(_)) => error.to_string(),
        EvalError::Engine(error) => of_engine(error),
        EvalError::Setting { name, expected, got } => setting(name, expected, got),
        EvalError::ShortText { .. } => format!("{error} (lower it with -c)"),
        _ => error.to_string(),
    }
}

/// Returns the line of an out-of-range number; other errors stay unchanged.
fn of_size(error: &BackendError) -> String {
    match error {
        BackendError::OutOfRange { name, min: least, max: most, got } => {
            setting(name, &format!("{least} to {most}"), &got.to_string())
        }
        other => other.to_string(),
    }
}

/// Returns the line of an invalid setting, by its flag where it has one.
fn setting(name: &str, expected: &str, got: &str) -> String {
    let flag = match name {
        "n_ctx" | "context" => "-c",
        "budget" => "--budget",
        "n_gpu_layers" => "-ngl",
        "layer_split" => "--tensor-split",
        "device" => "--device",
        "chunks" => "--chunks",
        "step" => "-ub",
        "repetitions" => "-r",
        "dim" => "--dim",
        "threads" => "-t",
        "maps_experts" => "--experts mmap",
        "prefill_precision" => "--prefill-precision",
        "kv_guard" => "--kv-guard",
        "vectors" => "--vectors",
        "sink" => "--kv-policy sink",
        "recent" => "--kv-policy recent",
        "needles" => "--needles",
        "depths" => "--depths",
        _ => name,
    };
    format!("{flag}: expected {expected}, got {got}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_type_is_reported_with_alternatives() {
        let mut writer = kvant::gguf::GgufWriter::new();
        writer.add_tensor("some.weight", &[256], kvant::DType::Q4K).unwrap();
        let mut bytes = Vec::new();
        let fill = |data: &mut kvant::gguf::TensorSink<'_>| data.bytes("some.weight", &[0; 144]);
        writer.write_to::<kvant::gguf::GgufError>(&mut bytes, fill).unwrap();
        // After the name: the number of dimensions, one dimension, the type.
        let name = bytes.windows(11).position(|window| window == b"some.weight").unwrap();
        bytes[name + 11 + 4 + 8] = 15;
        let line = of_engine(&kvant::Gguf::from_bytes(bytes).err().unwrap().into());
        assert!(line.contains("unsupported tensor type 15 (q8_K); read are f32 "), "{line}");
        assert!(line.ends_with("iq3_xxs iq3_s tq1_0 tq2_0 i8 i16 i32 i64 f64 (use the model in one of these types, or convert its f16 file with kvant quantize)"), "{line}");
    }

    #[test]
    fn errors_of_settings_name_the_flag() {
        let memory = |fitting| Error::WeightMemory {
            device: "gpu".to_owned(),
            needed: 9,
            usable: 5,
            fitting,
            n_layers: 8,
        };
        let cache =
            Error::CacheMemory { device: "gpu".to_owned(), tokens: 9, needed: 9, usable: 5, fitting: 4 };
        let size = |name| BackendError::OutOfRange { name, min: 1, max: 8, got: 9 };
        let setting = |name| Error::Setting { name, expected: "at least 1".to_owned(), got: "0".to_owned() };
        for (error, want) in [
            (Error::PromptTooLong { tokens: 9, n_ctx: 8 }, "(raise it with -c)"),
            (
                Error::TextTooLong { fewest: 9, n_ctx: 8 },
                "9 tokens or more, the context holds 8 (raise it with -c)",
            ),
            (
                kvant::TemplateError::Missing.into(),
                "(--chat-template with chatml, llama3, gemma, mistral, phi3, rwkv-world or a file; kvant run --raw continues a text as it is)",
            ),
            (KvError::Full { need: 9, n_ctx: 8 }.into(), "(raise it with -c)"),
            (memory(3), "3 of 8 layers fit (-ngl 3, or fewer, which leaves more memory for the cache)"),
            (memory(0), "0 of 8 layers fit (-ngl 0 runs all layers on the CPU)"),
            (cache, "4 tokens fit, or more in a smaller type (-c, -ctk, -ctv)"),
            (setting("n_ctx"), "-c: expected at least 1, got 0"),
            (setting("n_gpu_layers"), "-ngl: expected at least 1, got 0"),
            (setting("sessions"), "sessions: expected at least 1, got 0"),
            (setting("tuning"), "(see kvant doctor --tune)"),
            (size("threads").into(), "-t: expected 1 to 8, got 9"),
            (KvError::from(size("sink")).into(), "--kv-policy sink: expected 1 to 8, got 9"),
        ] {
            let line = of_engine(&error);
            assert!(line.contains(want), "{line}");
            if !matches!(error, Error::Template(_)) {
                assert_eq!(of_eval(&EvalError::Engine(error)), line);
            }
        }
        let missing = of_eval(&EvalError::Engine(kvant::TemplateError::Missing.into()));
        assert!(!missing.contains("--"), "{missing}");
        let short = EvalError::ShortText { tokens: 3, n_ctx: 8 };
        assert!(of_eval(&short).ends_with("(lower it with -c)"));
        let step = EvalError::Setting { name: "step", expected: "1 to 512".to_owned(), got: "0".to_owned() };
        assert_eq!(of_eval(&step), "-ub: expected 1 to 512, got 0");
    }
}
