"""gpt-oss' experts against the conversion of transformers, which defines what they mean."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmrun.errors import ModelFileError
from llmrun.formats.open import open_checkpoint
from llmrun.kernels.forms import Dense, Form, Lut16
from llmrun.quant.dequantize import dequantize

NAME = "model.layers.0.mlp.experts.gate_up_proj"
READ = f"{NAME}_blocks"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
Tensors = dict[str, torch.Tensor]


def _made(experts: int = 3, n: int = 10, groups: int = 3) -> Tensors:
    torch.manual_seed(n)
    return {
        f"{NAME}_blocks": torch.randint(0, 256, (experts, n, groups, 16), dtype=torch.uint8),
        f"{NAME}_scales": torch.randint(100, 140, (experts, n, groups), dtype=torch.uint8),
        f"{NAME}_bias": torch.ones(experts, n).bfloat16(),
        "lm_head.weight": torch.ones(2, 3),
    }


def _folder(path: Path, tensors: Tensors, config: dict[str, object]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, path / "model.safetensors")
    return path


def _library(tensors: Tensors) -> torch.Tensor:
    """Rows are output features here; transformers gives them as columns."""
    blocks, scales = tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"]
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)


def _values(form: Form) -> torch.Tensor:
    return torch.frombuffer(dequantize(form).data, dtype=torch.float32).view(form.shape)


def test_equal_to_transformers(tmp_path: Path) -> None:
    tensors = _made()
    opened = open_checkpoint(_folder(tmp_path, tensors, CONFIG))
    assert set(opened.tensors) == {READ, f"{NAME}_bias", "lm_head.weight"}
    assert opened.tensors[READ].shape == (3, 10, 96)
    assert opened.tensors[f"{NAME}_bias"].shape == (3, 10)
    form = opened.read(READ)
    assert isinstance(form, Lut16)
    assert opened.tensors[READ].kind == form.kind == "lut4 g32"
    assert form.shape == (30, 96)
    assert torch.equal(_values(form).view(3, 10, 96), _library(tensors))
    assert opened.quantization == "mxfp4 lut4 g32"
    assert isinstance(opened.read(f"{NAME}_bias"), Dense)


def test_every_code_and_every_finite_scale(tmp_path: Path) -> None:
    tensors = _made(1, 253, 16)
    tensors[f"{NAME}_blocks"][...] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    tensors[f"{NAME}_scales"][...] = torch.arange(253, dtype=torch.uint8).view(1, -1, 1)
    form = open_checkpoint(_folder(tmp_path, tensors, CONFIG)).read(READ)
    assert torch.equal(_values(form), _library(tensors)[0])
    assert _values(form).isfinite().all()


@pytest.mark.parametrize("exponent", [253, 255])
def test_a_scale_that_is_not_finite_is_named(exponent: int, tmp_path: Path) -> None:
    tensors = _made()
    tensors[f"{NAME}_scales"][1, 2, 0] = exponent
    opened = open_checkpoint(_folder(tmp_path, tensors, CONFIG))
    with pytest.raises(ModelFileError, match="_scales' is not finite at element 36"):
        opened.read(READ)


def test_codes_are_a_view_of_the_file(tmp_path: Path) -> None:
    opened = open_checkpoint(_folder(tmp_path, _made(), CONFIG))
    one, two = (opened.read(READ).arrays["codes"].data for _ in range(2))
    one[0] ^= 255
    assert one == two


def _change(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no blocks": (lambda tensors: tensors.pop(f"{NAME}_blocks"), "_blocks' is missing"),
    "no scales": (lambda tensors: tensors.pop(f"{NAME}_scales"), "_scales' is missing"),
    "blocks of 8": (_change(f"{NAME}_blocks", lambda t: t[..., :8]), "_blocks' is U8"),
    "three extents": (_change(f"{NAME}_blocks", lambda t: t[0]), "expected 4 extents"),
    "an expert less": (_change(f"{NAME}_scales", lambda t: t[:2]), "_scales' is U8 (2, 10, 3)"),
    "scales f32": (_change(f"{NAME}_scales", lambda t: t.float()), "_scales' is F32"),
    "blocks i8": (_change(f"{NAME}_blocks", lambda t: t.view(torch.int8)), "_blocks' is I8"),
    "plain too": (lambda tensors: tensors.update({NAME: torch.ones(2)}), "packed and plain"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_every_part_is_checked_before_data_is_read(
    fault: tuple[Callable[[Tensors], object], str], tmp_path: Path
) -> None:
    change, words = fault
    tensors = _made()
    change(tensors)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, tensors, CONFIG))
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dequantize": True}, "'dequantize' is True"),
        ({"modules_to_not_convert": 3}, "modules_to_not_convert is 3"),
        ({"block_size": 16}, "'block_size' is 16"),
    ],
)
def test_configs_that_mean_something_else_are_refused(
    config: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, _made(), {**CONFIG, **config}))
    assert words in caught.value.what


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = _folder(tmp_path, _made(), CONFIG) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="shorter than its header says"):
        open_checkpoint(tmp_path)
