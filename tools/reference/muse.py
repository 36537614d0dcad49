"""Muse Glimmer's text model with its head, which `transformers` has only beside a vision encoder."""

import torch
from transformers import GenerationMixin, MuseGlimmerTextConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel, MuseGlimmerTextModel


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
    """The logits of `MuseGlimmerForConditionalGeneration`."""

    config_class = MuseGlimmerTextConfig

    def __init__(self, config: MuseGlimmerTextConfig):
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs) -> CausalLMOutputWithPast:
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        outputs = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return CausalLMOutputWithPast(logits=cap * torch.tanh(logits / cap), past_key_values=outputs.cache)
