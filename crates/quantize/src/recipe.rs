//! Quantization recipes: the type of each weight matrix; one for all, or more bits where errors
//! cost more.
//!
//! Mixes have llama.cpp's names, ids (`general.file_type`) and rules, so that a file of a given
//! name has the expected contents. In each mix the matrix that produces the logits
//! (`output.weight`, or tied embeddings) is q6_K; [`RECIPES`] lists the other exceptions to the
//! main type. A recipe may also be a text ([`Recipe::parse_file`]).

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use kvant_codec::DType;
use kvant_gguf::Gguf;
use kvant_model::retype::is_matrix;

use crate::quantize::{stored_block, stored_name};
use crate::recipe_file::{self, RecipeFile, RecipeFileError};

use DType::{
    IQ3, IQ4NL, IQ4XS, MXFP4, NVFP4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, TQ3_1S, TQ3T,
    TQ4_1S,
};

/// The type of each weight matrix: [`Recipe::from`] a type applies it to all of them,
/// [`str::parse`] finds a mix by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    name: Cow<'static, str>,
    dtype: DType,
    file_type: Option<u32>,
    rules: Rules,
}

/// What determines the type of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Rules {
    /// All have the main type.
    None,
    /// The first matching rule of a mix, or else the main type.
    Mix(&'static [Rule]),
    /// A recipe file.
    File(RecipeFile),
}

/// The type of some matrices of a mix.
#[derive(Debug, PartialEq, Eq)]
struct Rule(Role, Layers, Models, DType);

/// Role of a matrix in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Value projection, possibly fused with queries and keys.
    Value,
    Key,
    /// Output projection of attention.
    Attended,
    /// Down projection of a feed-forward network.
    Down,
}

/// Selects among the `n` layers with such a matrix, by their index `i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layers {
    All,
    First(usize),
    /// The first of this many equal parts.
    Part(usize),
    /// An eighth at either end, and every third layer between.
    Half,
}

/// Selects models, or what is known of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Models {
    All,
    /// At least four query heads per KV head.
    Grouped,
    /// Eight experts: attention weights are small beside them.
    EightExperts,
    Other,
    /// An importance matrix is known.
    Weighted,
    /// None is known.
    Unweighted,
}

use Models::{EightExperts, Grouped, Other, Unweighted, Weighted};

/// Rules of every mix, before its own.
const ALWAYS: [Rule; 2] =
    [Rule(Role::Value, Layers::All, EightExperts, Q8_0), Rule(Role::Key, Layers::All, EightExperts, Q8_0)];

/// All mixes.
static RECIPES: [Recipe; 23] = [
    mix("q8_0", Q8_0, 7, &[]),
    // Types with minima are better in the first layers, but only with importance.
    mix("q4_0", Q4_0, 2, &[Rule(Role::Down, Layers::Part(8), Weighted, Q4_1)]),
    mix("q4_1", Q4_1, 3, &[]),
    mix("q5_0", Q5_0, 8, &[Rule(Role::Down, Layers::Part(8), Weighted, Q5_1)]),
    mix("q5_1", Q5_1, 9, &[]),
    mix(
        "q2_K",
        Q2K,
        10,
        &[
            Rule(Role::Value, Layers::All, Grouped, Q4K),
            Rule(Role::Value, Layers::All, Models::All, Q3K),
            Rule(Role::Down, Layers::All, Models::All, Q3K),
            Rule(Role::Attended, Layers::All, EightExperts, Q5K),
            Rule(Role::Attended, Layers::All, Other, Q3K),
        ],
    ),
    mix(
        "q2_K_S",
        Q2K,
        21,
        &[Rule(Role::Value, Layers::All, Grouped, Q4K), Rule(Role::Down, Layers::Part(8), Models::All, Q4K)],
    ),
    mix("q3_K_S", Q3K, 11, &[Rule(Role::Attended, Layers::All, EightExperts, Q5K)]),
    mix(
        "q3_K_M",
        Q3K,
        12,
        &[
            Rule(Role::Value, Layers::First(2), Models::All, Q5K),
            Rule(Role::Value, Layers::All, Models::All, Q4K),
            Rule(Role::Down, Layers::Part(16), Models::All, Q5K),
            Rule(Role::Down, Layers::All, Models::All, Q4K),
            Rule(Role::Attended, Layers::All, EightExperts, Q5K),
            Rule(Role::Attended, Layers::All, Other, Q4K),
        ],
    ),
    mix(
        "q3_K_L",
        Q3K,
        13,
        &[
            Rule(Role::Value, Layers::All, Models::All, Q5K),
            Rule(Role::Down, Layers::All, Models::All, Q5K),
            Rule(Role::Attended, Layers::All, Other, Q5K),
        ],
    ),
    mix(
        "q4_K_S",
        Q4K,
        14,
        &[
            Rule(Role::Value, Layers::First(4), Models::All, Q5K),
            Rule(Role::Down, Layers::Part(8), Models::All, Q5K),
            Rule(Role::Attended, Layers::All, EightExperts, Q5K),
        ],
    ),
    mix(
        "q4_K_M",
        Q4K,
        15,
        &[
            Rule(Role::Value, Layers::Half, Models::All, Q6K),
            Rule(Role::Down, Layers::Half, Models::All, Q6K),
            Rule(Role::Attended, Layers::All, EightExperts, Q5K),
        ],
    ),
    mix("q5_K_S", Q5K, 16, &[]),
    mix(
        "q5_K_M",
        Q5K,
        17,
        &[
            Rule(Role::Value, Layers::Half, Models::All, Q6K),
            Rule(Role::Down, Layers::Half, Models::All, Q6K),
        ],
    ),
    mix("q6_K", Q6K, 18, &[]),
    mix(
        "iq3_s",
        IQ3,
        26,
        &[Rule(Role::Value, Layers::All, Grouped, Q4K), Rule(Role::Attended, Layers::All, EightExperts, Q5K)],
    ),
    mix("iq4_nl", IQ4NL, 25, &IQ4),
    mix("iq4_xs", IQ4XS, 30, &IQ4),
    // llama.cpp has no mix of these; the ids are those that it, or its fork, gives files of mostly
    // such matrices.
    mix("mxfp4", MXFP4, 38, &[]),
    mix("nvfp4", NVFP4, 39, &[]),
    mix("tq3_1s", TQ3_1S, 43, &[]),
    mix("tq4_1s", TQ4_1S, 44, &[]),
    mix(
        "tq3t",
        TQ3T,
        TQ3T_FILE_TYPE,
        &[Rule(Role::Value, Layers::All, Models::All, Q4K), Rule(Role::Attended, Layers::All, Other, Q4K)],
    ),
];

/// Kvant's own, as the type is.
const TQ3T_FILE_TYPE: u32 = 19_321;

const IQ4: [Rule; 3] = [
    Rule(Role::Value, Layers::All, Grouped, Q5K),
    Rule(Role::Down, Layers::Part(8), Unweighted, Q5K),
    Rule(Role::Attended, Layers::All, EightExperts, Q5K),
];

/// Short names, resolved as in `llama-quantize`.
const ALIASES: [(&str, &str); 3] = [("q3_K", "q3_K_M"), ("q4_K", "q4_K_M"), ("q5_K", "q5_K_M")];

const fn mix(name: &'static str, dtype: DType, file_type: u32, rules: &'static [Rule]) -> Recipe {
    Recipe { name: Cow::Borrowed(name), dtype, file_type: Some(file_type), rules: Rules::Mix(rules) }
}

/// Not the name of a recipe.
#[derive(Debug, thiserror::Error)]
#[error("not a weight type; known: {}", Recipe::names().collect::<Vec<_>>().join(" "))]
pub struct UnknownRecipe;

impl Recipe {
    /// Iterates over the names of all recipes.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let floats = [DType::F32, DType::F16, DType::BF16].map(DType::name);
        let mixes = RECIPES.iter().map(|recipe| match &recipe.name {
            Cow::Borrowed(name) => *name,
            Cow::Owned(_) => unreachable!("the names of mixes are constants"),
        });
        floats.into_iter().chain(mixes).chain(recipe_file::BUILT_IN.iter().map(|built_in| built_in.name))
    }

    /// Parses a recipe file. Each line has a type and the matrices that have it: `*` for all, the
    /// layers `first:N` and `last:N`, or how a part of a tensor's name begins; the last line that
    /// has a matrix counts, and the first must have all. `#` begins a comment.
    ///
    /// # Errors
    /// A line of another form, or with a type that files cannot hold.
    pub fn parse_file(name: &str, text: &str) -> Result<Self, RecipeFileError> {
        Ok(Self::from_file(name, text.parse()?))
    }

    fn from_file(name: &str, file: RecipeFile) -> Self {
        let Self { dtype, file_type, .. } = file.main_type().into();
        Self { name: Cow::Owned(name.to_owned()), dtype, file_type, rules: Rules::File(file) }
    }

    /// Returns the type of most matrices.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the bits per value of most matrices in a file.
    pub fn main_bits(&self) -> f64 {
        let [len, bytes] = stored_block(self.dtype);
        8.0 * bytes as f64 / len as f64
    }

    /// Returns llama.cpp's id of such a file, `None` where files cannot hold the type.
    pub(crate) fn file_type(&self) -> Option<u32> {
        self.file_type
    }

    /// Returns the requested type of each tensor, in the order of `gguf`, regardless of row
    /// lengths; `None` for unchanged tensors.
    pub(crate) fn types(&self, gguf: &Gguf, is_weighted: bool) -> Vec<Option<DType>> {
        let facts = ModelFacts { is_weighted, ..ModelFacts::of(gguf) };
        let name = |at: usize| gguf.tensors()[at].name.as_str();
        // Layers are counted in layer order, whatever the order in the file.
        let mut order: Vec<usize> = (0..gguf.tensors().len()).collect();
        order.sort_by_key(|&at| (layer(name(at)), name(at)));
        let mut types = vec![None; order.len()];
        let mut seen = [0; 4];
        for at in order.into_iter().filter(|&at| is_matrix(&gguf.tensors()[at])) {
            let part = Role::of(name(at));
            let counted = part.map_or(0, |part| {
                seen[part as usize] += 1;
                seen[part as usize] - 1
            });
            // Experts may be separate tensors.
            let counts_layers = facts.n_experts > 1 && part == Some(Role::Down);
            let i = if counts_layers { layer(name(at)).unwrap_or_default() } else { counted };
            types[at] = Some(self.of_matrix(name(at), part, i, &facts));
        }
        types
    }

    /// Returns the type of one matrix, the `i`th of its role.
    fn of_matrix(&self, name: &str, part: Option<Role>, i: usize, facts: &ModelFacts) -> DType {
        let rules = match &self.rules {
            Rules::None => return self.dtype,
            Rules::File(file) => return file.type_of(name, facts.n_layers),
            Rules::Mix(rules) => rules,
        };
        if facts.is_output(name) {
            return if self.dtype == Q8_0 { Q8_0 } else { Q6K };
        }
        let Some(part) = part else { return self.dtype };
        let n = if part == Role::Value { facts.n_values } else { facts.n_layers };
        let holds = |rule: &&Rule| rule.0 == part && rule.1.contains(i, n) && rule.2.match_model(facts);
        let dtype = ALWAYS.iter().chain(*rules).find(holds).map_or(self.dtype, |rule| rule.3);
        // There the value projections have an eighth of the rows of the query projections.
        let is_small = part == Role::Value && facts.is_70b;
        if is_small && [Q3K, Q4K].contains(&dtype) { Q5K } else { dtype }
    }
}

impl From<DType> for Recipe {
    /// Creates a recipe with all matrices in this type.
    fn from(dtype: DType) -> Self {
        let file_type = match dtype {
            DType::F32 => Some(0),
            DType::F16 => Some(1),
            DType::BF16 => Some(32),
            // A type without an id of its own gets the id of the smallest mix.
            Q2K => Some(21),
            _ => RECIPES.iter().find(|recipe| recipe.dtype == dtype).and_then(Self::file_type),
        };
        Self { name: Cow::Borrowed(stored_name(dtype)), dtype, file_type, rules: Rules::None }
    }
}

impl FromStr for Recipe {
    type Err = UnknownRecipe;

    /// Parses a name, ignoring case.
    fn from_str(text: &str) -> Result<Self, UnknownRecipe> {
        let alias = ALIASES.iter().find(|(alias, _)| alias.eq_ignore_ascii_case(text));
        let name = alias.map_or(text, |(_, name)| name);
        let floats = [DType::F32, DType::F16, DType::BF16].map(Self::from);
        if let Some(built_in) = recipe_file::BUILT_IN.iter().find(|of| of.name.eq_ignore_ascii_case(name)) {
            return Ok(Self::from_file(built_in.name, built_in.parsed()));
        }
        let mut known = RECIPES.iter().cloned().chain(floats);
        known.find(|recipe| recipe.name.eq_ignore_ascii_case(name)).ok_or(UnknownRecipe)
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Role {
    fn of(name: &str) -> Option<Self> {
        const NAMES: [(&str, Role); 6] = [
            ("attn_qkv.weight", Role::Value),
            ("attn_kv_b.weight", Role::Value),
            ("attn_v.weight", Role::Value),
            ("attn_k.weight", Role::Key),
            ("attn_output.weight", Role::Attended),
            ("ffn_down", Role::Down),
        ];
        NAMES.iter().find(|(part, _)| name.contains(part)).map(|(_, part)| *part)
    }
}

impl Layers {
    fn contains(self, i: usize, n: usize) -> bool {
        match self {
            Self::All => true,
            Self::First(count) => i < count,
            Self::Part(parts) => i < n / parts,
            Self::Half => i < n / 8 || i >= n - n.div_ceil(8) || (i - n / 8) % 3 == 2,
        }
    }
}

impl Models {
    fn match_model(self, facts: &ModelFacts) -> bool {
        match self {
            Self::All => true,
            Self::Grouped => facts.heads_per_kv >= 4,
            Self::EightExperts => facts.n_experts == 8,
            Self::Other => facts.n_experts != 8,
            Self::Weighted => facts.is_weighted,
            Self::Unweighted => !facts.is_weighted,
        }
    }
}

/// Properties of a model that rules depend on.
struct ModelFacts {
    n_layers: usize,
    /// Number of value projections.
    n_values: usize,
    /// Query heads per KV head in the first layer.
    heads_per_kv: usize,
    n_experts: usize,
    /// Whether the embeddings are also the output matrix.
    is_tied: bool,
    is_70b: bool,
    /// Whether importance is known.
    is_weighted: bool,
}

impl ModelFacts {
    /// Reads the facts of a file. Missing or malformed entries count as those of a plain model:
    /// quantizing does not require a runnable one.
    fn of(gguf: &Gguf) -> Self {
        let meta = gguf.meta();
        let arch = meta.find::<&str>("general.architecture").ok().flatten().unwrap_or_default();
        let number = |key: &str| number_of_layer(gguf, &format!("{arch}.{key}"), 0);
        let n_layers = number("block_count").unwrap_or_default();
        let n_heads = number("attention.head_count").unwrap_or_default();
        let n_kv_heads = number("attention.head_count_kv").unwrap_or(n_heads);
        let is_value = |name: &str| Role::of(name) == Some(Role::Value);
        Self {
            n_layers,
            n_values: gguf.tensors().iter().filter(|info| is_value(&info.name)).count(),
            heads_per_kv: n_heads.checked_div(n_kv_heads).unwrap_or_default(),
            n_experts: number("expert_count").unwrap_or_default(),
            is_tied: gguf.find_info("output.weight").is_none(),
            is_70b: n_layers == 80 && n_heads != n_kv_heads,
            is_weighted: false,
        }
    }

    fn is_output(&self, name: &str) -> bool {
        let is_embedding = ["token_embd.weight", "per_layer_token_embd.weight"].contains(&name);
        name == "output.weight" || self.is_tied && is_embedding
    }
}

/// Returns a number that all layers have, or each its own.
pub(crate) fn number_of_layer(gguf: &Gguf, key: &str, layer: usize) -> Option<usize> {
    let of_layers = || gguf.meta().find::<Vec<usize>>(key).ok().flatten()?.get(layer).copied();
    gguf.meta().find::<usize>(key).ok().flatten().or_else(of_layers)
}

/// Returns the layer index in a tensor name.
pub(crate) fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_gguf::GgufWriter;

    /// Shape of a model: layers, query and KV heads, experts, and whether it has an output matrix.
    struct Shape {
        n_layers: usize,
        heads: [u32; 2],
        n_experts: u32,
        has_output: bool,
    }

    const PLAIN: Shape = Shape { n_layers: 24, heads: [9, 3], n_experts: 0, has_output: true };

    /// A file of that shape with tiny rows and layers in reverse order.
    fn file(shape: &Shape) -> Gguf {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", "llama").unwrap();
        writer.set("llama.block_count", shape.n_layers as u32).unwrap();
        writer.set("llama.attention.head_count", shape.heads[0]).unwrap();
        writer.set("llama.attention.head_count_kv", shape.heads[1]).unwrap();
        writer.set("llama.expert_count", shape.n_experts).unwrap();
        let down = if shape.n_experts > 0 { "ffn_down_exps" } else { "ffn_down" };
        let parts = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", down, "attn_norm"];
        let layers = (0..shape.n_layers).rev();
        let mut names: Vec<_> = layers
            .flat_map(|layer| parts.map(|part| format!("blk.{layer}.{part}.weight")))
            .chain(["token_embd.weight".to_owned()])
            .collect();
        names.extend(shape.has_output.then(|| "output.weight".to_owned()));
        for name in &names {
            writer.add_tensor(name, &[1, 2], DType::F32).unwrap();
        }
        let mut bytes = Vec::new();
        writer
            .write_to(&mut bytes, |sink| names.iter().try_for_each(|name| sink.bytes(name, &[0; 8])))
            .unwrap();
        Gguf::from_bytes(bytes).unwrap()
    }

    fn type_of(recipe: &str, shape: &Shape, name: &str) -> Option<DType> {
        let (gguf, recipe) = (file(shape), recipe.parse::<Recipe>().unwrap());
        let at = gguf.tensors().iter().position(|info| info.name == name).unwrap();
        recipe.types(&gguf, false)[at]
    }

    /// Returns the type of a role in each layer.
    fn types(recipe: &str, shape: &Shape, part: &str) -> Vec<DType> {
        let (gguf, recipe) = (file(shape), recipe.parse::<Recipe>().unwrap());
        let types = recipe.types(&gguf, false);
        let at = |layer: usize| {
            let name = format!("blk.{layer}.{part}.weight");
            gguf.tensors().iter().position(|info| info.name == name).unwrap()
        };
        (0..shape.n_layers).map(|layer| types[at(layer)].unwrap()).collect()
    }

    /// Returns `more` in these layers of `n`, `less` in the others.
    fn in_layers(n: usize, layers: &[usize], more: DType, less: DType) -> Vec<DType> {
        (0..n).map(|layer| if layers.contains(&layer) { more } else { less }).collect()
    }

    #[test]
    fn the_layers_with_more_bits_are_those_of_llama_cpp() {
        // For 18 layers, those that are q6_K in files of Gemma 3 270M; for 30, those of SmolLM2
        // 135M.
        let of_24 = [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23];
        let of_18 = [0, 1, 4, 7, 10, 13, 15, 16, 17];
        let of_30 = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29];
        for (n_layers, layers) in [(24, &of_24[..]), (18, &of_18), (30, &of_30)] {
            let shape = Shape { n_layers, ..PLAIN };
            for part in ["attn_v", "ffn_down"] {
                assert_eq!(types("Q4_K_M", &shape, part), in_layers(n_layers, layers, Q6K, Q4K), "{part}");
                assert_eq!(types("q5_k_m", &shape, part), in_layers(n_layers, layers, Q6K, Q5K), "{part}");
            }
        }
    }

    #[test]
    fn each_mix_gives_each_part_the_type_that_llama_cpp_gives() {
        let all = |dtype| vec![dtype; 24];
        let first = |n: usize, more, less| in_layers(24, &(0..n).collect::<Vec<_>>(), more, less);
        let table = [
            // Mix, values, down projection, attention output, all others.
            ("q2_K", all(Q3K), all(Q3K), Q3K, Q2K),
            ("q2_K_S", all(Q2K), first(3, Q4K, Q2K), Q2K, Q2K),
            ("q3_K_S", all(Q3K), all(Q3K), Q3K, Q3K),
            ("q3_K_M", first(2, Q5K, Q4K), first(1, Q5K, Q4K), Q4K, Q3K),
            ("q3_K_L", all(Q5K), all(Q5K), Q5K, Q3K),
            ("q4_K_S", first(4, Q5K, Q4K), first(3, Q5K, Q4K), Q4K, Q4K),
            ("q5_K_S", all(Q5K), all(Q5K), Q5K, Q5K),
            ("q6_K", all(Q6K), all(Q6K), Q6K, Q6K),
            ("q4_0", all(Q4_0), all(Q4_0), Q4_0, Q4_0),
            ("tq3t", all(Q4K), all(TQ3T), Q4K, TQ3T),
            ("iq4_xs", all(IQ4XS), first(3, Q5K, IQ4XS), IQ4XS, IQ4XS),
        ];
        for (mix, values, down, attended, rest) in table {
            assert_eq!(types(mix, &PLAIN, "attn_v"), values, "{mix}");
            assert_eq!(types(mix, &PLAIN, "ffn_down"), down, "{mix}");
            assert_eq!(types(mix, &PLAIN, "attn_output"), all(attended), "{mix}");
            for part in ["attn_q", "attn_k", "ffn_up"] {
                assert_eq!(types(mix, &PLAIN, part), all(rest), "{mix} {part}");
            }
            assert_eq!(type_of(mix, &PLAIN, "token_embd.weight"), Some(rest), "{mix}");
            assert_eq!(type_of(mix, &PLAIN, "output.weight"), Some(Q6K), "{mix}");
            assert_eq!(type_of(mix, &PLAIN, "blk.0.attn_norm.weight"), None, "{mix}");
        }
    }

    #[test]
    fn embeddings_that_give_the_logits_too_are_q6_k_and_q8_0_stays() {
        let tied = Shape { has_output: false, ..PLAIN };
        assert_eq!(type_of("q4_0", &tied, "token_embd.weight"), Some(Q6K));
        assert_eq!(type_of("q8_0", &tied, "token_embd.weight"), Some(Q8_0));
        assert_eq!(type_of("q8_0", &PLAIN, "output.weight"), Some(Q8_0));
        assert_eq!(type_of("f16", &tied, "token_embd.weight"), Some(DType::F16));
    }

    #[test]
    fn shared_values_eight_experts_and_eighty_layers_get_more() {
        let grouped = Shape { heads: [8, 2], ..PLAIN };
        assert_eq!(types("q2_K", &grouped, "attn_v"), [Q4K; 24]);
        assert_eq!(types("iq4_nl", &grouped, "attn_v"), [Q5K; 24]);
        let experts = Shape { n_experts: 8, ..PLAIN };
        for mix in ["q4_0", "q2_K", "q3_K_L", "q4_K_M", "q6_K"] {
            assert_eq!(types(mix, &experts, "attn_v"), [Q8_0; 24], "{mix}");
            assert_eq!(types(mix, &experts, "attn_k"), [Q8_0; 24], "{mix}");
        }
        for (mix, attended) in
            [("q2_K", Q5K), ("q3_K_M", Q5K), ("q3_K_L", Q3K), ("q4_K_M", Q5K), ("q5_K_M", Q5K)]
        {
            assert_eq!(types(mix, &experts, "attn_output"), [attended; 24], "{mix}");
        }
        let down = in_layers(24, &[0, 1, 2], Q5K, Q4K);
        assert_eq!(types("q4_K_S", &experts, "ffn_down_exps"), down);
        let large = Shape { n_layers: 80, heads: [64, 8], ..PLAIN };
        assert_eq!(types("q3_K_S", &large, "attn_v"), [Q5K; 80]);
        assert_eq!(types("q3_K_S", &large, "attn_k"), [Q3K; 80]);
    }

    #[test]
    fn a_type_alone_is_for_all_matrices_and_has_a_number_of_its_own() {
        for (dtype, number) in [(Q2K, 21), (Q3K, 11), (Q4K, 14), (Q5K, 16), (Q4_0, 2), (DType::BF16, 32)] {
            let recipe = Recipe::from(dtype);
            assert_eq!(recipe.file_type(), Some(number), "{dtype}");
            assert!(
                recipe.types(&file(&PLAIN), false).into_iter().flatten().all(|other| other == dtype),
                "{dtype}"
            );
        }
        assert_eq!(Recipe::from(DType::Turbo3).file_type(), None);
    }

    #[test]
    fn recipe_names_ignore_case_and_unknown_ones_list_all() {
        let number = |name: &str| name.parse::<Recipe>().unwrap().file_type();
        for (name, want) in
            [("Q4_K_M", 15), ("q4_k_m", 15), ("Q4_K", 15), ("q3_K", 12), ("q5_K", 17), ("Q2_K", 10)]
        {
            assert_eq!(number(name), Some(want), "{name}");
        }
        for name in Recipe::names() {
            assert_eq!(name.parse::<Recipe>().unwrap().to_string(), name);
        }
        for name in ["q4_K_XL", "turbo3", "COPY", ""] {
            let error = name.parse::<Recipe>().unwrap_err().to_string();
            assert!(error.starts_with("not a weight type; known: f32 f16 bf16 q8_0 "), "{error}");
        }
    }

    #[test]
    fn numbers_of_layers_that_cannot_be_true_do_no_harm() {
        for layers in [u64::MAX, 0] {
            let mut writer = GgufWriter::new();
            writer.set("general.architecture", "llama").unwrap();
            writer.set("llama.block_count", layers).unwrap();
            let name = format!("blk.{}.ffn_down.weight", u64::MAX);
            writer.add_tensor(&name, &[1, 2], DType::F32).unwrap();
            let mut bytes = Vec::new();
            writer.write_to(&mut bytes, |sink| sink.bytes(&name, &[0; 8])).unwrap();
            let gguf = Gguf::from_bytes(bytes).unwrap();
            for name in Recipe::names() {
                assert_eq!(name.parse::<Recipe>().unwrap().types(&gguf, false).len(), 1);
            }
        }
    }
}
