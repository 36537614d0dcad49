//! Random histories of sessions, whose logits must be those of feeding the tokens one by one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant::{
    BatchItem, ChannelScales, DeviceChoice, Drafter, GenerateOptions, KvBalance, KvLayerShape, KvOptions,
    LayerScales, Model, OpenOptions, SamplerParams, Session, SessionOptions,
};
use kvant_codec::random::Random;

/// Tokens of every text: past a prefix boundary of 512 and the block after it.
const N_TEXT: usize = 700;
/// Maximum number of sessions in a history.
const MAX_SESSIONS: usize = 8;

/// A KV cache under test: types of keys and values, policies, and whether channel scales and
/// centres apply. (Without a tail, the stored codes depend on how tokens are fed.)
pub type Case = (&'static str, &'static str, &'static str, bool);

pub const CASES: [Case; 16] = [
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
pub const FAMILIES: [&str; 3] = ["llama-h64-g1-yarn", "llama-h128-g2-llama3", "qwen3-h80-g2-linear"];

pub fn options<'a>(n_threads: usize) -> OpenOptions<'a> {
    OpenOptions { device: DeviceChoice::Cpu.into(), n_threads: Some(n_threads), ..Default::default() }
}

pub fn family(name: &str, n_threads: usize) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Model::open_with(folder.join(format!("{name}.gguf")), options(n_threads)).unwrap()
}

pub fn bundled(n_threads: usize) -> Model {
    Model::bundled(options(n_threads)).unwrap()
}

pub fn is_scalar(model: &Model) -> bool {
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

pub fn empty(model: &Model, (k, v, policies, is_balanced): Case) -> Session {
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
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
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
pub fn histories(models: &[Model], case: Case, seed: u64, n_steps: usize) -> (usize, usize) {
    histories_against(&models[0], models, case, seed, n_steps)
}

/// Runs [`histories`] with the logits of another model as the reference.
pub fn histories_against(
    expected: &Model,
    models: &[Model],
    case: Case,
    seed: u64,
    n_steps: usize,
) -> (usize, usize) {
    let mut random = Random::new(seed);
    let reference = Reference::new(expected, case, &mut random);
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

/// Answers `prompt` with `n` tokens without draft tokens and, by `drafted`, with some: the answers
/// must be the same. Returns how many draft tokens were accepted.
pub fn n_accepted_in_the_same_answer(
    plain: &Model,
    drafted: &Model,
    prompt: &[u32],
    sampler: SamplerParams,
    n: usize,
) -> usize {
    let answer = |model: &Model, draft_max| {
        let mut session = empty(model, CASES[1]);
        let options = GenerateOptions {
            max_tokens: Some(n),
            sampler,
            ignore_eos: true,
            draft_max,
            ..Default::default()
        };
        let mut generation = session.generate(prompt, options).unwrap();
        let ids: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
        (ids, generation.stats().n_accepted)
    };
    let (alone, _) = answer(plain, Some(0));
    let (ids, n_accepted) = answer(drafted, None);
    assert_eq!(ids, alone, "{sampler:?}");
    n_accepted
}
