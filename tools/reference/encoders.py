#!/usr/bin/env python3
"""Text encoders: tiny random ones, and real ones.

    python encoders.py                 writes crates/engine/tests/encoders/NAME
    python encoders.py FOLDER          writes FOLDER/kvant-golden.json: the vectors of TEXTS by sentence-transformers

NAME has config.json, model.safetensors and tokenizer files as `transformers` saves them, and golden.json:

texts, tokens      TEXTS and their tokens, by the tokenizer of the folder
vectors            of texts, pooled and of length 1, by sentence-transformers; or
pairs, scores      pairs of texts and their logits, by BertForSequenceClassification or XLMRobertaForSequenceClassification
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from encoders_texts import PAIRS, TEXTS
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
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


def byte_level():
    """Returns a tokenizer of RoBERTa's kind, of all bytes and a few merges."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(TEXTS[:10], trainer)
    raw.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    wrapped = wrapped_roberta(raw)
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
MPNET = ("<s>", "</s>", "<pad>", "<mask>")


def spread(model):
    """Gives every weight a size that shows in the result."""
    torch.manual_seed(7)
    for name, weight in model.named_parameters():
        if "LayerNorm.weight" in name or "norm" in name and name.endswith("weight"):
            torch.nn.init.normal_(weight, mean=1.0, std=0.2)
        else:
            is_head = name.startswith("classifier") or "pooler" in name
            torch.nn.init.normal_(weight, std=1.0 if is_head else 0.3 if weight.ndim < 2 else 0.2)
    return model.eval()


def save_pooling(folder, mode, max_tokens):
    """Writes the files of sentence-transformers."""
    kind = "sentence_transformers.models."
    modules = [("", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind + name} for i, (_, path, name) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "2_Normalize").mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens"}
    flags = {f"pooling_mode_{name}": key == mode for key, name in modes.items()}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens, "do_lower_case": False}))


def embedder(name, model, words_of, mode, max_tokens):
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    words, n_vocab = words_of
    spread(model(n_vocab)).save_pretrained(folder)
    words.save_pretrained(folder)
    save_pooling(folder, mode, max_tokens)
    write_golden(folder, folder / "golden.json")


def write_golden(folder, path):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    words = model.tokenizer
    tokens = [words(text, truncation=True, max_length=model.max_seq_length)["input_ids"] for text in TEXTS]
    # One by one: padding would change the last bits.
    vectors = [model.encode([text], normalize_embeddings=True)[0].tolist() for text in TEXTS]
    path.write_text(json.dumps({"texts": TEXTS, "tokens": tokens, "vectors": vectors}))


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


main()
