"""GPTQ folders packed here by the published layout, read as w = s * (q - z) in float64."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
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
Tensors = dict[str, torch.Tensor]


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack rows of codes [R, C] into I32 words [R * bits / 32, C], lowest bits first."""
    per_word = 32 // bits
    shifts = torch.arange(per_word).view(1, -1, 1) * bits
    words = (codes.view(-1, per_word, codes.shape[1]).long() << shifts).sum(1)
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


@dataclass
class Made:
    """A random weight [N, K], packed. ``zeros`` [G, N]; ``order`` [K]: the group of each column."""

    bits: int = 4
    group: int = 128
    n: int = 32
    k: int = 256
    symmetric: bool = True
    dtype: torch.dtype = torch.float16
    scattered: bool = False
    tensors: Tensors = field(init=False)
    expected: torch.Tensor = field(init=False)
    zeros: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.bits * self.k + self.group)
        group = self.k if self.group == -1 else self.group
        groups = -(-self.k // group)
        codes = torch.randint(0, 2**self.bits, (self.k, self.n))
        scales = torch.randn(groups, self.n).to(self.dtype)  # half of them negative
        self.zeros = torch.randint(1, 2**self.bits, (groups, self.n))
        if self.symmetric:
            self.zeros[...] = 2 ** (self.bits - 1)
        codes[:16] = self.zeros[0]  # zero weights, a whole group of them where groups are of 16
        order = torch.arange(self.k) // group
        if self.scattered:
            order = order[torch.randperm(self.k)]
        self.expected = (scales.double()[order] * (codes - self.zeros[order])).T
        self.tensors = {
            f"{MODULE}.qweight": _words(codes, self.bits),
            f"{MODULE}.scales": scales,
            f"{MODULE}.g_idx": order.int(),
            f"{MODULE}.bias": torch.ones(self.n).half(),
            "lm_head.weight": torch.ones(2, 3),
        }
        self.store_zeros(self.zeros - 1)

    def store_zeros(self, zeros: torch.Tensor) -> None:
        """Put zero points into the file as they are given, modulo the field."""
        fields = zeros & (2**self.bits - 1)
        self.tensors[f"{MODULE}.qzeros"] = _words(fields.T, self.bits).T.contiguous()

    def config(self, **changes: object) -> dict[str, object]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "sym": self.symmetric,
            "desc_act": self.scattered,
            **changes,
        }


def _folder(path: Path, tensors: Tensors, config: dict[str, object]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    return path


def _values(form: Form) -> torch.Tensor:
    return torch.frombuffer(dequantize(form).data, dtype=torch.float32).view(form.shape).double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("group", "k", "form_group"),
    [
        (128, 256, 128),
        (64, 192, 64),
        (32, 96, 32),
        (16, 64, 16),
        (-1, 224, 0),
        (256, 512, 128),
        (1024, 2048, 128),
        (128, 160, 32),
        (2048, 192, 64),
    ],
)
def test_equal_to_the_formula(
    group: int,
    k: int,
    form_group: int,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    made = Made(bits, group, 48, k, symmetric, dtype)
    opened = open_checkpoint(_folder(tmp_path, made.tensors, made.config()))
    assert set(opened.tensors) == {NAME, f"{MODULE}.bias", "lm_head.weight"}
    form = opened.read(NAME)
    assert isinstance(form, GroupInt)
    assert (form.bits, form.group) == (max(4, bits), form_group)
    assert (form.mins is None) == symmetric
    assert opened.tensors[NAME].kind == form.kind
    assert opened.tensors[NAME].shape == form.shape == (48, k)
    assert torch.equal(_values(form), made.expected)
    assert opened.quantization == f"gptq {form.kind}"
    assert isinstance(opened.read("lm_head.weight"), Dense)


@pytest.mark.parametrize(("version", "zeros"), [("gptq", 0x76543210), ("gptq_v2", 0x07654321)])
def test_q008_words_that_are_known_by_heart(version: str, zeros: int, tmp_path: Path) -> None:
    # Column 0 has zero point 1, column 1 has 2 and so on, column 7 has 8 or (v2 here) 0.
    k, n = 32, 8
    tensors = {
        f"{MODULE}.qweight": torch.full((k // 8, n), 0x76543210, dtype=torch.int32),
        f"{MODULE}.qzeros": torch.tensor([[zeros]], dtype=torch.int32),
        f"{MODULE}.scales": torch.full((1, n), 0.5).half(),
        f"{MODULE}.g_idx": torch.zeros(k, dtype=torch.int32),
    }
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False,
        "checkpoint_format": version,
    }  # fmt: skip
    values = _values(open_checkpoint(_folder(tmp_path, tensors, config)).read(NAME))
    assert values[0].tolist() == [-0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3] * 4
    assert values[6].tolist() == [-3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0] * 4
    last = (
        [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5]
        if version == "gptq"
        else [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    )
    assert values[7].tolist() == last * 4


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_both_checkpoint_formats_give_the_same_zero_points(bits: int, tmp_path: Path) -> None:
    made = Made(bits, 64, symmetric=False)
    first = open_checkpoint(_folder(tmp_path / "v1", made.tensors, made.config())).read(NAME)
    made.store_zeros(made.zeros)
    for number, name in enumerate(("checkpoint_format", "format")):
        folder = _folder(tmp_path / str(number), made.tensors, made.config(**{name: "gptq_v2"}))
        assert torch.equal(_values(open_checkpoint(folder).read(NAME)), _values(first))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_point_of_zero_wraps_in_its_own_field(bits: int, tmp_path: Path) -> None:
    made = Made(bits, 64, symmetric=False)
    made.expected += _shift_to_zero(made)
    made.store_zeros(made.zeros - 1)
    form = open_checkpoint(_folder(tmp_path, made.tensors, made.config())).read(NAME)
    assert torch.equal(_values(form), made.expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptqmodel_borrows_across_the_word(bits: int, tmp_path: Path) -> None:
    made = Made(bits, 64, symmetric=False)
    made.expected += _shift_to_zero(made)
    words = _words(made.zeros.T, bits).T.contiguous()
    ones = sum(1 << at for at in range(0, 32, bits))
    less = (words.view(torch.uint32).long() - ones) & 0xFFFFFFFF
    made.tensors[f"{MODULE}.qzeros"] = less.to(torch.uint32).view(torch.int32)
    for number, tools in enumerate((["gptqmodel:2.0.0", "other"], "gptqmodel:1.4")):
        config = made.config(meta={"quantizer": tools}, checkpoint_format="gptq")
        form = open_checkpoint(_folder(tmp_path / str(number), made.tensors, config)).read(NAME)
        assert torch.equal(_values(form), made.expected)


def _shift_to_zero(made: Made) -> torch.Tensor:
    """Make every third zero point 0; return what that adds to the weight."""
    shift = made.zeros.clone()
    shift.view(-1)[1::3] = 0
    made.zeros -= shift
    shift, made.zeros = made.zeros, shift
    order = made.tensors[f"{MODULE}.g_idx"].long()
    return (made.tensors[f"{MODULE}.scales"].double() * shift)[order].T


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("group", "k"), [(32, 160), (128, 160)])
def test_reordered_columns_are_brought_together(
    bits: int, symmetric: bool, group: int, k: int, tmp_path: Path
) -> None:
    made = Made(bits, group, 40 if bits == 4 else 48, k, symmetric, scattered=True)
    opened = open_checkpoint(_folder(tmp_path, made.tensors, made.config()))
    form = opened.read(NAME)
    assert isinstance(form, GroupInt)
    assert form.columns is not None
    assert not opened.tensors[NAME].opened
    assert opened.tensors[NAME].kind == form.kind
    assert torch.equal(_values(form), made.expected)


def test_scattered_groups_of_unequal_size_are_opened_exactly(tmp_path: Path) -> None:
    made = Made(4, 32, 40, 160, scattered=True)
    index = made.tensors[f"{MODULE}.g_idx"]
    at = int((index == 1).nonzero()[0])
    index[at] = 0
    scales = made.tensors[f"{MODULE}.scales"].double()
    made.expected[:, at] *= scales[0] / scales[1]  # all zero points are 8
    opened = open_checkpoint(_folder(tmp_path, made.tensors, made.config()))
    assert opened.tensors[NAME].opened
    assert opened.tensors[NAME].kind == "int4 with scattered columns, opened to F32"
    form = opened.read(NAME)
    assert isinstance(form, Dense)
    assert torch.allclose(_values(form), made.expected, rtol=1e-6, atol=0)


def test_columns_in_order_need_no_index(tmp_path: Path) -> None:
    made = Made()
    del made.tensors[f"{MODULE}.g_idx"]
    form = open_checkpoint(_folder(tmp_path / "a", made.tensors, made.config())).read(NAME)
    assert torch.equal(_values(form), made.expected)
    with pytest.raises(ModelFileError, match="g_idx' is missing"):
        open_checkpoint(_folder(tmp_path / "b", made.tensors, made.config(desc_act=True)))


def test_act_order_with_columns_in_order_keeps_the_form(tmp_path: Path) -> None:
    made = Made()
    form = open_checkpoint(_folder(tmp_path, made.tensors, made.config(desc_act=True))).read(NAME)
    assert isinstance(form, GroupInt)


def test_modules_differ_as_dynamic_says(tmp_path: Path) -> None:
    four, eight = Made(4, 128), Made(8, 32)
    other = MODULE.replace("q_proj", "v_proj")
    wide = {name.replace(MODULE, other): tensor for name, tensor in eight.tensors.items()}
    config = four.config(
        dynamic={
            r"-:.*\.gate$": {},
            r"+:.*\.(k|v)_proj$": {"bits": 8, "group_size": 32, "mse": 2.0},
            r".*v_proj": {"bits": 2},
        }
    )
    opened = open_checkpoint(_folder(tmp_path, four.tensors | wide, config))
    assert torch.equal(_values(opened.read(NAME)), four.expected)
    assert torch.equal(_values(opened.read(f"{other}.weight")), eight.expected)
    assert opened.quantization == "gptq int4 g128, int8 g32"


def test_a_packed_head(tmp_path: Path) -> None:
    made = Made()
    tensors = {name.replace(MODULE, "lm_head"): t for name, t in made.tensors.items()}
    del tensors["lm_head.weight"]
    opened = open_checkpoint(_folder(tmp_path / "a", tensors, made.config(lm_head=True)))
    assert torch.equal(_values(opened.read("lm_head.weight")), made.expected)
    with pytest.raises(ModelFileError, match="lm_head"):
        open_checkpoint(_folder(tmp_path / "b", tensors, made.config()))
    with pytest.raises(ModelFileError, match="lm_head"):
        open_checkpoint(_folder(tmp_path / "c", made.tensors, made.config(lm_head=True)))


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
    **{
        f"cut {part}": (_cut(f"{MODULE}.{part}"), f"{MODULE}.")
        for part in ("qweight", "qzeros", "scales", "g_idx")
    },
    "codes i64": (_cast(f"{MODULE}.qweight", torch.int64), "qweight' is I64"),
    "zeros f16": (_cast(f"{MODULE}.qzeros", torch.float16), "qzeros' is F16"),
    "scales f64": (_cast(f"{MODULE}.scales", torch.float64), "scales' is F64"),
    "order i64": (_cast(f"{MODULE}.g_idx", torch.int64), "g_idx' is I64"),
    "plain too": (
        lambda tensors: tensors.update({NAME: torch.ones(32, 256)}),
        "both packed and plain",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_every_part_is_checked_before_data_is_read(
    fault: tuple[Callable[[Tensors], object], str], tmp_path: Path
) -> None:
    change, words = fault
    made = Made()
    change(made.tensors)
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, made.tensors, made.config()))
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"bits": "4"}, "bits is '4'"),
        ({"bits": True}, "bits is True"),
        ({"bits": 8}, "scales' is F16 (2, 32), expected"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 8}, "expected F16"),
        ({"group_size": 24}, "expected F16"),
        ({"sym": "yes"}, "sym is 'yes'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"method": "qqq"}, "method is 'qqq'"),
        ({"format": "bitblas"}, "is 'bitblas'"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "format is 'gptq_v2'"),
        ({"is_marlin_format": True}, "is_marlin_format' is True"),
        ({"pack_dtype": "int64"}, "pack_dtype is 'int64'"),
        ({"adapter": {"path": "x"}}, "adapter' is"),
        ({"rotation": "hadamard"}, "rotation' is 'hadamard'"),
        ({"desc_act": "true"}, "desc_act is 'true'"),
        ({"new_meaning": 1}, "'new_meaning' is 1"),
        ({"dynamic": [1]}, "dynamic is [1]"),
        ({"dynamic": {r"+:.*": {"codebook": 1}}}, "'codebook' is 1"),
        ({"dynamic": {r"+:.*": {"bits": 3}}}, "bits is 3"),
        ({"dynamic": {r"-:(?!x).*": {}}}, "dynamic is '-:(?!x).*'"),
        ({"dynamic": {r"-:.*q_proj": {}}}, "leaves out"),
        ({"dynamic": {"x": 1}}, "dynamic 'x' is 1"),
    ],
)
def test_configs_that_mean_something_else_are_refused(
    config: dict[str, object], words: str, tmp_path: Path
) -> None:
    made = Made()
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(_folder(tmp_path, made.tensors, made.config(**config)))
    assert words in caught.value.what


def test_a_group_no_form_has_is_refused(tmp_path: Path) -> None:
    made = Made(4, 24, k=192)
    with pytest.raises(ModelFileError, match="group_size is 24"):
        open_checkpoint(_folder(tmp_path, made.tensors, made.config()))


def test_symmetric_by_the_config_but_not_by_the_zero_points(tmp_path: Path) -> None:
    for scattered in (False, True):
        made = Made(4, 128, scattered=scattered)
        made.store_zeros(made.zeros)  # as v2 stores them, called v1
        folder = _folder(tmp_path / str(scattered), made.tensors, made.config())
        opened = open_checkpoint(folder)
        with pytest.raises(ModelFileError, match="qzeros' holds zero points other than 8"):
            opened.read(NAME)


def test_scales_and_groups_that_no_weight_has_are_named(tmp_path: Path) -> None:
    made = Made(4, 128, scattered=True)
    made.tensors[f"{MODULE}.g_idx"][7] = 2
    opened = open_checkpoint(_folder(tmp_path / "a", made.tensors, made.config()))
    with pytest.raises(ModelFileError, match="g_idx' names group 2 of 2 at 7"):
        opened.read(NAME)
    for scattered in (False, True):
        made = Made(4, 128, scattered=scattered)
        made.tensors[f"{MODULE}.scales"][1, 3] = float("nan")
        folder = _folder(tmp_path / f"b{scattered}", made.tensors, made.config())
        opened = open_checkpoint(folder)
        with pytest.raises(ModelFileError, match=r"scales' is not finite.* at element 7"):
            opened.read(NAME)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("scattered", [True, False])
def test_a_scale_too_large_for_the_weight_is_named(scattered: bool, tmp_path: Path) -> None:
    made = Made(4, 128, symmetric=False, dtype=torch.bfloat16, scattered=scattered)
    made.tensors[f"{MODULE}.scales"][1, 3] = 3e38
    opened = open_checkpoint(_folder(tmp_path, made.tensors, made.config()))
    with pytest.raises(ModelFileError, match=r"scales' is not finite.* at element 7"):
        opened.read(NAME)


def test_what_the_tools_write_beside_it_is_read(tmp_path: Path) -> None:
    made = Made()
    config = made.config(
        checkpoint_format="gptq",
        pack_dtype="int32",
        format=None,
        lm_head=False,
        dynamic=None,
        damp_percent=0.01,
        static_groups=False,
        true_sequential=True,
        model_name_or_path="somebody/model",
        model_file_base_name="model",
        is_marlin_format=False,
        meta={"quantizer": "gptqmodel:1.4.0", "damp_auto_increment": 0.0015},
        use_exllama=True,
        exllama_config={"version": 1},
        modules_in_block_to_quantize=[["self_attn.q_proj"]],
    )
    form = open_checkpoint(_folder(tmp_path, made.tensors, config)).read(NAME)
    assert torch.equal(_values(form), made.expected)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    made = Made()
    file = _folder(tmp_path, made.tensors, made.config()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="shorter than its header says"):
        open_checkpoint(tmp_path)


# Configs as published; every one must be read, whatever else its tool wrote into it.
PUBLISHED: dict[str, dict[str, object]] = {
    "Qwen2.5-7B-Instruct-GPTQ-Int4": {
        **{"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "damp_percent": 0.01},
        **{"cache_block_outputs": True, "dataset": None, "desc_act": False, "group_size": 128},
        **{"exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": None},
        **{"module_name_preceding_first_block": None, "modules_in_block_to_quantize": None},
        **{"pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None},
        **{"true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
    },
    "Llama-2-7B-GPTQ of TheBloke": {
        **{"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True},
        **{"true_sequential": True, "model_name_or_path": None, "quant_method": "gptq"},
        "model_file_base_name": "model",
    },
    "Meta-Llama-3.1-8B-Instruct-quantized.w4a16": {
        **{"bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.1, "desc_act": False},
        **{"group_size": 128, "is_marlin_format": False, "lm_head": False, "sym": True},
        **{"meta": {"quantizer": "gptqmodel:0.9.9-dev0"}, "model_name_or_path": None},
        **{"model_file_base_name": "gptq_model-4bit-128g", "quant_method": "gptq"},
        **{"static_groups": False, "true_sequential": True},
    },
    "GPTQModel 5": {
        **{"bits": 4, "checkpoint_format": "gptq", "format": "gptq", "desc_act": False},
        **{"group_size": 128, "hyb_act": False, "lm_head": False, "method": "gptq", "sym": True},
        **{"meta": {"quantizer": ["gptqmodel:5.0.0"]}, "pack_dtype": "int32"},
        "quant_method": "gptq",
    },
    "AutoRound": {
        **{"amp": True, "autoround_version": "0.4.2", "batch_size": 8, "bits": 4},
        **{"damp_percent": 0.01, "data_type": "int", "desc_act": False, "group_size": 128},
        **{"enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "iters": 1000},
        **{"enable_quanted_input": True, "gradient_accumulate_steps": 1, "lr": 0.001},
        **{"low_gpu_mem_usage": False, "minmax_lr": 0.001, "nsamples": 512, "seqlen": 2048},
        **{"provider": "auto-round", "quant_method": "gptq", "scale_dtype": "torch.float16"},
        **{"sym": True, "to_quant_block_names": None, "train_bs": 8, "true_sequential": False},
    },
}


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read(config: dict[str, object], tmp_path: Path) -> None:
    made = Made()
    checkpoint = open_checkpoint(_folder(tmp_path, made.tensors, config))
    assert torch.equal(_values(checkpoint.read(NAME)), made.expected)


def test_more_patterns_than_any_model_has_are_refused(tmp_path: Path) -> None:
    made = Made()
    config = made.config(dynamic={f"+:{n}": {} for n in range(257)})
    with pytest.raises(ModelFileError, match="dynamic is '257 patterns, over 256'"):
        open_checkpoint(_folder(tmp_path, made.tensors, config))
