"""Step 3.7's text model with its head, which `transformers` has only beside a vision encoder."""

import torch
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7Config, Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7ForConditionalGeneration,
    Step3p7PreTrainedModel,
    Step3p7TextModel,
)

# Prefixes of the vision encoder's tensors in checkpoints.
VISION = ("vision_model.", "vit_large_projector.")


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


def beside_a_vision_encoder(model: Step3p7ForCausalLM) -> Step3p7ForConditionalGeneration:
    """Returns the text model in a vision model, as checkpoints have it."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    config = Step3p7Config(text_config=model.config.to_dict(), vision_config=vision, image_token_id=1)
    whole = Step3p7ForConditionalGeneration._from_config(config).eval()
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    return whole
