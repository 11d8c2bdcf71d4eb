"""A model whose weights lie on no quantization grid, made from one whose weights do.

    python benchmarks/dithered.py OUT [--model smollm2-135m] [--seed 0]

The models that can be had everywhere are quantized GGUF files, and a quantizer that hits their grid
looks better than it is: four bits with a scale and a minimum per 32 weights reproduce a Q4_1 file
without any error. So noise is added to each quantized weight, uniform and as wide as the step of
its group of 32 (the least gap between two of the group's values). The result is a bf16 checkpoint,
which is then its own reference; the same seed gives the same bytes.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from llmrun.cli.conversion import sidecars
from llmrun.cli.fetching import fetch_model
from llmrun.cli.settings import read_settings
from llmrun.cli.source import open_source
from llmrun.kernels.forms import Dense
from llmrun.quant.arrays import floats
from llmrun.quant.dequantize import dequantize
from llmrun.store.progress import SilentProgress

STARTER = "smollm2-135m"
GROUP = 32


def main() -> None:
    """Write the folder that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=STARTER, help="a GGUF model: a name or a path")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    local = fetch_model(options.model, read_settings(os.environ), SilentProgress())
    write_dithered(local.path, options.out, options.seed)


def write_dithered(gguf: Path, out: Path, seed: int) -> None:
    """Write a GGUF file's model as a dithered Hugging Face folder in bf16; ``out`` is new."""
    source = open_source(gguf, exact=True)
    binding = source.binding
    rng = np.random.default_rng(seed)
    state = {}
    for name in binding.held:  # in the file's order, which the random numbers follow
        form = source.checkpoint.read(name)
        weight = floats(dequantize(form)).copy()
        if not isinstance(form, Dense):
            weight = _dithered(weight, rng)
        order = binding.row_orders.get(name)
        weight = weight if order is None else weight[order]
        state[binding.published[name]] = torch.from_numpy(weight).to(torch.bfloat16)
    out.mkdir(parents=True)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = {**binding.config, "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for file, content in sidecars(gguf, source).items():
        assert isinstance(content, bytes)
        (out / file).write_bytes(content)


def _dithered(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    groups = weight.reshape(-1, GROUP)
    gaps = np.diff(np.sort(groups, axis=1), axis=1)
    gaps[gaps <= 1e-12] = np.inf
    step = gaps.min(axis=1, keepdims=True)
    step[~np.isfinite(step)] = 0.0
    noise = rng.random(groups.shape, dtype=np.float32) - 0.5
    result: np.ndarray = (groups + noise * step).reshape(weight.shape).astype(np.float32)
    return result


if __name__ == "__main__":
    main()
