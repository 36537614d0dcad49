//! Synthetic models: shapes of real models with random weights, to measure speed without a
//! download.

use kvant_codec::DType;
use kvant_codec::random::Random;
use kvant_gguf::{Gguf, GgufError, GgufWriter};
use kvant_model::retype::for_rows;

use crate::error::QuantizeError;

/// The shape of a published model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Its name, for [`Shape::named`].
    pub name: &'static str,
    arch: &'static str,
    n_layers: usize,
    n_embd: usize,
    n_ff: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    n_vocab: usize,
    tied: bool,
    /// Number of experts, experts per token, hidden size of one, and number of shared experts.
    experts: Option<[usize; 4]>,
    /// Key heads, value heads and head dimension of gated-delta-net layers: three of four layers.
    gated_delta: Option<[usize; 3]>,
    /// MLA: size of the latent vector, RoPE part of a key, plain part of a key, and value head
    /// dimension. The first layer has no experts.
    mla: Option<[usize; 4]>,
}

/// All shapes.
pub const SHAPES: [Shape; 13] = [
    shape("qwen2.5-1.5b", "qwen2", 28, 1536, 8960, (12, 2, 128), 151_936, true),
    shape("qwen2.5-7b", "qwen2", 28, 3584, 18_944, (28, 4, 128), 152_064, false),
    shape("llama-7b", "llama", 32, 4096, 11_008, (32, 32, 128), 32_000, false),
    shape("llama-3.2-1b", "llama", 16, 2048, 8192, (32, 8, 64), 128_256, true),
    shape("llama-3-8b", "llama", 32, 4096, 14_336, (32, 8, 128), 128_256, false),
    shape("mistral-24b", "llama", 40, 5120, 32_768, (32, 8, 128), 131_072, false),
    // 3 billion parameters, of which a token reads a fifth.
    Shape {
        experts: Some([64, 8, 512, 0]),
        ..shape("qwen3moe-3b", "qwen3moe", 28, 1024, 3072, (16, 4, 128), 151_936, true)
    },
    Shape {
        gated_delta: Some([16, 16, 128]),
        ..shape("qwen35-2b", "qwen35", 24, 2048, 6144, (8, 2, 256), 248_320, true)
    },
    Shape {
        experts: Some([64, 6, 1408, 2]),
        mla: Some([512, 64, 128, 128]),
        ..shape("deepseek-v2-lite", "deepseek2", 27, 2048, 10_944, (16, 1, 576), 102_400, false)
    },
    shape("tiny", "qwen2", 4, 256, 768, (4, 2, 64), 1024, true),
    Shape {
        experts: Some([8, 2, 256, 0]),
        ..shape("tiny-moe", "qwen3moe", 4, 256, 768, (4, 2, 64), 1024, true)
    },
    Shape {
        gated_delta: Some([2, 4, 64]),
        ..shape("tiny-delta", "qwen35", 4, 256, 768, (4, 2, 64), 1024, true)
    },
    Shape {
        experts: Some([8, 2, 256, 1]),
        mla: Some([256, 32, 32, 64]),
        ..shape("tiny-latent", "deepseek2", 4, 256, 768, (4, 1, 288), 1024, true)
    },
];

#[expect(clippy::too_many_arguments, reason = "one line of a table")]
const fn shape(
    name: &'static str,
    arch: &'static str,
    n_layers: usize,
    n_embd: usize,
    n_ff: usize,
    (n_heads, n_kv_heads, head_dim): (usize, usize, usize),
    n_vocab: usize,
    tied: bool,
) -> Shape {
    Shape {
        name,
        arch,
        n_layers,
        n_embd,
        n_ff,
        n_heads,
        n_kv_heads,
        head_dim,
        n_vocab,
        tied,
        experts: None,
        gated_delta: None,
        mla: None,
    }
}

/// A tensor of a shape: name, GGUF dimensions, type.
type Tensor = (String, Vec<usize>, DType);

/// Values in the random pattern that weight matrices repeat; a multiple of every block length.
const PATTERN: usize = 1 << 20;

/// Kernel size of the short convolution.
const CONV_KERNEL: usize = 4;
/// Interval of attention layers among recurrent ones: the last of each group attends.
const FULL_ATTENTION_INTERVAL: usize = 4;

impl Shape {
    /// Returns the shape of this name.
    ///
    /// # Errors
    /// An unknown name.
    pub fn named(name: &str) -> Result<Self, QuantizeError> {
        SHAPES.into_iter().find(|shape| shape.name == name).ok_or_else(|| QuantizeError::Setting {
            name: "shape",
            expected: format!("one of {}", SHAPES.map(|shape| shape.name).join(" ")),
            got: name.to_owned(),
        })
    }

    /// Returns the number of tokens in its vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Creates a model of this shape in memory, without a tokenizer. Its matrices have type
    /// `dtype`, or the next best where rows are not whole blocks. It loads like any file.
    ///
    /// # Errors
    /// A type that GGUF files cannot hold.
    pub fn model(&self, dtype: DType, n_ctx: usize) -> Result<Gguf, QuantizeError> {
        let tensors = self.tensors(dtype);
        let mut writer = self.metadata(n_ctx)?;
        for (name, shape, dtype) in &tensors {
            writer.add_tensor(name, shape, *dtype)?;
        }
        let mut bytes = Vec::new();
        let mut random = Random::new(1);
        let mut weights = vec![0.0; PATTERN];
        random.fill_gaussian(&mut weights, 0.02);
        // Routers, convolution kernels and rows that are not whole blocks have other types.
        let mut patterns: Vec<(DType, Vec<u8>)> = Vec::new();
        for &(_, _, of) in &tensors {
            if !patterns.iter().any(|(known, _)| *known == of) {
                let mut pattern = vec![0; of.row_bytes(PATTERN)?];
                kvant_codec::encode(of, &weights, &mut pattern)?;
                patterns.push((of, pattern));
            }
        }
        writer.write_to(&mut bytes, |sink| {
            for (name, shape, of) in &tensors {
                let values: usize = shape.iter().product();
                if shape.len() == 1 {
                    // States decay a little with every token.
                    let value = if name.ends_with("ssm_a") { -0.05_f32 } else { 1.0 };
                    sink.bytes(name, &value.to_le_bytes().repeat(values))?;
                } else {
                    let (_, pattern) = patterns.iter().find(|(known, _)| known == of).expect("made above");
                    sink.reader(name, &mut Repeat { pattern, at: 0, left: of.row_bytes(values)? })?;
                }
            }
            Ok::<(), QuantizeError>(())
        })?;
        Ok(Gguf::from_bytes(bytes)?)
    }

    fn metadata(&self, n_ctx: usize) -> Result<GgufWriter, GgufError> {
        let mut writer = GgufWriter::new();
        let key = |key: &str| format!("{}.{key}", self.arch);
        writer.set("general.architecture", self.arch)?;
        writer.set("general.name", self.name)?;
        for (name, size) in [
            ("block_count", self.n_layers),
            ("context_length", n_ctx),
            ("embedding_length", self.n_embd),
            ("feed_forward_length", self.n_ff),
            ("attention.head_count", self.n_heads),
            ("attention.head_count_kv", self.n_kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.mla.map_or(self.head_dim, |[rank, ..]| rank)),
        ] {
            writer.set(&key(name), size as u32)?;
        }
        if let Some([n, n_used, n_ff, n_shared]) = self.experts {
            for (name, size) in [
                ("expert_count", n),
                ("expert_used_count", n_used),
                ("expert_feed_forward_length", n_ff),
                ("expert_shared_count", n_shared),
            ] {
                writer.set(&key(name), size as u32)?;
            }
        }
        if let Some([rank, n_rot, plain, value]) = self.mla {
            for (name, size) in [
                ("attention.kv_lora_rank", rank),
                ("rope.dimension_count", n_rot),
                ("attention.key_length_mla", plain + n_rot),
                ("attention.value_length_mla", value),
                ("leading_dense_block_count", 1),
            ] {
                writer.set(&key(name), size as u32)?;
            }
        }
        if let Some([n_k, n_v, dim]) = self.gated_delta {
            for (name, size) in [
                ("ssm.conv_kernel", CONV_KERNEL),
                ("ssm.state_size", dim),
                ("ssm.group_count", n_k),
                ("ssm.time_step_rank", n_v),
                ("ssm.inner_size", n_v * dim),
                ("full_attention_interval", FULL_ATTENTION_INTERVAL),
            ] {
                writer.set(&key(name), size as u32)?;
            }
        }
        writer.set(&key("attention.layer_norm_rms_epsilon"), 1e-6_f32)?;
        writer.set(&key("rope.freq_base"), 1e6_f32)?;
        Ok(writer)
    }

    fn tensors(&self, dtype: DType) -> Vec<Tensor> {
        let (n_q, n_kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let matrix = |name: String, n_in, n_out| (name, vec![n_in, n_out], for_rows(n_in, dtype));
        let vector = |name: String, len| (name, vec![len], DType::F32);
        let mut tensors = vec![matrix("token_embd.weight".to_owned(), self.n_embd, self.n_vocab)];
        for layer in 0..self.n_layers {
            let name = |suffix: &str| format!("blk.{layer}.{suffix}");
            tensors.push(vector(name("attn_norm.weight"), self.n_embd));
            match (self.gated_delta, self.mla) {
                (Some(delta), _) if (layer + 1) % FULL_ATTENTION_INTERVAL != 0 => {
                    tensors.extend(self.delta_tensors(layer, delta, dtype))
                }
                (_, Some(latent)) => tensors.extend(self.mla_tensors(layer, latent, dtype)),
                (delta, _) => tensors.extend([
                    // Queries, then their gates.
                    matrix(name("attn_q.weight"), self.n_embd, if delta.is_some() { 2 * n_q } else { n_q }),
                    matrix(name("attn_k.weight"), self.n_embd, n_kv),
                    matrix(name("attn_v.weight"), self.n_embd, n_kv),
                    matrix(name("attn_output.weight"), n_q, self.n_embd),
                ]),
            }
            let norm =
                if self.gated_delta.is_some() { "post_attention_norm.weight" } else { "ffn_norm.weight" };
            tensors.push(vector(name(norm), self.n_embd));
            let through = |suffix: &str, n_ff| {
                [("gate", self.n_embd, n_ff), ("up", self.n_embd, n_ff), ("down", n_ff, self.n_embd)]
                    .map(|(of, n_in, n_out)| matrix(name(&format!("ffn_{of}{suffix}.weight")), n_in, n_out))
            };
            match self.experts.filter(|_| self.mla.is_none() || layer > 0) {
                None => tensors.extend(through("", self.n_ff)),
                Some([n, _, n_ff, n_shared]) => {
                    tensors.push((name("ffn_gate_inp.weight"), vec![self.n_embd, n], DType::F32));
                    tensors.extend(
                        through("_exps", n_ff).map(|(name, shape, of)| (name, [shape, vec![n]].concat(), of)),
                    );
                    if n_shared > 0 {
                        tensors.extend(through("_shexp", n_shared * n_ff));
                    }
                }
            }
            let attends = self.gated_delta.is_none() || (layer + 1) % FULL_ATTENTION_INTERVAL == 0;
            if attends && ["qwen3moe", "qwen35"].contains(&self.arch) {
                tensors.extend(
                    ["attn_q_norm.weight", "attn_k_norm.weight"].map(|of| vector(name(of), self.head_dim)),
                );
            }
            if self.arch == "qwen2" {
                let biases = [("attn_q.bias", n_q), ("attn_k.bias", n_kv), ("attn_v.bias", n_kv)];
                tensors.extend(biases.map(|(suffix, len)| vector(name(suffix), len)));
            }
        }
        tensors.push(vector("output_norm.weight".to_owned(), self.n_embd));
        if !self.tied {
            tensors.push(matrix("output.weight".to_owned(), self.n_embd, self.n_vocab));
        }
        tensors
    }

    /// Returns the tensors of a gated-delta-net layer, without its norms and feed-forward part.
    fn delta_tensors(&self, layer: usize, [n_k, n_v, dim]: [usize; 3], dtype: DType) -> [Tensor; 9] {
        let channels = (2 * n_k + n_v) * dim;
        let tensor =
            |suffix: &str, shape: &[usize], dtype| (format!("blk.{layer}.{suffix}"), shape.to_vec(), dtype);
        let matrix = |suffix, n_in, n_out| tensor(suffix, &[n_in, n_out], dtype);
        let vector = |suffix, len| tensor(suffix, &[len], DType::F32);
        [
            matrix("attn_qkv.weight", self.n_embd, channels),
            matrix("attn_gate.weight", self.n_embd, n_v * dim),
            matrix("ssm_beta.weight", self.n_embd, n_v),
            matrix("ssm_alpha.weight", self.n_embd, n_v),
            tensor("ssm_conv1d.weight", &[CONV_KERNEL, channels], DType::F32),
            vector("ssm_dt.bias", n_v),
            vector("ssm_a", n_v),
            vector("ssm_norm.weight", dim),
            matrix("ssm_out.weight", n_v * dim, self.n_embd),
        ]
    }

    /// Returns the tensors of an MLA layer, without its norms and feed-forward part.
    fn mla_tensors(
        &self,
        layer: usize,
        [rank, n_rot, plain, value]: [usize; 4],
        dtype: DType,
    ) -> [Tensor; 6] {
        let n = self.n_heads;
        let tensor = |suffix: &str, shape: &[usize]| {
            (format!("blk.{layer}.{suffix}.weight"), shape.to_vec(), for_rows(shape[0], dtype))
        };
        [
            tensor("attn_q", &[self.n_embd, n * (plain + n_rot)]),
            tensor("attn_kv_a_mqa", &[self.n_embd, rank + n_rot]),
            (format!("blk.{layer}.attn_kv_a_norm.weight"), vec![rank], DType::F32),
            tensor("attn_k_b", &[plain, rank, n]),
            tensor("attn_v_b", &[rank, value, n]),
            tensor("attn_output", &[n * value, self.n_embd]),
        ]
    }
}

/// Reads a pattern repeatedly, up to a length.
struct Repeat<'a> {
    pattern: &'a [u8],
    at: usize,
    left: usize,
}

impl std::io::Read for Repeat<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let n = out.len().min(self.left).min(self.pattern.len() - self.at);
        out[..n].copy_from_slice(&self.pattern[self.at..][..n]);
        self.at = (self.at + n) % self.pattern.len();
        self.left -= n;
        Ok(n)
    }
}
