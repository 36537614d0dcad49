#!/usr/bin/env python3
"""Describes the folders that `transformers` saves for the tiny models of `make_fixtures.py`, for
convertible families.

Writes crates/engine/tests/folders/NAME.json for each: the saved `config.json`, and every
safetensors tensor with the location of its values in crates/model/tests/fixtures/NAME.gguf:
{"name", "shape", "from": tensor, "rows": the row there of each row here (one number: consecutive
from there), "minus": a subtrahend}. Otherwise "from" is several locations, "rows" gives location
and row per row here, and "transposed" means that rows here are columns; a location NAME^T has its
columns as rows, NAME^1 its single values. Values without a location are in "values", integers with
their "dtype". So a test can write the whole folder, and no weights are stored twice. Locations are found by search,
independently of any converter.
"""

import json
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from kimi_k3 import KimiK3ForCausalLM, published_config, published_weights
from looped import NanbeigeForCausalLM, once
from make_fixtures import build_model
from models import SPECS
from safetensors.torch import load_file
from text_models import VISION, beside_a_vision_encoder

ROOT = Path(__file__).resolve().parents[2]
FIXTURES, OUT = ROOT / "crates/model/tests/fixtures", ROOT / "crates/engine/tests/folders"

CONVERTED = (
    "llama mistral mixtral qwen2 qwen2moe qwen3 qwen3moe gemma gemma2 gemma3 gemma4 granite granitehybrid smollm3 olmo2 olmo3 phi3 glm4 "
    "cohere2 mistral3 gptoss lfm2 lfm2moe qwen3next qwen35 qwen35moe deepseek2 deepseek3 deepseek32 glmdsa glm4moelite seedoss glm4moe dots1 ernie45 "
    "exaone4 olmoe granitemoe commandr arcee graniteh mamba2 nemotronh nemotronhmoe ernie45moe hunyuan "
    "starcoder2 phi2 stablelm nemotron jais2 chatglm gemma3n apertus mistral4 cohere2moe exaonemoe afmoe mellum hyv3 graniteswa laguna step35 kimilinear bailingmoe3 phimoe minimaxm3 nanbeige hyv4 deepseek4 qwen4exp dots3note kimik3"
).split()


def rows_of(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a GGUF file as rows in f32."""
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.asarray(tensor.data).astype(np.float32)
        tensors[tensor.name] = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(-1, 1)
    return tensors


def views_of(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a GGUF file as rows, as columns, and value by value if they are
    f32."""
    views = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.asarray(tensor.data)
        if values.dtype == np.float32:
            views[f"{tensor.name}^1"] = values.reshape(-1, 1)
        if values.ndim > 1:
            values = values.astype(np.float32)
            views[tensor.name] = values.reshape(-1, values.shape[-1])
            swapped = np.ascontiguousarray(values.swapaxes(-1, -2))
            views[f"{tensor.name}^T"] = swapped.reshape(-1, swapped.shape[-1])
    return views


def find(values: np.ndarray, tensors: dict[str, np.ndarray], places: dict[str, dict[bytes, int]]) -> dict | None:
    """Locates rows, whole or value by value; norms may be stored with 1 added."""
    for name, rows_there in places.items():
        for minus in (0.0, 1.0):
            row_len = tensors[name].shape[-1]
            shifted = values + np.float32(minus) if minus else values  # preserves -0.0
            rows = shifted.reshape(-1, row_len) if values.size % row_len == 0 else []
            order = [rows_there.get(row.tobytes()) for row in rows]
            if not order or None in order:
                continue
            again = tensors[name][order] - np.float32(minus)
            # Bits that a norm lost in the file are lost here too.
            assert np.array_equal(again + np.float32(minus), rows)
            is_run = order == list(range(order[0], order[0] + len(order)))
            return {"from": name, "rows": order[0] if is_run else order} | ({"minus": minus} if minus else {})
    return None


def find_scattered(values: np.ndarray, views: dict[str, np.ndarray], places: dict[tuple, tuple[str, int]]) -> dict:
    """Locates rows, columns or single values that are in several tensors, or in another order."""
    swapped = np.ascontiguousarray(values.swapaxes(-1, -2)) if values.ndim > 1 else values
    ways = [(False, values.shape[-1]), (True, swapped.shape[-1]), (False, 1)]
    for transposed, row_len in ways:
        rows = (swapped if transposed else values).reshape(-1, row_len)
        found = [places.get((row_len, row.tobytes())) for row in rows]
        if None not in found:
            names = list(dict.fromkeys(name for name, _ in found))
            assert np.array_equal(np.stack([views[name][row] for name, row in found]), rows)
            order = [[names.index(name), row] for name, row in found]
            return {"from": names, "rows": order} | ({"transposed": True} if transposed else {})
    assert values.size == max(values.shape), "a matrix that is nowhere"
    return {"values": values.reshape(-1).tolist()}


def saved_model(model: torch.nn.Module) -> tuple[dict, dict[str, torch.Tensor]]:
    """Returns the configuration and the weights of a folder."""
    if isinstance(model, KimiK3ForCausalLM):
        return published_config(model.config), dict(published_weights(model))
    with tempfile.TemporaryDirectory() as folder:
        model = once(model) if isinstance(model, NanbeigeForCausalLM) else beside_a_vision_encoder(model)
        model.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        return config, load_file(Path(folder, "model.safetensors"))


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for spec in SPECS:
        if spec.name.split("-")[0] not in CONVERTED:
            continue
        tensors = rows_of(FIXTURES / f"{spec.name}.gguf")
        places = {name: {row.tobytes(): i for i, row in enumerate(rows)} for name, rows in tensors.items()}
        views = views_of(FIXTURES / f"{spec.name}.gguf")
        scattered = {
            (rows.shape[-1], row.tobytes()): (name, i) for name, rows in views.items() for i, row in enumerate(rows)
        }
        config, saved = saved_model(build_model(spec))
        listed = []
        for name, weight in sorted(saved.items()):
            if name.startswith(VISION):
                continue
            if weight.dtype == torch.int64:
                listed.append({"name": name, "shape": list(weight.shape), "dtype": "I64", "values": weight.flatten().tolist()})
                continue
            values = weight.float().numpy()
            place = {"values": values.reshape(-1).tolist()} if values.ndim == 0 else find(values, tensors, places) or find_scattered(values, views, scattered)
            listed.append({"name": name, "shape": list(values.shape), **place})
        lines = ",\n".join(json.dumps(tensor, separators=(",", ":")) for tensor in listed)
        text = f'{{"config": {json.dumps(config, separators=(",", ":"))},\n"tensors": [\n{lines}\n]}}\n'
        (OUT / f"{spec.name}.json").write_text(text)
        print(f"{spec.name:30} {config['architectures'][0]:24} {len(listed):4} tensors  {len(text):6} bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
