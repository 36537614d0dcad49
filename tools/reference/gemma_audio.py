"""Audio models of Gemma for `audio.py`: conformers (arXiv 2005.08100), and frames of samples."""

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
import transformers as hf
from audio_models import CLIP, SHORT, AudioSpec
from spec import PROPORTIONAL
from transformers.models.gemma3n import modeling_gemma3n

LONG = 99_001

# The published template of Gemma 3n for messages of parts, and the output of that of Gemma 4.
GEMMA3N = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'audio' %}{{ '<audio_soft_token>' }}{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA4 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'audio' %}{{ '<|audio|>' }}{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)

# Parts of an encoder by their names in `transformers`, with those in files.
COMMON_PARTS = {
    "conv_0.conv": "a.conv1d.0",
    "conv_0.norm": "a.conv1d.0.norm",
    "conv_1.conv": "a.conv1d.1",
    "conv_1.norm": "a.conv1d.1.norm",
    "layer0.conv": "a.conv1d.0",
    "layer0.norm": "a.conv1d.0.norm",
    "layer1.conv": "a.conv1d.1",
    "layer1.norm": "a.conv1d.1.norm",
    "embed_audio.embedding": "mm.a.embedding",
    "embed_audio.hard_embedding_norm": "mm.a.hard_emb_norm",
    "embed_audio.soft_embedding_norm": "mm.a.soft_emb_norm",
    "embed_audio.embedding_projection": "mm.a.input_projection",
    # The converter exchanges the names of the convolution's two norms.
    "lconv1d.pre_layer_norm": "conv_norm",
    "lconv1d.conv_norm": "norm_conv",
    "lconv1d.depthwise_conv1d": "conv_dw",
    "lconv1d.linear_start": "conv_pw1",
    "lconv1d.linear_end": "conv_pw2",
}
GEMMA3N_PARTS = {
    **COMMON_PARTS,
    "input_proj_linear": "a.pre_encode.out",
    "ffw_layer_start.pre_layer_norm": "ffn_norm",
    "ffw_layer_start.ffw_layer_1": "ffn_up",
    "ffw_layer_start.ffw_layer_2": "ffn_down",
    "ffw_layer_start.post_layer_norm": "ffn_post_norm",
    "ffw_layer_end.pre_layer_norm": "ffn_norm_1",
    "ffw_layer_end.ffw_layer_1": "ffn_up_1",
    "ffw_layer_end.ffw_layer_2": "ffn_down_1",
    "ffw_layer_end.post_layer_norm": "ffn_post_norm_1",
    "attention.pre_attn_norm": "ln1",
    "attention.attn.q_proj": "attn_q",
    "attention.attn.k_proj": "attn_k",
    "attention.attn.v_proj": "attn_v",
    "relative_position_embedding.pos_proj": "linear_pos",
    "attention.post": "attn_out",
    "attention.post_norm": "ln2",
    "norm": "layer_pre_norm",
}
GEMMA4_PARTS = {
    **COMMON_PARTS,
    "input_proj_linear": "a.input_projection",
    "output_proj": "a.pre_encode.out",
    "feed_forward1.pre_layer_norm": "ffn_norm",
    "feed_forward1.ffw_layer_1": "ffn_up",
    "feed_forward1.ffw_layer_2": "ffn_down",
    "feed_forward1.post_layer_norm": "ffn_post_norm",
    "feed_forward2.pre_layer_norm": "ffn_norm_1",
    "feed_forward2.ffw_layer_1": "ffn_up_1",
    "feed_forward2.ffw_layer_2": "ffn_down_1",
    "feed_forward2.post_layer_norm": "ffn_post_norm_1",
    "norm_pre_attn": "attn_pre_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.relative_k_proj": "attn_k_rel",
    "self_attn.post": "attn_out",
    "norm_post_attn": "attn_post_norm",
    "norm_out": "ln2",
}


def part_name(parts: dict[str, str]) -> Callable[[str], str]:
    """Returns the name in files of a tensor by its name in `transformers`."""

    def stored_name(name: str) -> str:
        steps = name.replace(".linear.", ".").split(".")
        layer = next((f"a.blk.{step}." for step in steps if step.isdigit()), "")
        if steps[-1] == "per_dim_scale":  # a parameter, which becomes a module in Gemma 4's files
            return f"{layer}per_dim_scale" + (".weight" if parts is GEMMA4_PARTS else "")
        known = next(given for start in range(len(steps)) if (given := parts.get(".".join(steps[start:-1]))))
        return f"{'' if known.startswith(('a.', 'mm.')) else layer}{known}.{steps[-1]}"

    return stored_name


def stored_gemma4(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as Gemma 4's converter stores it."""
    return torch.nn.functional.softplus(weight) if name.endswith("per_dim_scale") else weight


def draw_gemma(name: str, weight: torch.Tensor) -> torch.Tensor | None:
    """Returns random values for a tensor that has others than in Whisper."""
    if name.endswith(("input_max", "output_max", "input_min", "output_min")):
        # Cuts a few percent of the values of unit spread.
        limit = 1.4 + 0.8 * torch.rand_like(weight)
        return -limit if name.endswith("min") else limit
    if weight.ndim < 2:
        return None
    n_in = weight[0].numel()
    gain = 0.4 if "embedding_projection" in name else 1.5 if "depthwise" in name else 1.0
    if "relative" in name:
        gain = 2.5
    elif "q_proj" in name or "k_proj" in name:  # scores that the cap changes
        gain = 3.2
    elif name.endswith("embedding.weight"):
        gain = n_in**0.5
    return (gain * n_in**-0.5 * torch.randn_like(weight)).half().float()


def expanded(tokenizer: hf.PreTrainedTokenizerFast, text: str, mark: str, rows: str, features: hf.BatchFeature) -> hf.BatchFeature:
    """Returns the inputs with `rows` in place of the mark."""
    inputs = tokenizer(text.replace(mark, rows), add_special_tokens=False, return_tensors="pt")
    return hf.BatchFeature({**inputs, **features})


def gemma4_expanded(tokenizer: hf.PreTrainedTokenizerFast, text: str, n_rows: int, features: hf.BatchFeature) -> hf.BatchFeature:
    """Returns the inputs of Gemma 4 with so many rows."""
    return expanded(tokenizer, text, "<|audio|>", f"<|audio>{n_rows * '<|audio|>'}<audio|>", features)


def features_of(extractor: hf.SequenceFeatureExtractor, samples: np.ndarray) -> hf.BatchFeature:
    """Returns the features, computed in f64: those in f32 are inexact in weak bins."""
    extract = extractor._extract_spectrogram
    extractor.window = np.hanning(len(extractor.window) + 1)[:-1]
    extractor._extract_spectrogram = lambda waveform, mask: extract(waveform.astype(np.float64), mask)
    return extractor([samples], return_tensors="pt")


def gemma4_inputs(tokenizer: hf.PreTrainedTokenizerFast, text: str, samples: np.ndarray) -> hf.BatchFeature:
    """Does what `Gemma4Processor` does, which insists on processors of images and videos."""
    features = features_of(hf.Gemma4AudioFeatureExtractor(), samples)
    return gemma4_expanded(tokenizer, text, int(features.input_features_mask[0, ::2][::2].sum()), features)


def unified_inputs(tokenizer: hf.PreTrainedTokenizerFast, text: str, samples: np.ndarray) -> hf.BatchFeature:
    features = hf.Gemma4UnifiedAudioFeatureExtractor()([samples], return_tensors="pt")
    return gemma4_expanded(tokenizer, text, int(features.input_features_mask.sum()), features)


def gemma3n_inputs(tokenizer: hf.PreTrainedTokenizerFast, text: str, samples: np.ndarray) -> hf.BatchFeature:
    features = features_of(hf.Gemma3nAudioFeatureExtractor(), samples)
    rows = f"\n\n<start_of_audio>{188 * '<audio_soft_token>'}<end_of_audio>\n\n"
    return expanded(tokenizer, text, "<audio_soft_token>", rows, features)


def to_gemma3n(text: hf.PreTrainedConfig, audio_token: int) -> torch.nn.Module:
    """Returns a model without its vision encoder."""
    of_text = text.vocab_size_per_layer_input
    config = hf.Gemma3nConfig(
        text_config=text,
        vision_config=hf.Gemma3nVisionConfig(hidden_size=8, vocab_offset=of_text, vocab_size=1),
        audio_config=hf.Gemma3nAudioConfig(
            vocab_offset=of_text + 1,
            vocab_size=text.vocab_size - of_text - 1,
            hidden_size=64,
            conf_num_attention_heads=2,
            conf_num_hidden_layers=2,
            sscp_conv_channel_size=(12, 8),
        ),
        audio_token_id=audio_token,
    )
    make = modeling_gemma3n.AutoModel.from_config

    def without_images(config: hf.PreTrainedConfig, **given) -> torch.nn.Module:
        return torch.nn.Identity() if isinstance(config, hf.Gemma3nVisionConfig) else make(config, **given)

    with patch.object(modeling_gemma3n.AutoModel, "from_config", without_images):
        return hf.Gemma3nForConditionalGeneration(config)


def forget_earlier_frames(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Makes the statistics of the first norm those of each frame alone."""
    norm = model.model.audio_tower.subsample_conv_projection.conv_0.norm

    def alone(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=(2, 3), keepdim=True)
        return (x - mean) * torch.rsqrt((x - mean).pow(2).mean(dim=(2, 3), keepdim=True) + norm.eps) * norm.weight

    norm.forward = alone


def see_one_key_more(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Makes a key more visible to each query of Gemma 4: as many as there are relative positions."""
    encoder = model.model.audio_tower
    blocks_of = encoder._convert_4d_mask_to_blocked_5d

    def blocks_of_the_usual_size(mask: torch.Tensor) -> torch.Tensor:
        encoder.config.attention_context_left -= 1
        blocks = blocks_of(mask)
        encoder.config.attention_context_left += 1
        return blocks

    encoder.config.attention_context_left += 1
    encoder._convert_4d_mask_to_blocked_5d = blocks_of_the_usual_size


def uncap(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Leaves scores as large as they are."""
    for module in model.modules():
        if hasattr(module, "softcap"):
            module.softcap.fill_(1e6)


def unclip(model: torch.nn.Module, _: dict[str, torch.Tensor]) -> None:
    """Leaves inputs and outputs of products as large as they are."""
    for module in model.modules():
        if hasattr(module, "use_clipped_linears"):
            module.use_clipped_linears = False


GEMMA3N_MARKS = (
    *("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_audio>"),
    # Those of images and audio, whose embeddings are with the encoders.
    *("<end_of_image>", "<end_of_audio>", "<audio_soft_token>", "<unused>", "<padding>"),
)
GEMMA4_MARKS = ("<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>", "<|audio>", "<|audio|>", "<audio|>")
NAMED = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
N_BYTES = 257  # tokens before the marks
TEXT = {
    "hidden": 64,
    "layers": 2,
    "tied": True,
    "theta": 1e6,
    "extra": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 40,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 24,
        "pad_token_id": 0,
    },
}
SIZES = {"clip.audio.feed_forward_length": 256, "clip.audio.block_count": 2, "clip.audio.attention.head_count": 2, "clip.audio.num_mel_bins": 128}

FIELDS = {"named": NAMED, "pre": "gpt-2", "text_mark": None, "draw": draw_gemma}
GEMMA4_FIELDS = {
    **FIELDS,
    "marks": GEMMA4_MARKS,
    "audio_token": "<|audio|>",
    "template": GEMMA4,
    "stored_name": part_name(GEMMA4_PARTS),
}


def gemma4_text(n_per_layer: int) -> dict:
    """Returns the text model, with embeddings per layer of this width."""
    of_layers = {"hidden_size_per_layer_input": n_per_layer, "vocab_size_per_layer_input": N_BYTES + len(GEMMA4_MARKS)}
    return {**TEXT, "rope": PROPORTIONAL, "extra": {**TEXT["extra"], **of_layers, "global_head_dim": 64}}


GEMMA_MODELS = [
    AudioSpec(
        "gemma4",
        "gemma4",
        **GEMMA4_FIELDS,
        clips=(SHORT, CLIP, LONG),
        to_model=lambda text, audio_token: hf.Gemma4ForConditionalGeneration(
            hf.Gemma4Config(
                text_config=text,
                vision_config=None,
                audio_config=hf.Gemma4AudioConfig(
                    hidden_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    subsampling_conv_channels=[128, 8],  # the first is also taken for the number of mel bins
                    output_proj_dims=48,
                ),
                audio_token_id=audio_token,
            )
        ),
        to_inputs=gemma4_inputs,
        projector="gemma4a",
        stored=stored_gemma4,
        keys={**SIZES, "clip.audio.projector_type": "gemma4a", "clip.audio.attention.layer_norm_epsilon": 1e-5},
        text=gemma4_text(24),
        ablations=(see_one_key_more, uncap, unclip),
    ),
    AudioSpec(
        "gemma4unified",
        "gemma4",
        **GEMMA4_FIELDS,
        clips=(SHORT, CLIP),
        to_model=lambda text, audio_token: hf.Gemma4UnifiedForConditionalGeneration(
            hf.Gemma4UnifiedConfig(
                text_config=hf.Gemma4UnifiedTextConfig(**text.to_dict() | {"model_type": "gemma4_unified_text"}),
                vision_config=None,
                audio_config=hf.Gemma4UnifiedAudioConfig(),
                audio_token_id=audio_token,
            )
        ),
        to_inputs=unified_inputs,
        projector="gemma4ua",
        keys={
            **{key: 0 for key in SIZES},
            "clip.audio.num_mel_bins": 128,
            "clip.audio.projector_type": "gemma4ua",
            "clip.audio.attention.layer_norm_epsilon": 1e-6,
        },
        text=gemma4_text(0),
    ),
    AudioSpec(
        "gemma3n",
        "gemma3n",
        **FIELDS,
        marks=GEMMA3N_MARKS,
        audio_token="<audio_soft_token>",
        template=GEMMA3N,
        clips=(SHORT, LONG),
        to_model=to_gemma3n,
        to_inputs=gemma3n_inputs,
        projector="gemma3na",
        stored_name=part_name(GEMMA3N_PARTS),
        keys={**SIZES, "clip.audio.projector_type": "gemma3na", "clip.audio.attention.layer_norm_epsilon": 1e-5},
        text={
            **TEXT,
            "extra": {
                **TEXT["extra"],
                "vocab_size_per_layer_input": N_BYTES + GEMMA3N_MARKS.index("<end_of_image>"),
                "altup_num_inputs": 4,
                "laurel_rank": 8,
                "activation_sparsity_pattern": [0.8, 0.0],
            },
        },
        ablations=(forget_earlier_frames, uncap),
    ),
]
