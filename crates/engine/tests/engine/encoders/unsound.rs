//! Unsound files and folders of text encoders are refused by one line that names their fault.

use kvant::{Model, open_file};
use kvant_gguf::Value as GgufValue;
use serde_json::json;

use super::{ChangedFolder, NEO_BERT, NOMIC_MOE, changed, options};

#[test]
fn unsound_files_are_refused_by_name() {
    let error = |name, key, value: GgufValue<'_>| {
        let file = changed(name, &[(key, value)], "");
        Model::from_gguf(file, options()).unwrap_err().to_string()
    };
    for (name, key, value, complaint) in [
        (
            "bert",
            "bert.attention.head_count",
            5_u32.into(),
            "bert.attention.head_count: expected a divisor of 32",
        ),
        ("bert", "bert.attention.head_count", 0_u32.into(), "expected a positive number, got 0"),
        (
            NOMIC_MOE,
            "nomic-bert-moe.expert_used_count",
            7_u32.into(),
            "expected at most the 6 experts, got 7",
        ),
        (
            NOMIC_MOE,
            "nomic-bert-moe.expert_count",
            5_u32.into(),
            "'blk.1.ffn_gate_inp.weight': expected shape",
        ),
        (
            NOMIC_MOE,
            "nomic-bert-moe.moe_every_n_layers",
            1_u32.into(),
            "experts without a period of layers (nomic-bert-moe.expert_count)",
        ),
        (
            NEO_BERT,
            "neo-bert.attention.head_count_kv",
            2_u32.into(),
            "'blk.0.attn_qkv.weight' with 2 KV heads for 4 heads",
        ),
        (NOMIC_MOE, "nomic-bert-moe.moe_every_n_layers", 3_u32.into(), "blk.3.ffn_up.weight"),
        ("bert", "bert.block_count", 1_000_000_u32.into(), "expected at most one layer for each of"),
        ("bert", "bert.block_count", 1_u32.into(), "not supported yet: tensor 'blk.1."),
        ("bert", "bert.block_count", 3_u32.into(), "blk.2."),
        (
            "bert",
            "bert.context_length",
            2_000_000_000_u32.into(),
            "tensor 'position_embd.weight': expected shape",
        ),
        (
            "bert",
            "bert.context_length",
            20_u32.into(),
            "kvant.encoder.max_tokens: expected 2 to the 20 positions",
        ),
        ("bert", "kvant.encoder.max_tokens", 1_u32.into(), "kvant.encoder.max_tokens: expected 2 to"),
        ("bert", "bert.attention.causal", true.into(), "bert.attention.causal: expected false in an encoder"),
        ("bert", "bert.attention.layer_norm_epsilon", f32::NAN.into(), "expected a finite number"),
        ("mpnet", "mpnet.attention.relative_buckets_count", 30_u32.into(), "expected a multiple of 4"),
        ("nomic-bert", "nomic-bert.rope.freq_base", 0.5_f32.into(), "expected a number from 1 on"),
        ("nomic-bert", "nomic-bert.rope.scaling.type", "yarn".into(), "RoPE scaling of an encoder"),
        ("nomic-bert", "nomic-bert.rope.dimension_count", 8_u32.into(), "expected all 16 of a head"),
        ("nomic-bert", "nomic-bert.hidden_activation", "mish".into(), "expected gelu, gelu_pytorch_tanh"),
        ("bert", "bert.attention.sliding_window", 4_u32.into(), "local attention (bert.attention.sliding_"),
        (
            "modern-bert",
            "modern-bert.attention.sliding_window_pattern",
            0_u32.into(),
            "expected a positive number, got 0",
        ),
        ("modern-bert", "modern-bert.rope.freq_base_swa", 0.0_f32.into(), "expected a number from 1 on"),
        ("modern-bert-ranker", "modern-bert.classifier.pooling_type", 3_u32.into(), "expected 1 (mean) or"),
        (
            "gemma-embedding",
            "gemma-embedding.attention.head_count_kv",
            3_u32.into(),
            "expected a divisor of the 4 heads",
        ),
        (
            "gemma-embedding",
            "gemma-embedding.attention.value_length",
            8_u32.into(),
            "expected the 16 of a key",
        ),
        ("gemma-embedding", "gemma-embedding.block_count", 5_u32.into(), "expected 5 layers, got 4"),
    ] {
        let error = error(name, key, value);
        assert!(error.contains(complaint), "{key}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    for name in ["token_embd.weight", "position_embd.weight", "token_embd_norm.bias", "blk.0.ffn_up.weight"] {
        let error = Model::from_gguf(changed("bert", &[], name), options()).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn unsupported_folders_are_refused_by_their_key() {
    for (name, file, pointer, value, complaint) in [
        (
            "bert",
            "config.json",
            "/hidden_act",
            json!("gelu_new"),
            "'hidden_act': expected gelu, got gelu_new",
        ),
        (
            "bert",
            "config.json",
            "/position_embedding_type",
            json!("relative_key"),
            "'position_embedding_type'",
        ),
        ("bert", "config.json", "/is_decoder", json!(true), "'is_decoder': expected false, got true"),
        ("bert", "config.json", "/quantization_config", json!({}), "quantized weights of a text encoder"),
        ("bert", "config.json", "/hidden_size", json!(0), "'hidden_size': expected a number from 1 on"),
        ("bert", "config.json", "/num_hidden_layers", json!(1), "tensor 'encoder.layer.1"),
        ("bert", "config.json", "/hidden_size", json!(16), "expected rows of 16 values"),
        ("mpnet", "config.json", "/max_position_embeddings", json!(3), "'max_position_embeddings'"),
        (
            "nomic-bert",
            "config.json",
            "/rope_parameters/rope_type",
            json!("dynamic"),
            "'rope_type': expected default",
        ),
        ("nomic-bert", "config.json", "/prenorm", json!(true), "'prenorm': expected false, got true"),
        ("nomic-bert", "config.json", "/head_dim", json!(8), "'head_dim': expected 32 / 2, got 8"),
        (
            "bert",
            "tokenizer.json",
            "/model/type",
            json!("WordLevel"),
            "'type': expected WordPiece, Unigram or BPE, got WordLevel",
        ),
        (
            "bert",
            "tokenizer.json",
            "/model/max_input_chars_per_word",
            json!(50),
            "'max_input_chars_per_word'",
        ),
        ("bert", "tokenizer.json", "/model/continuing_subword_prefix", json!("@@"), "expected ##, got @@"),
        ("bert", "tokenizer.json", "/normalizer/type", json!("NFC"), "WordPiece without a BertNormalizer"),
        ("bert", "tokenizer.json", "/normalizer/clean_text", json!(false), "'clean_text': expected true"),
        ("bert", "tokenizer.json", "/pre_tokenizer/type", json!("Whitespace"), "Whitespace"),
        (
            "bert",
            "tokenizer.json",
            "/post_processor",
            json!(null),
            "a post-processor that puts no known marks",
        ),
        (
            "bert",
            "modules.json",
            "/2/type",
            json!("models.LSTM"),
            "'type': expected Transformer, Pooling, Normalize, Dense",
        ),
        ("bert", "modules.json", "/2/type", json!("models.Dense"), "2_Normalize/config.json"),
        (
            "gemma-embedding",
            "modules.json",
            "/1/type",
            json!("models.Dense"),
            "expected Pooling before Dense",
        ),
        (
            "gemma-embedding",
            "modules.json",
            "/2/path",
            json!("../2"),
            "'path': expected a folder in this one",
        ),
        (
            "gemma-embedding",
            "modules.json",
            "/4/type",
            json!("x.Dense"),
            "more than 2 products behind pooling",
        ),
        (
            "gemma-embedding",
            "2_Dense/config.json",
            "/activation_function",
            json!("torch.nn.modules.activation.Tanh"),
            "'activation_function': expected torch.nn.modules.linear.Identity",
        ),
        ("gemma-embedding", "2_Dense/config.json", "/out_features", json!(40), "expected 40 x 32"),
        (
            "gemma-embedding",
            "config.json",
            "/use_bidirectional_attention",
            json!(false),
            "'use_bidirectional_attention': expected true",
        ),
        ("gemma-embedding", "config.json", "/query_pre_attn_scalar", json!(8), "expected 16, got 8"),
        ("gemma-embedding", "config.json", "/layer_types", json!([]), "'layer_types': expected 4 layers"),
        ("modern-bert", "config.json", "/layer_types", json!(["x"]), "expected full_attention or sliding"),
        ("modern-bert", "config.json", "/local_attention", json!(null), "'local_attention'"),
        ("modern-bert-ranker", "config.json", "/classifier_pooling", json!("max"), "expected mean or cls"),
        (
            "modern-bert",
            "config.json",
            "/rope_parameters/sliding_attention/rope_type",
            json!("yarn"),
            "'rope_type': expected default",
        ),
        (
            "bert",
            "sentence_bert_config.json",
            "/max_seq_length",
            json!(1),
            "'max_seq_length': expected a number from 2",
        ),
        (
            "bert",
            "1_Pooling/config.json",
            "/pooling_mode_cls_token",
            json!(true),
            "expected one mode, got several",
        ),
    ] {
        let changed = ChangedFolder::new(name, file, |all| {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            all.pointer_mut(parent).unwrap_or_else(|| panic!("{file}: no {parent}"))[key] = value;
        });
        let error = open_file(&changed.0).err().unwrap_or_else(|| panic!("{pointer} is taken")).to_string();
        assert!(error.contains(complaint) && !error.contains('\n'), "{pointer}: {error}");
    }
}
