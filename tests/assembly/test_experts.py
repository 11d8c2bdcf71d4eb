"""Mixtures of experts through quantizing: on disk where experts have names, else in memory."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmrun.cli.assemble import LoadOptions, load
from llmrun.cli.quantizing import convert
from llmrun.cli.settings import Settings
from llmrun.cli.source import open_source
from llmrun.errors import UnavailableError
from llmrun.kernels.forms import Dense, GroupInt
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.quant.dequantize import dequantize
from llmrun.quant.roles import Role
from llmrun.store.progress import SilentProgress

QUIET = SilentProgress()


@pytest.mark.parametrize(
    ("model_type", "number", "changes", "router"),
    [
        ("mixtral", 0, {}, "layers.1.block_sparse_moe.gate"),
        ("qwen3_moe", 1, {}, "layers.3.mlp.gate"),
    ],
)
def test_named_experts_are_written_quantized_and_the_router_is_not(
    tiny_model: Any,
    settings: Settings,
    tmp_path: Path,
    model_type: str,
    number: int,
    changes: dict[str, object],
    router: str,
) -> None:
    path = tiny_model(model_type, number, **changes)
    out = tmp_path / "out"
    convert(str(path), "int8", out, settings, QUIET)
    source, copy = open_source(path), open_source(out)
    assert copy.binding.spec == source.binding.spec
    assert copy.checkpoint.tensors[f"model.{router}.weight"].kind == "BF16"
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    patterns = [entry.removeprefix("re:") for entry in described["ignore"]]
    assert any(re.fullmatch(pattern, f"model.{router}") for pattern in patterns)
    theirs = dict(source.tensors(lambda _, form: form))
    roles: dict[Role, set[type]] = {}
    for name, form in copy.tensors(lambda _, form: form):
        role = copy.binding.parameters[name].role
        roles.setdefault(role, set()).add(type(form))
        original = theirs[name]
        assert isinstance(original, Dense)
        want = as_tensor(original.w).float()
        got = as_tensor(form.w).float() if isinstance(form, Dense) else as_tensor(dequantize(form))
        assert float((got - want).norm()) < 0.02 * float(want.norm()), name
    assert roles[Role.EXPERTS] == roles[Role.ATTN_QKV] == {GroupInt}
    assert roles[Role.ROUTER] == roles[Role.EMBEDDING] == {Dense}
    if model_type == "qwen3_moe":
        assert roles[Role.GATE_UP] == {GroupInt}


@pytest.mark.parametrize("model_type", ["granitemoe", "gpt_oss"])
def test_stacked_experts_are_quantized_in_memory_only(
    tiny_model: Any, settings: Settings, tmp_path: Path, model_type: str
) -> None:
    path = tiny_model(model_type)
    with pytest.raises(UnavailableError, match="holds all experts of a layer in one tensor"):
        convert(str(path), "int8", tmp_path / "no", settings, QUIET)
    loaded = load(LoadOptions(str(path), quant="int8", device="cpu"), settings, QUIET)
    spec = loaded.decoder.spec
    assert spec.mixture is not None
    n_layers, n_experts = len(spec.layers), spec.mixture.n_experts
    quantized = sum(n for kind, n in loaded.coverage.kinds.items() if kind.startswith("int8"))
    # Four projections and all experts of each layer, embedding and head.
    assert quantized == n_layers * (4 + 3 * n_experts) + 2
