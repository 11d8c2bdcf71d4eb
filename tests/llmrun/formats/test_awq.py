"""AWQ folders packed here by the published layout, read as w = s * (q - z) in float64."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmrun.errors import ModelFileError
from llmrun.formats.open import open_checkpoint
from llmrun.kernels.forms import Dense, Form, GroupInt
from llmrun.quant.dequantize import dequantize

MODULE = "model.layers.0.self_attn.q_proj"
NAME = f"{MODULE}.weight"
CONFIG = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
Tensors = dict[str, torch.Tensor]


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack [R, N] into I32 [R, N / 8]: nibble p of a word is its column 0, 2, 4, 6, 1, 3, 5, 7."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for position, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].long() << (4 * position)
    return words.to(torch.uint32).view(torch.int32)


def _made(
    group: int, n: int, k: int, dtype: torch.dtype = torch.float16
) -> tuple[Tensors, torch.Tensor]:
    """A random weight's stored tensors, and its values [N, K]."""
    torch.manual_seed(group + n + k)
    size = k if group == -1 else group
    groups = -(-k // size)
    codes = torch.randint(0, 16, (k, n))
    zeros = torch.randint(0, 16, (groups, n))
    scales = torch.randn(groups, n).to(dtype)  # half of them negative
    codes[:16] = zeros[0]
    order = torch.arange(k) // size
    tensors = {
        f"{MODULE}.qweight": _packed(codes),
        f"{MODULE}.qzeros": _packed(zeros),
        f"{MODULE}.scales": scales,
        f"{MODULE}.bias": torch.ones(n).half(),
        "lm_head.weight": torch.ones(2, 3),
    }
    return tensors, (scales.double()[order] * (codes - zeros[order])).T


def _folder(path: Path, tensors: Tensors, config: dict[str, object]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def _values(form: Form) -> torch.Tensor:
    return torch.frombuffer(dequantize(form).data, dtype=torch.float32).view(form.shape).double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "n", "k", "form_group"),
    [
        (128, 40, 256, 128),
        (64, 8, 192, 64),
        (32, 72, 96, 32),
        (16, 16, 48, 16),
        (-1, 24, 200, 0),
        (256, 16, 512, 128),
        (128, 136, 1056, 32),
    ],
)
def test_equal_to_the_formula(
    group: int, n: int, k: int, form_group: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors, expected = _made(group, n, k, dtype)
    opened = open_checkpoint(_folder(tmp_path, tensors, {**CONFIG, "group_size": group}))
    assert set(opened.tensors) == {NAME, f"{MODULE}.bias", "lm_head.weight"}
    form = opened.read(NAME)
    assert isinstance(form, GroupInt)
    assert (form.bits, form.group) == (4, form_group)
    assert opened.tensors[NAME].kind == form.kind
    assert opened.tensors[NAME].shape == form.shape == (n, k)
    assert torch.equal(_values(form), expected)
    assert opened.quantization == f"awq {form.kind}"
    assert isinstance(opened.read("lm_head.weight"), Dense)


def test_without_zero_points_codes_are_around_8(tmp_path: Path) -> None:
    tensors, _ = _made(64, 16, 128)
    tensors[f"{MODULE}.qzeros"] = _packed(torch.full((2, 16), 8))
    config = {**CONFIG, "group_size": 64, "zero_point": False}
    given = open_checkpoint(_folder(tmp_path / "a", tensors, config)).read(NAME)
    del tensors[f"{MODULE}.qzeros"]
    opened = open_checkpoint(_folder(tmp_path / "b", tensors, config))
    form = opened.read(NAME)
    assert opened.tensors[NAME].kind == form.kind == "int4 g64"
    assert torch.equal(_values(form), _values(given))


def _cut(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def _cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    **{
        f"no {part}": (
            lambda tensors, part=part: tensors.pop(f"{MODULE}.{part}"),
            f"{MODULE}.{part}' is missing",
        )
        for part in ("qweight", "qzeros", "scales")
    },
    "cut qweight": (_cut(f"{MODULE}.qweight"), "qweight' has 127 rows"),
    "cut qzeros": (_cut(f"{MODULE}.qzeros"), "qzeros' is I32 (1, 2), expected I32 (2, 2)"),
    "cut scales": (_cut(f"{MODULE}.scales"), "scales' is F16 (1, 16), expected"),
    "codes i64": (_cast(f"{MODULE}.qweight", torch.int64), "qweight' is I64"),
    "zeros f16": (_cast(f"{MODULE}.qzeros", torch.float16), "qzeros' is F16"),
    "scales f64": (_cast(f"{MODULE}.scales", torch.float64), "scales' is F64"),
    "flat codes": (
        lambda tensors: tensors.update({f"{MODULE}.qweight": torch.ones(8, dtype=torch.int32)}),
        "expected 2 extents",
    ),
    "plain too": (
        lambda tensors: tensors.update({NAME: torch.ones(16, 128)}),
        "both packed and plain",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_every_part_is_checked_before_data_is_read(
    fault: tuple[Callable[[Tensors], object], str], tmp_path: Path
) -> None:
    change, words = fault
    tensors, _ = _made(64, 16, 128)
    change(tensors)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, tensors, {**CONFIG, "group_size": 64}))
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 8}, "bits is 8"),
        ({"bits": None}, "bits is None"),
        ({"version": "gemv"}, "version is 'gemv'"),
        ({"version": "marlin"}, "version is 'marlin'"),
        ({"version": "exllama"}, "version is 'exllama'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"method": "gptq"}, "method is 'gptq'"),
        ({"format": "llm-awq"}, "format is 'llm-awq'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 8}, "group_size is 8"),
        ({"group_size": 32}, "scales' is F16 (2, 16), expected"),
        ({"zero_point": 1}, "zero_point is 1"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is"),
        ({"smooth": True}, "'smooth' is True"),
    ],
)
def test_configs_that_mean_something_else_are_refused(
    config: dict[str, object], words: str, tmp_path: Path
) -> None:
    tensors, _ = _made(64, 16, 128)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, tensors, {**CONFIG, "group_size": 64, **config}))
    assert words in caught.value.what


def test_what_the_tools_write_beside_it_is_read(tmp_path: Path) -> None:
    tensors, expected = _made(64, 16, 128)
    config = {
        **CONFIG,
        "group_size": 64,
        "version": "GEMM",
        "modules_to_not_convert": None,
        "do_fuse": False,
        "fuse_max_seq_len": None,
        "exllama_config": {"version": 2},
        "backend": "autoawq",
    }
    form = open_checkpoint(_folder(tmp_path, tensors, config)).read(NAME)
    assert torch.equal(_values(form), expected)


def test_a_scale_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tensors, _ = _made(64, 16, 128)
    tensors[f"{MODULE}.scales"][1, 3] = float("inf")
    opened = open_checkpoint(_folder(tmp_path, tensors, {**CONFIG, "group_size": 64}))
    with pytest.raises(ModelFileError, match="scales' is not finite, or too large, at element 7"):
        opened.read(NAME)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    tensors, _ = _made(64, 16, 128)
    file = _folder(tmp_path, tensors, {**CONFIG, "group_size": 64}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="shorter than its header says"):
        open_checkpoint(tmp_path)


# Configs as published; every one must be read, whatever else its tool wrote into it.
PUBLISHED: dict[str, dict[str, object]] = {
    "Qwen2.5-7B-Instruct-AWQ": {
        **{"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq"},
        **{"version": "gemm", "zero_point": True},
    },
    "Meta-Llama-3.1-8B-Instruct-AWQ-INT4": {
        **{"backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None},
        **{"fuse_max_seq_len": None, "group_size": 128, "modules_to_fuse": None},
        **{"modules_to_not_convert": None, "quant_method": "awq", "version": "gemm"},
        "zero_point": True,
    },
    "AutoRound": {
        **{"amp": True, "autoround_version": "0.4.2", "batch_size": 8, "bits": 4},
        **{"data_type": "int", "enable_minmax_tuning": True, "enable_quanted_input": True},
        **{"gradient_accumulate_steps": 1, "group_size": 128, "iters": 1000, "lr": 0.001},
        **{"minmax_lr": 0.001, "modules_to_not_convert": ["lm_head"], "nsamples": 512},
        **{"provider": "auto-round", "quant_method": "awq", "seqlen": 2048, "sym": False},
        **{"version": "gemm", "zero_point": True},
    },
}


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read(config: dict[str, object], tmp_path: Path) -> None:
    tensors, expected = _made(128, 16, 256)
    assert torch.equal(
        _values(open_checkpoint(_folder(tmp_path, tensors, config)).read(NAME)), expected
    )
