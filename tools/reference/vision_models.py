"""Vision models of `images.py`: sizes, marks, chat templates and processors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from spec import GROWING, Spec
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.paddleocr_vl.configuration_paddleocr_vl import PaddleOCRTextConfig, PaddleOCRVisionConfig
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

VISION_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attn_implementation": "eager",
}
DEEP_VISION_CONFIG = {**VISION_CONFIG, "num_hidden_layers": 3}


@dataclass(frozen=True)
class Text(Spec):
    """Text model of a vision model."""

    n_vocab: int = 0
    eps: float = 1e-6

    def to_config(self, rope: dict[str, Any], extra: dict[str, Any] | None = None) -> hf.PreTrainedConfig:
        config = super().to_config(rope, extra)
        config.vocab_size = self.n_vocab
        if hasattr(config, "rms_norm_eps"):
            config.rms_norm_eps = self.eps
        return config


@dataclass(frozen=True)
class VlmSpec:
    """A vision model."""

    name: str
    family: str  # of the text model
    marks: tuple[str, ...]
    named: dict[str, str]  # roles of the marks, by the names of `transformers`
    image_token: str
    pre: str  # pre-tokenizer, by llama.cpp's name
    template: str
    to_config: Callable[[hf.PreTrainedConfig, int], hf.PreTrainedConfig]  # of the text model's and of image_token
    to_processor: Callable[[hf.PreTrainedTokenizerFast, str], hf.ProcessorMixin]  # of the template too
    keys: dict[str, Any]  # additional metadata of the vision encoder; None removes a key
    projector_names: dict[str, str]  # names of the projector's parts in files
    text: dict[str, Any] = field(default_factory=dict)  # of its Spec
    adds_bos: bool = False
    has_rope: bool = False  # with RoPE, for which rows of Q and K are reordered
    in_f32: tuple[str, ...] = ("position_embedding",)  # matrices in f32 in files
    is_split: bool = False  # files have separate Q, K and V where the model has one matrix
    text_keys: dict[str, Any] = field(default_factory=dict)  # additional metadata of the text model
    ablations: tuple[Callable[[torch.nn.Module, dict[str, torch.Tensor]], Any], ...] = ()  # parts to remove for the sensitivity check


def marks_of_grid(mark: str, rows: int, columns: int) -> tuple[str, ...]:
    """Returns the marks of the cells in a grid."""
    return tuple(mark.format(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1))


# As published.
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
INTERNVL = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% elif content['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n' }}{% endif %}"
)
PIXTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" }}
        {%- else %}
            {{- "[INST]" }}
        {%- endif %}
        {%- if message["content"] is not string %}
            {%- for chunk in message["content"] %}
                {%- if chunk["type"] == "text" %}
                    {%- if "content" in chunk %}
                        {{- chunk["content"] }}
                    {%- elif "text" in chunk %}
                        {{- chunk["text"] }}
                    {%- endif %}
                {%- elif chunk["type"] == "image" %}
                    {{- "[IMG]" }}
                {%- else %}
                    {{- raise_exception("Unrecognized content type!") }}
                {%- endif %}
            {%- endfor %}
        {%- else %}
            {{- message["content"] }}
        {%- endif %}
        {{- "[/INST]" }}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}"""
LFM2VL = """\
{{- bos_token -}}
{%- set ns = namespace(system_prompt="", content="") -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system_prompt = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system_prompt = ns.system_prompt + ("\\n" if ns.system_prompt else "") + "List of tools: <|tool_list_start|>[" -%}
    {%- for tool in tools -%}
        {%- if tool is not string -%}
            {%- set tool = tool | tojson -%}
        {%- endif -%}
        {%- set ns.system_prompt = ns.system_prompt + tool -%}
        {%- if not loop.last -%}
            {%- set ns.system_prompt = ns.system_prompt + ", " -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set ns.system_prompt = ns.system_prompt + "]<|tool_list_end|>" -%}
{%- endif -%}
{%- if ns.system_prompt -%}
    {{- "<|im_start|>system\\n" + ns.system_prompt + "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message["role"] + "\\n" -}}
    {%- set content = message["content"] -%}
    {%- if content is not string -%}
        {%- set ns.content = "" -%}
        {%- for item in content -%}
            {%- if item["type"] == "image" -%}
                {%- set ns.content = ns.content + "<image>" -%}
            {%- elif item["type"] == "text" -%}
                {%- set ns.content = ns.content + item["text"] -%}
            {%- else -%}
                {%- set ns.content = ns.content + item | tojson -%}
            {%- endif -%}
        {%- endfor -%}
        {%- set content = ns.content -%}
    {%- endif -%}
    {%- if message["role"] == "tool" -%}
        {%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
    {%- endif -%}
    {{- content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}"""

# Output of the published templates without tools.
QWEN25VL = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3VL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
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

# Output of the published template; images come first in a message.
PADDLEOCR = """\
{{- '<|begin_of_sentence|>' -}}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- 'User: ' -}}
        {%- for part in message.content if part.type == 'image' -%}
            {{- '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' -}}
        {%- endfor -%}
        {%- for part in message.content if part.type == 'text' -%}
            {{- part.text -}}
        {%- endfor -%}
        {{- '\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- 'Assistant: ' -}}
        {%- for part in message.content if part.type == 'text' -%}
            {{- part.text -}}
        {%- endfor -%}
        {{- '</s>' -}}
    {%- elif message.role == 'system' -%}
        {%- for part in message.content if part.type == 'text' -%}
            {{- part.text + '\\n' -}}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Assistant: ' -}}
{%- endif -%}"""


class PillowBackend(TorchvisionBackend):
    """Resizes with Pillow instead of torchvision."""

    def resize(self, image: torch.Tensor, size: Any, resample: int, **_: Any) -> torch.Tensor:
        resized = [
            np.asarray(Image.fromarray(one.permute(1, 2, 0).numpy()).resize((size.width, size.height), resample)) for one in image
        ]
        return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


class Lfm2VlImageProcessor(hf.Lfm2VlImageProcessor, PillowBackend):
    """The common processor, which has no Pillow variant."""


def pixtral(name: str, merge: int, keys: dict[str, Any], **more: Any) -> VlmSpec:
    """Pixtral and its successors."""
    return VlmSpec(
        name,
        marks=("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        named={"bos_token": "<s>", "eos_token": "</s>"},
        image_token="[IMG]",
        pre="tekken",
        template=PIXTRAL,
        to_processor=lambda tokenizer, template: hf.PixtralProcessor(
            PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=8), tokenizer, 8, merge, chat_template=template
        ),
        keys={
            "clip.projector_type": "pixtral",
            "clip.use_silu": True,
            "clip.vision.image_size": 64,
            "clip.vision.attention.layer_norm_epsilon": 1e-5,
            **keys,
        },
        adds_bos=True,
        has_rope=True,
        **more,
    )


def as_config(kind: type[hf.PreTrainedConfig], text: hf.PreTrainedConfig, **rope: Any) -> hf.PreTrainedConfig:
    """Returns the same text model with this RoPE, in the configuration class of its vision
    model."""
    given = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "transformers_version")}
    turns = {**given.pop("rope_parameters"), **rope}
    return kind(**given, rope_parameters=turns, attn_implementation="eager")


def qwenvl(
    name: str,
    kinds: tuple[type[hf.ProcessorMixin], type],  # of processors: of the model, and of videos
    patch: int,
    rows: tuple[int, int],  # rows per image, minimum and maximum
    keys: dict[str, Any],
    more_of_images: dict[str, Any],
    **more: Any,
) -> VlmSpec:
    """Qwen2.5-VL and its successors."""
    min_pixels, max_pixels = (count * (2 * patch) ** 2 for count in rows)
    return VlmSpec(
        name,
        marks=(
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
            *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
        ),
        named={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        image_token="<|image_pad|>",
        pre="qwen2",
        to_processor=lambda tokenizer, template: kinds[0](
            Qwen2VLImageProcessorPil(
                size={"shortest_edge": min_pixels, "longest_edge": max_pixels}, patch_size=patch, merge_size=2, **more_of_images
            ),
            tokenizer,
            kinds[1](),
            chat_template=template,
        ),
        keys={
            "clip.vision.attention.layer_norm_epsilon": 1e-6,
            # Keys that the converter omits: values that differ from all published models.
            "clip.vision.image_min_pixels": min_pixels,
            "clip.vision.image_max_pixels": max_pixels,
            **keys,
        },
        **more,
    )


def marks_of_qwenvl(image_token: int) -> dict[str, int]:
    """The marks that a configuration names, which enclose this one."""
    return {
        "image_token_id": image_token,
        "video_token_id": image_token + 1,
        "vision_start_token_id": image_token - 3,
        "vision_end_token_id": image_token - 2,
    }


def turn_once(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Rotates all pairs by the first of the three positions."""
    model.model.language_model.rotary_emb.mrope_section = [32, 0, 0]


def without_a_norm(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Removes the norm before the merger."""
    model.model.projector.pre_norm = torch.nn.Identity()


def without_vision_rope(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Rotates no head of the vision encoder."""
    model.model.visual.vision_model.encoder.rotary_pos_emb.inv_freq.zero_()


def between_corners(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Aligns position embeddings at the corners instead of the edges."""
    model.model.visual.vision_model.embeddings.interpolation_align_corners = True


PADDLEOCR_PIXELS = {"shortest_edge": 12 * 16**2, "longest_edge": 40 * 16**2}

PIXTRAL_VISION = hf.PixtralVisionConfig(**VISION_CONFIG, image_size=64, patch_size=8, hidden_act="silu")

VLMS = [
    VlmSpec(
        "smolvlm",
        "llama",
        marks=(
            *("<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"),
            *marks_of_grid("<row_{}_col_{}>", 3, 3),
        ),
        named={"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"},
        image_token="<image>",
        pre="smollm",
        template=SMOLVLM,
        to_config=lambda text, image_token: hf.SmolVLMConfig(
            vision_config=hf.SmolVLMVisionConfig(**VISION_CONFIG, image_size=32, patch_size=8),
            text_config=text,
            scale_factor=2,
            image_token_id=image_token,
        ),
        to_processor=lambda tokenizer, template: hf.SmolVLMProcessor(
            SmolVLMImageProcessorPil(
                size={"longest_edge": 96},
                max_image_size={"longest_edge": 32},
                image_mean=3 * [0.5],
                image_std=3 * [0.5],
            ),
            tokenizer,
            hf.SmolVLMVideoProcessor(),
            image_seq_len=4,
            chat_template=template,
        ),
        keys={
            "clip.projector_type": "idefics3",
            "clip.use_gelu": True,
            "clip.vision.preproc_image_size": 96,
            "clip.vision.projector.scale_factor": 2,
        },
        projector_names={"proj": "mm.model.fc"},
        in_f32=("patch_embedding", "position_embedding"),
    ),
    VlmSpec(
        "internvl",
        "qwen2",
        marks=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        image_token="<IMG_CONTEXT>",
        pre="qwen2",
        template=INTERNVL,
        to_config=lambda text, image_token: hf.InternVLConfig(
            vision_config=hf.InternVLVisionConfig(**VISION_CONFIG, image_size=32, patch_size=8, attention_bias=True),
            text_config=text,
            image_token_id=image_token,
            image_seq_length=4,
            tie_word_embeddings=False,
        ),
        to_processor=lambda tokenizer, template: hf.InternVLProcessor(
            GotOcr2ImageProcessorPil(
                size={"height": 32, "width": 32}, min_patches=1, max_patches=6, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD
            ),
            tokenizer,
            hf.InternVLVideoProcessor(),
            image_seq_length=4,
            chat_template=template,
        ),
        keys={
            "clip.projector_type": "internvl",
            "clip.use_gelu": True,
            "clip.vision.preproc_min_tiles": 1,
            "clip.vision.preproc_max_tiles": 6,
            "clip.vision.projector.scale_factor": 2,
        },
        projector_names={"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"},
    ),
    pixtral(
        "pixtral",
        merge=1,
        keys={},
        family="mistral",
        to_config=lambda text, image_token: hf.LlavaConfig(
            vision_config=PIXTRAL_VISION,
            text_config=text,
            image_token_index=image_token,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        projector_names={"linear_1": "mm.1", "linear_2": "mm.2"},
        text={"theta": 1e6, "eps": 1e-5, "extra": {"sliding_window": None}},
    ),
    pixtral(
        "mistral3",
        merge=2,
        keys={"clip.vision.spatial_merge_size": 2},
        family="mistral3",
        to_config=lambda text, image_token: hf.Mistral3Config(
            vision_config=PIXTRAL_VISION, text_config=text, image_token_index=image_token, tie_word_embeddings=False
        ),
        projector_names={"norm": "mm.input_norm", "merging_layer": "mm.patch_merger", "linear_1": "mm.1", "linear_2": "mm.2"},
        text={"theta": 1e6, "eps": 1e-5, "rope": GROWING},
    ),
    VlmSpec(
        "lfm2vl",
        "lfm2",
        marks=(
            *("<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>", "<image>"),
            *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *marks_of_grid("<|img_row_{}_col_{}|>", 3, 3),
        ),
        named={"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
        image_token="<image>",
        pre="lfm2",
        template=LFM2VL,
        to_config=lambda text, image_token: hf.Lfm2VlConfig(
            vision_config=hf.Siglip2VisionConfig(**VISION_CONFIG, patch_size=16, num_patches=16, vision_use_head=False),
            text_config=text,
            image_token_id=image_token,
            projector_hidden_size=96,
        ),
        to_processor=lambda tokenizer, template: hf.Lfm2VlProcessor(
            Lfm2VlImageProcessor(min_tiles=2, max_tiles=6, tile_size=64, min_image_tokens=3, max_image_tokens=6),
            tokenizer,
            chat_template=template,
        ),
        keys={
            "clip.projector_type": "lfm2",
            "clip.use_gelu": True,
            "clip.vision.image_size": 256,
            "clip.vision.projector.scale_factor": 2,
            # Keys that the converter omits: values that differ from all published models.
            "clip.vision.image_min_pixels": 3 * 32**2,
            "clip.vision.image_max_pixels": 6 * 32**2,
            "clip.vision.preproc_image_size": 64,
            "clip.vision.preproc_min_tiles": 2,
            "clip.vision.preproc_max_tiles": 6,
        },
        projector_names={"layer_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"},
        text={
            "tied": True,
            "theta": 1e6,
            "extra": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        },
        adds_bos=True,
    ),
    qwenvl(
        "qwen25vl",
        (hf.Qwen2_5_VLProcessor, hf.Qwen2VLVideoProcessor),
        patch=14,
        rows=(32, 48),
        family="qwen2vl",
        template=QWEN25VL,
        to_config=lambda text, image_token: hf.Qwen2_5_VLConfig(
            vision_config=hf.Qwen2_5_VLVisionConfig(
                **DEEP_VISION_CONFIG, out_hidden_size=text.hidden_size, patch_size=14, window_size=112, fullatt_block_indexes=[1]
            ),
            text_config=as_config(hf.Qwen2_5_VLTextConfig, text, mrope_section=[8, 12, 12]),
            **marks_of_qwenvl(image_token),
        ),
        more_of_images={},
        keys={
            "clip.projector_type": "qwen2.5vl_merger",
            "clip.use_silu": True,
            "clip.vision.image_size": 560,
            "clip.vision.n_wa_pattern": 2,
        },
        projector_names={"ln_q": "v.post_ln", "0": "mm.0", "2": "mm.2"},
        is_split=True,
        text_keys={"rope.dimension_sections": [8, 12, 12, 0]},
        ablations=(
            turn_once,
            lambda model, _: setattr(model.model.visual, "fullatt_block_indexes", [0, 1, 2]),
            lambda model, _: setattr(model.model.visual, "fullatt_block_indexes", []),
        ),
    ),
    qwenvl(
        "qwen3vl",
        (hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor),
        patch=8,
        rows=(12, 40),
        family="qwen3vl",
        template=QWEN3VL,
        to_config=lambda text, image_token: hf.Qwen3VLConfig(
            vision_config=hf.Qwen3VLVisionConfig(
                **DEEP_VISION_CONFIG,
                out_hidden_size=text.hidden_size,
                patch_size=8,
                num_position_embeddings=49,
                deepstack_visual_indexes=[0, 2],
            ),
            text_config=as_config(hf.Qwen3VLTextConfig, text, mrope_section=[12, 10, 10], mrope_interleaved=True),
            **marks_of_qwenvl(image_token),
        ),
        more_of_images={"image_mean": 3 * [0.5], "image_std": 3 * [0.5]},
        keys={
            "clip.projector_type": "qwen3vl_merger",
            "clip.use_gelu": True,
            "clip.vision.image_size": 56,
            "clip.vision.spatial_merge_size": 2,
            "clip.vision.is_deepstack_layers": [True, False, True],
        },
        projector_names={"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"},
        text_keys={"rope.dimension_sections": [12, 10, 10, 0], "n_deepstack_layers": 2},
        text={"hidden": 64, "layers": 3},
        in_f32=("pos_embed",),
        ablations=(turn_once, lambda model, _: setattr(model.model.visual, "deepstack_visual_indexes", [])),
    ),
    VlmSpec(
        "paddleocr",
        "paddleocr",
        marks=("<unk>", "<s>", "</s>", "<|begin_of_sentence|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
        named={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "image_token": "<|IMAGE_PLACEHOLDER|>"},
        image_token="<|IMAGE_PLACEHOLDER|>",
        pre="qwen2",
        template=PADDLEOCR,
        to_config=lambda text, image_token: hf.PaddleOCRVLConfig(
            vision_config=PaddleOCRVisionConfig(**VISION_CONFIG, image_size=80, patch_size=8),
            text_config=as_config(PaddleOCRTextConfig, text, mrope_section=[4, 14, 14]),
            image_token_id=image_token,
            video_token_id=image_token - 1,
            vision_start_token_id=image_token + 1,
            vision_end_token_id=image_token + 2,
            tie_word_embeddings=False,
        ),
        to_processor=lambda tokenizer, template: hf.PaddleOCRVLProcessor(
            PaddleOCRVLImageProcessorPil(
                size=PADDLEOCR_PIXELS, patch_size=8, merge_size=2, image_mean=3 * [0.5], image_std=3 * [0.5]
            ),
            tokenizer,
            chat_template=template,
        ),
        keys={
            "clip.projector_type": "paddleocr",
            "clip.use_gelu": True,
            "clip.vision.image_size": int(PADDLEOCR_PIXELS["longest_edge"] ** 0.5),  # the converter's
            "clip.vision.image_min_pixels": PADDLEOCR_PIXELS["shortest_edge"],
            "clip.vision.image_max_pixels": PADDLEOCR_PIXELS["longest_edge"],
        },
        projector_names={"pre_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"},
        text={"theta": 5e5},
        text_keys={"rope.dimension_sections": [4, 14, 14, 0]},
        ablations=(turn_once, without_a_norm, without_vision_rope, between_corners),
    ),
]
