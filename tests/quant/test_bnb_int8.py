"""bnb-int8 beside bitsandbytes itself, through the file it is written to and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llmrun.errors import InternalError, ModelFileError
from llmrun.formats.layout import plan_layout
from llmrun.formats.open import open_checkpoint
from llmrun.formats.planned import Planned
from llmrun.formats.write import Content, write_folder
from llmrun.kernels import bnb
from llmrun.kernels.bnb import _without_remote_kernels
from llmrun.kernels.forms import GroupInt
from llmrun.kernels.host import DType
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.quant.arrays import floats, unsigned
from llmrun.quant.dequantize import dequantize
from llmrun.quant.scheme import find

NAME = "model.layers.0.mlp.up_proj.weight"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def functional() -> Any:
    with _without_remote_kernels():
        import bitsandbytes.functional
    return bitsandbytes.functional


def quantized(weight: torch.Tensor) -> GroupInt:
    form = find("bnb-int8").quantize(to_host(weight))
    assert isinstance(form, GroupInt)
    return form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (33, 130), (64, 320), (7, 33)])
def test_codes_and_scales_are_those_of_bitsandbytes(
    shape: tuple[int, int],
    dtype: torch.dtype,
    functional: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bnb, "_CHUNK", 400)  # several rows each, and a short last part
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    codes, absmax, _ = functional.int8_vectorwise_quant(weight.half())
    form = quantized(weight)
    assert form.kind == "int8 row"
    assert torch.equal(as_tensor(form.codes).short() - 128, codes.short())
    assert np.array_equal(floats(form.scales)[:, 0], absmax.numpy() / np.float32(127))
    theirs = functional.int8_vectorwise_dequant(codes, absmax)
    ours = as_tensor(dequantize(form))
    assert torch.allclose(ours, theirs.float(), rtol=3e-7, atol=0)


def test_a_row_of_zeros_is_zero() -> None:
    weight = torch.randn(3, 64)
    weight[1] = 0
    form = quantized(weight)
    assert (unsigned(form.codes)[1] == 128).all()
    assert (floats(form.scales) > 0).all()
    assert not as_tensor(dequantize(form))[1].any()


@pytest.mark.parametrize("value", [65520.0, -1e5, 3e38])
def test_weights_that_f16_does_not_hold_are_refused(value: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 5] = value
    with pytest.raises(ModelFileError, match="too large for bitsandbytes"):
        quantized(weight)


def written(out: Path, form: GroupInt, dtype: DType = DType.BF16) -> None:
    planned = [Planned(NAME, form.kind, form.shape, scale=DType.F32)]
    content = Content(plan_layout(planned, dtype, {}), {"model_type": "llama"}, {}, {})
    out.mkdir()
    write_folder(out, lambda start: [(NAME, form, {})], content)


@pytest.mark.parametrize("shape", [(48, 128), (5, 96)])
def test_written_as_bitsandbytes_stores_it_and_read_back(
    shape: tuple[int, int], functional: Any, tmp_path: Path
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16() * 0.03
    codes, absmax, _ = functional.int8_vectorwise_quant(weight.half())
    form = quantized(weight)
    written(tmp_path / "out", form)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored[NAME], codes)
    assert torch.equal(stored["model.layers.0.mlp.up_proj.SCB"], absmax)
    assert stored["model.layers.0.mlp.up_proj.weight_format"].tolist() == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["load_in_8bit"]) == ("bitsandbytes", True)

    read = open_checkpoint(tmp_path / "out").read(NAME)
    assert isinstance(read, GroupInt)
    assert read.kind == form.kind
    assert bytes(read.codes.data) == bytes(form.codes.data)
    assert bytes(read.scales.data) == bytes(form.scales.data)


def test_other_scales_are_not_written_as_if_they_were(tmp_path: Path) -> None:
    form = quantized(torch.randn(4, 64))
    form.scales.data[0] ^= 1
    with pytest.raises(InternalError, match="not those of bitsandbytes"):
        written(tmp_path / "out", form)
