//! Recurrent models: their logits are bit-identical after any history of a sequence, and faults of
//! their files are one-line errors.

use std::path::Path;

use kvant::gguf::{GgufError, GgufWriter, Value};
use kvant::{BatchItem, DType, Gguf, KvOptions, Model, OpenOptions, Session, SessionOptions};
use kvant_model::LayerRange;

const LFM2: &str = "lfm2-h64-g2-conv3";
const QWEN35: &str = "qwen35-h64-g2-delta";
const QWEN3_NEXT: &str = "qwen3next-h64-g2-delta-experts";
const GRANITE: &str = "graniteh-h64-g2-space";
const GRANITE_OF_EXPERTS: &str = "graniteh-h64-g2-space-experts";
const NEMOTRON: &str = "nemotronh-h64-g2-space";
const NEMOTRON_OF_EXPERTS: &str = "nemotronhmoe-h64-g2-space-latent";
const KIMI: &str = "kimilinear-latent128-kda";
const KIMI_K3: &str = "kimik3-latent128-streams";
const LING3: &str = "bailingmoe3-latent128-kda-bound";
/// No layer has attention.
const MAMBA2: &str = "mamba2-space";
const RWKV7: &str = "rwkv7-h32";
/// Every layer also has attention.
const FALCON: &str = "falconh1-h64-g2-beside-normed";
const ALL: [&str; 13] = [
    LFM2,
    QWEN35,
    QWEN3_NEXT,
    GRANITE,
    GRANITE_OF_EXPERTS,
    NEMOTRON,
    NEMOTRON_OF_EXPERTS,
    KIMI,
    KIMI_K3,
    LING3,
    MAMBA2,
    RWKV7,
    FALCON,
];

fn fixture(name: &str) -> Gguf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    Gguf::open(dir.join(format!("{name}.gguf"))).unwrap()
}

/// Returns a fixture with changed keys, and without the tensor `leave`.
fn changed(name: &str, keys: &[(&str, Value<'_>)], leave: &str) -> Gguf {
    let gguf = fixture(name);
    let mut writer = GgufWriter::new();
    let is_kept = |key: &str| keys.iter().all(|(changed, _)| *changed != key);
    for (key, value) in gguf.meta().iter().filter(|(key, _)| is_kept(key)).chain(keys.iter().copied()) {
        writer.set(key, value).unwrap();
    }
    let kept = || gguf.tensors().iter().filter(|info| info.name != leave);
    kept().for_each(|info| writer.add_tensor(&info.name, &info.shape, info.dtype).unwrap());
    let mut bytes = Vec::new();
    let written = writer.write_to::<GgufError>(&mut bytes, |sink| {
        kept().try_for_each(|info| sink.bytes(&info.name, &gguf.data(info)))
    });
    written.unwrap();
    Gguf::from_bytes(bytes).unwrap()
}

fn open(gguf: Gguf, n_threads: usize) -> Result<Model, String> {
    let options = OpenOptions { n_threads: Some(n_threads), ..Default::default() };
    Model::from_gguf(gguf, options).map_err(|error| error.to_string())
}

fn session(model: &Model) -> Session {
    model.session(SessionOptions { n_ctx: Some(1300), kv: KvOptions::symmetric(DType::Turbo3) }).unwrap()
}

fn feed(session: &mut Session, tokens: &[u32], chunk: usize) {
    tokens.chunks(chunk).for_each(|tokens| session.feed(tokens, &mut |_| true).unwrap());
}

fn bits(session: &mut Session) -> Vec<u32> {
    session.logits().unwrap().iter().map(|logit| logit.to_bits()).collect()
}

/// Steps of any size across state snapshots; threads; batches; rewinds to a snapshot, between
/// snapshots and to a checkpoint; a fork; a saved and a shared prefix.
#[test]
fn recurrent_logits_depend_on_the_tokens_alone() {
    let tokens: Vec<u32> = (0..1100).map(|i| (i * i / 3 + i * 37) % 64).collect();
    for name in ALL {
        let model = open(fixture(name), 2).unwrap();
        let mut whole = session(&model);
        feed(&mut whole, &tokens, 1100);
        let want = bits(&mut whole);
        let is_same = |session: &mut Session, what: &str| assert!(bits(session) == want, "{name}, {what}");

        let mut pieces = session(&model);
        feed(&mut pieces, &tokens[..40], 1);
        feed(&mut pieces, &tokens[40..], 93);
        is_same(&mut pieces, "in pieces");
        let one = open(fixture(name), 1).unwrap();
        let mut alone = session(&one);
        feed(&mut alone, &tokens, 700);
        is_same(&mut alone, "on one thread");

        let (mut a, mut b) = (session(&model), session(&model));
        feed(&mut a, &tokens[..1000], 200);
        feed(&mut b, &tokens[50..90], 40);
        let feeds = [(&mut a, &tokens[1000..]), (&mut b, &tokens[..9])];
        Session::step_batch(&mut feeds.map(|(session, tokens)| BatchItem::new(session, tokens))).unwrap();
        is_same(&mut a, "in a batch");

        let mut fork = a.fork();
        for (n, session) in [(1024, &mut a), (700, &mut fork), (3, &mut b)] {
            session.rewind(n).unwrap();
            feed(session, if n == 3 { &tokens[..1] } else { &tokens[n..] }, 301);
        }
        is_same(&mut a, "after a rewind to what is remembered");
        is_same(&mut fork, "after a fork's rewind");

        let path = std::env::temp_dir().join(format!("kvant-recurrent-{}-{name}", std::process::id()));
        let mut half = session(&model);
        feed(&mut half, &tokens[..777], 111);
        half.save(&path).unwrap();
        let mut loaded = model.load_session(&path, Some(1300)).unwrap();
        std::fs::remove_file(&path).unwrap();
        feed(&mut loaded, &tokens[777..], 100);
        is_same(&mut loaded, "saved and loaded");

        let mut begun = session(&model);
        let n = begun.attach_prefix(&tokens);
        // Snapshots of models without attention are further apart than these tokens.
        assert!(
            n.is_multiple_of(512) && (n > 0) != [MAMBA2, RWKV7].contains(&name),
            "{name}: {n} tokens are shared"
        );
        feed(&mut begun, &tokens[n..], 64);
        is_same(&mut begun, "after a shared beginning");
    }
}

#[test]
fn states_are_counted_beside_keys_and_values() {
    for (name, states) in [
        (LFM2, vec![256; 3]),
        (QWEN35, [3 * 320, 4 * 32 * 48].repeat(3)),
        (QWEN3_NEXT, [3 * 320, 4 * 32 * 48].repeat(2)),
        (GRANITE_OF_EXPERTS, [3 * 384, 16 * 32 * 16].repeat(2)),
    ] {
        let model = open(fixture(name), 1).unwrap();
        let config = model.config();
        let shape = config.kv_shape();
        assert_eq!((shape.layers.len(), &shape.states), (1, &states), "{name}");
        let mut session = session(&model);
        feed(&mut session, &[1, 2, 3], 3);
        let bytes: usize = states.iter().map(|n| (4 * n).next_multiple_of(64)).sum();
        assert!(session.kv().bytes > bytes, "{name}");
        // A part of the model counts its own layers.
        let [first, _] = LayerRange::split(config.layers.len(), 1);
        assert_eq!(config.kv_shape_of(first.layers()).layers.len(), 0, "{name}");
        let is_recurrent = |layer: usize| config.layers[layer].recurrence.is_some();
        assert!(is_recurrent(0) && is_recurrent(config.layers.len() - 1), "{name}");
    }
}

#[test]
fn faulty_recurrent_files_are_refused_with_one_line() {
    let u32 = Value::U32;
    let keys: [(&str, &str, Value<'_>, &str); 43] = [
        (LFM2, "lfm2.shortconv.l_cache", u32(0), "expected a positive number, got 0"),
        (LFM2, "lfm2.shortconv.l_cache", u32(1), "l_cache: expected a kernel of 2 to 8, got 1"),
        (LFM2, "lfm2.shortconv.l_cache", u32(4), "blk.0.shortconv.conv.weight"),
        (LFM2, "lfm2.attention.head_count_kv", u32(1), "blk.0."),
        (
            QWEN35,
            "qwen35.ssm.state_size",
            u32(24),
            "state_size: expected heads of a multiple of 16 up to 256, got 24",
        ),
        (
            QWEN35,
            "qwen35.ssm.state_size",
            u32(512),
            "state_size: expected heads of a multiple of 16 up to 256, got 512",
        ),
        (
            QWEN35,
            "qwen35.ssm.group_count",
            u32(3),
            "time_step_rank: expected a multiple of the 3 key heads, got 4",
        ),
        (QWEN35, "qwen35.ssm.time_step_rank", u32(0), "expected a positive number, got 0"),
        (
            QWEN35,
            "qwen35.ssm.inner_size",
            u32(190),
            "inner_size: expected a multiple of the 4 value heads, got 190",
        ),
        (QWEN35, "qwen35.ssm.inner_size", u32(128), "blk.0.attn_qkv.weight"),
        (QWEN35, "qwen35.ssm.conv_kernel", u32(9), "conv_kernel: expected a kernel of 2 to 8, got 9"),
        (
            QWEN35,
            "qwen35.nextn_predict_layers",
            u32(4),
            "nextn_predict_layers: expected fewer than the 4 layers, got 4",
        ),
        (QWEN35, "qwen35.attention.value_length", u32(32), "value_length: expected the 64 of a query"),
        (QWEN35, "qwen35.block_count", u32(5), "recurrent_layers: expected 5 layers, got 4"),
        (QWEN3_NEXT, "qwen3next.full_attention_interval", u32(0), "expected a positive number, got 0"),
        (QWEN3_NEXT, "qwen3next.full_attention_interval", u32(3), "blk.1."),
        (KIMI, "kimi-linear.kda.head_dim", u32(24), "head_dim: expected heads of a multiple of 16 up to 256"),
        (KIMI, "kimi-linear.kda.head_dim", u32(64), "blk.0.attn_q.weight"),
        (
            KIMI,
            "kimi-linear.kda.head_dim",
            u32(272),
            "head_dim: expected heads of a multiple of 16 up to 256",
        ),
        (KIMI, "kimi-linear.attention.head_count", u32(2), "blk.0.attn_q.weight"),
        (KIMI, "kimi-linear.attention.head_count_kv", u32(1), "blk.0.attn_kv_a_mqa.weight"),
        (KIMI, "kimi-linear.ssm.conv_kernel", u32(3), "blk.0.ssm_conv1d_q.weight"),
        (KIMI_K3, "kimi-k3.attn_res.block_size", u32(0), "res_score.weight"),
        (KIMI_K3, "kimi-k3.attn_res.block_size", Value::F32(2.0), "kimi-k3.attn_res.block_size"),
        (KIMI_K3, "kimi-k3.activation.situ_beta", Value::F32(0.0), "expected a number above 0, got 0"),
        (KIMI_K3, "kimi-k3.activation.situ_beta", Value::F32(-1.0), "expected a finite number, got -1"),
        (
            KIMI_K3,
            "kimi-k3.activation.situ_linear_beta",
            Value::F32(f32::NAN),
            "expected a finite number, got NaN",
        ),
        (KIMI_K3, "kimi-k3.expert_latent_length", u32(64), "blk.1.ffn_gate_exps.weight"),
        (KIMI_K3, "kimi-k3.expert_latent_length", u32(0), "blk.1.ffn_gate_exps.weight"),
        (LING3, "bailingmoe3.kda.gate_lower_bound", Value::F32(0.0), "expected a negative number, got 0"),
        (
            LING3,
            "bailingmoe3.kda.gate_lower_bound",
            Value::F32(f32::NAN),
            "expected a negative number, got NaN",
        ),
        (LING3, "bailingmoe3.kda.gate_lower_bound", u32(5), "bailingmoe3.kda.gate_lower_bound"),
        // Rates of bounded decays are positive.
        (
            LING3,
            "bailingmoe3.kda.safe_gate",
            Value::Bool(false),
            "ssm_a: expected decay factors of at most 0",
        ),
        (LING3, "bailingmoe3.attention.head_count", u32(2), "blk.0.attn_q.weight"),
        (MAMBA2, "mamba2.ssm.state_size", u32(24), "expected heads of a multiple of 16 up to 256, got 24"),
        (RWKV7, "rwkv7.wkv.head_size", u32(24), "expected heads of a multiple of 16 up to 256, got 24"),
        (
            RWKV7,
            "rwkv7.wkv.head_size",
            u32(48),
            "head_size: expected a divisor of the hidden size 128, got 48",
        ),
        (RWKV7, "rwkv7.token_shift_count", u32(1), "token_shift_count: expected 2"),
        (RWKV7, "rwkv7.feed_forward_length", u32(128), "blk.0.channel_mix_key.weight"),
        (GRANITE, "granitehybrid.ssm.time_step_rank", u32(8), "blk.0.ssm_in.weight"),
        (GRANITE, "granitehybrid.ssm.group_count", u32(2), "blk.0.ssm_in.weight"),
        (
            GRANITE,
            "granitehybrid.ssm.inner_size",
            u32(200),
            "inner_size: expected a multiple of the 16 value heads",
        ),
        (GRANITE, "granitehybrid.attention.head_count_kv", u32(1), "blk.0."),
    ];
    for (name, key, value, want) in keys {
        let error =
            open(changed(name, &[(key, value)], ""), 1).err().unwrap_or_else(|| panic!("{key}: taken"));
        assert!(error.contains(want) && !error.contains('\n'), "{key}: {error}");
    }
    for (name, tensors) in [
        (LFM2, &["shortconv.in_proj.weight", "shortconv.conv.weight", "shortconv.out_proj.weight"][..]),
        (QWEN35, &["attn_qkv.weight", "attn_gate.weight", "ssm_conv1d.weight", "ssm_dt.bias", "ssm_a"]),
        (QWEN35, &["ssm_norm.weight", "ssm_out.weight", "ssm_alpha.weight", "post_attention_norm.weight"]),
        (QWEN3_NEXT, &["ssm_ba.weight", "ffn_gate_shexp.weight"]),
        (MAMBA2, &["ssm_in.weight", "ssm_norm.weight", "ssm_out.weight", "attn_norm.weight"]),
        (
            RWKV7,
            &["attn_norm.bias", "attn_norm_2.weight", "time_mix_lerp_fused.weight", "time_mix_w0.weight"],
        ),
        (
            RWKV7,
            &["time_mix_a1.weight", "time_mix_g2.weight", "time_mix_ln.bias", "channel_mix_lerp_k.weight"],
        ),
        (KIMI, &["attn_k.weight", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight"]),
        (KIMI, &["ssm_beta.weight", "ssm_conv1d_v.weight", "ssm_dt.bias", "ssm_a", "attn_output.weight"]),
        (KIMI_K3, &["attn_res_score.weight", "ffn_res_score.weight", "ssm_g.weight", "ffn_gate.weight"]),
        (
            GRANITE,
            &[
                "ssm_in.weight",
                "ssm_conv1d.weight",
                "ssm_conv1d.bias",
                "ssm_dt.bias",
                "ssm_a",
                "ssm_d",
                "ssm_norm.weight",
            ],
        ),
        (GRANITE, &["ssm_out.weight", "ffn_norm.weight"]),
    ] {
        for tensor in tensors.iter().map(|tensor| format!("blk.0.{tensor}")) {
            let error = open(changed(name, &[], &tensor), 1).unwrap_err();
            assert!(error.contains(&format!("\"{tensor}\": is missing")) && !error.contains('\n'), "{error}");
        }
    }
}

/// MTP layers are left out unless requested.
#[test]
fn mtp_layers_are_not_run_by_default() {
    let drafting = ("qwen35.nextn_predict_layers", Value::U32(1));
    let gguf = changed(QWEN35, &[drafting], "");
    let expected = LayerRange::whole(3).n_bytes(&gguf);
    assert!(expected < LayerRange::whole(4).n_bytes(&gguf));
    let model = open(gguf, 1).unwrap();
    assert_eq!(model.weight_bytes(), expected, "unloaded layers are counted");
    assert_eq!((model.config().layers.len(), model.config().n_mtp), (3, 1));
    let mut session = session(&model);
    feed(&mut session, &[1, 2, 3], 3);
    assert!(session.logits().unwrap().iter().all(|logit| logit.is_finite()));
}
