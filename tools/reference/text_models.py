"""Text models that `transformers` has in another form: beside a vision encoder, with other names."""

import torch
from kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from rwkv import Rwkv7Config, Rwkv7ForCausalLM
from transformers import GenerationMixin, Mamba2Config
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig, MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLForCausalLM,
)
from transformers.models.step3p7.configuration_step3p7 import Step3p7Config, Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7ForConditionalGeneration,
    Step3p7PreTrainedModel,
    Step3p7TextModel,
)

# Prefixes of tensors of vision encoders in checkpoints.
VISION = ("vision_model.", "vit_large_projector.", "vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")


class Step3p7ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The logits of `Step3p7ForConditionalGeneration`."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig):
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs) -> CausalLMOutputWithPast:
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        outputs = self.model(input_ids=input_ids, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(outputs.last_hidden_state), past_key_values=outputs.cache)


class Mamba2ForCausalLM(modeling_mamba2.Mamba2ForCausalLM):
    """The same with the names of caches that other models have."""

    def forward(self, input_ids: torch.Tensor, past_key_values=None, **kwargs) -> CausalLMOutputWithPast:
        outputs = super().forward(input_ids, cache=past_key_values, **kwargs)
        return CausalLMOutputWithPast(logits=outputs.logits, past_key_values=outputs.cache)


OF_CONFIG = {KimiK3Config: KimiK3ForCausalLM, Mamba2Config: Mamba2ForCausalLM, Rwkv7Config: Rwkv7ForCausalLM, Step3p7TextConfig: Step3p7ForCausalLM, MiniMaxM3VLTextConfig: MiniMaxM3VLForCausalLM}


def beside_a_vision_encoder(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a text model in a vision model, as checkpoints have it; others as they are."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    text = model.config.to_dict()
    if isinstance(model, Step3p7ForCausalLM):
        config = Step3p7Config(text_config=text, vision_config=vision, image_token_id=1)
        whole = Step3p7ForConditionalGeneration._from_config(config)
    elif isinstance(model, MiniMaxM3VLForCausalLM):
        config = MiniMaxM3VLConfig(
            text_config=text,
            vision_config={**vision, "intermediate_size": 16},
            image_token_index=1,
            video_token_index=2,
            projector_hidden_size=16,
        )
        whole = MiniMaxM3SparseForConditionalGeneration._from_config(config)
    else:
        return model
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    return whole.eval()
