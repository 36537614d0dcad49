#!/usr/bin/env python3
"""Creates tiny random vision models, and the outputs of `transformers` for two images.

Writes to `crates/vision/tests`: `images/wide.png` and `tall.png`, and for every model of VLMS
that is made by default, or for the named ones, in `models/NAME`

text.gguf      the text model by the conventions of llama.cpp's converter, as `make_fixtures.py` writes those, with a vocabulary:
               token b is the byte b, token 256 is two newlines (the only merge), and the marks of the family follow.
mmproj.gguf    the vision encoder, by the same conventions: those of `convert_hf_to_gguf.py --mmproj`. Matrices are f16 but for some
               embeddings, everything else is f32.
wide.golden, tall.golden
               the f32 output of `transformers` for exactly those weights, little-endian:
                   u8  magic[4] = "KVPI"
                   u32 n_tokens, n_vocab, n_tiles, n_rows, n_hidden
                   i32 image_token
                   i32 tokens [n_tokens]            PROMPT by the chat template, with image_token for each row (n_rows times)
                   n_tiles times, in the order of their rows:
                       i32 height, width
                       f32 pixels [3, height, width]   red, green, blue, normalized
                   f32 rows [n_rows, n_hidden]      the rows in place of image_token, as the text model reads them; in Qwen3-VL with
                                                    the rows added after each of the first layers (DeepStack)
                   f32 logits [n_tokens, n_vocab]   row t: after tokens 0..=t were read

Images are resized by Pillow before version 13, which chooses the order of rows and columns; also
where `transformers` only supports torchvision, which differs in the last bit of some bytes. Each
model is validated as a test before it is written: the f32 result is near the f64 result, and the
image, the peculiarities of its family and every weight of the vision encoder have a detectable
effect.
"""

import argparse
import copy
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from make_fixtures import MAX_ROUNDING_ERROR, MIN_EFFECT, build_model, stored_tensors, to_interleaved, write_file, write_metadata
from PIL import Image, ImageDraw, ImageOps
from vision_models import VLMS, Text, VlmSpec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

OUT = Path(__file__).resolve().parents[2] / "crates/vision/tests"

SIZES = {"wide": (150, 98), "tall": (29, 67)}  # width and height
PROMPT = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "and say what it is."}]

MIN_ROW_EFFECT = 0.05  # largest change of a row's value without one weight of the encoder
EXTENT = (0.1, 1.0)  # range of the rows' standard deviation: that of embeddings is 0.18


def draw(width: int, height: int) -> Image.Image:
    """Returns an image of gradients and shapes, with edges that distinguish resampling methods."""
    y, x = np.mgrid[:height, :width] / max(width, height)
    slopes = np.stack([x, y, 1 - x * y], axis=-1) * 200 + 20 * np.sin(np.stack([40 * y, 30 * x, 25 * (x + y)], axis=-1))
    image = Image.fromarray(slopes.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((0.1 * width, 0.15 * height, 0.5 * width, 0.6 * height), fill=(230, 40, 30))
    pen.rectangle((0.55 * width, 0.4 * height, 0.9 * width, 0.75 * height), fill=(20, 90, 220))
    pen.polygon([(0.3 * width, 0.95 * height), (0.6 * width, 0.1 * height), (0.7 * width, 0.9 * height)], fill=(250, 220, 60))
    for i in range(0, max(width, height), 5):
        pen.line((i, height, i + 0.3 * width, 0.8 * height), fill=(10, 10, 10))
    return image


def tokenizer_of(vlm: VlmSpec) -> hf.PreTrainedTokenizerFast:
    """Returns the vocabulary: bytes, two newlines, and the marks."""
    vocab = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE({**vocab, "ĊĊ": 256}, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in vlm.marks])
    if vlm.adds_bos:
        bos = vlm.named["bos_token"]
        ids = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    usual = {key: mark for key, mark in vlm.named.items() if key in ("bos_token", "eos_token", "pad_token")}
    others = {key: mark for key, mark in vlm.named.items() if key not in usual}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=others, **usual)


def spec_of(vlm: VlmSpec, n_vocab: int) -> Text:
    """Returns the text model."""
    explicit = ("llama", "mistral", "mistral3", "qwen3vl", "paddleocr", "gemma3n", "gemma4")
    head_dim = 64 if vlm.family in explicit else None
    name = f"{vlm.family}-{vlm.name}"
    return Text(name, heads=2, kv_heads=1, head_dim=head_dim, n_vocab=n_vocab, **{"hidden": 128, "ffn": 96, **vlm.text})


def text_model_of(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the text model without its head."""
    return model.model.text_model if hasattr(model.model, "text_model") else model.model.language_model


def vision_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the modules outside the text model."""
    for name, weight in model.model.named_parameters():
        if not name.startswith(("text_model.", "language_model.")):
            yield name, weight


def offset_of(name: str) -> float:
    """Returns the offset of the weight of a norm after the vision encoder; files contain the
    sum."""
    return 1.0 if "soft_emb_norm" in name else 0.0


def build(vlm: VlmSpec, text: torch.nn.Module, image_token: int) -> torch.nn.Module:
    """Returns a model around this text model, with scores, norms and branches far from uniform, and
    matrices exact in f16."""
    torch.manual_seed(zlib.crc32(vlm.name.encode()))
    model = hf.AutoModelForImageTextToText.from_config(vlm.to_config(text.config, image_token)).eval()
    text_model_of(model).load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    for name, weight in vision_parameters(model):
        n_in = weight[0].numel()
        if "lambda_" in name:
            values = 0.6 + 0.8 * torch.rand_like(weight)
        elif name.endswith("bias"):
            gain = 0.8 if "q_proj" in name or "qkv" in name else 0.5 if "visual.blocks" in name else 0.3
            values = gain * torch.randn_like(weight)
        elif "position_embedding" in name or "pos_embed" in name or "cls_token" in name or "class_embedding" in name:
            values = (0.7 * torch.randn_like(weight)).half().float()
        elif weight.ndim == 1:
            values = 1 + 0.3 * torch.randn_like(weight) - offset_of(name)
        else:
            # Output spread for unit inputs; the last outputs have about the spread of embeddings.
            last = any(part in name for part in ("linear_2", "modality_projection", "input_projection", "merger.mlp.2"))
            last |= "merger" in name and "linear_fc2" in name
            gain = 1.4 if name.endswith(("q_proj.weight", "k_proj.weight", "qkv.weight")) else 0.3 if last else 1.0
            values = (gain * n_in**-0.5 * torch.randn_like(weight)).half().float()
        weight.data.copy_(values)
    return model


@torch.no_grad()
def forward(model: torch.nn.Module, inputs: hf.BatchFeature) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of the image as the text model reads them, and the logits."""
    entered, added = [], []

    def keep(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        entered.append(given["inputs_embeds"][0])
        added.extend(given.get("deepstack_visual_embeds") or [])

    hook = text_model_of(model).register_forward_pre_hook(keep, with_kwargs=True)
    kind = next(model.parameters()).dtype
    given = {name: value.to(kind) if value.is_floating_point() else value for name, value in inputs.items()}
    logits = model(**given).logits[0]
    hook.remove()
    return torch.cat([entered[0][inputs["input_ids"][0] == model.config.image_token_id], *added], dim=-1), logits


def tiles_of(inputs: hf.BatchFeature) -> list[torch.Tensor]:
    """Returns the encoder's input images, `[3, height, width]`."""
    pixels = inputs["pixel_values"]
    if "image_grid_thw" in inputs and pixels.ndim == 4:  # patches line by line
        _, rows, columns = inputs["image_grid_thw"][0].tolist()
        side = pixels.shape[-1]
        grid = pixels.reshape(rows, columns, 3, side, side)
        return [grid.permute(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)]
    if "image_grid_thw" in inputs:  # patches of two frames, ordered in squares of 2 x 2
        _, rows, columns = inputs["image_grid_thw"][0].tolist()
        side = int((pixels.shape[-1] // 6) ** 0.5)
        grid = pixels.reshape(rows // 2, columns // 2, 2, 2, 3, 2, side, side)
        assert torch.equal(grid[..., 0, :, :], grid[..., 1, :, :])
        return [grid[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)]
    if "spatial_shapes" not in inputs:
        return list(pixels.reshape(-1, *pixels.shape[-3:]))
    tiles = []
    for patches, (rows, columns) in zip(pixels, inputs["spatial_shapes"].tolist()):
        side = int((patches.shape[-1] // 3) ** 0.5)
        grid = patches[: rows * columns].reshape(rows, columns, side, side, 3)
        tiles.append(grid.permute(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side))
    return tiles


def inputs_for(processor: hf.ProcessorMixin, image: Image.Image) -> hf.BatchFeature:
    """Returns the model's inputs for PROMPT with this image."""
    content = [{**part, "image": image} if part["type"] == "image" else part for part in PROMPT]
    messages = [{"role": "user", "content": content}]
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def least_row_effect(
    parts: Iterable[tuple[str, str, torch.nn.Parameter]], rows_of: Callable[[], torch.Tensor], rows: torch.Tensor
) -> tuple[str, float]:
    """Returns the stored part of the encoder without which the rows change least, and that change."""
    effects = {}
    for name, _, weight in parts:
        if name.endswith("attn_k.bias"):  # equal for all keys of a query, so softmax cancels it
            continue
        values = weight.clone()
        weight.data.zero_()
        effects[name] = float((rows_of() - rows).abs().max())
        weight.data.copy_(values)
    return min(effects.items(), key=lambda effect: effect[1])


def check_sensitivity(vlm: VlmSpec, model: torch.nn.Module, processor: hf.ProcessorMixin, image: Image.Image) -> None:
    """Rejects a model whose golden data is inexact or insensitive to mistakes; prints the
    figures."""
    inputs = inputs_for(processor, image)
    rows, logits = forward(model, inputs)
    exact = forward(model.double(), inputs)
    rounding = max(float((one - other).abs().max()) for one, other in zip(exact, (rows, logits)))
    model.float()
    assert rounding <= MAX_ROUNDING_ERROR, f"{vlm.name}: rounding error {rounding}"
    extent = float(rows.std())
    assert EXTENT[0] <= extent <= EXTENT[1], f"{vlm.name}: rows are {extent} wide"
    other = forward(model, inputs_for(processor, ImageOps.invert(image)))[1]
    effect = float((other - logits).abs().max())
    assert effect >= MIN_EFFECT, f"{vlm.name}: the image changes logits by {effect} only"
    effects = [effect]
    for leave_out in vlm.ablations:
        other, given = copy.deepcopy(model), dict(inputs)
        leave_out(other, given)
        effects.append(float((forward(other, given)[1] - logits).abs().max()))
        assert effects[-1] >= MIN_EFFECT, f"{vlm.name}: a feature changes logits by {effects[-1]} only"
    name, row_effect = least_row_effect(stored_parts(vlm, model), lambda: forward(model, inputs)[0], rows)
    assert row_effect >= MIN_ROW_EFFECT, f"{vlm.name}: {name} changes rows by {row_effect} only"
    print(
        f"{vlm.name:10} rows' std {extent:.2f}  logits' std {float(logits.std()):.2f}  rounding {rounding:.1e}  "
        f"effects of the image and of features {' '.join(f'{effect:.2f}' for effect in effects)}, of {name} {row_effect:.2f}"
    )


# Names of the vision encoder's parts in files: outside the layers, and in them.
OUTER = {
    "patch_embedding": "patch_embd",
    "projection": "patch_embd",
    "patch_conv": "patch_embd",
    "position_embedding": "position_embd",
    "position_embeddings": "position_embd.weight",
    "cls_token": "class_embd",
    "class_embedding": "class_embd",
    "ln_pre": "pre_ln",
    "pre_layrnorm": "pre_ln",
    "proj": "patch_embd",
    "pos_embed": "position_embd",
    "post_layernorm": "post_ln",
}
INNER = {
    "layer_norm1": "ln1",
    "layernorm_before": "ln1",
    "norm1": "ln1",
    "attention_norm": "ln1",
    "qkv": "attn_qkv",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "out_proj": "attn_out",
    "o_proj": "attn_out",
    "proj": "attn_out",
    "projection_layer": "attn_out",
    "lambda_1": "ls1.weight",
    "layer_norm2": "ln2",
    "layernorm_after": "ln2",
    "norm2": "ln2",
    "ffn_norm": "ln2",
    "gate_proj": "ffn_gate",
    "fc1": "ffn_up",
    "linear_fc1": "ffn_up",
    "up_proj": "ffn_up",
    "fc2": "ffn_down",
    "linear_fc2": "ffn_down",
    "down_proj": "ffn_down",
    "lambda_2": "ls2.weight",
}


def stored_parts(vlm: VlmSpec, model: torch.nn.Module) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yields the vision encoder's tensors in file format, with the names in the file and here."""
    for name, weight in vision_parameters(model):
        *path, end = name.split(".")
        part, suffix = (path[-1], f".{end}") if end in ("weight", "bias") else (end, "")
        layer = next((int(step) for step in path if step.isdigit()), None)
        if path[0] in ("connector", "multi_modal_projector", "projector") or "merger" in path:
            yield vlm.projector_names[part] + suffix, name, weight
        elif "deepstack_merger_list" in path:
            behind = model.config.vision_config.deepstack_visual_indexes[layer]
            yield f"v.deepstack.{behind}.{part.removeprefix('linear_')}{suffix}", name, weight
        elif part == "qkv" and vlm.is_split:
            for letter, third in zip("qkv", weight.chunk(3)):
                yield f"v.blk.{layer}.attn_{letter}{suffix}", name, third
        elif weight.ndim == 5:  # of two frames
            for moment, end in enumerate(("", ".1")):
                yield f"v.patch_embd.weight{end}", name, weight[:, :, moment]
        elif layer is not None:
            yield f"v.blk.{layer}.{INNER[part]}{suffix}", name, weight
        else:
            yield f"v.{OUTER[part]}{suffix}", name, weight


def write_mmproj(path: Path, vlm: VlmSpec, model: torch.nn.Module, processor: hf.ProcessorMixin, tokenizer: Any) -> None:
    """Writes the vision encoder as a GGUF file."""
    writer = gguf.GGUFWriter(path, "clip")
    vision = model.config.vision_config
    side = vision.image_size if hasattr(vision, "image_size") else 0
    patch = vision.patch_size
    keys = {
        "general.type": "mmproj",
        "general.name": vlm.name,
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_F16),
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": model.config.text_config.hidden_size,
        "clip.vision.image_size": side if isinstance(side, int) else side[0],
        "clip.vision.patch_size": patch if isinstance(patch, int) else patch[0],
        "clip.vision.embedding_length": vision.hidden_size,
        "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": vision.num_hidden_layers,
        "clip.vision.attention.head_count": vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": getattr(vision, "layer_norm_eps", None),
        "clip.vision.image_mean": list(processor.image_processor.image_mean),
        "clip.vision.image_std": list(processor.image_processor.image_std),
        **vlm.keys,
    }
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in keys.items():
        if value is not None:
            adds[type(value)](key, value)
    for name, here, weight in stored_parts(vlm, model):
        if vlm.has_rope and name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = to_interleaved(weight, vision.num_attention_heads)
        if name == "v.patch_embd.weight" and weight.ndim == 2:  # in the order of patches: rows, columns, colours
            weight = weight.reshape(len(weight), patch, patch, 3).permute(0, 3, 1, 2).contiguous()
        weight = weight + offset_of(name)
        is_vector = weight.ndim == 1 or "class_embd" in name or any(part in here for part in vlm.in_f32)
        stored = weight.detach().to(torch.float32 if is_vector else torch.float16)
        assert torch.equal(stored.float(), weight), f"{name} is not exact in {stored.dtype}"
        writer.add_tensor(name, stored.contiguous().numpy())
    if vlm.has_rope:
        row = text_model_of(model).embed_tokens.weight[tokenizer.convert_tokens_to_ids("[IMG_BREAK]")]
        writer.add_tensor("v.token_embd.img_break", row.detach().numpy())
    write_file(writer)


def write_text(path: Path, vlm: VlmSpec, spec: Text, text: torch.nn.Module, tokenizer: hf.PreTrainedTokenizerFast) -> None:
    """Writes the text model with its vocabulary, as a GGUF file."""
    arch = gguf.MODEL_ARCH_NAMES[spec.family.arch]
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, spec, text, 0)
    for key in (gguf.Keys.Tokenizer.MODEL, gguf.Keys.LLM.VOCAB_SIZE.format(arch=arch)):
        del writer.kv_data[0][key]  # the file has tokens
    writer.add_vocab_size(len(tokenizer))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vlm.pre)
    n_usual = len(tokenizer) - len(vlm.marks)
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    writer.add_token_types([gguf.TokenType.NORMAL] * n_usual + [gguf.TokenType.CONTROL] * len(vlm.marks))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(vlm.adds_bos)
    writer.add_chat_template(vlm.template)
    for key, value in vlm.text_keys.items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{arch}.{key}", value)
    for name, stored in stored_tensors(spec, text):
        if name == "per_layer_token_embd.weight":  # padded by the converter
            stored = np.pad(stored, ((0, len(tokenizer) - len(stored)), (0, 0)))
        writer.add_tensor(name, stored)
    write_file(writer)


def write_golden(path: Path, model: torch.nn.Module, inputs: hf.BatchFeature) -> None:
    """Writes the golden file; see the top of this file for its layout."""
    tokens, image_token = inputs["input_ids"][0], model.config.image_token_id
    rows, logits = forward(model, inputs)
    tiles = tiles_of(inputs)
    assert len(rows) == int((tokens == image_token).sum()) and len(logits) == len(tokens)
    counts = (len(tokens), logits.shape[-1], len(tiles), *rows.shape)
    parts = [struct.pack("<4s5Ii", b"KVPI", *counts, image_token), tokens.numpy().astype("<i4").tobytes()]
    for tile in tiles:
        parts += [struct.pack("<2i", *tile.shape[1:]), tile.numpy().astype("<f4").tobytes()]
    path.write_bytes(b"".join([*parts, rows.numpy().astype("<f4").tobytes(), logits.numpy().astype("<f4").tobytes()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to (default: %(default)s)")
    parser.add_argument("names", nargs="*", help="models to make (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    images = {name: draw(*size) for name, size in SIZES.items()}
    (args.out / "images").mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        image.save(args.out / f"images/{name}.png")
    for vlm in VLMS:
        if args.names and vlm.name not in args.names:
            continue
        tokenizer = tokenizer_of(vlm)
        processor = vlm.to_processor(tokenizer, vlm.template)
        spec = spec_of(vlm, len(tokenizer))
        text = build_model(spec)
        model = build(vlm, text, tokenizer.convert_tokens_to_ids(vlm.image_token))
        check_sensitivity(vlm, model, processor, images["wide"])
        folder = args.out / "models" / vlm.name
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "text.gguf", vlm, spec, text, tokenizer)
        write_mmproj(folder / "mmproj.gguf", vlm, model, processor, tokenizer)
        for name, image in images.items():
            write_golden(folder / f"{name}.golden", model, inputs_for(processor, image))


if __name__ == "__main__":
    main()
