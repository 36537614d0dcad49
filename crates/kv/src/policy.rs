//! Policies: named rules that change a plan. They are data, parsed from text such as
//! `sink:16,recent:64`, and each reports its changes.

use std::fmt;
use std::str::FromStr;

use kvant_backend::limits::{MAX_TOKENS, check_size};
use kvant_codec::DType;
use kvant_codec::tile::TILE;

use crate::{HeadTypes, KvError, KvShape, Plan};

/// One rule.
#[derive(Debug, Clone, PartialEq)]
pub enum Policy {
    /// Raises keys to the smallest type whose predicted score variance is acceptable, according to
    /// the weights ([`WeightStatistics`](crate::WeightStatistics)).
    AutoKeys {
        /// The largest acceptable predicted variance of scores, in nats squared: above it a code
        /// blurs the attention weights.
        max_noise: f64,
    },
    /// Raises keys below 8 bits to q8_0 where 6 or more query heads share a KV head: symmetric
    /// low-bit keys ruined such models (Qwen2.5: perplexity 2887 against 7.4).
    AutoAsymmetric,
    /// Raises the first and last KV layers to q8_0, counted by KV-layer ordinal.
    Boundary {
        /// Layers at the start.
        first: usize,
        /// Layers at the end.
        last: usize,
    },
    /// Stores the first tokens in f16.
    Sink(usize),
    /// Stores the youngest tokens in f16.
    Recent(usize),
    /// Multiplies every encoded norm by this factor.
    Alpha(f32),
    /// Sets types from a table, see [`Policies::with_table`].
    Table(Vec<TableRule>),
}

/// One line of a type table: the heads it selects and their types.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRule {
    /// Its number in the table, from 1, for errors.
    pub line: usize,
    /// The layer; `None` for all.
    pub layer: Option<usize>,
    /// The KV head; `None` for all.
    pub head: Option<usize>,
    /// Type of the keys; `None` leaves it unchanged.
    pub k: Option<DType>,
    /// Type of the values; `None` leaves it unchanged.
    pub v: Option<DType>,
}

/// The rules of a cache, applied in order.
#[derive(Debug, Clone, PartialEq)]
pub struct Policies(pub Vec<Policy>);

/// Query heads per KV head from which low-bit keys are not trusted.
const MIN_WIDE_GQA_RATIO: usize = 6;

/// Default limit of the score variance of a code, in nats squared. Of the models measured, only the
/// first layer of Qwen2.5-0.5B exceeds it at 3 bits (3.7; the next is a layer of Gemma 3 270M with
/// 2.1, which loses nothing by it): that layer alone caused three quarters of all the divergence.
const MAX_SCORE_NOISE: f64 = 2.5;

/// Syntax of policies.
const POLICY_SYNTAX: &str = "none, or a comma list of auto-keys[:NOISE], auto-asymmetric, boundary[:FIRST[,LAST]], sink:N, recent:N, alpha:X";

impl Default for Policies {
    /// `auto-keys,sink:16`: prevents a silent loss of quality. Many heads attend to the first token
    /// from any position, so its coding error affects every query; one f16 tile is the cheapest
    /// improvement available.
    fn default() -> Self {
        Self(vec![Policy::AutoKeys { max_noise: MAX_SCORE_NOISE }, Policy::Sink(TILE)])
    }
}

impl Policies {
    /// Returns no rules.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// Adds an explicit type table, applied last. Each line has the form `LAYER HEAD K|V|KV TYPE`,
    /// where LAYER and HEAD are numbers from 0 or `*`; later lines win; `#` starts a comment.
    ///
    /// # Errors
    /// When a line is invalid; the shape is checked when the plan is made.
    pub fn with_table(mut self, text: &str) -> Result<Self, KvError> {
        let rules = text.lines().enumerate().filter_map(|(i, line)| {
            let line_text = line.split('#').next().unwrap_or_default().trim();
            (!line_text.is_empty()).then(|| TableRule::parse(i + 1, line_text))
        });
        self.0.push(Policy::Table(rules.collect::<Result<_, _>>()?));
        Ok(self)
    }

    pub(crate) fn apply(&self, shape: &KvShape, plan: &mut Plan) -> Result<(), KvError> {
        self.0.iter().try_for_each(|policy| policy.apply(shape, plan))
    }
}

impl FromStr for Policies {
    type Err = KvError;

    fn from_str(text: &str) -> Result<Self, KvError> {
        if text == "none" {
            return Ok(Self::none());
        }
        let mut rules: Vec<String> = Vec::new();
        for part in text.split(',') {
            match rules.last_mut() {
                // `boundary:1,2`: the comma belongs to the rule.
                Some(rule) if is_number(part) && rule.strip_prefix("boundary:").is_some_and(is_number) => {
                    rule.push(':');
                    rule.push_str(part);
                }
                _ => rules.push(part.to_owned()),
            }
        }
        rules.iter().map(|rule| rule.parse()).collect::<Result<_, _>>().map(Self)
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

impl FromStr for Policy {
    type Err = KvError;

    fn from_str(text: &str) -> Result<Self, KvError> {
        let error = || KvError::Policy { got: text.to_owned(), expected: POLICY_SYNTAX };
        let mut parts = text.trim().split(':');
        let name = parts.next().unwrap_or_default();
        let args: Vec<&str> = parts.collect();
        let count = |arg: &str| arg.parse::<usize>().map_err(|_| error());
        match (name, args.as_slice()) {
            ("auto-keys", []) => Ok(Self::AutoKeys { max_noise: MAX_SCORE_NOISE }),
            ("auto-keys", [x]) => {
                let max_noise =
                    x.parse().ok().filter(|max_noise: &f64| *max_noise >= 0.0 && max_noise.is_finite());
                max_noise.map(|max_noise| Self::AutoKeys { max_noise }).ok_or_else(error)
            }
            ("auto-asymmetric", []) => Ok(Self::AutoAsymmetric),
            ("boundary", []) => Ok(Self::Boundary { first: 2, last: 2 }),
            ("boundary", [n]) => Ok(Self::Boundary { first: count(n)?, last: count(n)? }),
            ("boundary", [first, last]) => Ok(Self::Boundary { first: count(first)?, last: count(last)? }),
            ("sink", [n]) => Ok(Self::Sink(count(n)?)),
            ("recent", [n]) => Ok(Self::Recent(count(n)?)),
            ("alpha", [x]) => x.parse().ok().filter(is_alpha).map(Self::Alpha).ok_or_else(error),
            _ => Err(error()),
        }
    }
}

impl Policy {
    fn apply(&self, shape: &KvShape, plan: &mut Plan) -> Result<(), KvError> {
        match self {
            Self::AutoKeys { max_noise } => raise_sensitive_keys(shape, plan, *max_noise),
            Self::AutoAsymmetric => {
                let mut raised = None;
                for (layer, heads) in shape.layers.iter().zip(&mut plan.types) {
                    for types in heads.iter_mut().filter(|types| types.k.bits_per_value() < 8.0) {
                        if layer.gqa_ratio() >= MIN_WIDE_GQA_RATIO {
                            raised = Some((types.k, layer.gqa_ratio()));
                            types.k = DType::Q8_0;
                        }
                    }
                }
                if let Some((from, ratio)) = raised {
                    plan.notes.push(format!(
                        "auto-asymmetric: K raised from {} to q8_0 ({ratio} query heads per KV head; policy none keeps it)",
                        from.name()
                    ));
                }
            }
            Self::Boundary { first, last } => {
                let n = plan.types.len();
                let mut touched = 0;
                for (layer, heads) in plan.types.iter_mut().enumerate() {
                    if layer < *first || layer.saturating_add(*last) >= n {
                        let before = heads.clone();
                        heads.iter_mut().for_each(raise_to_q8_0);
                        touched += usize::from(*heads != before);
                    }
                }
                if touched > 0 {
                    plan.notes.push(format!("boundary: q8_0 in {touched} of {n} KV layers"));
                }
            }
            Self::Sink(n) => {
                plan.sink_tokens = check_size("sink", *n, 0..=MAX_TOKENS)?;
                // Float types have no sink to report.
                let mut heads = shape.layers.iter().zip(&plan.types).flat_map(|(layer, heads)| {
                    heads.iter().flat_map(|types| layer.sides().iter().map(|&side| types.of(side)))
                });
                if *n > 0 && heads.any(|dtype| dtype.code().is_some()) {
                    plan.notes.push(format!("sink: first {n} tokens in f16"));
                }
            }
            Self::Recent(n) => {
                plan.recent_tokens = check_size("recent", *n, 0..=MAX_TOKENS)?;
                plan.notes.push(format!("recent: last {n} tokens in f16"));
            }
            Self::Alpha(x) => {
                if !is_alpha(x) {
                    return Err(KvError::Policy { got: format!("alpha:{x}"), expected: POLICY_SYNTAX });
                }
                plan.alpha = *x;
                plan.notes.push(format!("alpha: norms times {x}"));
            }
            Self::Table(rules) => {
                for rule in rules {
                    rule.apply(shape, plan)?;
                }
                plan.notes.push(format!("types from a table of {} rules", rules.len()));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (i, policy) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "," })?;
            match policy {
                Policy::AutoKeys { max_noise: MAX_SCORE_NOISE } => f.write_str("auto-keys"),
                Policy::AutoKeys { max_noise } => write!(f, "auto-keys:{max_noise}"),
                Policy::AutoAsymmetric => f.write_str("auto-asymmetric"),
                Policy::Boundary { first, last } => write!(f, "boundary:{first},{last}"),
                Policy::Sink(n) => write!(f, "sink:{n}"),
                Policy::Recent(n) => write!(f, "recent:{n}"),
                Policy::Alpha(x) => write!(f, "alpha:{x}"),
                Policy::Table(rules) => write!(f, "table({} rules)", rules.len()),
            }?;
        }
        Ok(())
    }
}

/// Types that keys are raised to, smallest first.
const KEY_TYPE_LADDER: [DType; 3] = [DType::Turbo3, DType::Turbo4, DType::Q8_0];

/// Raises keys whose scores a code would blur to the smallest sufficient type.
fn raise_sensitive_keys(shape: &KvShape, plan: &mut Plan, max_noise: f64) {
    let Some(statistics) = &shape.statistics else { return };
    let (mut n, mut raised) = (0, 0);
    for (heads, noise) in plan.types.iter_mut().zip(&statistics.score_noise) {
        for (types, noise) in heads.iter_mut().zip(noise) {
            n += 1;
            let blurs = |dtype: DType| noise * dtype.squared_error() > max_noise;
            if !blurs(types.k) {
                continue;
            }
            let bits = types.k.bits_per_value();
            let mut sharper = KEY_TYPE_LADDER.into_iter().filter(|dtype| dtype.bits_per_value() > bits);
            if let Some(dtype) = sharper.clone().find(|&dtype| !blurs(dtype)).or_else(|| sharper.next_back())
            {
                types.k = dtype;
                raised += 1;
            }
        }
    }
    if raised > 0 {
        plan.notes
            .push(format!("auto-keys: keys of {raised} of {n} KV heads raised (policy none keeps them)"));
    }
}

/// Returns whether `x` is a valid factor on norms.
fn is_alpha(x: &f32) -> bool {
    *x > 0.0 && *x < 4.0
}

fn raise_to_q8_0(types: &mut HeadTypes) {
    for dtype in [&mut types.k, &mut types.v] {
        if dtype.bits_per_value() < 8.0 {
            *dtype = DType::Q8_0;
        }
    }
}

impl TableRule {
    fn parse(line: usize, text: &str) -> Result<Self, KvError> {
        let error = |what: String| KvError::Table { line, what };
        let fields: Vec<&str> = text.split_whitespace().collect();
        let [layer, head, side, dtype] = fields.as_slice() else {
            return Err(error(format!("expected 'LAYER HEAD K|V|KV TYPE', got '{text}'")));
        };
        let index = |field: &str| match field {
            "*" => Ok(None),
            _ => field.parse().map(Some).map_err(|_| error(format!("expected a number or *, got '{field}'"))),
        };
        let dtype: DType = dtype.parse().map_err(|e| error(format!("{e}")))?;
        if !dtype.is_kv() {
            return Err(error(KvError::NotKvType { got: dtype.name().to_owned() }.to_string()));
        }
        let (k, v) = match *side {
            "K" => (Some(dtype), None),
            "V" => (None, Some(dtype)),
            "KV" => (Some(dtype), Some(dtype)),
            _ => return Err(error(format!("expected K, V or KV, got '{side}'"))),
        };
        Ok(Self { line, layer: index(layer)?, head: index(head)?, k, v })
    }

    fn apply(&self, shape: &KvShape, plan: &mut Plan) -> Result<(), KvError> {
        let n_heads = shape.layers.iter().map(|layer| layer.n_kv_heads).max().unwrap_or(0);
        for (what, index, n) in [("layer", self.layer, shape.layers.len()), ("head", self.head, n_heads)] {
            if let Some(index) = index.filter(|&index| index >= n) {
                let what = format!("{what} {index} of a model with {n}");
                return Err(KvError::Table { line: self.line, what });
            }
        }
        let selects =
            |selected: Option<usize>, index: usize| selected.is_none_or(|selected| selected == index);
        let layers = plan.types.iter_mut().enumerate().filter(|(layer, _)| selects(self.layer, *layer));
        let heads = layers.flat_map(|(_, heads)| heads.iter_mut().enumerate());
        for (_, types) in heads.filter(|(head, _)| selects(self.head, *head)) {
            types.k = self.k.unwrap_or(types.k);
            types.v = self.v.unwrap_or(types.v);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kvant_codec::tile::Side;

    use super::*;
    use crate::KvLayerShape;

    fn shape(n_layers: usize, n_heads: usize, n_kv_heads: usize, head_dim: usize) -> KvShape {
        let (k_head_dim, v_head_dim, window) = (head_dim, head_dim, None);
        KvShape::uniform(
            n_layers,
            KvLayerShape {
                n_heads,
                n_kv_heads,
                k_head_dim,
                v_head_dim,
                window,
                shared_kv: false,
                index: None,
                pool: None,
            },
        )
    }

    fn qwen() -> KvShape {
        shape(28, 12, 2, 128)
    }

    fn llama() -> KvShape {
        shape(4, 4, 4, 64)
    }

    fn plan(shape: &KvShape, k: DType, v: DType, policies: &str) -> Plan {
        Plan::new(shape, k, v, &policies.parse().unwrap()).unwrap()
    }

    #[test]
    fn auto_asymmetric_raises_low_bit_keys_of_wide_groups_only() {
        for k in [DType::Turbo2, DType::Turbo3, DType::Turbo4, DType::Q4_0] {
            let plan = plan(&qwen(), k, DType::Turbo3, "auto-asymmetric");
            assert_eq!(plan.type_names(), ("q8_0", "turbo3"));
            assert_eq!(plan.notes.len(), 1);
        }
        assert_eq!(plan(&qwen(), DType::F16, DType::Turbo3, "auto-asymmetric").type_names().0, "f16");
        assert_eq!(plan(&llama(), DType::Turbo3, DType::Turbo3, "auto-asymmetric").type_names().0, "turbo3");
        assert_eq!(plan(&qwen(), DType::Turbo3, DType::Turbo3, "none").type_names().0, "turbo3");
    }

    #[test]
    fn auto_keys_raises_blurred_keys_to_the_smallest_sharp_type() {
        // Two layers of four KV heads.
        let score_noise = vec![vec![1.0, 100.0, 1000.0, 1e9], vec![0.0; 4]];
        let statistics = crate::WeightStatistics { score_noise, ..Default::default() };
        let shape = KvShape { statistics: Some(std::sync::Arc::new(statistics)), ..shape(2, 4, 4, 64) };
        let keys = |k: DType, policies: &str| {
            let plan = plan(&shape, k, DType::Turbo2, policies);
            assert!(plan.types[1].iter().all(|types| types.k == k));
            assert!(plan.types.iter().flatten().all(|types| types.v == DType::Turbo2));
            (plan.types[0].iter().map(|types| types.k.name()).collect::<Vec<_>>().join(" "), plan.notes)
        };
        let (types, notes) = keys(DType::Turbo2, "auto-keys");
        assert_eq!(types, "turbo2 turbo4 q8_0 q8_0");
        assert_eq!(notes, ["auto-keys: keys of 3 of 8 KV heads raised (policy none keeps them)"]);
        assert_eq!(keys(DType::Turbo3, "auto-keys").0, "turbo3 turbo4 q8_0 q8_0");
        assert_eq!(keys(DType::Turbo4, "auto-keys").0, "turbo4 turbo4 q8_0 q8_0");
        assert_eq!(keys(DType::Turbo4, "auto-keys:0.5").0, "turbo4 q8_0 q8_0 q8_0");
        for exact in [DType::Q8_0, DType::F16] {
            let (types, notes) = keys(exact, "auto-keys");
            assert_eq!((types, notes.len()), ([exact.name(); 4].join(" "), 0));
        }
        assert_eq!(keys(DType::Turbo2, "none").0, "turbo2 turbo2 turbo2 turbo2");
        // A bare shape has no statistics.
        assert_eq!(plan(&qwen(), DType::Turbo2, DType::Turbo2, "auto-keys").type_names().0, "turbo2");
    }

    #[test]
    fn boundary_counts_kv_layers_and_never_lowers_a_type() {
        let p = plan(&qwen(), DType::F16, DType::Turbo2, "boundary:1,2");
        let raised: Vec<usize> = (0..28).filter(|&i| p.types[i][0].v == DType::Q8_0).collect();
        assert_eq!(raised, [0, 26, 27]);
        assert!(p.types.iter().flatten().all(|t| t.k == DType::F16));
        // A boundary of more layers than the model has covers all of them, without overflow.
        let p = plan(&llama(), DType::Turbo2, DType::Turbo2, "boundary:9");
        assert_eq!(p.type_names(), ("q8_0", "q8_0"));
    }

    #[test]
    fn an_mla_latent_is_one_tensor_of_the_keys_type() {
        let layer = KvLayerShape {
            n_heads: 16,
            n_kv_heads: 1,
            k_head_dim: 576,
            v_head_dim: 512,
            window: None,
            shared_kv: true,
            index: None,
            pool: None,
        };
        let (shared_kv, f16) = (KvShape::uniform(2, layer), DType::F16);
        let apart = KvShape::uniform(2, KvLayerShape { shared_kv: false, ..layer });
        let p = plan(&shared_kv, DType::Turbo3, DType::Turbo3, "none");
        assert_eq!((p.type_names(), p.notes.len()), (("turbo3", "turbo3"), 0));
        assert_eq!(p.kv_tensor(&shared_kv, 1, 0, Side::K), p.kv_tensor(&shared_kv, 1, 0, Side::V));
        // 576 of 576 + 512 values are stored.
        assert_eq!(
            17 * plan(&shared_kv, f16, f16, "none").n_bytes(&shared_kv, 1280),
            9 * apart.f16_bytes(1280)
        );
        // Policies for keys apply to both; a type for values alone is ignored with a note.
        let p = plan(&shared_kv, DType::Turbo3, DType::Turbo3, "auto-asymmetric");
        assert_eq!((p.type_names(), p.notes.len()), (("q8_0", "q8_0"), 2));
        assert!(p.notes[1].contains("of the keys' type q8_0; turbo3 for values is ignored"), "{:?}", p.notes);
        let policies = Policies::none().with_table("0 0 V f32\n1 0 K turbo2").unwrap();
        let p = Plan::new(&shared_kv, f16, f16, &policies).unwrap();
        let of = |dtype| vec![HeadTypes { k: dtype, v: dtype }];
        assert_eq!(p.types, [of(f16), of(DType::Turbo2)]);
    }

    #[test]
    fn sink_and_recent_are_whole_tiles_and_skip_float_tensors() {
        let p = plan(&llama(), DType::Turbo3, DType::F16, "sink:4,recent:100,alpha:1.02");
        let k = p.kv_tensor(&llama(), 0, 0, Side::K);
        assert_eq!((k.sink_tiles, k.tail_tiles, k.alpha), (1, 9, 1.02));
        let v = p.kv_tensor(&llama(), 0, 0, Side::V);
        assert_eq!((v.sink_tiles, v.tail_tiles, v.alpha), (0, 0, 1.0));
    }

    #[test]
    fn token_counts_are_limited_and_sizes_saturate() {
        for name in ["sink", "recent"] {
            for n in [MAX_TOKENS + 1, usize::MAX] {
                let policies: Policies = format!("{name}:{n}").parse().unwrap();
                let error = Plan::new(&llama(), DType::Turbo3, DType::Turbo3, &policies).unwrap_err();
                assert_eq!(error.to_string(), format!("{name}: expected 0 to {MAX_TOKENS}, got {n}"));
            }
        }
        let policy = format!("sink:{MAX_TOKENS},recent:{MAX_TOKENS}");
        let p = plan(&llama(), DType::Turbo3, DType::Turbo3, &policy);
        // Keys and values of four heads of 64 in four layers, in f16.
        assert!(p.n_bytes(&llama(), 1) >= 2 * MAX_TOKENS * (2 * 4 * 64 * 4) * 2);
        let p = plan(&llama(), DType::F16, DType::F16, &format!("boundary:{0},{0}", usize::MAX));
        assert_eq!(p.n_bytes(&llama(), usize::MAX), usize::MAX);
    }

    #[test]
    fn a_table_names_layers_heads_and_sides_and_later_lines_win() {
        let policies =
            Policies::none().with_table("# all\n* * KV turbo2\n0 * K q8_0 # first\n3 1 V f16\n").unwrap();
        let p = Plan::new(&llama(), DType::F16, DType::F16, &policies).unwrap();
        assert_eq!(p.types[0][3], HeadTypes { k: DType::Q8_0, v: DType::Turbo2 });
        assert_eq!(p.types[3][1], HeadTypes { k: DType::Turbo2, v: DType::F16 });
        assert_eq!(p.types[3][0], HeadTypes { k: DType::Turbo2, v: DType::Turbo2 });
    }

    #[test]
    fn invalid_policies_and_tables_are_rejected_with_the_line() {
        for bad in [
            "",
            "boundry",
            "sink",
            "sink:x",
            "sink:1:2",
            "alpha:nan",
            "alpha:0",
            "auto-keys:nan",
            "auto-keys:-1",
            "auto-keys:1:2",
            "none,sink:1",
            "boundary:1,2,3",
            "sink:1,2",
            "7",
        ] {
            assert!(matches!(bad.parse::<Policies>(), Err(KvError::Policy { .. })), "{bad:?}");
        }
        for bad in ["0 0 K", "0 0 Q f16", "x 0 K f16", "0 0 K q5_K", "0 0 K nope", "-1 0 K f16"] {
            let error = Policies::none().with_table(&format!("\n{bad}\n")).unwrap_err();
            assert!(matches!(error, KvError::Table { line: 2, .. }), "{bad:?}: {error}");
        }
        let beyond = Policies::none().with_table("4 0 K f16").unwrap();
        assert!(Plan::new(&llama(), DType::F16, DType::F16, &beyond).is_err());
        assert!(Plan::new(&llama(), DType::Q6K, DType::F16, &Policies::none()).is_err());
    }

    #[test]
    fn policies_print_as_written() {
        for text in [
            "none",
            "auto-keys",
            "auto-keys:0.5",
            "auto-asymmetric",
            "boundary:1,2,sink:16,recent:64,alpha:1.02",
        ] {
            assert_eq!(text.parse::<Policies>().unwrap().to_string(), text);
        }
    }
}
