#!/usr/bin/env python3
"""Creates tiny random audio models, and the outputs of `transformers` for clips of one recording.

Writes to `crates/audio/tests`: `clips/clip.wav`, a chirp in noise of a mono second at 16 kHz, the
same as `clip.flac`, and as `stereo.mp3` and `stereo.ogg` of 44.1 kHz, whose second channel is half
as loud; and for every model of AUDIO_MODELS that is made by default, or for the named ones, in
`models/NAME`

text.gguf      the text model, as `images.py` writes those.
mmproj.gguf    the audio encoder by the conventions of `convert_hf_to_gguf.py --mmproj`. Matrices and kernels are f16, everything
               else is f32.
N.golden       the f32 output of `transformers` for the first N samples of the repeated clip, little-endian:
                   u8  magic[4] = "KVPA"
                   u32 n_tokens, n_vocab, n_mels, n_frames, n_rows, n_hidden
                   i32 audio_token
                   i32 tokens [n_tokens]            PROMPT by the chat template, with audio_token for each row (n_rows times)
                   f32 mel [n_frames, n_mels]       the features, without padded frames
                   f32 rows [n_rows, n_hidden]      the rows in place of audio_token, as the text model reads them
                   f32 logits [n_tokens, n_vocab]   row t: after tokens 0..=t were read

Each model is validated as a test before it is written: the f32 result is near the f64 result, and
the audio, the peculiarities of its family and every weight of the audio encoder have a detectable
effect.
"""

import argparse
import copy
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import soundfile
import torch
import transformers as hf
from audio_models import AUDIO_MODELS, CLIP, RATE, AudioSpec
from gemma_audio import GEMMA_MODELS
from images import EXTENT, MIN_ROW_EFFECT, least_row_effect, spec_of, text_model_of, tokenizer_of, write_text
from make_fixtures import MAX_ROUNDING_ERROR, MIN_EFFECT, build_model, write_file
from scipy.signal import resample_poly

OUT = Path(__file__).resolve().parents[2] / "crates/audio/tests"

PROMPT = [{"type": "text", "text": "Hear "}, {"type": "audio"}, {"type": "text", "text": "and say what it is."}]


def record() -> np.ndarray:
    """Returns a chirp from 150 Hz to 7 kHz in noise that fades, as 16-bit integers."""
    time = np.arange(CLIP) / RATE
    duration = CLIP / RATE
    chirp = np.sin(2 * np.pi * (150 * time + (7000 - 150) / (2 * duration) * time**2))
    noise = np.random.default_rng(7).standard_normal(CLIP) * np.exp(-3 * time / duration)
    return np.round(32767 * (0.4 * chirp * np.sin(np.pi * time / duration) + 0.05 * noise)).astype(np.int16)


def samples_of(n: int) -> np.ndarray:
    """Returns the first `n` samples of the repeated clip, full scale being 1."""
    return np.resize(record(), n).astype(np.float32) / 32768


def write_clips(folder: Path) -> None:
    """Writes the clip in all formats."""
    folder.mkdir(parents=True, exist_ok=True)
    clip = record()
    soundfile.write(folder / "clip.wav", clip, RATE, subtype="PCM_16")
    soundfile.write(folder / "clip.flac", clip, RATE, subtype="PCM_16")
    resampled = resample_poly(clip / 32768, 441, 160)
    stereo = np.stack([resampled, 0.5 * resampled], axis=1)
    soundfile.write(folder / "stereo.mp3", stereo, 44_100)
    ogg = folder / "stereo.ogg"
    if not ogg.exists():  # libsndfile gives each Ogg stream a random number
        soundfile.write(ogg, stereo, 44_100)


def audio_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters outside the text model, and the limits of products."""
    limits = ("input_min", "input_max", "output_min", "output_max")
    kept = [(name, buffer) for name, buffer in model.model.named_buffers() if name.endswith(limits)]
    for name, weight in (*model.model.named_parameters(), *kept):
        if not name.startswith(("language_model.", "embed_vision.")):
            yield name, weight


def build(audio: AudioSpec, text: torch.nn.Module, audio_token: int) -> torch.nn.Module:
    """Returns a model around this text model, with scores, norms and branches far from uniform, and
    matrices exact in f16."""
    torch.manual_seed(zlib.crc32(audio.name.encode()))
    model = audio.to_model(text.config, audio_token).eval()
    text_model_of(model).load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    for name, weight in audio_parameters(model):
        if (values := audio.draw(name, weight)) is not None:
            weight.data.copy_(values)
            continue
        n_in = weight[0].numel()
        if name.endswith("bias"):
            values = (1.5 if "q_proj" in name else 0.3) * torch.randn_like(weight)
        elif "embed_positions" in name:
            values = 0.7 * torch.randn_like(weight)
        elif weight.ndim == 1:
            values = 1 + 0.3 * torch.randn_like(weight)
        else:
            # Output spread for unit inputs; the last outputs have about the spread of embeddings, and GELU narrows its own.
            is_last = "linear_2" in name or name.endswith("projector.linear.weight")
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 0.5 if is_last else 1.5 if "conv" in name else 1.0
            values = (gain * n_in**-0.5 * torch.randn_like(weight)).half().float()
        weight.data.copy_(values)
    return model


def inputs_for(audio: AudioSpec, tokenizer: hf.PreTrainedTokenizerFast, samples: np.ndarray) -> dict[str, Any]:
    """Returns the model's inputs for PROMPT with these samples."""
    content: Any = PROMPT
    if audio.text_mark is not None:
        content = "".join(part.get("text", audio.text_mark) for part in PROMPT)
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, chat_template=audio.template, add_generation_prompt=True, tokenize=False)
    return dict(audio.to_inputs(tokenizer, text, samples))


def is_row(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns which tokens stand for rows of the encoder: those of the clip, and (Gemma 3n) the one
    that ends it."""
    offset = getattr(model.config.audio_config, "vocab_offset", None)
    return tokens == model.config.audio_token_id if offset is None else tokens >= offset


@torch.no_grad()
def forward(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of the clip as the text model reads them, and the logits."""
    entered = []
    hook = text_model_of(model).register_forward_pre_hook(
        lambda _module, _args, given: entered.append(given["inputs_embeds"][0]), with_kwargs=True
    )
    kind = next(model.parameters()).dtype
    given = {name: value.to(kind) if value.is_floating_point() else value for name, value in inputs.items()}
    logits = model(**given).logits[0]
    hook.remove()
    return entered[0][is_row(model, inputs["input_ids"][0])], logits


def mel_of(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Returns the features in the order of time, `[frames, mels]`, without padded frames."""
    mel = inputs["input_features"]
    # Gemma's are in this order.
    mel = mel[0] if "gemma" in type(model).__name__.lower() else mel.transpose(1, 2).flatten(0, 1)
    if "input_features_mask" in inputs:
        mel = mel[: int(inputs["input_features_mask"].sum())]
    return mel.contiguous()


def check_sensitivity(audio: AudioSpec, model: torch.nn.Module, tokenizer: hf.PreTrainedTokenizerFast) -> None:
    """Rejects a model whose golden data is inexact or insensitive to mistakes; prints the
    figures."""
    samples = samples_of(audio.clips[-1])
    inputs = inputs_for(audio, tokenizer, samples)
    rows, logits = forward(model, inputs)
    with patch.object(torch.Tensor, "float", torch.Tensor.double):  # where the model asks for f32
        exact = forward(model.double(), inputs)
    rounding = max(float((one - other).abs().max()) for one, other in zip(exact, (rows, logits)))
    model.float()
    assert rounding <= MAX_ROUNDING_ERROR, f"{audio.name}: rounding error {rounding}"
    extent = float(rows.std())
    assert EXTENT[0] <= extent <= EXTENT[1], f"{audio.name}: rows are {extent} wide"
    other = forward(model, inputs_for(audio, tokenizer, samples[::-1].copy()))[1]
    effects = [float((other - logits).abs().max())]
    for leave_out in audio.ablations:
        changed, given = copy.deepcopy(model), dict(inputs)
        leave_out(changed, given)
        effects.append(float((forward(changed, given)[1] - logits).abs().max()))
    assert min(effects) >= MIN_EFFECT, f"{audio.name}: the audio or a feature changes logits by {effects} only"
    name, row_effect = least_row_effect(stored_parts(audio, model), lambda: forward(model, inputs)[0], rows)
    assert row_effect >= MIN_ROW_EFFECT, f"{audio.name}: {name} changes rows by {row_effect} only"
    print(
        f"{audio.name:10} rows' std {extent:.2f}  logits' std {float(logits.std()):.2f}  rounding {rounding:.1e}  "
        f"effects of the audio and of features {' '.join(f'{effect:.2f}' for effect in effects)}, of {name} {row_effect:.2f}"
    )


# Names of the audio encoder's parts in files: outside the layers, and in them.
OUTER = {
    "conv1": "a.conv1d.1",
    "conv2": "a.conv1d.2",
    "conv2d1": "a.conv2d.1",
    "conv2d2": "a.conv2d.2",
    "conv2d3": "a.conv2d.3",
    "conv_out": "a.conv_out",
    "embed_positions": "a.position_embd",
    "layer_norm": "a.post_ln",
    "ln_post": "a.post_ln",
}
INNER = {
    "self_attn_layer_norm": "ln1",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "out_proj": "attn_out",
    "final_layer_norm": "ln2",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}


def stored_parts(audio: AudioSpec, model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields the audio encoder's tensors, with the names in the file and here."""
    for name, weight in audio_parameters(model):
        if audio.stored_name is not None:
            yield audio.stored_name(name), name, weight
            continue
        *path, part, end = name.split(".")
        layer = next((int(step) for step in path if step.isdigit()), None)
        if path[0:1] == ["multi_modal_projector"] or part in audio.projector_names:
            yield f"{audio.projector_names[part]}.{end}", name, weight
        elif layer is not None:
            yield f"a.blk.{layer}.{INNER[part]}.{end}", name, weight
        else:
            yield f"{OUTER[part]}.{end}", name, weight


def is_of_convolution(name: str) -> bool:
    """Returns whether Gemma's converter keeps a matrix in f32."""
    return ".conv" in name or "_conv" in name


def write_mmproj(path: Path, audio: AudioSpec, model: torch.nn.Module) -> None:
    """Writes the audio encoder as a GGUF file."""
    writer = gguf.GGUFWriter(path, "clip")
    config = model.config.audio_config
    keys = {
        "general.type": "mmproj",
        "general.name": audio.name,
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_F16),
        "clip.has_audio_encoder": True,
        "clip.audio.projection_dim": model.config.text_config.hidden_size,
        "clip.audio.embedding_length": config.hidden_size,
    }
    if audio.stored_name is None:
        keys |= {
            "clip.audio.feed_forward_length": config.intermediate_size,
            "clip.audio.block_count": config.num_hidden_layers,
            "clip.audio.attention.head_count": config.num_attention_heads,
            "clip.audio.num_mel_bins": config.num_mel_bins,
            "clip.audio.attention.layer_norm_epsilon": 1e-5,
            # Qwen3's converter has the key of files with several encoders, also for Qwen3-ASR.
            "clip.audio.projector_type" if audio.projector == "qwen3a" else "clip.projector_type": audio.projector,
        }
    keys |= audio.keys
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        adds[type(value)](key, value)
    for name, own_name, weight in stored_parts(audio, model):
        values = stored = audio.stored(own_name, weight.detach())
        if "conv" in name and name.endswith("bias"):  # with the axes of the convolution
            stored = stored.reshape(-1, *(1,) * (1 if "conv1d" in name else 2))
        elif "depthwise_conv1d" in own_name:
            stored = stored.squeeze(1)
        elif weight.ndim == 0:
            stored = stored.reshape(1)
        elif weight.ndim > 1 and "position_embd" not in name and not (audio.stored_name and is_of_convolution(own_name)):
            stored = stored.half()
        assert torch.equal(stored.float().flatten(), values.flatten()), f"{name} is not exact in {stored.dtype}"
        writer.add_tensor(name, stored.contiguous().numpy())
    if audio.projector == "qwen3a":
        # Files have 1,500 positions, computed by the converter; a chunk reads 13.
        writer.add_tensor("a.position_embd.weight", sinusoids(16, config.hidden_size))
    write_file(writer)


def sinusoids(n: int, width: int) -> np.ndarray:
    """Returns the fixed position embeddings of Qwen3, `[n, width]`."""
    rates = np.exp(-np.log(10_000) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(n)[:, None] * rates[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def write_golden(path: Path, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
    """Writes the golden file; see the top of this file for its layout."""
    tokens, audio_token = inputs["input_ids"][0].clone(), model.config.audio_token_id
    tokens[is_row(model, tokens)] = audio_token
    mel = mel_of(model, inputs)
    rows, logits = forward(model, inputs)
    assert len(rows) == int((tokens == audio_token).sum()) and len(logits) == len(tokens)
    header = struct.pack("<4s6Ii", b"KVPA", len(tokens), logits.shape[-1], *reversed(mel.shape), *rows.shape, audio_token)
    values = (part.numpy().astype("<f4").tobytes() for part in (mel, rows, logits))
    path.write_bytes(b"".join([header, tokens.numpy().astype("<i4").tobytes(), *values]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to (default: %(default)s)")
    parser.add_argument("names", nargs="*", help="models to make (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    write_clips(args.out / "clips")
    for audio in (*AUDIO_MODELS, *GEMMA_MODELS):
        if args.names and audio.name not in args.names:
            continue
        tokenizer = tokenizer_of(audio)
        spec = spec_of(audio, len(tokenizer))
        text = build_model(spec)
        model = build(audio, text, tokenizer.convert_tokens_to_ids(audio.audio_token))
        check_sensitivity(audio, model, tokenizer)
        folder = args.out / "models" / audio.name
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "text.gguf", audio, spec, text, tokenizer)
        write_mmproj(folder / "mmproj.gguf", audio, model)
        for n in audio.clips:
            write_golden(folder / f"{n}.golden", model, inputs_for(audio, tokenizer, samples_of(n)))


if __name__ == "__main__":
    main()
