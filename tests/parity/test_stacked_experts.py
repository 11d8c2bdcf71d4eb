"""Mixtures as transformers holds them in memory, all experts of a layer in one tensor, are the
models they are as published."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmrun.cli.source import open_source
from llmrun.kernels.forms import Dense
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.model.architecture import find


@pytest.mark.parametrize(
    ("model_type", "number"),
    [("mixtral", 0), ("qwen3_moe", 1), ("olmoe", 0), ("granitemoe", 0)],
)
def test_stacks_hold_the_same_parameters(model_type: str, number: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**find(model_type).tiny[number])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    with safe_open(tmp_path / "stacked" / "model.safetensors", "pt") as file:
        assert any(name.endswith("experts.gate_up_proj") for name in file.keys())  # noqa: SIM118
    published, stacked = (open_source(tmp_path / name) for name in ("published", "stacked"))
    assert stacked.binding.spec == published.binding.spec
    theirs = dict(published.tensors(lambda _, form: form))
    found = dict(stacked.tensors(lambda _, form: form))
    assert found.keys() == theirs.keys()
    for name, form in found.items():
        other = theirs[name]
        assert isinstance(form, Dense)
        assert isinstance(other, Dense)
        assert torch.equal(as_tensor(form.w), as_tensor(other.w)), name
