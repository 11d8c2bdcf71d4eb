"""Who is quantized, who is not, and that every reason is said before work begins."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from llmrun.errors import InternalError, ModelFileError
from llmrun.kernels.forms import Dense, GroupInt
from llmrun.kernels.host import DType
from llmrun.quant.mixing import Unit
from llmrun.quant.recipe import Planned, apply, plan
from llmrun.quant.roles import QUANTIZED_ROLES, Role
from llmrun.quant.scheme import Scheme, find, schemes

MATRIX = (256, 512)


def plan_one(
    scheme: Scheme | None,
    role: Role,
    shape: tuple[int, ...] = MATRIX,
    kind: str = "BF16",
    resident: bool = True,
) -> Planned:
    return plan(scheme, {"x": (role, shape, kind)}, resident=resident)["x"]


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("name", schemes())
@pytest.mark.parametrize("role", Role)
def test_roles_decide(role: Role, name: str, resident: bool) -> None:
    planned = plan_one(find(name), role, resident=resident)
    if role in QUANTIZED_ROLES:
        assert planned.scheme == name
    elif role in (Role.EMBEDDING, Role.HEAD) and resident:
        assert planned.scheme == "int8"
    else:
        assert planned.scheme is None
        assert str(role) in planned.reason


def test_five_roles_are_quantized() -> None:
    assert [str(role) for role in QUANTIZED_ROLES] == [
        "attn_qkv",
        "attn_out",
        "gate_up",
        "down",
        "experts",
    ]


@pytest.mark.parametrize(
    ("name", "k", "group"),
    [
        ("int4-g128", 512, "128"),
        ("int4-g128", 576, "64"),
        ("int4-g128", 96, "32"),
        ("int8", 576, "64"),
        ("nf4", 96, "32"),
        ("int4", 96, "32"),
    ],
)
def test_r104_group_fallback_is_planned(name: str, k: int, group: str) -> None:
    planned = plan_one(find(name), Role.DOWN, (8, k))
    assert planned.scheme == name
    assert f"groups of {group}" in planned.reason


@pytest.mark.parametrize("name", [name for name, scheme in schemes().items() if scheme.group])
@pytest.mark.parametrize("k", [4304, 100, 31])
def test_r104_width_no_group_divides_stays_dense_and_is_named(name: str, k: int) -> None:
    planned = plan_one(find(name), Role.DOWN, (8, k))
    assert planned.scheme is None
    assert str(k) in planned.reason


def test_a_scale_per_row_fits_every_width() -> None:
    planned = plan_one(find("bnb-int8"), Role.DOWN, (8, 31))
    assert planned == Planned("bnb-int8", "bnb-int8 with a scale per row")


def test_resident_embedding_takes_the_largest_group_that_divides() -> None:
    assert "groups of 64" in plan_one(find("int4"), Role.EMBEDDING, (1000, 576)).reason
    assert plan_one(find("int4"), Role.HEAD, (1000, 72)).scheme is None


@pytest.mark.parametrize("kind", ["Q4_1", "int4 g32", "Q6_K", "lut4 g64", "F64"])
@pytest.mark.parametrize("role", [Role.DOWN, Role.EMBEDDING])
def test_a_quantized_weight_is_kept_and_says_so(role: Role, kind: str) -> None:
    planned = plan_one(find("int8"), role, kind=kind)
    assert planned.scheme is None
    assert kind in planned.reason


@pytest.mark.parametrize("kind", ["BF16", "bf16", "F16", "f32"])
def test_dense_kinds_in_either_spelling(kind: str) -> None:
    assert plan_one(find("int4"), Role.DOWN, kind=kind).scheme == "int4"


@pytest.mark.parametrize("role", Role)
def test_no_scheme_keeps_everything(role: Role) -> None:
    assert plan_one(None, role).scheme is None


def test_a_stack_of_matrices_is_not_quantized_silently() -> None:
    planned = plan_one(find("int4"), Role.EXPERTS, (4, 256, 512))
    assert planned.scheme is None
    assert "4 x 256 x 512" in planned.reason


def test_apply_gives_the_planned_form(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    dense = Dense(oracle.make(gaussian(4, 64), DType.BF16))
    form = apply(Planned("int4", ""), "x", dense)
    assert isinstance(form, GroupInt)
    assert form.kind == "int4 g32"
    assert apply(Planned(None, ""), "x", dense) is dense


def test_apply_names_the_tensor_that_is_not_finite(oracle: SimpleNamespace) -> None:
    values = np.zeros((2, 64), np.float32)
    values[1, 7] = np.nan
    with pytest.raises(ModelFileError, match=r"^model\.x\.weight: .*\[1, 7\]"):
        apply(Planned("int8", ""), "model.x.weight", Dense(oracle.make(values)))


def test_apply_refuses_to_quantize_twice(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    form = apply(Planned("int8", ""), "x", Dense(oracle.make(gaussian(4, 64))))
    with pytest.raises(InternalError, match="x: planned to become int4"):
        apply(Planned("int4", ""), "x", form)


def test_widened_units_get_eight_bits_and_no_others() -> None:
    names = {
        "model.layers.0.mlp.down_proj.weight": Role.DOWN,
        "model.layers.1.mlp.down_proj.weight": Role.DOWN,
        "model.layers.1.self_attn.q_proj.weight": Role.ATTN_QKV,
        "model.layers.1.self_attn.v_proj.weight": Role.ATTN_QKV,
    }
    weights = {name: (role, MATRIX, "BF16") for name, role in names.items()}
    widened = {Unit(0, Role.DOWN), Unit(1, Role.ATTN_QKV)}
    planned = plan(find("int4"), weights, resident=False, widened=widened)
    assert [planned[name].scheme for name in names] == ["int8", "int4", "int8", "int8"]
