"""nf4 and fp4 as bitsandbytes itself would have saved them, and as transformers loads them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmrun.errors import InternalError
from llmrun.formats.layout import plan_layout
from llmrun.formats.open import open_checkpoint
from llmrun.formats.planned import Planned
from llmrun.formats.write import Content, Item, write_folder
from llmrun.kernels.bnb import _without_remote_kernels
from llmrun.kernels.forms import Dense, Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.scheme import find

NAME = "model.layers.0.mlp.up_proj.weight"


def _host(tensor: torch.Tensor, dtype: DType) -> HostArray:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return HostArray(dtype, tuple(tensor.shape), memoryview(bytearray(raw)))


@pytest.fixture(scope="module")
def functional() -> Any:
    with _without_remote_kernels():
        import bitsandbytes.functional
    return bitsandbytes.functional


def _written(
    out: Path, weights: dict[str, torch.Tensor], config: dict[str, object], **how: Any
) -> dict[str, Lut16]:
    """Write a model whose projections are quantized; return their forms."""
    scheme = find(f"{how['table']}-dq" if how.get("nested") else how["table"])
    items: list[Item] = []
    planned = []
    forms = {}
    for name, weight in weights.items():
        dense = Dense(_host(weight, DType.BF16))
        if "_proj" not in name:
            items.append((name, dense, {}))
            planned.append(Planned(name, dense.kind, dense.shape))
            continue
        form = scheme.quantize(dense.w)
        assert isinstance(form, Lut16)
        forms[name] = form
        items.append((name, form, {}))
        planned.append(Planned(name, form.kind, form.shape, **how))
    out.mkdir()
    content = Content(plan_layout(planned, DType.BF16, {}), config, {}, {})
    report = write_folder(out, lambda start: items[start:], content)
    assert report.nbytes == report.predicted_bytes
    return forms


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(48, 128), (5, 96), (64, 320)])
def test_bitsandbytes_reads_the_weights_it_would_have_made(
    table: str, nested: bool, shape: tuple[int, int], functional: Any, tmp_path: Path
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    weight[0, :64] = 0
    forms = _written(tmp_path / "out", {NAME: weight}, {}, table=table, nested=nested)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    packed = stored.pop(NAME)
    parts = {key.removeprefix(f"{NAME}."): tensor for key, tensor in stored.items()}
    state = functional.QuantState.from_dict(dict(parts), device=torch.device("cpu"))
    found = functional.dequantize_4bit(packed, state)

    own, own_state = functional.quantize_4bit(
        weight, blocksize=64, quant_type=table, compress_statistics=nested
    )
    assert parts.keys() == own_state.as_dict(packed=True).keys()
    assert torch.equal(packed, own)
    assert (state.shape, state.blocksize, state.dtype) == (weight.shape, 64, torch.bfloat16)
    expected = functional.dequantize_4bit(own, own_state)
    assert torch.equal(found, expected)

    read = open_checkpoint(tmp_path / "out").read(NAME)
    assert isinstance(read, Lut16)
    assert read.kind == forms[NAME].kind
    assert bytes(read.codes.data) == bytes(forms[NAME].codes.data)
    assert torch.equal(_weights(read), _weights(forms[NAME]))


def test_groups_that_a_block_does_not_hold_are_our_fault(tmp_path: Path) -> None:
    form = find("nf4").quantize(_host(torch.randn(4, 96).bfloat16(), DType.BF16))
    assert isinstance(form, Lut16)
    form.scales.data[0] ^= 1
    planned = Planned(NAME, form.kind, form.shape, table="nf4")
    content = Content(plan_layout([planned], DType.BF16, {}), {}, {}, {})
    with pytest.raises(InternalError, match="different scales"):
        write_folder(tmp_path, lambda start: [(NAME, form, {})], content)


def test_scales_that_are_not_nested_cannot_be_written_so(tmp_path: Path) -> None:
    form = find("nf4").quantize(_host(torch.randn(4, 64).bfloat16(), DType.BF16))
    planned = Planned(NAME, form.kind, (4, 64), table="nf4", nested=True)
    content = Content(plan_layout([planned], DType.BF16, {}), {}, {}, {})
    with pytest.raises(InternalError, match="its own are not"):
        write_folder(tmp_path, lambda start: [(NAME, form, {})], content)


def test_a_table_other_than_planned_is_our_fault(tmp_path: Path) -> None:
    form = find("nf4").quantize(_host(torch.randn(4, 64).bfloat16(), DType.BF16))
    planned = Planned(NAME, form.kind, (4, 64), table="fp4")
    content = Content(plan_layout([planned], DType.BF16, {}), {}, {}, {})
    with pytest.raises(InternalError, match="table of fp4"):
        write_folder(tmp_path, lambda start: [(NAME, form, {})], content)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "nested", "tied"), [("nf4", False, True), ("nf4", True, False), ("fp4", False, False)]
)
def test_transformers_loads_it_with_the_weights_of_the_form(
    table: str,
    nested: bool,
    tied: bool,
    llama: Callable[[bool], SimpleNamespace],
    functional: Any,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    model = llama(tied)
    out = tmp_path / "out"
    _written(out, model.weights, model.config, table=table, nested=nested)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["bnb_4bit_use_double_quant"] is nested
    loaded = AutoModelForCausalLM.from_pretrained(out, device_map={"": "cpu"})
    found = dict(loaded.named_modules())
    count = 0
    for name in model.weights:
        if "_proj" not in name:
            continue
        module = found[name.removesuffix(".weight")]
        assert type(module).__name__ == "Linear4bit"
        state = module.weight.quant_state
        dense = functional.dequantize_4bit(module.weight.data, state)
        read = open_checkpoint(out).read(name)
        assert torch.equal(dense, _weights(read).bfloat16())
        count += 1
    assert count == 14
    assert type(found["lm_head"]).__name__ == "Linear"
    with torch.no_grad():
        logits = loaded(torch.arange(1, 33).view(1, -1)).logits
    assert torch.isfinite(logits).all()


def _weights(form: Any) -> torch.Tensor:
    """table[u] * scale, each in fp32."""
    codes = torch.frombuffer(form.codes.data, dtype=torch.uint8)
    u = torch.stack((codes & 15, codes >> 4), -1).reshape(-1, form.group).long()
    table = torch.frombuffer(form.table.data, dtype=torch.float32)
    scales = torch.frombuffer(form.scales.data, dtype=torch.float32).view(-1, 1)
    return (table[u] * scales).view(form.shape)
