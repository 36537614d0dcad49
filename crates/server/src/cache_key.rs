//! The cache key: what two sequences must have in common to share a prefix. Its hash separates
//! prefix caches in memory and names files on disk.
//!
//! The hash is defined by bytes, not by what a type prints: [`VERSION`] first, then each field in
//! the order of its declaration; numbers are little-endian, counts precede lists, lengths precede
//! texts, and an enum begins with the number of its variant. A field that is added to one of the
//! types does not compile here until the hash has it, under the next version.

use std::sync::{Arc, OnceLock};

use kvant::{ChannelScales, Error, KvBalance, KvOptions, LayerScales, Model, Policies, Policy};
use kvant::{TOKENS_PER_BLOCK, TableRule};
use xxhash_rust::xxh3::Xxh3;

use crate::scheduler::Cost;

/// Version of the hash. Files that an earlier version named are found by no key: they count against
/// the budget of the disk tier, as least recently used ones, until others need their room.
const VERSION: u64 = 1;

/// Cache options and LoRA scales of a model, with a hash: the channel scales of a plan are many
/// numbers to compare.
#[derive(Debug)]
pub(crate) struct CacheSpec {
    pub options: KvOptions,
    /// LoRA scale of each adapter; `None` for the scales they were loaded with.
    pub lora_scales: Option<Arc<[f32]>>,
    /// Size of a cache, once computed.
    cost: OnceLock<Cost>,
    hash: u64,
}

impl CacheSpec {
    pub fn new(options: KvOptions, lora_scales: Option<Arc<[f32]>>) -> Arc<Self> {
        let mut hash = KeyHash::new();
        hash.options(&options);
        hash.option(lora_scales.as_deref(), KeyHash::floats);
        Arc::new(Self { options, lora_scales, cost: OnceLock::new(), hash: hash.finish() })
    }

    /// Returns the hash of options and LoRA scales.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Returns the size of a cache of the model with these options.
    ///
    /// # Errors
    /// Types that the model does not support.
    pub fn cost(&self, model: &Model) -> Result<Cost, Error> {
        if let Some(&cost) = self.cost.get() {
            return Ok(cost);
        }
        let shape = model.config().kv_shape();
        let plan = self.options.plan(&shape)?;
        let bytes = |n_blocks: usize| model.kv_bytes_for(&plan, n_blocks * TOKENS_PER_BLOCK);
        let block = (bytes(16) - bytes(8)) / 8;
        // Includes the checkpoint at the start of the answer, and the states before draft tokens.
        let cost = Cost { fixed: bytes(8) - 8 * block + plan.bytes_aside(&shape), block };
        Ok(*self.cost.get_or_init(|| cost))
    }
}

/// Cache key of a model.
#[derive(Debug, Clone)]
pub(crate) struct CacheKey {
    pub spec: Arc<CacheSpec>,
    /// Owner (API key).
    pub owner: Option<Arc<str>>,
}

impl CacheKey {
    /// Returns the hash of the key, among those of one model.
    pub fn hash(&self) -> u64 {
        let mut hash = KeyHash::new();
        hash.key(self);
        hash.finish()
    }

    /// Returns the hash of the key and of a model, by its
    /// [fingerprint](Model::compute_fingerprint).
    pub fn hash_with_model(&self, fingerprint: &str) -> u64 {
        let mut hash = KeyHash::new();
        hash.key(self);
        hash.text(fingerprint);
        hash.finish()
    }
}

impl PartialEq for CacheKey {
    fn eq(&self, other: &Self) -> bool {
        (self.spec.hash, &self.owner) == (other.spec.hash, &other.owner)
    }
}

/// Hash of a cache key. See the [module](self).
struct KeyHash(Xxh3);

impl KeyHash {
    fn new() -> Self {
        let mut hash = Self(Xxh3::new());
        hash.number(VERSION);
        hash
    }

    fn finish(self) -> u64 {
        self.0.digest()
    }

    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    fn count(&mut self, count: usize) {
        self.number(count as u64);
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.0.update(text.as_bytes());
    }

    fn floats(&mut self, floats: &[f32]) {
        self.count(floats.len());
        floats.iter().for_each(|x| self.0.update(&x.to_le_bytes()));
    }

    fn option<T>(&mut self, option: Option<T>, some: impl FnOnce(&mut Self, T)) {
        self.number(option.is_some().into());
        if let Some(value) = option {
            some(self, value);
        }
    }

    fn list<T>(&mut self, list: &[T], each: impl Fn(&mut Self, &T)) {
        self.count(list.len());
        list.iter().for_each(|item| each(self, item));
    }

    fn key(&mut self, CacheKey { spec, owner }: &CacheKey) {
        self.number(spec.hash);
        self.option(owner.as_deref(), Self::text);
    }

    fn options(&mut self, KvOptions { k, v, policies: Policies(policies), balance, tail }: &KvOptions) {
        self.text(k.name());
        self.text(v.name());
        self.list(policies, Self::policy);
        match balance {
            KvBalance::Off => self.number(0),
            KvBalance::Weights => self.number(1),
            KvBalance::Plan(scales) => {
                self.number(2);
                let ChannelScales { layers } = &**scales;
                self.list(layers, Self::layer_scales);
            }
        }
        self.number((*tail).into());
    }

    fn policy(&mut self, policy: &Policy) {
        match policy {
            Policy::AutoKeys { max_noise } => {
                self.number(0);
                self.number(max_noise.to_bits());
            }
            Policy::AutoAsymmetric => self.number(1),
            Policy::Boundary { first, last } => {
                self.number(2);
                self.count(*first);
                self.count(*last);
            }
            Policy::Sink(n) => {
                self.number(3);
                self.count(*n);
            }
            Policy::Recent(n) => {
                self.number(4);
                self.count(*n);
            }
            Policy::Alpha(factor) => {
                self.number(5);
                self.number(factor.to_bits().into());
            }
            Policy::Table(rules) => {
                self.number(6);
                self.list(rules, Self::table_rule);
            }
        }
    }

    fn table_rule(&mut self, TableRule { line, layer, head, k, v }: &TableRule) {
        self.count(*line);
        self.option(*layer, Self::count);
        self.option(*head, Self::count);
        self.option(k.map(|k| k.name()), Self::text);
        self.option(v.map(|v| v.name()), Self::text);
    }

    fn layer_scales(&mut self, LayerScales { k_scale, v_scale, v_centre }: &LayerScales) {
        self.floats(k_scale);
        self.floats(v_scale);
        self.floats(v_centre);
    }
}

#[cfg(test)]
mod tests {
    use kvant::DType;

    use super::*;

    /// All that a key covers.
    #[derive(Clone)]
    struct Fields {
        options: KvOptions,
        lora_scales: Option<Vec<f32>>,
        owner: Option<&'static str>,
        model: &'static str,
    }

    impl Fields {
        /// Returns fields with every policy and a plan.
        fn all() -> Self {
            let policies = "auto-keys:0.5,auto-asymmetric,boundary:1,2,sink:16,recent:64,alpha:1.5";
            let table = "0 * K q8_0\n* 1 KV turbo4";
            let layer = LayerScales { k_scale: vec![2.0, 0.5], v_scale: vec![1.5], v_centre: vec![-1.0] };
            let plan = ChannelScales { layers: vec![layer] };
            let options = KvOptions {
                k: DType::Turbo3,
                v: DType::Turbo4,
                policies: policies.parse::<Policies>().unwrap().with_table(table).unwrap(),
                balance: KvBalance::Plan(Arc::new(plan)),
                tail: true,
            };
            Self { options, lora_scales: Some(vec![1.0, 0.5]), owner: Some("alice"), model: "0123" }
        }

        fn key(&self) -> CacheKey {
            let lora_scales = self.lora_scales.clone().map(Arc::from);
            CacheKey {
                spec: CacheSpec::new(self.options.clone(), lora_scales),
                owner: self.owner.map(Arc::from),
            }
        }

        fn hash(&self) -> u64 {
            self.key().hash_with_model(self.model)
        }

        /// Changes the channel scales of the plan.
        fn scales(&mut self, change: impl FnOnce(&mut LayerScales)) {
            let KvBalance::Plan(plan) = &mut self.options.balance else { panic!("a plan") };
            change(&mut Arc::make_mut(plan).layers[0]);
        }

        /// Changes a rule of the type table, the last policy.
        fn rule(&mut self, change: impl FnOnce(&mut TableRule)) {
            let Some(Policy::Table(rules)) = self.options.policies.0.last_mut() else { panic!("a table") };
            change(&mut rules[0]);
        }
    }

    /// Another value means that files on disk are orphaned: it has another [`VERSION`].
    #[test]
    fn the_hash_of_a_key_is_pinned() {
        let all = Fields::all();
        assert_eq!(all.key().hash(), 0xfac3_e1ee_49a1_3713);
        assert_eq!(all.hash(), 0x4c09_e95b_3c7f_8c1e);
        let plain = Fields { options: KvOptions::default(), lora_scales: None, owner: None, model: "" };
        assert_eq!(plain.hash(), 0x9c18_77ae_6d11_2748);
    }

    #[test]
    fn each_field_of_a_key_changes_its_hash() {
        type Change = (&'static str, fn(&mut Fields));
        let changes: &[Change] = &[
            ("k", |all| all.options.k = DType::Turbo2),
            ("v", |all| all.options.v = DType::Turbo3),
            ("k and v", |all| std::mem::swap(&mut all.options.k, &mut all.options.v)),
            ("auto-keys", |all| all.options.policies.0[0] = Policy::AutoKeys { max_noise: 0.25 }),
            ("auto-asymmetric", |all| _ = all.options.policies.0.remove(1)),
            ("boundary", |all| all.options.policies.0[2] = Policy::Boundary { first: 2, last: 2 }),
            ("its end", |all| all.options.policies.0[2] = Policy::Boundary { first: 1, last: 1 }),
            ("sink", |all| all.options.policies.0[3] = Policy::Sink(32)),
            ("sink to recent", |all| all.options.policies.0[3] = Policy::Recent(16)),
            ("recent", |all| all.options.policies.0[4] = Policy::Recent(32)),
            ("alpha", |all| all.options.policies.0[5] = Policy::Alpha(1.25)),
            ("order of policies", |all| all.options.policies.0.swap(3, 4)),
            ("table", |all| _ = all.options.policies.0.pop()),
            ("line", |all| all.rule(|rule| rule.line = 2)),
            ("layer", |all| all.rule(|rule| rule.layer = None)),
            ("head", |all| all.rule(|rule| rule.head = Some(0))),
            ("type of keys", |all| all.rule(|rule| rule.k = None)),
            ("type of values", |all| all.rule(|rule| rule.v = Some(DType::F16))),
            ("balance off", |all| all.options.balance = KvBalance::Off),
            ("balance by weights", |all| all.options.balance = KvBalance::Weights),
            ("key scales", |all| all.scales(|layer| layer.k_scale[1] = 0.25)),
            ("value scales", |all| all.scales(|layer| layer.v_scale[0] = 1.25)),
            ("value centres", |all| all.scales(|layer| layer.v_centre[0] = 1.0)),
            ("ends of lists", |all| {
                all.scales(|layer| (layer.k_scale, layer.v_scale) = (vec![2.0], vec![0.5, 1.5]));
            }),
            ("tail", |all| all.options.tail = false),
            ("LoRA scales", |all| all.lora_scales = Some(vec![1.0, 0.25])),
            ("no LoRA scales", |all| all.lora_scales = None),
            ("owner", |all| all.owner = Some("bob")),
            ("no owner", |all| all.owner = None),
            ("model", |all| all.model = "0124"),
            ("end of the owner", |all| (all.owner, all.model) = (Some("alic"), "e0123")),
        ];
        let mut seen = vec![("none", Fields::all().hash())];
        for (name, change) in changes {
            let mut changed = Fields::all();
            change(&mut changed);
            let hash = changed.hash();
            let same = seen.iter().find(|(_, other)| *other == hash);
            assert_eq!(same, None, "{name}");
            // The model is no part of a key.
            assert_eq!(changed.key() == Fields::all().key(), *name == "model", "{name}");
            seen.push((name, hash));
        }
        assert_eq!(Fields::all().hash(), Fields::all().hash());
    }
}
