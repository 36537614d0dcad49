#!/usr/bin/env python3
"""Creates LoRA adapters of the tiny models of `make_fixtures.py` with PEFT, and the resulting
logits.

For every model three files are written to `crates/engine/tests/adapters/NAME`:

adapter_config.json, adapter_model.safetensors    as PEFT saves them; matrices are f32, and exact in f16
logits                                            f32 [tokens, vocab], little-endian: after each token of the golden text

and for some of them `crates/model/tests/fixtures/adapters/NAME.gguf`, by the conventions of
llama.cpp's `convert_lora_to_gguf.py`, in f16.
"""

import argparse
import json
import struct
from pathlib import Path

import gguf
import numpy as np
import torch
from make_fixtures import MIN_EFFECT, build_model, forward, to_interleaved, write_file
from models import SPECS
from peft import LoraConfig, get_peft_model
from spec import Spec

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "crates/model/tests/fixtures"
RANK, ALPHA = 4, 8

# Modules and other options per adapter.
OF = {
    "llama-h64-g8": {"target_modules": "all-linear"},
    "qwen3-h80-g2-linear": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}},
    "gemma3-h96-g2-window40-linear": {"target_modules": "all-linear", "use_rslora": True},
    "phi3-h64-g2-window24": {"target_modules": "all-linear"},
    "deepseek3-latent192-yarn": {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "lfm2-h64-g2-conv3": {"target_modules": "all-linear"},
    "arcee-h64-g2-yarn": {"target_modules": "all-linear"},
}


# Adapters that are written as GGUF too.
IN_GGUF = ["llama-h64-g8", "arcee-h64-g2-yarn"]


def write_gguf(path: Path, spec: Spec, peft: torch.nn.Module) -> None:
    """Writes the adapter as a GGUF file."""
    path.parent.mkdir(exist_ok=True)
    names = gguf.get_tensor_name_map(spec.family.arch, spec.layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[spec.family.arch])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, weight in peft.named_parameters():
        module, found, side = name.partition(".lora_")
        if not found:
            continue
        if side.startswith("B") and spec.family.interleaved_rope and module.endswith(("q_proj", "k_proj")):
            weight = to_interleaved(weight, spec.heads if module.endswith("q_proj") else spec.kv_heads)
        given = names.get_name(module.removeprefix("base_model.model."))
        writer.add_tensor(f"{given}.weight.lora_{side[0].lower()}", weight.detach().half().numpy())
    write_file(writer)


def tokens_of(name: str) -> list[int]:
    """Returns the golden text of a model."""
    golden = (FIXTURES / f"{name}.golden").read_bytes()
    n_prompt, n_steps, _ = struct.unpack_from("<4xIII", golden)
    return np.frombuffer(golden, "<i4", n_prompt + n_steps, 16).tolist()


def main() -> None:
    default = ROOT / "crates/engine/tests/adapters"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=default, help="folder to write to (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for spec in SPECS:
        if spec.name not in OF:
            continue
        model, tokens = build_model(spec), tokens_of(spec.name)
        plain = forward(model, tokens)
        peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **OF[spec.name])).eval()
        torch.manual_seed(1)
        for name, weight in peft.named_parameters():
            if "lora_" in name:
                spread = 0.1 if "lora_B" in name else weight.shape[-1] ** -0.5
                weight.data.copy_((spread * torch.randn_like(weight)).half().float())
        logits = forward(peft, tokens)
        effect = float((logits - plain).abs().max())
        assert effect >= MIN_EFFECT, f"{spec.name}: the adapter changes logits by {effect} only"
        if spec.name in IN_GGUF:
            write_gguf(FIXTURES / f"adapters/{spec.name}.gguf", spec, peft)
        folder = args.out / spec.name
        peft.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["target_modules"].sort()  # a set, in any order
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "logits").write_bytes(logits.numpy().astype("<f4").tobytes())
        print(f"{spec.name}: {effect:.1f}")


if __name__ == "__main__":
    main()
