#!/usr/bin/env python3
"""Text encoders: tiny random ones, and real ones.

    python encoders.py                 writes crates/engine/tests/encoders/NAME
    python encoders.py FOLDER          writes FOLDER/kvant-golden.json: the vectors of TEXTS by sentence-transformers

NAME has config.json, model.safetensors and tokenizer files as `transformers` saves them, and golden.json:

texts, tokens      TEXTS and their tokens, by the tokenizer of the folder
vectors            of texts, pooled and of length 1, by sentence-transformers; or
pairs, scores      pairs of texts and their logits, by the ForSequenceClassification of `transformers`
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from encoders_texts import PAIRS, TEXTS
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    EuroBertConfig,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

OUT = Path(__file__).resolve().parents[2] / "crates/engine/tests/encoders"
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
# Beyond 128 tokens, distances share MPNet's last bucket.
N_CTX = 160


def tokenizer(marks):
    """Returns a WordPiece tokenizer of letters and a few words, cased or not, with these marks."""
    first, last, pad, mask = marks
    words = ["cat", "mat", "the", "lazy", "##s", "##ing", "sleep", "jump", "dog", "fox", "##ov", "##er", "##ick"]
    letters = [chr(c) for c in [*range(33, 127), *range(0xE0, 0x100), *range(0x430, 0x450)]] + list("京中国首都の—")
    # MPNet takes padding for the second token, whatever the configuration says.
    vocab = [first, pad, last, "[UNK]", mask]
    vocab += dict.fromkeys(word for word in [*words, *letters, *("##" + letter for letter in letters)] if word not in vocab)
    raw = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ids = {word: vocab.index(word) for word in (first, last)}
    if first == "<s>":
        raw.post_processor = processors.RobertaProcessing((last, ids[last]), (first, ids[first]))
    else:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=list(ids.items())
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="[UNK]",
        pad_token=pad,
        cls_token=first,
        sep_token=last,
        mask_token=mask,
        model_max_length=N_CTX,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    return wrapped, len(vocab)


# What characters become: full-width letters, a ligature, an accent of its own, kinds of space.
CHARSMAP = {"Ａ": "A", "ｘ": "x", "ﬁ": "fi", "e\u0301": "é", "\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "\u3000": " ", "\u200d": "", "…": "..."}


def charsmap():
    """Returns a map as SentencePiece compiles it."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        code = lambda text: " ".join(f"{ord(c):X}" for c in text)
        (folder / "rules.tsv").write_text("".join(f"{code(a)}\t{code(b)}\n" for a, b in CHARSMAP.items()))
        (folder / "text").write_text("the cat sat on the mat\n" * 50)
        settings = {"input": folder / "text", "model_prefix": folder / "m", "vocab_size": 20, "hard_vocab_limit": False}
        sentencepiece.SentencePieceTrainer.train(normalization_rule_tsv=str(folder / "rules.tsv"), minloglevel=2, **{k: str(v) for k, v in settings.items()})
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString((folder / "m.model").read_bytes())
        return proto.normalizer_spec.precompiled_charsmap


def unigram(splits_words):
    """Returns a tokenizer of XLM-RoBERTa's kind, of letters and a few pieces."""
    marks = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = ["▁", "▁the", "▁cat", "▁lazy", "▁mat", "ing", "s", "sleep", "▁sleeps", "jump", "dog", "▁d", "og", "fo", "x", "ov", "er", "▁b", "row", "n"]
    letters = [chr(c) for c in [*range(33, 127), *range(0xE0, 0x100), *range(0x430, 0x450)]] + list("京中国首都の—")
    pieces += [letter for letter in dict.fromkeys(letters) if letter not in pieces]
    scores = [round(-2 - 0.37 * len(piece) % 1.7 - (6 if len(piece) == 1 else 0) - i * 0.01, 4) for i, piece in enumerate(pieces)]
    vocab = [*((mark, 0.0) for mark in marks), *zip(pieces, scores, strict=True), ("<mask>", 0.0)]
    raw = Tokenizer(models.Unigram(vocab, 3, False))
    if splits_words:
        raw.normalizer = normalizers.Precompiled(charsmap())
        raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        raw.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    else:
        raw.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap()), normalizers.Replace(Regex(" {2,}"), " ")])
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
        raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return wrapped_roberta(raw), len(vocab)


def trained(special, unknown=None):
    """Returns byte-level BPE of all bytes and a few merges."""
    raw = Tokenizer(models.BPE(unk_token=unknown))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(TEXTS[:10], trainer)
    return raw


def byte_level():
    """Returns a tokenizer of RoBERTa's kind."""
    raw = trained(["<s>", "<pad>", "</s>", "<unk>"], "<unk>")
    raw.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    wrapped = wrapped_roberta(raw)
    return wrapped, len(wrapped)


def modern():
    """Returns a tokenizer of ModernBERT's kind, with runs of spaces as tokens."""
    raw = trained(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    raw.normalizer = normalizers.NFC()
    marks = [(mark, raw.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=marks)
    raw.add_tokens([AddedToken("   ", normalized=True, special=False), AddedToken("|||EMAIL_ADDRESS|||", normalized=True, special=False)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token=AddedToken("[MASK]", lstrip=True, special=True),
        model_max_length=N_CTX,
        model_input_names=["input_ids", "attention_mask"],
    )
    return wrapped, len(wrapped)


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def euro():
    """Returns a tokenizer of Llama 3's kind, with a mark before a text and none after it."""
    first, last, pad = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
    raw = trained([first, last, pad])
    raw.model.ignore_merges = True
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    template = processors.TemplateProcessing(single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, 0)])
    raw.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    names = {"bos_token": first, "eos_token": last, "pad_token": pad}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=N_CTX, model_input_names=["input_ids", "attention_mask"], **names)
    return wrapped, len(wrapped)


def gemma():
    """Returns a tokenizer of Gemma's kind: merges of marked words, and bytes for other characters."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = ["▁t", "▁th", "▁the", "▁c", "at", "▁cat", "▁l", "az", "▁laz", "▁lazy", "in", "ing", "og", "do", "▁d", "▁dog"]
    letters = [chr(c) for c in [*range(33, 127), *range(0xE0, 0x100)]] + ["▁", "\n"]
    vocab = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *pieces]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "l"), ("a", "z"), ("▁l", "az"), ("▁laz", "y")]
    merges += [("i", "n"), ("in", "g"), ("o", "g"), ("d", "o"), ("▁", "d"), ("▁d", "og")]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", pair="<bos> $A <eos> <bos> $B <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=N_CTX,
        model_input_names=["input_ids", "attention_mask"],
    )
    return wrapped, len(wrapped)


def wrapped_roberta(raw):
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
        model_max_length=N_CTX,
        model_input_names=["input_ids", "attention_mask"],
    )


BERT = ("[CLS]", "[SEP]", "[PAD]", "[MASK]")
MODERN_IDS = {"cls": "CLS", "bos": "CLS", "sep": "SEP", "eos": "SEP", "pad": "PAD"}
MPNET = ("<s>", "</s>", "<pad>", "<mask>")


def spread(model):
    """Gives every weight a size that shows in the result."""
    torch.manual_seed(7)
    for name, weight in model.named_parameters():
        if "LayerNorm.weight" in name or "norm" in name and name.endswith("weight"):
            # Gemma's norms multiply by one more.
            torch.nn.init.normal_(weight, mean=0.0 if isinstance(model, Gemma3TextModel) else 1.0, std=0.2)
        else:
            is_head = name.startswith(("classifier", "pre_classifier", "head.")) or "pooler" in name
            torch.nn.init.normal_(weight, std=1.0 if is_head else 0.3 if weight.ndim < 2 else 0.2)
    return model.eval()


def save_pooling(folder, mode, max_tokens, dense=(), n_embd=SIZES["hidden_size"]):
    """Writes the files of sentence-transformers, with products of these widths behind pooling."""
    from sentence_transformers.sentence_transformer.modules import Dense

    kind = "sentence_transformers.models."
    names = ["", "Pooling", *("Dense" for _ in dense[1:]), "Normalize"]
    paths = [f"{i}_{name}" if name else "" for i, name in enumerate(names)]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind + (name or "Transformer")} for i, (path, name) in enumerate(zip(paths, names, strict=True))]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    for path, n_in, n_out in zip(paths[2:], dense, dense[1:], strict=False):
        module = Dense(n_in, n_out, bias=False, activation_function=torch.nn.Identity())
        spread(module).save(str(folder / path))
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    flags = {f"pooling_mode_{name}": key == mode for key, name in modes.items()}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": n_embd, **flags}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens, "do_lower_case": False}))


def embedder(name, model, words_of, mode, max_tokens, dense=()):
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    words, n_vocab = words_of
    spread(model(n_vocab)).save_pretrained(folder)
    words.save_pretrained(folder)
    save_pooling(folder, mode, max_tokens, dense)
    write_golden(folder, folder / "golden.json")


def write_golden(folder, path):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    words = model.tokenizer
    tokens = [words(text, truncation=True, max_length=model.max_seq_length)["input_ids"] for text in TEXTS]
    # One by one: padding would change the last bits.
    vectors = [model.encode([text], normalize_embeddings=True)[0].tolist() for text in TEXTS]
    path.write_text(json.dumps({"texts": TEXTS, "tokens": tokens, "vectors": vectors}))


class Gated(torch.nn.Module):
    """JinaBERT's gate, which is the first half of the outputs."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.gated_layers = torch.nn.Linear(n_in, 2 * n_out, bias=False)

    def forward(self, x):
        gates, values = self.gated_layers(x).chunk(2, dim=-1)
        return torch.nn.functional.gelu(gates) * values


def alibi(n_heads, n):
    """Returns the biases of the scores of n tokens, [1, n_heads, n, n] (arXiv 2108.12409)."""
    powers = lambda n: [2 ** (-8 * (i + 1) / n) for i in range(n)]
    whole = 2 ** (n_heads.bit_length() - 1)
    slopes = torch.tensor([*powers(whole), *powers(2 * whole)[::2]][:n_heads])
    distance = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs()
    return -(slopes[:, None, None] * distance)[None]


def jina_bert_v2():
    """Writes a JinaBERT, whose code is on the hub alone, from `transformers`' BERT: with biases by distance in place of
    embeddings of positions, and a gate."""
    folder = OUT / "jina-bert-v2"
    folder.mkdir(parents=True, exist_ok=True)
    words, n_vocab = tokenizer(BERT)
    sizes = {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "max_position_embeddings": N_CTX, "pad_token_id": 1}
    config = BertConfig(vocab_size=n_vocab, attn_implementation="eager", **sizes)
    model = BertModel(config, add_pooling_layer=False)
    for layer in model.encoder.layer:
        layer.intermediate = Gated(config.hidden_size, config.intermediate_size)
    spread(model).embeddings.position_embeddings.weight.data.zero_()
    names = {".intermediate.": ".mlp.", ".output.dense.": ".mlp.wo.", ".output.LayerNorm.": ".mlp.layernorm."}
    weights = {}
    for name, weight in model.state_dict().items():
        for theirs, ours in names.items():
            name = name if ".attention." in name else name.replace(theirs, ours)
        if "position_embeddings" not in name:
            weights[name] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = {**json.loads(config.to_json_string()), "architectures": ["JinaBertModel"], "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    words.save_pretrained(folder)
    save_pooling(folder, "mean", 150, n_embd=config.hidden_size)
    tokens = [words(text, truncation=True, max_length=150)["input_ids"] for text in TEXTS]
    vectors = []
    for ids in tokens:
        with torch.no_grad():
            states = model(torch.tensor([ids]), attention_mask=alibi(config.num_attention_heads, len(ids))).last_hidden_state
        vectors.append(torch.nn.functional.normalize(states[0].mean(0), dim=0).tolist())
    (folder / "golden.json").write_text(json.dumps({"texts": TEXTS, "tokens": tokens, "vectors": vectors}))


def ranker(name, model, words_of):
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    words, n_vocab = words_of
    model = spread(model(n_vocab))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    scores = []
    for first, second in PAIRS:
        # The library parses marks that a text spells; here texts are plain.
        # In lists: otherwise it takes a pair with an empty text for one text.
        inputs = words([first], [second], truncation="longest_first", max_length=N_CTX, return_tensors="pt", split_special_tokens=True)
        scores.append(model(**inputs).logits.item())
    (folder / "golden.json").write_text(json.dumps({"pairs": PAIRS, "scores": scores}))


def main():
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        return write_golden(folder, folder / "kvant-golden.json")
    bert = {"max_position_embeddings": N_CTX, **SIZES}
    embedder("bert", lambda n: BertModel(BertConfig(vocab_size=n, pad_token_id=1, **bert)), tokenizer(BERT), "mean", 150)
    embedder("bert-cls", lambda n: BertModel(BertConfig(vocab_size=n, pad_token_id=1, **bert)), tokenizer(BERT), "cls", 64)
    mpnet = {**bert, "max_position_embeddings": N_CTX + 2}
    embedder("mpnet", lambda n: MPNetModel(MPNetConfig(vocab_size=n, **mpnet)), tokenizer(MPNET), "mean", N_CTX)
    nomic = {"head_dim": 16, "pad_token_id": 1, **bert}
    embedder("nomic-bert", lambda n: NomicBertModel(NomicBertConfig(vocab_size=n, **nomic)), tokenizer(BERT), "mean", N_CTX)
    xlm = {**mpnet, "type_vocab_size": 1}
    embedder("xlm-roberta", lambda n: XLMRobertaModel(XLMRobertaConfig(vocab_size=n, **xlm)), unigram(False), "cls", N_CTX)
    bert_ranker = lambda n: BertForSequenceClassification(BertConfig(vocab_size=n, pad_token_id=1, num_labels=1, **bert))
    ranker("bert-ranker", bert_ranker, tokenizer(BERT))
    xlm_ranker = lambda n: XLMRobertaForSequenceClassification(XLMRobertaConfig(vocab_size=n, num_labels=1, **xlm))
    ranker("xlm-roberta-ranker", xlm_ranker, unigram(True))
    roberta = lambda n: RobertaForSequenceClassification(RobertaConfig(vocab_size=n, num_labels=1, **xlm))
    ranker("roberta-ranker", roberta, byte_level())
    names = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers", "intermediate_size": "hidden_dim"}
    distil = {names[key]: value for key, value in SIZES.items()}
    distilbert = lambda n: DistilBertModel(DistilBertConfig(vocab_size=n, pad_token_id=1, max_position_embeddings=N_CTX, **distil))
    embedder("distilbert", distilbert, tokenizer(BERT), "mean", 150)
    distil_ranker = lambda n: DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=n, pad_token_id=1, num_labels=1, max_position_embeddings=N_CTX, seq_classif_dropout=0.0, **distil)
    )
    ranker("distilbert-ranker", distil_ranker, tokenizer(BERT))
    # One layer of three is global, the first; a token sees four on either side in the others.
    words = modern()
    ids = {f"{name}_token_id": words[0].convert_tokens_to_ids(f"[{mark}]") for name, mark in MODERN_IDS.items()}
    modern_bert = {"local_attention": 8, **ids, **bert, "num_hidden_layers": 5}
    embedder("modern-bert", lambda n: ModernBertModel(ModernBertConfig(vocab_size=n, **modern_bert)), words, "cls", N_CTX)
    modern_ranker = lambda n: ModernBertForSequenceClassification(ModernBertConfig(vocab_size=n, num_labels=1, classifier_pooling="mean", **modern_bert))
    ranker("modern-bert-ranker", modern_ranker, modern())
    # Heads wider than the hidden size, which share one head of keys and values.
    gemma3 = {"head_dim": 16, "query_pre_attn_scalar": 16, "num_key_value_heads": 1, "sliding_window": 8, "num_attention_heads": 4}
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    gemma3.update(num_hidden_layers=4, layer_types=kinds, use_bidirectional_attention=True, max_position_embeddings=N_CTX)
    gemma3 = {**SIZES, **gemma3}
    embedder("gemma-embedding", lambda n: Gemma3TextModel(Gemma3TextConfig(vocab_size=n, **gemma3)), gemma(), "mean", N_CTX, [32, 48, 32])
    euro_bert = {"num_key_value_heads": 1, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "mask_token_id": 3, **bert}
    embedder("eurobert", lambda n: EuroBertModel(EuroBertConfig(vocab_size=n, **euro_bert)), euro(), "last", N_CTX)
    embedder("jina-bert-v3", lambda n: JinaEmbeddingsV3Model(JinaEmbeddingsV3Config(vocab_size=n, **xlm)), unigram(False), "mean", N_CTX)
    jina_bert_v2()


if __name__ == "__main__":
    main()
