//! MoE layers: which layers have experts, and how their router selects them.

use kvant_backend::{Activation, ExpertGroups, RouterScores, Routing};

use kvant_gguf::Value;

use super::{ExpertSpec, Keys};
use crate::ModelError;
use crate::family::{ExpertRule, Family, SharedExpert};

const COUNT: &str = "expert_count";
const USED: &str = "expert_used_count";
const SHARED_WIDTH: &str = "expert_shared_feed_forward_length";
/// Names of the width of the experts' latent space.
const LATENT: [&str; 2] = ["moe_latent_size", "expert_latent_length"];
const HASHED: &str = "hash_layer_count";
/// Names of the tensors with the router's selection bias.
pub(crate) const SELECTION_BIAS: [&str; 2] = ["exp_probs_b.bias", "exp_probs_b"];

/// The feed-forward layers of a model.
pub(super) struct FeedForward {
    /// Width of each layer's dense FFN; 0 if the layer has no FFN.
    dense: Vec<usize>,
    /// Total width of the shared experts; 0 if absent.
    shared: usize,
    experts: Option<ExpertSpec>,
    /// Activations of each layer: of the dense FFN or the shared expert, and of the experts.
    activations: [Vec<Activation>; 2],
    /// Number of leading dense layers, and the period after them: the last layer of each period has
    /// experts.
    n_leading: usize,
    step: usize,
    /// Number of leading layers with a table of experts.
    n_hashed: usize,
}

impl FeedForward {
    /// Returns the experts of a layer.
    pub fn of_layer(&self, index: usize) -> Option<ExpertSpec> {
        let has_experts = index >= self.n_leading && (index + 1).is_multiple_of(self.step);
        let experts = self.experts.filter(|_| has_experts && self.has(index))?;
        let has_table = index < self.n_hashed;
        Some(ExpertSpec { activation: self.activations[1][index], has_table, ..experts })
    }

    /// Returns the activation of the dense FFN, or of the shared expert in a MoE layer.
    pub fn shared_activation(&self, index: usize) -> Activation {
        self.activations[0][index]
    }

    /// Returns whether a layer has a feed-forward layer.
    pub fn has(&self, index: usize) -> bool {
        self.dense[index] > 0
    }

    /// Returns the width of the dense FFN, or of the shared expert in a MoE layer.
    pub fn n_ff(&self, index: usize) -> usize {
        match self.of_layer(index) {
            Some(experts) if experts.shared != SharedExpert::Beside => self.shared,
            _ => self.dense[index],
        }
    }
}

/// Reads and checks the expert keys of a file.
pub(super) fn read(
    keys: &Keys,
    family: &Family,
    n_embd: usize,
    n_layers: usize,
) -> Result<FeedForward, ModelError> {
    const WIDTH: &str = "feed_forward_length";
    let n = keys.count(COUNT)?;
    // If all layers have experts, a file may give only the experts' width.
    let dense = match n > 0 && !keys.has(WIDTH) {
        true => vec![keys.size("expert_feed_forward_length")?; n_layers],
        // The only sublayer of each layer is recurrent.
        false if family.single_sublayer && !family.attends => vec![0; n_layers],
        false => keys.of_layers(WIDTH, n_layers)?,
    };
    let activations = read_activations(keys, family, n_layers)?;
    if !family.single_sublayer && dense.contains(&0) {
        return Err(keys.bad(WIDTH, "a positive number for each layer", 0));
    }
    let rule = match (family.experts, n) {
        (Some(rule), 1..) => rule,
        (None, 1..) => {
            let what = format!("experts in the family {} ({})", family.name, keys.key(COUNT));
            return Err(ModelError::Unsupported { what });
        }
        (rule, 0) => {
            let router = keys.gguf.tensors().iter().find(|info| info.name.ends_with(".ffn_gate_inp.weight"));
            if let Some(router) = router {
                return Err(keys.bad(COUNT, &format!("the number of experts in '{}'", router.name), n));
            }
            if rule.is_some_and(|rule| rule.is_required) {
                return Err(keys.bad(COUNT, "at least one expert", n));
            }
            return Ok(FeedForward {
                dense,
                shared: 0,
                experts: None,
                activations,
                n_leading: 0,
                step: 1,
                n_hashed: 0,
            });
        }
    };
    // The router has a row of weights per expert.
    let stored: u128 = keys.gguf.tensors().iter().map(|info| info.elements() as u128).sum();
    if n as u128 * n_embd as u128 > stored {
        return Err(keys.bad(COUNT, &format!("experts that {stored} values in tensors suffice for"), n));
    }
    let n_used = keys.size(USED)?;
    if n_used > n {
        return Err(keys.bad(USED, &format!("1 to {n}, as there are {n} experts"), n_used));
    }
    let expert_groups = read_groups(keys, n, n_used)?;
    let widest = dense.iter().copied().max().unwrap_or(0);
    let n_ff = keys.size_or("expert_feed_forward_length", widest)?;
    let shared = match rule.shared {
        // The dense layer's width applies.
        SharedExpert::None | SharedExpert::Beside => 0,
        SharedExpert::Gated => keys.size_or(SHARED_WIDTH, widest)?,
        SharedExpert::Several => match keys.count(SHARED_WIDTH)? {
            0 => keys.count("expert_shared_count")?.saturating_mul(n_ff),
            together => together,
        },
    };
    let (scores, normalizes) = read_scores(keys, rule)?;
    let scale = keys.positive("expert_weights_scale")?.unwrap_or(1.0);
    let n_leading = read_leading(keys, rule, n_layers)?;
    let step = keys.size_or("interleave_moe_layer_step", 1)?;
    let shared_scale = (rule.averages && shared > 0).then_some(0.5);
    let scale = scale * shared_scale.unwrap_or(1.0);
    let routing = Routing { n_used, scores, normalizes, scale, expert_groups };
    if rule.shared != SharedExpert::Several {
        LATENT.iter().try_for_each(|key| keys.refuse(key, "experts in a latent space"))?;
    }
    let [latent, other] = LATENT.map(|key| keys.count(key));
    let latent = Some(latent?.max(other?)).filter(|&n| n > 0);
    let (activation, shared_expert) = (family.activation, rule.shared);
    let of_experts = ExpertSpec {
        n,
        n_ff,
        activation,
        routing,
        shared: shared_expert,
        shared_scale,
        latent,
        has_table: false,
    };
    let n_hashed = keys.count(HASHED)?;
    Ok(FeedForward { dense, shared, experts: Some(of_experts), activations, n_leading, step, n_hashed })
}

/// Reads the activations of each layer, whose SiLU may have a limit: of the dense FFN or the shared
/// expert, and of the experts.
fn read_activations(
    keys: &Keys,
    family: &Family,
    n_layers: usize,
) -> Result<[Vec<Activation>; 2], ModelError> {
    if family.situ {
        let situ = vec![read_situ(keys)?; n_layers];
        return Ok([situ.clone(), situ]);
    }
    let read = |key| {
        let limits = read_limits(keys, key, n_layers)?;
        if family.activation != Activation::Silu && limits.iter().any(Option::is_some) {
            let what = format!("limits of other activations than SiLU ({})", keys.key(key));
            return Err(ModelError::Unsupported { what });
        }
        let limited = |limit| match family.clamps_gates {
            true => Activation::Clamped { limit },
            false => Activation::Limited { limit },
        };
        let of = |limit: Option<f32>| limit.map_or(family.activation, limited);
        Ok(limits.into_iter().map(of).collect())
    };
    Ok([read("swiglu_clamp_shexp")?, read("swiglu_clamp_exp")?])
}

/// Reads the limits of SiTU: of the gate, and of the other factor, where 0 is none.
fn read_situ(keys: &Keys) -> Result<Activation, ModelError> {
    const LIMIT: &str = "activation.situ_beta";
    match keys.float(LIMIT)? {
        limit if limit > 0.0 => {
            let up_limit = Some(keys.float("activation.situ_linear_beta")?).filter(|&limit| limit > 0.0);
            Ok(Activation::Situ { limit, up_limit })
        }
        limit => Err(keys.bad(LIMIT, "a number above 0", limit)),
    }
}

/// Reads a number above 0 per layer, or one for all layers; `None` if absent or 0.
fn read_limits(keys: &Keys, key: &str, n_layers: usize) -> Result<Vec<Option<f32>>, ModelError> {
    if !matches!(keys.gguf.meta().value(&keys.key(key)), Some(Value::Array(_))) {
        return Ok(vec![keys.positive(key)?; n_layers]);
    }
    let numbers: Vec<f32> = keys.gguf.meta().get(&keys.key(key))?;
    if numbers.len() < n_layers {
        return Err(keys.bad(key, &format!("{n_layers} layers"), numbers.len()));
    }
    if let Some(bad) = numbers.iter().find(|x| !(x.is_finite() && **x >= 0.0)) {
        return Err(keys.bad(key, "finite numbers from 0 on", bad));
    }
    Ok(numbers.into_iter().take(n_layers).map(|x| Some(x).filter(|x| *x > 0.0)).collect())
}

/// Reads the number of leading dense layers. In some families' files these are the layers before
/// the first that has experts.
fn read_leading(keys: &Keys, rule: ExpertRule, n_layers: usize) -> Result<usize, ModelError> {
    const COUNT: &str = "leading_dense_block_count";
    if !rule.finds_leading || keys.has(COUNT) {
        return keys.count(COUNT);
    }
    let has_experts = |index: &usize| {
        let parts = ["ffn_gate_inp", "ffn_down_exps"].map(|part| format!("blk.{index}.{part}.weight"));
        parts.iter().any(|name| keys.gguf.find_info(name).is_some())
    };
    Ok((0..n_layers).find(has_experts).unwrap_or(0))
}

/// Reads the router's score function, and whether its weights are normalized.
fn read_scores(keys: &Keys, rule: ExpertRule) -> Result<(RouterScores, bool), ModelError> {
    const GATING: &str = "expert_gating_func";
    let normalizes = keys.flag_or("expert_weights_norm", rule.normalizes)?;
    match keys.count(GATING)? {
        // Unspecified: a selection bias implies sigmoid scores, unless the family adds it to a
        // softmax.
        0 if SELECTION_BIAS.iter().any(|name| keys.has_tensor(name)) && !rule.adds_to_softmax => {
            Ok((RouterScores::Sigmoid, normalizes))
        }
        0 => Ok((rule.scores, normalizes && rule.scores != RouterScores::SparseMixer)),
        1 => Ok((RouterScores::Softmax, normalizes)),
        2 => Ok((RouterScores::Sigmoid, normalizes)),
        // A softmax over the selected experts alone.
        3 => Ok((RouterScores::Softmax, true)),
        4 => Ok((RouterScores::SqrtSoftplus, normalizes)),
        got => {
            let known = "known: 1, softmax; 2, sigmoid; 3, softmax of the selected experts; 4, √softplus";
            Err(ModelError::Unsupported { what: format!("{} {got} ({known})", keys.key(GATING)) })
        }
    }
}

/// Reads the expert groups, if the router first selects groups (group-limited routing).
fn read_groups(
    keys: &Keys,
    n_experts: usize,
    n_used_experts: usize,
) -> Result<Option<ExpertGroups>, ModelError> {
    const GROUPS: &str = "expert_group_count";
    const USED: &str = "expert_group_used_count";
    let n = keys.count(GROUPS)?;
    if n <= 1 {
        return Ok(None);
    }
    if !n_experts.is_multiple_of(n) {
        return Err(keys.bad(GROUPS, &format!("groups of equal size of the {n_experts} experts"), n));
    }
    let n_used = keys.size(USED)?;
    let min_used = n_used_experts.div_ceil(n_experts / n);
    if !(min_used..=n).contains(&n_used) {
        let what = format!("{min_used} to {n}, as {n_used_experts} experts of {n} groups are used");
        return Err(keys.bad(USED, &what, n_used));
    }
    Ok(Some(ExpertGroups { n, n_used }).filter(|expert_groups| expert_groups.n_used < expert_groups.n))
}

#[cfg(test)]
mod tests {
    use kvant_backend::RouterScores;
    use kvant_gguf::{Gguf, GgufWriter};

    use crate::Config;

    /// Returns the configuration of a file of this architecture with these keys beside the required
    /// ones, and one tensor.
    fn config(arch: &str, tensor: &str, keys: &[(&str, u32)]) -> Result<Config, String> {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", arch).unwrap();
        let usual = [
            ("block_count", 4),
            ("context_length", 64),
            ("embedding_length", 32),
            ("feed_forward_length", 48),
            ("attention.head_count", 2),
        ];
        for (key, value) in usual.iter().chain(keys) {
            writer.set(&format!("{arch}.{key}"), *value).unwrap();
        }
        writer.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5_f32).unwrap();
        let names = [tensor, "a", "b", "c"];
        names.iter().for_each(|name| writer.add_tensor(name, &[32, 32], kvant_codec::DType::F32).unwrap());
        let mut bytes = Vec::new();
        let zeros = [0; 4 * 32 * 32];
        writer
            .write_to(&mut bytes, |sink| names.iter().try_for_each(|name| sink.bytes(name, &zeros)))
            .unwrap();
        Config::from_gguf(&Gguf::from_bytes(bytes).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn layers_have_experts_as_in_the_file() {
        let of = |keys: &[(&str, u32)]| -> Vec<_> {
            let keys = [&[("expert_count", 8), ("expert_used_count", 2)], keys].concat();
            let layers = config("qwen3moe", "t", &keys).unwrap().layers;
            layers.iter().map(|layer| (layer.n_ff, layer.experts.map(|experts| experts.n_ff))).collect()
        };
        let (dense, wide, narrow) = ((48, None), (0, Some(48)), (0, Some(20)));
        assert_eq!(of(&[]), [wide; 4]);
        let narrow_key = ("expert_feed_forward_length", 20);
        assert_eq!(of(&[narrow_key, ("leading_dense_block_count", 1)]), [dense, narrow, narrow, narrow]);
        assert_eq!(of(&[narrow_key, ("interleave_moe_layer_step", 2)]), [dense, narrow, dense, narrow]);
    }

    #[test]
    fn expert_weights_are_normalized_as_in_file_or_family() {
        let routing = |arch, keys: &[(&str, u32)]| {
            let keys = [&[("expert_count", 8), ("expert_used_count", 3)], keys].concat();
            let layer = config(arch, "t", &keys).unwrap().layers[0];
            (layer.experts.unwrap().routing.normalizes, layer.n_ff)
        };
        assert_eq!(routing("llama", &[]), (true, 0));
        assert_eq!(routing("qwen3moe", &[]), (true, 0));
        assert_eq!(routing("qwen2moe", &[]), (false, 48));
        let shared = ("expert_shared_feed_forward_length", 24);
        assert_eq!(routing("qwen2moe", &[shared, ("expert_gating_func", 1)]), (false, 24));
        assert_eq!(routing("qwen2moe", &[shared, ("expert_gating_func", 3)]), (true, 24));
    }

    #[test]
    fn router_scores_follow_the_file_or_the_family() {
        let scores = |arch, func| {
            let keys = [("expert_count", 8), ("expert_used_count", 3), ("shortconv.l_cache", 3)];
            let routing = config(arch, "t", &[&keys[..], &[("expert_gating_func", func)]].concat());
            routing.unwrap().layers[0].experts.unwrap().routing.scores
        };
        for (arch, usual) in [("qwen3moe", RouterScores::Softmax), ("lfm2moe", RouterScores::Sigmoid)] {
            let want = [usual, RouterScores::Softmax, RouterScores::Sigmoid, RouterScores::Softmax];
            assert_eq!([0, 1, 2, 3].map(|func| scores(arch, func)), want, "{arch}");
        }
    }

    #[test]
    fn invalid_expert_counts_are_rejected_in_one_line() {
        let router = "blk.2.ffn_gate_inp.weight";
        for (arch, tensor, keys, want) in [
            (
                "llama",
                router,
                &[][..],
                "llama.expert_count: expected the number of experts in 'blk.2.ffn_gate_inp.weight', got 0",
            ),
            ("qwen3moe", "t", &[], "qwen3moe.expert_count: expected at least one expert, got 0"),
            ("qwen3moe", "t", &[("expert_count", 4)], "qwen3moe.expert_used_count"),
            (
                "llama",
                "t",
                &[("expert_count", 4), ("expert_used_count", 5)],
                "llama.expert_used_count: expected 1 to 4, as there are 4 experts, got 5",
            ),
            (
                "llama",
                "t",
                &[("expert_count", 4), ("expert_used_count", 0)],
                "llama.expert_used_count: expected a positive number, got 0",
            ),
            (
                "qwen2moe",
                "t",
                &[("expert_count", u32::MAX), ("expert_used_count", 1)],
                "qwen2moe.expert_count: expected experts that 4096 values in tensors suffice for, got 4294967295",
            ),
            (
                "llama",
                "t",
                &[("expert_count", 4), ("expert_used_count", 2), ("expert_gating_func", 5)],
                "not supported yet: llama.expert_gating_func 5 (known: 1, softmax; 2, sigmoid; 3, softmax of the selected experts; 4, √softplus)",
            ),
            (
                "lfm2moe",
                "t",
                &[
                    ("expert_count", 8),
                    ("expert_used_count", 2),
                    ("expert_group_count", 3),
                    ("shortconv.l_cache", 3),
                ],
                "lfm2moe.expert_group_count: expected groups of equal size of the 8 experts, got 3",
            ),
            (
                "qwen3moe",
                "t",
                &[
                    ("expert_count", 8),
                    ("expert_used_count", 3),
                    ("expert_group_count", 4),
                    ("expert_group_used_count", 1),
                ],
                "qwen3moe.expert_group_used_count: expected 2 to 4, as 3 experts of 4 groups are used, got 1",
            ),
            (
                "qwen3moe",
                "t",
                &[("expert_count", 8), ("expert_used_count", 3), ("expert_group_count", 4)],
                "\"qwen3moe.expert_group_used_count\"",
            ),
            (
                "gemma",
                "t",
                &[("expert_count", 4)],
                "not supported yet: experts in the family gemma (gemma.expert_count)",
            ),
        ] {
            let error = config(arch, tensor, keys).expect_err(want);
            assert!(error.contains(want) && error.lines().count() == 1, "{error}");
        }
    }
}
