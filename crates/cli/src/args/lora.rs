//! Arguments of LoRA adapters and their scales.

use clap::Args;

/// Arguments of LoRA adapters.
#[derive(Args, Debug, Clone, Default)]
pub struct LoraArgs {
    /// LoRA adapter: a GGUF file, or a PEFT folder or hub id; may be repeated, or a comma-separated
    /// list
    #[arg(long, value_name = "FILE", env = "KVANT_LORA", value_delimiter = ',')]
    lora: Vec<String>,
    /// LoRA adapter with its scale (1 is full strength); counted after those of --lora
    #[arg(long, value_name = "FILE:SCALE", env = "KVANT_LORA_SCALED", value_delimiter = ',', value_parser = scaled)]
    lora_scaled: Vec<Scaled>,
}

/// An adapter and its LoRA scale.
#[derive(Debug, Clone, PartialEq)]
pub struct Scaled {
    pub name: String,
    pub scale: f32,
}

impl LoraArgs {
    /// Returns whether no adapters were given.
    pub fn is_empty(&self) -> bool {
        self.lora.is_empty() && self.lora_scaled.is_empty()
    }

    /// Returns all adapters, those of `--lora` first.
    pub fn all(&self) -> impl Iterator<Item = Scaled> {
        let whole = self.lora.iter().map(|name| Scaled { name: name.clone(), scale: 1.0 });
        whole.chain(self.lora_scaled.iter().cloned())
    }

    /// Returns the summary's text for the adapters, after the model's name.
    pub fn label(&self) -> String {
        let of = |Scaled { name, scale }: Scaled| {
            let name = short(&name);
            if scale == 1.0 { format!(" + {name}") } else { format!(" + {scale} {name}") }
        };
        self.all().map(of).collect()
    }
}

/// Returns the file name without its folder and without `.gguf`.
pub fn short(name: &str) -> String {
    let name = name.rsplit(['/', '\\']).find(|part| !part.is_empty()).unwrap_or_default();
    name.strip_suffix(".gguf").unwrap_or(name).to_owned()
}

/// Parses `FILE:SCALE`.
fn scaled(text: &str) -> Result<Scaled, String> {
    let parts = text.rsplit_once(':').filter(|(name, _)| !name.is_empty());
    let scaled = parts.and_then(|(name, scale)| Some((name.to_owned(), scale.parse().ok()?)));
    match scaled.filter(|(_, scale): &(_, f32)| scale.is_finite()) {
        Some((name, scale)) => Ok(Scaled { name, scale }),
        None => Err("expected FILE:SCALE, such as adapter.gguf:0.5".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lora_scale_follows_the_last_colon() {
        let of = |text| scaled(text).map(|Scaled { name, scale }| (name, scale));
        assert_eq!(of("a.gguf:0.5"), Ok(("a.gguf".to_owned(), 0.5)));
        assert_eq!(of("USER/REPO:Q8_0:-1"), Ok(("USER/REPO:Q8_0".to_owned(), -1.0)));
        for wrong in ["a.gguf", "a.gguf:", ":1", "a.gguf:x", "a.gguf:inf", "a.gguf:nan"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_label_has_adapter_files_and_scales() {
        let args = LoraArgs {
            lora: vec!["folder/a.gguf".to_owned(), "b/".to_owned()],
            lora_scaled: vec![Scaled { name: "c.gguf".to_owned(), scale: 0.5 }],
        };
        assert_eq!(args.label(), " + a + b + 0.5 c");
    }
}
