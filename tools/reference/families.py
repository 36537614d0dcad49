"""The model families of the tiny models in `models.py`: one line of FAMILIES each."""

from dataclasses import dataclass

import gguf
from kimi_k3 import KimiK3Config
from rwkv import Rwkv7Config
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    BailingHybridConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    DeepseekV4Config,
    Dots1Config,
    Dots3NoteTextConfig,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HYV3Config,
    HYV4Config,
    Jais2Config,
    KimiLinearConfig,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerTextConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    Step3p7TextConfig,
)


@dataclass(frozen=True)
class Family:
    """A model family: the `transformers` configuration and the GGUF architecture it is stored
    as."""

    config: type[PreTrainedConfig]
    arch: gguf.MODEL_ARCH
    interleaved_rope: bool = False  # rows of Q and K are reordered for RoPE on neighbours instead of halves
    norm_offset: float = 0.0  # offset of norm weights; files contain the sum
    quiet: float = 1.0  # divisor of embeddings and factor after the last norm: scaled embeddings dominate the layers
    local_theta: float | None = None  # RoPE base of sliding-window layers, without scaling
    mean: float = 0.0  # mean of embeddings, for norms that subtract it
    unscaled: bool = False  # scores are not divided by the root of the head size, since QK-norm bounds them
    transposed_experts: bool = False  # gate and up are alternating columns
    arch_name: str = ""  # that of the file, where the package has no `arch` for it


FAMILIES = {
    "llama": Family(LlamaConfig, gguf.MODEL_ARCH.LLAMA, interleaved_rope=True),
    "mistral": Family(MistralConfig, gguf.MODEL_ARCH.LLAMA, interleaved_rope=True),
    "mixtral": Family(MixtralConfig, gguf.MODEL_ARCH.LLAMA, interleaved_rope=True),
    "qwen2": Family(Qwen2Config, gguf.MODEL_ARCH.QWEN2),
    "qwen3": Family(Qwen3Config, gguf.MODEL_ARCH.QWEN3),
    "qwen2moe": Family(Qwen2MoeConfig, gguf.MODEL_ARCH.QWEN2MOE),
    "qwen3moe": Family(Qwen3MoeConfig, gguf.MODEL_ARCH.QWEN3MOE),
    "qwen35": Family(Qwen3_5TextConfig, gguf.MODEL_ARCH.QWEN35, norm_offset=1.0),
    "qwen35moe": Family(Qwen3_5MoeTextConfig, gguf.MODEL_ARCH.QWEN35MOE, norm_offset=1.0),
    # Whose architecture the package lacks.
    "qwen4exp": Family(Qwen4ExpTextConfig, gguf.MODEL_ARCH.QWEN35MOE, arch_name="qwen4exp"),
    "qwen3next": Family(Qwen3NextConfig, gguf.MODEL_ARCH.QWEN3NEXT, norm_offset=1.0),
    "gemma": Family(GemmaConfig, gguf.MODEL_ARCH.GEMMA, norm_offset=1.0, quiet=8.0),
    "gemma2": Family(Gemma2Config, gguf.MODEL_ARCH.GEMMA2, norm_offset=1.0, quiet=8.0),
    "gemma3": Family(Gemma3TextConfig, gguf.MODEL_ARCH.GEMMA3, norm_offset=1.0, quiet=8.0, local_theta=10_000.0),
    "gemma3n": Family(Gemma3nTextConfig, gguf.MODEL_ARCH.GEMMA3N, quiet=8.0, local_theta=10_000.0, unscaled=True),
    "gemma4": Family(Gemma4TextConfig, gguf.MODEL_ARCH.GEMMA4, quiet=8.0, local_theta=10_000.0, unscaled=True),
    "granite": Family(GraniteConfig, gguf.MODEL_ARCH.GRANITE, interleaved_rope=True, quiet=8.0),
    "granitehybrid": Family(GraniteMoeHybridConfig, gguf.MODEL_ARCH.GRANITE, interleaved_rope=True, quiet=8.0),
    "graniteh": Family(GraniteMoeHybridConfig, gguf.MODEL_ARCH.GRANITE_HYBRID, interleaved_rope=True, quiet=8.0),
    "graniteswa": Family(
        GraniteSWAConfig, gguf.MODEL_ARCH.GRANITE, interleaved_rope=True, quiet=8.0, arch_name="granite_swa"
    ),
    "smollm3": Family(SmolLM3Config, gguf.MODEL_ARCH.SMOLLM3, interleaved_rope=True),
    "olmo2": Family(Olmo2Config, gguf.MODEL_ARCH.OLMO2),
    "olmo3": Family(Olmo3Config, gguf.MODEL_ARCH.OLMO2, local_theta=5e5),
    "deepseek2": Family(DeepseekV2Config, gguf.MODEL_ARCH.DEEPSEEK2),
    "deepseek3": Family(DeepseekV3Config, gguf.MODEL_ARCH.DEEPSEEK2),
    "deepseek32": Family(DeepseekV32Config, gguf.MODEL_ARCH.DEEPSEEK2, arch_name="deepseek32"),
    # Whose tensor names the package lacks.
    "deepseek4": Family(DeepseekV4Config, gguf.MODEL_ARCH.DEEPSEEK2, arch_name="deepseek4"),
    "glmdsa": Family(GlmMoeDsaConfig, gguf.MODEL_ARCH.GLM_DSA),
    # dots.3 note, with the tensor names of GLM-5.
    "dots3note": Family(Dots3NoteTextConfig, gguf.MODEL_ARCH.GLM_DSA, arch_name="dots3note"),
    # With the tensor names of GLM-5.
    "hyv4": Family(HYV4Config, gguf.MODEL_ARCH.GLM_DSA, arch_name="hy_v4"),
    "glm4moelite": Family(Glm4MoeLiteConfig, gguf.MODEL_ARCH.DEEPSEEK2),
    "mistral4": Family(Mistral4Config, gguf.MODEL_ARCH.MISTRAL4),
    # Ling 3, with the tensor names of Kimi Linear.
    "bailingmoe3": Family(BailingHybridConfig, gguf.MODEL_ARCH.KIMI_LINEAR, arch_name="bailingmoe3"),
    "kimilinear": Family(KimiLinearConfig, gguf.MODEL_ARCH.KIMI_LINEAR),
    "kimik3": Family(KimiK3Config, gguf.MODEL_ARCH.KIMI_LINEAR, arch_name="kimi-k3"),
    "phi3": Family(Phi3Config, gguf.MODEL_ARCH.PHI3),
    "glm4": Family(Glm4Config, gguf.MODEL_ARCH.GLM4),
    "gptoss": Family(GptOssConfig, gguf.MODEL_ARCH.GPT_OSS, transposed_experts=True),
    "lfm2": Family(Lfm2Config, gguf.MODEL_ARCH.LFM2),
    "lfm2moe": Family(Lfm2MoeConfig, gguf.MODEL_ARCH.LFM2MOE),
    "cohere2": Family(Cohere2Config, gguf.MODEL_ARCH.COHERE2, mean=0.5),
    "cohere2moe": Family(Cohere2MoeConfig, gguf.MODEL_ARCH.EXAONE_MOE, mean=0.5, arch_name="cohere2moe"),
    "mistral3": Family(Ministral3Config, gguf.MODEL_ARCH.MISTRAL3, interleaved_rope=True),
    # Text models of vision models.
    "qwen2vl": Family(Qwen2Config, gguf.MODEL_ARCH.QWEN2VL),
    "qwen3vl": Family(Qwen3Config, gguf.MODEL_ARCH.QWEN3VL),
    "qwen3vlmoe": Family(Qwen3MoeConfig, gguf.MODEL_ARCH.QWEN3VLMOE),
    # PaddleOCR-VL, whose text model is Llama's without the converter's permutation.
    "paddleocr": Family(LlamaConfig, gguf.MODEL_ARCH.PADDLEOCR),
    "seedoss": Family(SeedOssConfig, gguf.MODEL_ARCH.SEED_OSS),
    "glm4moe": Family(Glm4MoeConfig, gguf.MODEL_ARCH.GLM4_MOE),
    # Ling 2.0, which `transformers` lacks: GLM-4.5 with other names of norms in files.
    "bailingmoe2": Family(Glm4MoeConfig, gguf.MODEL_ARCH.BAILINGMOE2),
    "dots1": Family(Dots1Config, gguf.MODEL_ARCH.DOTS1),
    "ernie45": Family(Ernie4_5Config, gguf.MODEL_ARCH.ERNIE4_5),
    "ernie45moe": Family(Ernie4_5_MoeConfig, gguf.MODEL_ARCH.ERNIE4_5_MOE),
    "hunyuan": Family(HunYuanDenseV1Config, gguf.MODEL_ARCH.HUNYUAN_DENSE),
    "hunyuanmoe": Family(HunYuanMoEV1Config, gguf.MODEL_ARCH.HUNYUAN_MOE),
    "arcee": Family(ArceeConfig, gguf.MODEL_ARCH.ARCEE, interleaved_rope=True),
    "exaone4": Family(Exaone4Config, gguf.MODEL_ARCH.EXAONE4),
    "olmoe": Family(OlmoeConfig, gguf.MODEL_ARCH.OLMOE),
    "minimaxm2": Family(MiniMaxM2Config, gguf.MODEL_ARCH.MINIMAXM2),
    "minimaxm3": Family(MiniMaxM3VLTextConfig, gguf.MODEL_ARCH.EXAONE_MOE, norm_offset=1.0, arch_name="minimax-m3"),
    "granitemoe": Family(GraniteMoeConfig, gguf.MODEL_ARCH.GRANITE_MOE, interleaved_rope=True, quiet=8.0),
    "falconh1": Family(FalconH1Config, gguf.MODEL_ARCH.FALCON_H1),
    "nemotronh": Family(NemotronHConfig, gguf.MODEL_ARCH.NEMOTRON_H),
    "nemotronhmoe": Family(NemotronHConfig, gguf.MODEL_ARCH.NEMOTRON_H_MOE),
    "mamba2": Family(Mamba2Config, gguf.MODEL_ARCH.MAMBA2),
    "rwkv7": Family(Rwkv7Config, gguf.MODEL_ARCH.RWKV7),
    "commandr": Family(CohereConfig, gguf.MODEL_ARCH.COMMAND_R, mean=0.5),
    "starcoder2": Family(Starcoder2Config, gguf.MODEL_ARCH.STARCODER2),
    "phi2": Family(PhiConfig, gguf.MODEL_ARCH.PHI2),
    "phimoe": Family(PhimoeConfig, gguf.MODEL_ARCH.PHIMOE, mean=0.5),
    "stablelm": Family(StableLmConfig, gguf.MODEL_ARCH.STABLELM),
    "nemotron": Family(NemotronConfig, gguf.MODEL_ARCH.NEMOTRON, norm_offset=1.0),
    "jais2": Family(Jais2Config, gguf.MODEL_ARCH.JAIS2),
    "chatglm": Family(GlmConfig, gguf.MODEL_ARCH.CHATGLM),
    "exaonemoe": Family(ExaoneMoeConfig, gguf.MODEL_ARCH.EXAONE_MOE),
    "afmoe": Family(AfmoeConfig, gguf.MODEL_ARCH.AFMOE),
    "apertus": Family(ApertusConfig, gguf.MODEL_ARCH.APERTUS),
    "mimo2": Family(MiMoV2FlashConfig, gguf.MODEL_ARCH.MIMO2, local_theta=10_000.0),
    "mellum": Family(MellumConfig, gguf.MODEL_ARCH.QWEN3MOE, local_theta=10_000.0, arch_name="mellum"),
    "hyv3": Family(HYV3Config, gguf.MODEL_ARCH.EXAONE_MOE, arch_name="hy_v3"),
    "museglimmer": Family(
        MuseGlimmerTextConfig,
        gguf.MODEL_ARCH.AFMOE,
        interleaved_rope=True,
        norm_offset=1.0,
        arch_name="muse-glimmer",
    ),
    "laguna": Family(LagunaConfig, gguf.MODEL_ARCH.STEP35, local_theta=10_000.0, arch_name="laguna"),
    "step35": Family(Step3p7TextConfig, gguf.MODEL_ARCH.STEP35, norm_offset=1.0, local_theta=10_000.0),
    # Families of other tools, which `transformers` has under other names.
    "orion": Family(StableLmConfig, gguf.MODEL_ARCH.ORION),
    "internlm2": Family(LlamaConfig, gguf.MODEL_ARCH.INTERNLM2, interleaved_rope=True),
    "xverse": Family(LlamaConfig, gguf.MODEL_ARCH.XVERSE, interleaved_rope=True),
    "baichuan": Family(LlamaConfig, gguf.MODEL_ARCH.BAICHUAN, interleaved_rope=True),
    "nanbeige": Family(LlamaConfig, gguf.MODEL_ARCH.LLAMA, interleaved_rope=True, arch_name="nanbeige"),
    "exaone": Family(LlamaConfig, gguf.MODEL_ARCH.EXAONE),
    "pangu": Family(Qwen2Config, gguf.MODEL_ARCH.PANGU_EMBED),
}
