"""Audio models of `audio.py`: sizes, marks, chat templates and processors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers as hf
from vision_models import PIXTRAL

RATE = 16_000
HOP = 160  # samples per frame

# Samples of the clips: the file's, repeated as often as needed.
SHORT, CLIP, TWICE, LONG = 5_003, 11_701, 23_402, 152_113

ENCODER = {"num_hidden_layers": 2, "num_attention_heads": 2, "attn_implementation": "eager"}

# As published.
QWEN2AUDIO = (
    "{% set audio_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if 'audio' in content or 'audio_url' in content or message['type'] == 'audio' or content['type'] == 'audio' %}"
    "{% set audio_count.value = audio_count.value + 1 %}Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Output of the published template without tools.
QWEN3OMNI = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'audio' %}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


@dataclass(frozen=True)
class AudioSpec:
    """An audio model. The fields that `images.py` reads have the meaning of those of its models."""

    name: str
    family: str
    marks: tuple[str, ...]
    named: dict[str, str]
    audio_token: str
    pre: str
    template: str
    text_mark: str | None  # in the text of a prompt, for templates that know no audio
    clips: tuple[int, ...]  # samples of the clips
    to_model: Callable[[hf.PreTrainedConfig, int], torch.nn.Module]  # of the text model's configuration and of audio_token
    to_inputs: Callable[[hf.PreTrainedTokenizerFast, str, np.ndarray], hf.BatchFeature]  # of the prompt's text and of the samples
    projector: str  # clip.projector_type
    projector_names: dict[str, str] = field(default_factory=dict)
    stored_name: Callable[[str], str] | None = None  # of a tensor in files, where it is not the name of a Whisper encoder's
    stored: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, weight: weight  # values in files
    draw: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda _, weight: None  # values, where they are others
    keys: dict[str, Any] = field(default_factory=dict)  # additional metadata of the audio encoder
    text: dict[str, Any] = field(default_factory=dict)
    adds_bos: bool = False
    text_keys: dict[str, Any] = field(default_factory=dict)
    ablations: tuple[Callable[[torch.nn.Module, dict[str, torch.Tensor]], Any], ...] = ()


VOXTRAL_POSITIONS = 48


def voxtral_inputs(tokenizer: hf.PreTrainedTokenizerFast, text: str, samples: np.ndarray) -> hf.BatchFeature:
    """Does what `VoxtralProcessor` does, whose tokenizer is that of mistral-common: the features of
    audio padded to whole windows are cut into windows."""
    frames = 2 * VOXTRAL_POSITIONS
    extractor = hf.WhisperFeatureExtractor(feature_size=128)
    features = extractor(
        samples, sampling_rate=RATE, padding=True, truncation=False, pad_to_multiple_of=frames * HOP, return_tensors="pt"
    ).input_features
    windows = features.reshape(128, -1, frames).transpose(0, 1)
    n_rows = len(windows) * VOXTRAL_POSITIONS // 4
    inputs = tokenizer(text.replace("[AUDIO]", n_rows * "[AUDIO]"), add_special_tokens=False, return_tensors="pt")
    return hf.BatchFeature({**inputs, "input_features": windows})


def qwen2_inputs(tokenizer: hf.PreTrainedTokenizerFast, text: str, samples: np.ndarray) -> hf.BatchFeature:
    extractor = hf.WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    processor = hf.Qwen2AudioProcessor(extractor, tokenizer)
    return processor(text=[text], audio=[samples], sampling_rate=RATE, return_tensors="pt")


def qwen3_inputs(tokenizer: hf.PreTrainedTokenizerFast, text: str, samples: np.ndarray) -> hf.BatchFeature:
    processor = hf.Qwen3ASRProcessor(hf.Qwen3ASRFeatureExtractor(feature_size=40), tokenizer)
    return processor(text=[text], audio=[samples], sampling_rate=RATE, padding=True, return_tensors="pt")


def attend_to_all(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Makes one attention window of all positions."""
    model.model.audio_tower.n_window_infer = 100_000


def unmask(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Lets positions attend to the silence behind the clip."""
    encoder = model.model.audio_tower
    lengths_of = encoder._get_feat_extract_output_lengths
    encoder._get_feat_extract_output_lengths = lambda frames: (torch.full_like(frames, 50), lengths_of(frames)[1])


QWEN_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}

AUDIO_MODELS = [
    AudioSpec(
        "voxtral",
        "llama",
        marks=("<s>", "</s>", "[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]"),
        named={"bos_token": "<s>", "eos_token": "</s>"},
        audio_token="[AUDIO]",
        pre="tekken",
        template=PIXTRAL,
        text_mark="[BEGIN_AUDIO][AUDIO]",
        clips=(CLIP, TWICE),
        to_model=lambda text, audio_token: hf.VoxtralForConditionalGeneration(
            hf.VoxtralConfig(
                audio_config=hf.VoxtralEncoderConfig(
                    **ENCODER, hidden_size=64, intermediate_size=256, num_mel_bins=128, max_source_positions=VOXTRAL_POSITIONS
                ),
                text_config=text,
                audio_token_id=audio_token,
            )
        ),
        to_inputs=voxtral_inputs,
        projector="voxtral",
        projector_names={"linear_1": "mm.a.mlp.1", "linear_2": "mm.a.mlp.2"},
        keys={"clip.audio.projector.stack_factor": 4},
        text={"theta": 1e8, "eps": 1e-5},
        adds_bos=True,
    ),
    AudioSpec(
        "qwen2audio",
        "qwen2",
        marks=(*QWEN_MARKS, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
        named={**QWEN_NAMED, "audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        audio_token="<|AUDIO|>",
        pre="qwen2",
        template=QWEN2AUDIO,
        text_mark=None,
        clips=(SHORT, CLIP),
        to_model=lambda text, audio_token: hf.Qwen2AudioForConditionalGeneration(
            hf.Qwen2AudioConfig(
                audio_config=hf.Qwen2AudioEncoderConfig(
                    encoder_layers=2,
                    encoder_attention_heads=2,
                    attn_implementation="eager",
                    d_model=64,
                    encoder_ffn_dim=96,
                    num_mel_bins=80,
                    max_source_positions=50,
                ),
                text_config=text,
                audio_token_index=audio_token,
            )
        ),
        to_inputs=qwen2_inputs,
        projector="qwen2a",
        projector_names={"linear": "mm.a.fc"},
        ablations=(unmask,),
    ),
    AudioSpec(
        "qwen3asr",
        "qwen3vl",
        marks=(*QWEN_MARKS, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
        named={**QWEN_NAMED, "audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
        audio_token="<|audio_pad|>",
        pre="qwen2",
        template=QWEN3OMNI,
        text_mark=None,
        clips=(SHORT, CLIP, LONG),
        to_model=lambda text, audio_token: hf.Qwen3ASRForConditionalGeneration(
            hf.Qwen3ASRConfig(
                audio_config=hf.Qwen3ASREncoderConfig(
                    encoder_layers=2,
                    encoder_attention_heads=2,
                    attn_implementation="eager",
                    d_model=64,
                    encoder_ffn_dim=96,
                    num_mel_bins=40,
                    downsample_hidden_size=24,
                    output_dim=text.hidden_size,
                ),
                text_config=text,
                audio_token_id=audio_token,
                tie_word_embeddings=False,
            )
        ),
        to_inputs=qwen3_inputs,
        projector="qwen3a",
        projector_names={"linear_1": "mm.a.mlp.1", "linear_2": "mm.a.mlp.2"},
        text={"hidden": 64},
        text_keys={"rope.dimension_sections": [12, 10, 10, 0], "n_deepstack_layers": 0},
        ablations=(attend_to_all,),
    ),
]
