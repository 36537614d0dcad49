//! Batch invariance: the logits of a session depend on its tokens alone, bit for bit, not on the
//! history of the cache.
//!
//! A reference is fed token by token on one thread. Other sessions reach the same tokens by random
//! histories, and must have the reference's logits wherever they stop.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant::{
    BatchItem, ChannelScales, DeviceChoice, Drafter, Dry, GenerateOptions, KvBalance, KvLayerShape,
    KvOptions, LayerScales, Message, Mirostat, MirostatVersion, Model, OpenOptions, SamplerParams, Session,
    SessionOptions, Xtc,
};
use kvant_codec::random::Random;

/// Tokens of every text: past a prefix boundary of 512 and the block after it.
const N_TEXT: usize = 700;
/// Maximum number of sessions in a history.
const MAX_SESSIONS: usize = 8;

/// A KV cache under test: types of keys and values, policies, and whether channel scales and
/// centres apply. (Without a tail, the stored codes depend on how tokens are fed.)
type Case = (&'static str, &'static str, &'static str, bool);

const CASES: [Case; 16] = [
    ("turbo3", "turbo3", "none", false),
    ("q8_0", "q8_0", "none", false),
    ("f16", "f16", "none", false),
    ("turbo2", "turbo2", "none", false),
    ("turbo3", "turbo3", "sink:16", false),
    ("turbo3", "turbo3", "recent:64", false),
    ("turbo3", "q8_0", "none", true),
    ("turbo4", "turbo4", "none", false),
    ("q4_0", "q4_0", "none", false),
    ("bf16", "bf16", "none", false),
    ("f32", "f32", "none", false),
    ("f16", "turbo2", "none", false),
    ("q8_0", "turbo4", "sink:16,recent:64", false),
    ("turbo2", "f32", "sink:40", false),
    ("q4_0", "turbo3", "recent:64", false),
    ("turbo4", "turbo4", "sink:16", true),
];

/// Families: one query head per KV head with YaRN, large heads with GQA, and a head dimension that
/// is not a power of two.
const FAMILIES: [&str; 3] = ["llama-h64-g1-yarn", "llama-h128-g2-llama3", "qwen3-h80-g2-linear"];

fn options<'a>(n_threads: usize) -> OpenOptions<'a> {
    OpenOptions { device: DeviceChoice::Cpu.into(), n_threads: Some(n_threads), ..Default::default() }
}

fn family(name: &str, n_threads: usize) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Model::open_with(folder.join(format!("{name}.gguf")), options(n_threads)).unwrap()
}

fn bundled(n_threads: usize) -> Model {
    Model::bundled(options(n_threads)).unwrap()
}

fn is_scalar(model: &Model) -> bool {
    model.device().kernels.contains("scalar")
}

/// Channel scales between 1/2 and 2, and centres.
fn balance(model: &Model) -> Arc<ChannelScales> {
    let mut random = Random::new(5);
    let mut values = |n: usize| {
        let mut values = vec![0.0; n];
        random.fill_gaussian(&mut values, 1.0);
        values
    };
    let factors = |values: Vec<f32>| values.into_iter().map(|x| x.clamp(-1.0, 1.0).exp2()).collect();
    let layers = model.config().kv_shape().layers;
    let of_layer = |layer: &KvLayerShape| {
        let (n_k, n_v) = (layer.n_kv_heads * layer.k_head_dim, layer.n_kv_heads * layer.v_head_dim);
        let (k_scale, v_scale) = (factors(values(n_k)), factors(values(n_v)));
        LayerScales { k_scale, v_scale, v_centre: values(n_v) }
    };
    Arc::new(ChannelScales { layers: layers.iter().map(of_layer).collect() })
}

fn empty(model: &Model, (k, v, policies, is_balanced): Case) -> Session {
    let (k, v, policies) = (k.parse().unwrap(), v.parse().unwrap(), policies.parse().unwrap());
    let balance = if is_balanced { KvBalance::Plan(balance(model)) } else { KvBalance::Off };
    let kv = KvOptions { k, v, policies, balance, ..Default::default() };
    model.session(SessionOptions { n_ctx: Some(N_TEXT), kv }).unwrap()
}

fn feed(session: &mut Session, tokens: &[u32]) {
    session.feed(tokens, &mut |_| true).unwrap();
}

fn bits(session: &mut Session) -> Vec<u32> {
    session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
}

/// A file of this process, removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("kvant-{name}-{}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A leftover file in the temporary folder is harmless.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A text, and the logits after each of its tokens.
struct Reference {
    text: Vec<u32>,
    /// `[N_TEXT][n_vocab]`, as bits
    logits: Vec<Vec<u32>>,
}

impl Reference {
    fn new(model: &Model, case: Case, random: &mut Random) -> Self {
        let text: Vec<u32> = (0..N_TEXT).map(|_| below(random, model.n_vocab()) as u32).collect();
        let mut session = empty(model, case);
        let logits = text.iter().map(|&token| {
            feed(&mut session, &[token]);
            assert!(session.logits().unwrap().iter().all(|logit| logit.is_finite()), "{case:?}");
            bits(&mut session)
        });
        Self { logits: logits.collect(), text }
    }
}

fn below(random: &mut Random, n: usize) -> usize {
    (random.bits() % n as u64) as usize
}

/// Sessions of one model, each of which holds a prefix of the reference's text between any two
/// steps.
struct History<'a> {
    model: &'a Model,
    case: Case,
    reference: &'a Reference,
    random: Random,
    file: &'a Path,
    sessions: Vec<Session>,
    /// The actions so far, printed when logits differ.
    actions: Vec<String>,
    /// Tokens in attached prefixes.
    attached: usize,
    /// Draft tokens verified.
    read_ahead: usize,
    /// Draft tokens predicted by the model itself.
    predicted: usize,
}

impl History<'_> {
    fn below(&mut self, n: usize) -> usize {
        below(&mut self.random, n)
    }

    /// Returns sizes of all magnitudes, so that steps end within tiles, within blocks and beyond
    /// prefix boundaries.
    fn size(&mut self) -> usize {
        let max = [1, 16, 130, 512][self.below(4)];
        1 + self.below(max)
    }

    fn check(&mut self, index: usize) {
        let (n, actions) = (self.sessions[index].tokens().len(), &self.actions);
        assert_eq!(self.sessions[index].tokens(), &self.reference.text[..n], "{:?}: {actions:#?}", self.case);
        let is_same = bits(&mut self.sessions[index]) == self.reference.logits[n - 1];
        assert!(is_same, "{:?}: session {index} differs after {n} tokens: {actions:#?}", self.case);
    }

    fn add(&mut self, session: Session) {
        if self.sessions.len() == MAX_SESSIONS {
            let index = self.below(MAX_SESSIONS);
            self.sessions.swap_remove(index);
            self.actions.push(format!("drop {index}"));
        }
        self.sessions.push(session);
    }

    /// Returns the text behind a session's tokens, at most `max` tokens.
    fn next(&self, index: usize, max: usize) -> &[u32] {
        let start = self.sessions[index].tokens().len();
        &self.reference.text[start..N_TEXT.min(start + max)]
    }

    fn feed(&mut self) {
        let (index, size) = (self.below(self.sessions.len()), self.size());
        let tokens = self.next(index, size).to_vec();
        if !tokens.is_empty() {
            self.actions.push(format!("feed {index} {}", tokens.len()));
            feed(&mut self.sessions[index], &tokens);
            self.check(index);
        }
    }

    fn feed_together(&mut self) {
        let sizes: Vec<_> = (0..self.sessions.len()).map(|_| self.size() * self.below(3).min(1)).collect();
        self.feed_all(&sizes);
    }

    /// Feeds as many tokens to each session, in the order of the sessions.
    fn feed_all(&mut self, sizes: &[usize]) {
        let tokens: Vec<_> = (0..sizes.len()).map(|index| self.next(index, sizes[index]).to_vec()).collect();
        self.actions.push(format!("together {:?}", tokens.iter().map(Vec::len).collect::<Vec<_>>()));
        // Draft tokens for some, right or wrong: they count where a single token is fed.
        let draft_tokens: Vec<_> = (0..sizes.len())
            .map(|index| {
                let (right, wrong) = (self.below(4), self.below(3));
                let from = self.sessions[index].tokens().len() + tokens[index].len();
                let right = &self.reference.text[from..N_TEXT.min(from + right)];
                [right, &self.reference.text[..wrong]].concat()
            })
            .collect();
        let each = self.sessions.iter_mut().zip(&tokens).zip(&draft_tokens);
        let feeds = each.map(|((session, tokens), draft_tokens)| BatchItem {
            draft_tokens,
            ..BatchItem::new(session, tokens)
        });
        let mut feeds: Vec<_> = feeds.filter(|feed| !feed.tokens.is_empty()).collect();
        Session::step_batch(&mut feeds).unwrap();
        (0..tokens.len()).filter(|&index| !tokens[index].is_empty()).for_each(|index| self.check(index));
    }

    /// Feeds a token with draft tokens, right up to some position and then wrong. Each token fed
    /// after it must have its logits, whether it was drafted or not.
    fn feed_ahead(&mut self) {
        let index = self.below(self.sessions.len());
        let (n_right, n_wrong) = (self.below(8), self.below(4));
        let Some((&token, right)) = self.next(index, 1 + n_right).split_first() else { return };
        let mut draft_tokens = right.to_vec();
        draft_tokens.extend(self.reference.text.iter().take(n_wrong).map(|token| token ^ 1));
        if self.model.has_drafter() && self.below(2) == 0 {
            draft_tokens = self.sessions[index].draft(&mut Drafter::default(), token, 1 + n_right).to_vec();
            self.predicted += draft_tokens.len();
        }
        let before = self.sessions[index].tokens().len();
        self.sessions[index].verify(token, &draft_tokens).unwrap();
        self.actions.push(format!(
            "{index} at {before} drafts {n_right} right and {n_wrong} wrong tokens, verifies {}",
            self.sessions[index].draft_tokens().len()
        ));
        self.read_ahead += self.sessions[index].draft_tokens().len();
        self.check(index);
        // Sometimes the next action is unrelated, with draft tokens still in the cache.
        for _ in 0..self.below(n_right + n_wrong + 2) {
            let Some(&token) = self.next(index, 1).first() else { return };
            match self.below(4) {
                0 => feed(&mut self.sessions[index], &[token]),
                1 => self.sessions[index].verify(token, &[1, 2, 3]).unwrap(),
                2 => {
                    let session = &mut self.sessions[index];
                    let (tokens, draft_tokens) = ([token], [1, 2]);
                    Session::step_batch(&mut [BatchItem {
                        draft_tokens: &draft_tokens,
                        ..BatchItem::new(session, &tokens)
                    }])
                    .unwrap();
                }
                _ => {
                    let tokens = self.next(index, 3).to_vec();
                    feed(&mut self.sessions[index], &tokens);
                }
            }
            self.check(index);
        }
    }

    fn fork(&mut self) {
        let index = self.below(self.sessions.len());
        self.actions.push(format!("fork {index}"));
        let fork = self.sessions[index].fork();
        self.add(fork);
    }

    /// Rewinds to some token, continues with another text, and rewinds again, perhaps further.
    fn rewind(&mut self) {
        let index = self.below(self.sessions.len());
        let n = self.below(self.sessions[index].tokens().len() + 1);
        let wrong = self.size().min(N_TEXT - n);
        let again = n - self.below(n + 1) * self.below(2);
        self.actions.push(format!("rewind {index} to {n}, {wrong} others, to {again}"));
        let other: Vec<u32> = (0..wrong).map(|i| self.reference.text[wrong - 1 - i]).collect();
        let session = &mut self.sessions[index];
        session.rewind(n).unwrap();
        if !other.is_empty() {
            feed(session, &other);
        }
        session.rewind(again).unwrap();
        assert_eq!(session.tokens().len(), again);
    }

    fn save(&mut self) {
        let index = self.below(self.sessions.len());
        self.actions.push(format!("save {index} ({} tokens)", self.sessions[index].tokens().len()));
        self.sessions[index].save(self.file).unwrap();
    }

    /// Loads the file, which may come from a session with another number of threads.
    fn load(&mut self) {
        if !self.file.exists() {
            return self.save();
        }
        let session = self.model.load_session(self.file, Some(N_TEXT)).unwrap();
        self.actions.push(format!("load {} tokens", session.tokens().len()));
        self.add(session);
    }

    fn load_prefix(&mut self) {
        if !self.file.exists() {
            return self.save();
        }
        let n = self.below(N_TEXT + 1);
        let mut prompt = self.reference.text[..n].to_vec();
        // The continuation is another text.
        prompt.extend(self.reference.text.get(n).map(|token| token ^ 1));
        let mut session = empty(self.model, self.case);
        let loaded = session.load_prefix(self.file, &prompt).unwrap();
        self.actions.push(format!("load a prefix of {n}: {loaded}"));
        assert!(loaded <= n && session.tokens() == &self.reference.text[..loaded]);
        self.add(session);
    }

    fn attach(&mut self, n: usize) {
        let mut session = empty(self.model, self.case);
        let attached = session.attach_prefix(&self.reference.text[..n]);
        self.actions.push(format!("attach to a prefix of {n}: {attached}"));
        assert!(attached < n.max(1) && session.tokens() == &self.reference.text[..attached]);
        self.attached += attached;
        self.add(session);
    }

    fn run(mut self, n_steps: usize) -> (usize, usize) {
        for _ in 0..n_steps {
            match self.below(15) {
                12.. => self.feed_ahead(),
                0..3 => self.feed(),
                3..6 => self.feed_together(),
                6 => self.fork(),
                7 => self.rewind(),
                8 => self.save(),
                9 => self.load(),
                10 => self.load_prefix(),
                _ => {
                    let n = self.below(N_TEXT + 1);
                    self.attach(n);
                }
            }
        }
        // With a tail, no prefix can be shared before a prefix boundary, so few of those attached
        // any token.
        self.feed_all(&[N_TEXT]);
        self.attach(N_TEXT);
        // After any history, it continues like the reference.
        self.feed_all(&vec![17; self.sessions.len()]);
        self.feed_all(&vec![1; self.sessions.len()]);
        assert_eq!(self.predicted > 0, self.model.has_drafter());
        (self.attached, self.read_ahead)
    }
}

/// Runs one history per model; the models differ in the number of threads, and each passes its
/// saved file to the next. Returns the numbers of attached tokens and of verified draft tokens.
fn histories(models: &[Model], case: Case, seed: u64, n_steps: usize) -> (usize, usize) {
    let mut random = Random::new(seed);
    let reference = Reference::new(&models[0], case, &mut random);
    let file = Scratch::new(&format!("schedules-{seed}"));
    let run = |model: &Model| {
        let sessions = vec![empty(model, case), empty(model, case)];
        let (random, actions) = (Random::new(random.bits()), Vec::new());
        let (reference, file) = (&reference, &*file.0);
        let [attached, read_ahead, predicted] = [0; 3];
        let history = History {
            model,
            case,
            reference,
            random,
            file,
            sessions,
            actions,
            attached,
            read_ahead,
            predicted,
        };
        history.run(n_steps)
    };
    models.iter().map(run).fold((0, 0), |(a, b), (c, d)| (a + c, b + d))
}

#[test]
fn logits_depend_on_the_tokens_alone() {
    let scalar = is_scalar(&family(FAMILIES[0], 1));
    let (n_cases, n_steps, threads) =
        if scalar { (5, 10, &[1, 3][..]) } else { (CASES.len(), 30, &[1, 2, 3, 4][..]) };
    let models = FAMILIES.map(|name| threads.iter().map(|&n| family(name, n)).collect::<Vec<_>>());
    for (i, &case) in CASES[..n_cases].iter().enumerate() {
        let (attached, read_ahead) = histories(&models[i % models.len()], case, i as u64, n_steps);
        assert!(read_ahead > 0, "{case:?}: no draft token was verified");
        // A window kept beyond prefix boundaries leaves nothing to share.
        assert_eq!(attached == 0, case.2.contains("recent"), "{case:?}: {attached} tokens attached");
    }
}

/// Recurrent states cannot be truncated; they return to their values before the draft tokens.
#[test]
fn logits_of_recurrent_models_depend_on_the_tokens_alone() {
    let scalar = is_scalar(&family(FAMILIES[0], 1));
    let (n_steps, threads) = if scalar { (10, &[2][..]) } else { (40, &[1, 2][..]) };
    let families = [
        "lfm2-h64-g2-conv3",
        "qwen35-h64-g2-delta",
        "graniteh-h64-g2-space-experts",
        "falconh1-h64-g2-beside",
    ];
    for (i, name) in families.into_iter().enumerate() {
        let models: Vec<_> = threads.iter().map(|&n| family(name, n)).collect();
        for case in [CASES[0], CASES[2], CASES[4]] {
            let (_, read_ahead) = histories(&models, case, 200 + i as u64, n_steps);
            assert!(read_ahead > 0, "{name}, {case:?}: no draft token was verified");
        }
    }
}

/// MTP changes nothing: the reference is the model without the layer.
#[test]
fn logits_with_mtp_depend_on_the_tokens_alone() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/predictions");
    let open = |name: &str, n_threads, mtp| {
        Model::open_with(folder.join(format!("{name}.gguf")), OpenOptions { mtp, ..options(n_threads) })
            .unwrap()
    };
    for (i, name) in
        ["qwen35-h64-g2-delta", "glm4moe-h64-g2-dense1", "glm4moelite-latent128"].into_iter().enumerate()
    {
        let models = [open(name, 1, false), open(name, 1, true), open(name, 2, true)];
        let n_steps = if is_scalar(&models[0]) { 15 } else { 40 };
        for case in [CASES[0], CASES[2], CASES[4]] {
            let (_, read_ahead) = histories(&models, case, 300 + i as u64, n_steps);
            assert!(read_ahead > 0, "{name}, {case:?}: no draft token was verified");
        }
    }
}

/// Nor does a draft model, wherever its context ends.
#[test]
fn logits_with_a_draft_model_depend_on_the_tokens_alone() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let file = |name: &str| Arc::new(kvant::open_file(folder.join(format!("{name}.gguf"))).unwrap());
    let open = |name: &str, n_threads, draft: Option<&str>| {
        Model::from_gguf(file(name), OpenOptions { draft: draft.map(file), ..options(n_threads) }).unwrap()
    };
    let pairs = [("llama-h64-g1-yarn", "lfm2-h64-g2-conv3"), ("qwen35-h64-g2-delta", "llama-h128-g2-llama3")];
    for (i, (name, draft)) in pairs.into_iter().enumerate() {
        let models = [open(name, 1, None), open(name, 1, Some(draft)), open(name, 2, Some(name))];
        let n_steps = if is_scalar(&models[0]) { 30 } else { 40 };
        for case in [CASES[0], CASES[2], CASES[4]] {
            let (_, read_ahead) = histories(&models, case, 400 + i as u64, n_steps);
            assert!(read_ahead > 0, "{name}, {case:?}: no draft token was verified");
        }
    }
}

#[test]
fn a_trained_model_is_batch_invariant_after_any_history() {
    let models = [1, 2, 3].map(bundled);
    let (cases, n_steps) = if is_scalar(&models[0]) { (&CASES[..1], 3) } else { (&CASES[..2], 12) };
    for (i, &case) in cases.iter().enumerate() {
        histories(&models, case, 100 + i as u64, n_steps);
    }
}

/// Returns a question with a preamble of about `words` words.
fn question(model: &Model, words: usize) -> Vec<u32> {
    let preamble = "The capital of a country is where it is governed from. ".repeat(words.div_ceil(11));
    model.chat_prompt(&[Message::user(format!("{preamble}What is the capital of France?"))]).unwrap()
}

/// Returns the greedy continuation of `prompt`.
fn continuation(session: &mut Session, prompt: &[u32], n: usize) -> Vec<u32> {
    let sampler = SamplerParams::greedy();
    let options = GenerateOptions { sampler, max_tokens: Some(n), ignore_eos: true, ..Default::default() };
    session.generate(prompt, options).unwrap().map(|token| token.unwrap().id).collect()
}

#[test]
fn a_prompt_cache_changes_no_token() {
    let model = bundled(2);
    let n = if is_scalar(&model) { 40 } else { 90 };
    for (i, words) in [0, 30, 430].into_iter().enumerate() {
        let file = Scratch::new(&format!("prompt-cache-{i}"));
        let prompt = question(&model, words);
        let mut session = empty(&model, CASES[0]);
        let want = continuation(&mut session, &prompt, n);
        session.save(&file.0).unwrap();
        drop(session);
        for _ in 0..2 {
            let mut session = empty(&model, CASES[0]);
            session.load_prefix(&file.0, &prompt).unwrap();
            assert_eq!(continuation(&mut session, &prompt, n), want, "a prompt of {} tokens", prompt.len());
            session.save(&file.0).unwrap();
        }
    }
}

/// A repetitive text, so that prompt lookup proposes tokens: greedy or sampled, a generation has
/// the same tokens with and without speculative decoding, and most tokens need no step of their
/// own.
#[test]
fn draft_tokens_change_no_token() {
    let model = bundled(2);
    let n = if is_scalar(&model) { 60 } else { 200 };
    let drawn = SamplerParams { seed: 7, ..SamplerParams::default() };
    let dry = Dry { multiplier: 0.3, ..Dry::default() };
    // Samplers with state, too.
    let with_state = SamplerParams { dry, xtc: Xtc { probability: 0.3, threshold: 0.1 }, ..drawn };
    let mirostat = Mirostat { version: MirostatVersion::V2, tau: 2.0, eta: 0.3 };
    for case in [CASES[0], CASES[2]] {
        for sampler in [SamplerParams::greedy(), drawn, with_state, SamplerParams { mirostat, ..drawn }] {
            let answer = |draft_max| {
                let mut session = empty(&model, case);
                let options = GenerateOptions {
                    max_tokens: Some(n),
                    sampler,
                    ignore_eos: true,
                    draft_max,
                    ..Default::default()
                };
                let prompt = question(&model, 200);
                let mut generation = session.generate(&prompt, options).unwrap();
                let ids: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
                let stats = generation.stats();
                // Rejected draft tokens are not in the cache afterwards.
                let cached = session.tokens().to_vec();
                assert_eq!((cached.len(), session.kv().tokens), (prompt.len() + n - 1, prompt.len() + n - 1));
                (ids, cached, stats.n_drafted, stats.n_accepted)
            };
            let (plain, drafted, few) = (answer(Some(0)), answer(None), answer(Some(2)));
            assert_eq!((plain.2, plain.3), (0, 0));
            assert_eq!((&drafted.0, &drafted.1), (&plain.0, &plain.1), "{case:?}, {sampler:?}");
            assert_eq!((&few.0, &few.1), (&plain.0, &plain.1), "{case:?}, {sampler:?}, two at most");
            assert!(drafted.3 > 0 && drafted.3 <= drafted.2, "{} of {} accepted", drafted.3, drafted.2);
        }
    }
}

/// A model that drafts for itself has every draft token accepted under greedy sampling.
#[test]
fn a_draft_model_changes_no_token() {
    let plain = bundled(2);
    let draft = Some(Arc::new(Model::bundled_file().unwrap()));
    let drafted = Model::bundled(OpenOptions { draft, ..options(2) }).unwrap();
    let n = if is_scalar(&plain) { 60 } else { 200 };
    let prompt = question(&plain, 60);
    for (sampler, min_accepted) in [
        (SamplerParams::greedy(), n * 3 / 5),
        (SamplerParams { seed: 7, ..SamplerParams::default() }, n / 10),
    ] {
        let answer = |model: &Model, draft_max| {
            let mut session = empty(model, CASES[1]);
            let options = GenerateOptions {
                max_tokens: Some(n),
                sampler,
                ignore_eos: true,
                draft_max,
                ..Default::default()
            };
            let mut generation = session.generate(&prompt, options).unwrap();
            let ids: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
            (ids, generation.stats().n_accepted)
        };
        let (alone, _) = answer(&plain, Some(0));
        let (ids, n_accepted) = answer(&drafted, None);
        assert_eq!(ids, alone, "{sampler:?}");
        assert!(n_accepted >= min_accepted, "{sampler:?}: {n_accepted} of {n} tokens were drafted");
    }
}

#[test]
fn the_number_of_threads_changes_no_token() {
    let models = [1, 2, 3].map(bundled);
    let n = if is_scalar(&models[0]) { 40 } else { 90 };
    for case in [CASES[0], CASES[2]] {
        let prompt = question(&models[0], 60);
        let continuations = models.each_ref().map(|model| continuation(&mut empty(model, case), &prompt, n));
        assert_eq!(continuations[1], continuations[0], "{case:?}: 2 threads and 1");
        assert_eq!(continuations[2], continuations[0], "{case:?}: 3 threads and 1");
    }
}
