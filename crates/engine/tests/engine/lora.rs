//! A model with LoRA adapters (arXiv 2106.09685) has the logits of a model with the adapters merged
//! into its matrices, in every family.
//!
//! Tolerance: as in `golden.rs`, 1e-4 on logits of order 1 to 10: all numbers of the adapters are
//! exact in f16, so that only the order of f32 sums differs. The largest difference is 6.9e-5, of
//! Granite, as there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvant::gguf::{GgufError, GgufWriter, TensorSink};
use kvant::{
    BatchItem, DType, Gguf, KvOptions, LoraFile, Model, OpenOptions, Session, SessionOptions, open_lora,
};
use kvant_codec::random::Random;

const TOLERANCE: f32 = 1e-4;

/// Matrices that adapters may change.
const CHANGED: [&str; 27] = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_output",
    "attn_gate",
    "attn_q_a",
    "attn_q_b",
    "attn_kv_a_mqa",
    "attn_kv",
    "attn_compressor_kv",
    "attn_output_b",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "ffn_gate_shexp",
    "ffn_up_shexp",
    "ffn_down_shexp",
    "ssm_in",
    "ssm_out",
    "ssm_beta",
    "ssm_alpha",
    "ssm_ba",
    "shortconv.in_proj",
    "shortconv.out_proj",
    "inp_gate",
    "proj",
];

/// Update of a tensor `[n_out, n_in]`, in numbers exact in f16.
struct Change {
    tensor: String,
    n_in: usize,
    rank: usize,
    a: Vec<f32>,
    b: Vec<f32>,
}

/// An adapter of rank `rank` with `alpha`, applied with scale `strength`.
struct Adapter {
    changes: Vec<Change>,
    alpha: f32,
    strength: f32,
}

fn fixtures() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut models: Vec<_> = files.filter(|path| path.extension().is_some_and(|ext| ext == "gguf")).collect();
    models.sort();
    models
}

fn suffix(tensor: &str) -> Option<&str> {
    let name = tensor.strip_suffix(".weight")?;
    Some(name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, suffix)| suffix))
}

fn changes(tensor: &str) -> bool {
    suffix(tensor).is_some_and(|suffix| suffix == "output" || CHANGED.contains(&suffix))
}

/// Creates random updates of rank `rank` of every tensor whose index `is_selected` accepts.
fn adapter(gguf: &Gguf, rank: usize, strength: f32, is_selected: impl Fn(usize) -> bool) -> Adapter {
    let mut random = Random::new(rank as u64);
    let mut sixtyfourths = |n: usize, sigma: f64| -> Vec<f32> {
        let mut values = vec![0.0; n];
        random.fill_gaussian(&mut values, 64.0 * sigma);
        values.iter().map(|x| x.round().clamp(-128.0, 128.0) / 64.0).collect()
    };
    let tensors = gguf.tensors().iter().filter(|info| changes(&info.name)).enumerate();
    let changes = tensors.filter(|(i, _)| is_selected(*i)).map(|(_, info)| {
        let (n_in, n_out) = (info.row_len(), info.rows());
        let (a, b) = (sixtyfourths(rank * n_in, 0.3), sixtyfourths(n_out * rank, 0.05));
        Change { tensor: info.name.clone(), n_in, rank, a, b }
    });
    Adapter { changes: changes.collect(), alpha: 2.0 * rank as f32, strength }
}

fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
    if dtype == DType::F32 {
        // NaN and infinities stay unchanged.
        return values.iter().flat_map(|x| x.to_le_bytes()).collect();
    }
    let mut bytes = vec![0; values.len() * dtype.block_bytes()];
    kvant_codec::encode(dtype, values, &mut bytes).unwrap();
    bytes
}

/// Returns the adapter as a file, after `change`.
fn file(
    architecture: &str,
    adapter: &Adapter,
    dtype: DType,
    change: impl FnOnce(&mut GgufWriter),
) -> Arc<Gguf> {
    let mut writer = GgufWriter::new();
    writer.set("general.type", "adapter").unwrap();
    writer.set("general.architecture", architecture).unwrap();
    writer.set("adapter.type", "lora").unwrap();
    writer.set("adapter.lora.alpha", adapter.alpha).unwrap();
    let mut tensors = Vec::new();
    for Change { tensor, n_in, rank, a, b } in &adapter.changes {
        let n_out = b.len() / rank;
        tensors.push((format!("{tensor}.lora_a"), vec![*n_in, *rank], bytes_of(a, dtype)));
        tensors.push((format!("{tensor}.lora_b"), vec![*rank, n_out], bytes_of(b, dtype)));
    }
    tensors.iter().for_each(|(name, shape, _)| writer.add_tensor(name, shape, dtype).unwrap());
    change(&mut writer);
    let mut out = Vec::new();
    let fill = |data: &mut TensorSink<'_>| -> Result<(), GgufError> {
        tensors.iter().try_for_each(|(name, _, bytes)| data.bytes(name, bytes))
    };
    writer.write_to(&mut out, fill).unwrap();
    Arc::new(Gguf::from_bytes(out).unwrap())
}

/// Returns the adapters as files, in alternating types.
fn files(gguf: &Gguf, adapters: &[Adapter]) -> Vec<LoraFile> {
    let architecture: &str = gguf.meta().get("general.architecture").unwrap();
    let files = adapters
        .iter()
        .zip([DType::F32, DType::F16])
        .map(|(adapter, dtype)| LoraFile::new(file(architecture, adapter, dtype, |_| ()), adapter.strength));
    files.collect()
}

/// Returns the model with the adapters merged into its matrices.
fn merged(gguf: &Gguf, adapters: &[Adapter]) -> Gguf {
    let mut writer = GgufWriter::with_meta(gguf.meta()).unwrap();
    for info in gguf.tensors() {
        writer.add_tensor(&info.name, &info.shape, DType::F32).unwrap();
    }
    let mut out = Vec::new();
    let fill = |data: &mut TensorSink<'_>| -> Result<(), GgufError> {
        for info in gguf.tensors() {
            let mut values = vec![0.0; info.elements()];
            kvant_codec::decode(info.dtype, &gguf.data(info), &mut values).unwrap();
            for Adapter { changes, alpha, strength } in adapters {
                for Change { n_in, rank, a, b, .. } in changes.iter().filter(|of| of.tensor == info.name) {
                    let scale = f64::from(alpha / *rank as f32 * strength);
                    for (row, b) in values.chunks_exact_mut(*n_in).zip(b.chunks_exact(*rank)) {
                        for (col, w) in row.iter_mut().enumerate() {
                            let of = |r: usize| f64::from(b[r]) * f64::from(a[r * n_in + col]);
                            *w = (f64::from(*w) + scale * (0..*rank).map(of).sum::<f64>()) as f32;
                        }
                    }
                }
            }
            data.bytes(&info.name, &bytes_of(&values, DType::F32))?;
        }
        Ok(())
    };
    writer.write_to(&mut out, fill).unwrap();
    Gguf::from_bytes(out).unwrap()
}

fn open(gguf: impl Into<Arc<Gguf>>, loras: Vec<LoraFile>) -> Result<Model, String> {
    let options = OpenOptions { loras, mtp: true, ..Default::default() };
    Model::from_gguf(gguf, options).map_err(|error| error.to_string())
}

fn session(model: &Model) -> Session {
    let kv = KvOptions::symmetric(DType::F32);
    model.session(SessionOptions { n_ctx: Some(64), kv }).unwrap()
}

fn tokens(model: &Model) -> Vec<u32> {
    (0..30).map(|i| (i * 37 + 5) % model.n_vocab() as u32).collect()
}

/// Returns the logits of all tokens, the first 24 in one step and the others one by one.
fn logits(model: &Model) -> Vec<f32> {
    logits_of(session(model))
}

fn logits_of(mut session: Session) -> Vec<f32> {
    let tokens = tokens(session.model());
    let mut all = Vec::new();
    session.feed_scored(&tokens[..24], 0, &mut |_, logits| all.extend_from_slice(logits)).unwrap();
    for &token in &tokens[24..] {
        session.feed(&[token], &mut |_| true).unwrap();
        all.extend_from_slice(session.logits().unwrap());
    }
    all
}

fn furthest(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let off = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    off.fold(0.0, |max, off| if max >= off { max } else { off })
}

#[test]
fn lora_equals_merged_weights_in_every_family() {
    let mut seen = BTreeSet::new();
    for path in fixtures() {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let gguf = Arc::new(Gguf::open(&path).unwrap());
        let adapters = [adapter(&gguf, 4, 0.5, |_| true), adapter(&gguf, 3, 0.25, |i| i % 3 != 1)];
        seen.extend(adapters[0].changes.iter().map(|change| suffix(&change.tensor).unwrap().to_owned()));
        let adapted =
            open(gguf.clone(), files(&gguf, &adapters)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (got, want) = (logits(&adapted), logits(&open(merged(&gguf, &adapters), Vec::new()).unwrap()));
        let off = furthest(&got, &want);
        // Written so that NaN fails.
        assert!(off <= TOLERANCE, "{name}: {off}");
        let plain = logits(&open(gguf, Vec::new()).unwrap());
        assert!(furthest(&plain, &want) > 0.1, "{name}: the adapters change nothing");
    }
    let never: Vec<_> = CHANGED.iter().filter(|&&suffix| !seen.contains(suffix)).collect();
    assert!(never.is_empty(), "no fixture has {never:?}");
}

/// A small model with a separate output matrix, which adapters change too.
fn with_output() -> Arc<Gguf> {
    let has_output = |gguf: &Gguf| gguf.find_info("output.weight").is_some();
    let mut files = fixtures().into_iter().map(|path| Gguf::open(path).unwrap());
    Arc::new(files.find(has_output).expect("a fixture whose output matrix is its own"))
}

#[test]
fn sessions_with_different_lora_scales_share_a_batch() {
    let gguf = with_output();
    let mut adapters = [adapter(&gguf, 4, 0.5, |_| true), adapter(&gguf, 3, 0.0, |i| i % 3 != 1)];
    let model = open(gguf.clone(), files(&gguf, &adapters)).unwrap();
    let all = [[0.5, 0.0], [1.0, 0.0], [0.0, 0.75], [-0.5, 0.25], [0.0, 0.0]];
    let mut alone = Vec::new();
    for strengths in all {
        let got = logits_of(session(&model).with_lora_scales(&strengths).unwrap());
        adapters.iter_mut().zip(strengths).for_each(|(adapter, strength)| adapter.strength = strength);
        let off = furthest(&got, &logits(&open(merged(&gguf, &adapters), Vec::new()).unwrap()));
        assert!(off <= TOLERANCE, "{strengths:?}: {off}");
        alone.push(got);
    }
    assert_eq!(alone[0], logits(&model), "as they were loaded");
    assert_eq!(alone[4], logits(&open(gguf, Vec::new()).unwrap()), "without any");
    // Different scales in each step, for prefill and decode.
    let tokens = tokens(&model);
    let mut sessions = all.map(|strengths| session(&model).with_lora_scales(&strengths).unwrap());
    let n_vocab = model.n_vocab();
    for rows in [0..24, 24..25, 25..26] {
        let mut feeds: Vec<_> =
            sessions.iter_mut().map(|session| BatchItem::new(session, &tokens[rows.clone()])).collect();
        Session::step_batch(&mut feeds).unwrap();
        for (session, alone) in sessions.iter_mut().zip(&alone) {
            assert_eq!(session.logits().unwrap(), &alone[(rows.end - 1) * n_vocab..rows.end * n_vocab]);
        }
    }
    for wrong in [&[][..], &[1.0], &[1.0, f32::NAN]] {
        let error = session(&model).with_lora_scales(wrong).err().unwrap().to_string();
        assert_eq!(error, format!("lora_strengths: expected a number for each of 2 adapters, got {wrong:?}"));
    }
}

#[test]
fn caches_are_not_shared_between_lora_scales() {
    let gguf = Arc::new(Model::bundled_file().unwrap());
    let adapters = [adapter(&gguf, 4, 1.0, |_| true)];
    let model = open(gguf.clone(), files(&gguf, &adapters)).unwrap();
    let session = || {
        let kv = KvOptions::symmetric("turbo3".parse().unwrap());
        model.session(SessionOptions { n_ctx: Some(700), kv }).unwrap()
    };
    let tokens: Vec<u32> = (0..600).map(|i| (i * 37 + 5) % model.n_vocab() as u32).collect();
    let (mut whole, mut half) = (session(), session().with_lora_scales(&[0.5]).unwrap());
    whole.feed(&tokens, &mut |_| true).unwrap();
    assert_eq!(half.attach_prefix(&tokens), 0);
    half.feed(&tokens, &mut |_| true).unwrap();
    assert!(furthest(half.logits().unwrap(), whole.logits().unwrap()) > 0.1);
    // Sessions with equal scales do, explicit or default.
    assert_eq!(session().with_lora_scales(&[0.5]).unwrap().attach_prefix(&tokens), 512);
    assert_eq!(session().with_lora_scales(&[1.0]).unwrap().attach_prefix(&tokens), 512);
    assert_eq!(half.fork().reuse_prefix(&tokens), 599);
    let saved = half.to_saved().unwrap();
    let error = session().load_saved_prefix(&saved, &tokens).unwrap_err().to_string();
    assert_eq!(error, "(memory): model.adapters: expected [1.0], the file has [0.5]");
    let mut again = session().with_lora_scales(&[0.5]).unwrap();
    assert_eq!(again.load_saved_prefix(&saved, &tokens).unwrap(), 599);
    again.feed(&tokens[599..], &mut |_| true).unwrap();
    assert_eq!(again.logits().unwrap(), half.logits().unwrap());
    // Models with other adapters, or with other default scales, do not.
    let plain = open(gguf.clone(), Vec::new()).unwrap();
    let weaker = open(gguf.clone(), files(&gguf, &[adapter(&gguf, 4, 0.5, |_| true)])).unwrap();
    let other = open(gguf.clone(), files(&gguf, &[adapter(&gguf, 3, 1.0, |_| true)])).unwrap();
    let by = BTreeSet::from([&plain, &weaker, &other, &model].map(Model::compute_fingerprint));
    assert_eq!((by.len(), plain.compute_fingerprint()), (4, plain.fingerprint().to_owned()));
}

/// Quantization of activations costs the same error with adapters or without.
#[test]
fn lora_does_not_increase_quantization_error() {
    let gguf = Arc::new(Model::bundled_file().unwrap());
    assert!(gguf.tensors().iter().any(|info| info.dtype == DType::Q8_0));
    let adapters = [adapter(&gguf, 4, 0.25, |_| true)];
    let mean =
        |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32;
    let difference = |adapters: &[Adapter]| {
        let exact = logits(&open(merged(&gguf, adapters), Vec::new()).unwrap());
        mean(&logits(&open(gguf.clone(), files(&gguf, adapters)).unwrap()), &exact)
    };
    let (plain, adapted) = (difference(&[]), difference(&adapters));
    assert!(plain > 0.0 && adapted <= 2.0 * plain, "{adapted}, without adapters {plain}");
}

/// An error and its cause.
type Case<'a, E, T> = (E, &'a dyn Fn(&mut T));

#[test]
fn adapters_that_do_not_fit_are_refused_with_what_is_wrong() {
    let gguf = with_output();
    let architecture: &str = gguf.meta().get("general.architecture").unwrap();
    let whole = || adapter(&gguf, 4, 1.0, |i| i == 0);
    let first = whole().changes.remove(0).tensor;
    let refused = |adapter: &Adapter, change: &dyn Fn(&mut GgufWriter)| {
        let file = file(architecture, adapter, DType::F32, change);
        let error = open(gguf.clone(), vec![LoraFile::new(file, adapter.strength)]).expect_err("a refusal");
        // The prefix names the adapter, unless a tensor was at fault.
        error.strip_prefix("adapter (memory): ").unwrap_or(&error).to_owned()
    };
    let set = |key: &'static str, value: &'static str| {
        move |writer: &mut GgufWriter| writer.set(key, value).unwrap()
    };
    let cases: [Case<&str, GgufWriter>; 4] = [
        ("general.type: expected adapter, got model", &set("general.type", "model")),
        ("adapter.type: expected lora, got control_vector", &set("adapter.type", "control_vector")),
        (
            &format!("general.architecture: expected {architecture}, got mamba"),
            &set("general.architecture", "mamba"),
        ),
        ("not supported yet: adapters with invocation tokens (adapter.alora.invocation_tokens)", &|writer| {
            writer.set_array("adapter.alora.invocation_tokens", [1u32, 2]).unwrap()
        }),
    ];
    for (expected, change) in cases {
        assert_eq!(refused(&whole(), change), expected);
    }
    let with = |change: &dyn Fn(&mut Adapter)| {
        let mut adapter = whole();
        change(&mut adapter);
        refused(&adapter, &|_| ())
    };
    let (n_in, n_out) = (whole().changes[0].n_in, whole().changes[0].b.len() / 4);
    let missing = "'blk.99.attn_q.weight.lora_a' of an adapter, for a tensor that the model lacks";
    let cases: [Case<String, Adapter>; 6] = [
        (format!("not supported yet: {missing}"), &|adapter| {
            adapter.changes[0].tensor = "blk.99.attn_q.weight".to_owned()
        }),
        ("not supported yet: an adapter that changes 'token_embd.weight'".to_owned(), &|adapter| {
            let table = gguf.find_info("token_embd.weight").unwrap();
            let (n_in, rows) = (table.row_len(), table.rows());
            let (a, b) = (vec![0.5; n_in], vec![0.5; rows]);
            let change = Change { tensor: table.name.clone(), n_in, rank: 1, a, b };
            adapter.changes.push(change);
        }),
        (
            format!("tensor '{first}.lora_b': expected shape [4, {n_out}], got [4, {}]", n_out + 1),
            &|adapter| adapter.changes[0].b.extend([0.0; 4]),
        ),
        (format!("tensor '{first}.lora_a': expected shape [{n_in}, 4], got [{}, 4]", n_in + 1), &|adapter| {
            adapter.changes[0].a.extend([0.0; 4]);
            adapter.changes[0].n_in += 1;
        }),
        (format!("tensor '{first}.lora_b': row 1 holds NaN or an infinity"), &|adapter| {
            adapter.changes[0].b[5] = f32::NAN
        }),
        ("strength: expected a number, got inf".to_owned(), &|adapter| adapter.strength = f32::INFINITY),
    ];
    for (expected, change) in cases {
        assert_eq!(with(change), expected);
    }
}

fn peft_folders() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/adapters");
    let mut folders: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 6);
    folders
}

fn fixture(folder: &Path) -> PathBuf {
    let name = folder.file_name().unwrap().to_str().unwrap();
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../model/tests/fixtures/{name}.gguf"))
}

/// PEFT folders and the logits of PEFT with them (generator: `tools/reference`).
#[test]
fn peft_adapters_give_the_logits_of_peft() {
    for folder in peft_folders() {
        let path = fixture(&folder);
        let gguf = Arc::new(Gguf::open(&path).unwrap());
        let file = Arc::new(open_lora(&folder, &gguf).unwrap());
        let model = open(gguf, vec![LoraFile::new(file, 1.0)]).unwrap();
        // The text of the model's golden file.
        let golden = std::fs::read(path.with_extension("golden")).unwrap();
        let words = golden.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        let words: Vec<u32> = words.collect();
        let tokens = &words[4..][..(words[1] + words[2]) as usize];
        let logits = std::fs::read(folder.join("logits")).unwrap();
        let want: Vec<f32> =
            logits.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
        let kv = KvOptions::symmetric(DType::F32);
        let mut session = model.session(SessionOptions { n_ctx: Some(128), kv }).unwrap();
        let mut got = Vec::new();
        session.feed_scored(tokens, 0, &mut |_, logits| got.extend_from_slice(logits)).unwrap();
        let off = furthest(&got, &want);
        assert!(off <= TOLERANCE, "{}: {off}", folder.display());
    }
}

#[test]
fn adapters_of_peft_that_do_more_are_refused() {
    let folders = peft_folders();
    let of = |name: &str| folders.iter().find(|folder| folder.ends_with(name)).unwrap();
    let [llama, gemma] = ["llama-h64-g8", "gemma3-h96-g2-window40-linear"].map(of);
    let changed = std::env::temp_dir().join(format!("kvant-lora-{}", std::process::id()));
    std::fs::create_dir_all(&changed).unwrap();
    let refused = |folder: &Path, from: &str, to: &str, base: &Path| {
        let config = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
        assert!(config.contains(from), "{from}");
        std::fs::write(changed.join("adapter_config.json"), config.replacen(from, to, 1)).unwrap();
        let weights = "adapter_model.safetensors";
        std::fs::copy(folder.join(weights), changed.join(weights)).unwrap();
        let base = Gguf::open(fixture(base)).unwrap();
        let error = open_lora(&changed, &base).and_then(|file| {
            let loras = vec![LoraFile::new(file, 1.0)];
            Model::from_gguf(base, OpenOptions { loras, ..Default::default() })
        });
        error.expect_err(to).to_string()
    };
    for (folder, from, to, expected) in [
        (llama, "\"peft_type\": \"LORA\"", "\"peft_type\": \"IA3\"", "'peft_type': expected LORA, got IA3"),
        (llama, "\"use_dora\": false", "\"use_dora\": true", "'use_dora': expected nothing, got true"),
        (llama, "\"bias\": \"none\"", "\"bias\": \"all\"", "'bias': expected none, got all"),
        (
            llama,
            "\"alpha_pattern\": {}",
            "\"alpha_pattern\": {\"q_proj\": 1}",
            "'alpha_pattern': expected nothing, got an object",
        ),
        (llama, "\"lora_alpha\": 8", "\"lora_alpha\": \"8\"", "'lora_alpha': expected a number, got \"8\""),
        (
            gemma,
            "\"rank_pattern\": {}",
            "\"rank_pattern\": {\"q_proj\": 2}",
            "'rank_pattern': expected nothing beside use_rslora",
        ),
    ] {
        let error = refused(folder, from, to, folder);
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
    let other = refused(llama, "", "", gemma);
    assert!(other.contains("tensor 'blk.0.") && other.contains("expected shape"), "{other}");
    std::fs::remove_file(changed.join("adapter_config.json")).unwrap();
    let base = Gguf::open(fixture(llama)).unwrap();
    let error = open_lora(&changed, &base).err().unwrap().to_string();
    assert!(error.ends_with("has no adapter_config.json: neither a GGUF file nor a PEFT adapter"), "{error}");
    std::fs::remove_dir_all(&changed).unwrap();
}
