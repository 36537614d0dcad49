#!/usr/bin/env python3
"""Quantizes tiny models with the libraries that people use, and dequantizes them with the same.

Writes crates/engine/tests/quantized/NAME:

config.json, model.safetensors    as the library saves them
golden.json                       "weights": for each the type of its dequantized values, and FNV-1a of their bytes
                                  [out, in]; "logits": after TOKENS, of `transformers` in f32 with weights that the
                                  library dequantizes in f32 (8-bit floats, and bitsandbytes' 8 bits: in the model's type)

The weights of bitsandbytes' 4 bits are those in f32.

Needs gptqmodel, llmcompressor, compressed-tensors and bitsandbytes besides requirements.txt; one process for each:

    python quantized.py | xargs -n 1 python quantized.py
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

OUT = Path(__file__).resolve().parents[2] / "crates/engine/tests/quantized"
TOKENS = list(range(40))
TEXTS = ["The quick brown fox jumps over the lazy dog. " * 6] * 16
SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
# The library, and its options. Rows of queries and keys of Llama have another order in GGUF.
GPTQ = {
    "gptq-g128": {"bits": 4, "group_size": 128},
    "gptq-asymmetric-g32": {"bits": 4, "group_size": 32, "sym": False},
    "gptq-g32": {"bits": 4, "group_size": 32},
    "gptq-act-order": {"bits": 4, "group_size": 32, "desc_act": True, "act_group_aware": False},
    "gptq-8-bit": {"bits": 8, "group_size": 128},
    "awq-g128": {"bits": 4, "group_size": 128, "quant_method": "awq", "format": "gemm", "sym": False},
}
COMPRESSED = {
    "compressed-w4a16": (Qwen2Config, torch.float16, "W4A16"),
    "compressed-w4a16-asymmetric": (LlamaConfig, torch.bfloat16, "W4A16_ASYM"),
    "compressed-w8a16": (LlamaConfig, torch.bfloat16, "W8A16"),
    "compressed-w8a8": (Qwen2Config, torch.bfloat16, "INT8"),
    "compressed-fp8": (LlamaConfig, torch.bfloat16, "FP8_DYNAMIC"),
    "compressed-mxfp4": (Qwen2Config, torch.bfloat16, "MXFP4A16"),
    "compressed-nvfp4": (LlamaConfig, torch.bfloat16, "NVFP4A16"),
    "compressed-fp8-blocks": (Qwen2Config, torch.bfloat16, "FP8_BLOCK"),
}
BITSANDBYTES = {
    "bnb-nf4": (LlamaConfig, torch.bfloat16, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bnb-nf4-double": (
        Qwen2Config,
        torch.float16,
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "bnb-fp4": (Qwen2Config, torch.bfloat16, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
    "bnb-int8": (LlamaConfig, torch.float16, {"load_in_8bit": True}),
}


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def build(kind, dtype, folder):
    """Saves a random model and a tokenizer of bytes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES))
    for name, weight in model.named_parameters():
        if weight.ndim > 1 or name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.08)
    model.to(dtype).save_pretrained(folder)
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    end = next(iter(vocab))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end).save_pretrained(folder)


def by_gptqmodel(base, out, options):
    """Quantizes with gptqmodel, and returns the dequantized weights, and these in f32."""
    # gptqmodel shares out more threads than a small machine has.
    os.cpu_count = lambda: 8
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    build(Qwen2Config, torch.float16, base)
    model = GPTQModel.load(base, QuantizeConfig(**options), device="cpu")
    model.quantize(TEXTS, batch_size=1)
    model.save(out)
    is_awq = options.get("quant_method") == "awq"
    backend = BACKEND.TORCH_AWQ if is_awq else BACKEND.TORCH
    model = GPTQModel.load(out, backend=backend, device="cpu", dtype=torch.float16).model
    stored = load_file(Path(out) / "model.safetensors")
    weights = {name: stored.get(name, value) for name, value in model.named_parameters()}

    def dequantized(name, module, dtype):
        # On a CPU the library computes in bf16, which the scales of the file are not.
        module.scales = stored[f"{name}.scales"].to(dtype)
        if is_awq:
            return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size).T
        return module.dequantize_weight().T

    # Groups out of order are values of the model's type here, too.
    is_rounded = options.get("desc_act", False)
    exact = {}
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            weights[f"{name}.weight"] = dequantized(name, module, stored[f"{name}.scales"].dtype)
            if not is_rounded:
                exact[f"{name}.weight"] = dequantized(name, module, torch.float32)
            if module.bias is not None:
                weights[f"{name}.bias"] = stored[f"{name}.bias"]
    return weights, {**weights, **exact}


def by_llmcompressor(base, out, kind, dtype, scheme):
    """Quantizes with llmcompressor, and returns the weights that compressed-tensors dequantizes, and
    these in f32."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import CompressedTensorsConfig

    build(kind, dtype, base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    oneshot(model=model, recipe=[QuantizationModifier(targets="Linear", ignore=["lm_head"], scheme=scheme)])
    model.save_pretrained(out, save_compressed=True)
    config = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(out, quantization_config=config, dtype="auto")
    weights = dict(model.named_parameters())
    if scheme.startswith("NVFP4"):
        # Those that the compressor dequantizes differ from those of the loaded model.
        return {**weights, **dequantized(out, None)}, weights
    return weights, weights if "FP" in scheme else {**weights, **dequantized(out, torch.float32)}


def dequantized(folder, dtype):
    """Returns the quantized weights of a folder, as compressed-tensors dequantizes them: with scales
    of this type, or as they are stored."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    described = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**described["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(described["format"])
    stored = load_file(Path(folder) / "model.safetensors")
    weights = {}
    for name in [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]:
        parts = {end.removeprefix(f"{name}."): value for end, value in stored.items() if end.startswith(f"{name}.")}
        if dtype is not None:
            parts["weight_scale"] = parts["weight_scale"].to(dtype)
        weights[f"{name}.weight"] = compressor.decompress(parts, scheme)["weight"]
        assert dtype is None or weights[f"{name}.weight"].dtype == dtype
    return weights


def by_bitsandbytes(base, out, kind, dtype, options):
    """Quantizes with bitsandbytes, and returns the weights that it dequantizes: 4 bits in f32, 8 bits in
    the model's type."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, int8_vectorwise_dequant
    from transformers import BitsAndBytesConfig

    build(kind, dtype, base)
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=config, device_map="cpu")
    model.save_pretrained(out)
    stored = load_file(Path(out) / "model.safetensors")
    exact = {name: value for name, value in stored.items() if value.is_floating_point() and value.ndim > 0}
    weights = {}
    for name in [name.removesuffix("SCB") for name in stored if name.endswith(".SCB")]:
        values = int8_vectorwise_dequant(stored[f"{name}weight"], stored[f"{name}SCB"])
        weights[f"{name}weight"] = exact[f"{name}weight"] = values.to(dtype)
        del exact[f"{name}SCB"]
    for name in [name.removesuffix(".absmax") for name in stored if name.endswith(".absmax")]:
        parts = {end: value for end, value in stored.items() if end.startswith(f"{name}.")}
        state = QuantState.from_dict(
            {end.removeprefix(f"{name}."): value for end, value in parts.items()}, torch.device("cpu")
        )
        state.dtype = torch.float32
        for end in parts:
            exact.pop(end, None)
        weights[name] = exact[name] = dequantize_4bit(stored[name], state)
    return weights, exact


def logits(folder, weights):
    """Returns the logits of a model with these weights in f32."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0, -1].tolist()


def main():
    if len(sys.argv) == 1:
        print(*GPTQ, *COMPRESSED, *BITSANDBYTES, sep="\n")
        return
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as out:
        if name in GPTQ:
            weights, exact = by_gptqmodel(base, out, GPTQ[name])
        elif name in BITSANDBYTES:
            weights, exact = by_bitsandbytes(base, out, *BITSANDBYTES[name])
        else:
            weights, exact = by_llmcompressor(base, out, *COMPRESSED[name])
        # Zeros lose their sign, which tables of 4-bit floats do not have.
        weights = {name: weight.detach().contiguous() + 0 for name, weight in weights.items()}
        described = {
            name: {
                "dtype": str(weight.dtype).removeprefix("torch."),
                "hash": f"{fnv1a(weight.view(torch.uint8).numpy().tobytes()):016x}",
            }
            for name, weight in weights.items()
            if name.endswith("_proj.weight")
        }
        values = [float(np.float32(value)) for value in logits(out, exact)]
        folder = OUT / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ["config.json", "model.safetensors"]:
            shutil.copyfile(Path(out) / file, folder / file)
        text = json.dumps({"weights": described, "logits": values}, indent=1)
        (folder / "golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
