"""Coverage is counted from arrays, and a model that stayed large is refused."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from llmrun.errors import UnavailableError
from llmrun.kernels.forms import Dense, GroupInt
from llmrun.kernels.host import DType, empty
from llmrun.quant.audit import CoverageBuilder
from llmrun.quant.mixing import Unit
from llmrun.quant.recipe import Planned, apply, plan
from llmrun.quant.roles import Role
from llmrun.quant.scheme import find, schemes


def dense(*shape: int, dtype: DType = DType.BF16) -> Dense:
    return Dense(empty(dtype, shape))


def audited(
    name: str, weights: dict[str, tuple[Role, Dense]], *, resident: bool = True
) -> CoverageBuilder:
    scheme = find(name)
    headers = {key: (role, form.shape, form.kind) for key, (role, form) in weights.items()}
    planned = plan(scheme, headers, resident=resident)
    builder = CoverageBuilder(scheme)
    for key, (role, form) in weights.items():
        builder.add(key, role, apply(planned[key], key, form), planned[key])
    return builder


MODEL = {
    "embed": (Role.EMBEDDING, dense(100, 128)),
    "q": (Role.ATTN_QKV, dense(128, 128)),
    "down": (Role.DOWN, dense(128, 256)),
    "norm": (Role.NORM, dense(128)),
}


def test_sums_per_role_and_in_all() -> None:
    coverage = audited("int4", MODEL).finish()
    assert list(coverage.roles) == [Role.ATTN_QKV, Role.DOWN, Role.EMBEDDING, Role.NORM]
    assert coverage.roles[Role.DOWN].bits_per_weight == 4.5
    assert coverage.roles[Role.EMBEDDING].bits_per_weight == 8.125
    assert coverage.roles[Role.NORM].nbytes == 256
    total = 128 * 128 * 4.5 + 128 * 256 * 4.5 + 12800 * 8.125 + 128 * 16
    assert coverage.total.tensors == 4
    assert coverage.total.bits_per_weight == total / (128 * 128 + 128 * 256 + 12800 + 128)
    assert coverage.kinds == {"bf16": 1, "int4 g32": 2, "int8 g128": 1}
    assert coverage.unquantized == ()
    assert (coverage.requested_bits, coverage.actual_bits) == (4.5, 4.5)
    assert not coverage.partial


def test_the_embedding_on_disk_is_listed_but_no_failure() -> None:
    coverage = audited("int4", MODEL, resident=False).finish()
    (left,) = coverage.unquantized
    assert (left.name, left.role, left.kind) == ("embed", Role.EMBEDDING, "bf16")
    assert "on disk" in left.reason


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("k", [512, 576, 96])
@pytest.mark.parametrize("name", schemes())
def test_a_group_fallback_alone_passes(name: str, k: int, dtype: DType) -> None:
    coverage = audited(name, {"x": (Role.DOWN, dense(64, k, dtype=dtype))}).finish()
    assert coverage.actual_bits == pytest.approx(coverage.requested_bits)


@pytest.mark.parametrize("widened", [(), (Unit(0, Role.DOWN),)])
@pytest.mark.parametrize("name", schemes())
def test_what_is_expected_from_headers_is_what_is_counted(
    name: str, widened: tuple[Unit, ...]
) -> None:
    weights = {
        "layers.0.q": (Role.ATTN_QKV, dense(64, 96)),
        "layers.0.down": (Role.DOWN, dense(64, 512, dtype=DType.F32)),
        "layers.0.odd": (Role.GATE_UP, dense(2, 40)),
    }
    headers = {key: (role, form.shape, form.kind) for key, (role, form) in weights.items()}
    planned = plan(find(name), headers, resident=True, widened=widened)
    before, after = CoverageBuilder(find(name)), CoverageBuilder(find(name))
    for key, (role, form) in weights.items():
        before.expect(key, role, form.shape, form.kind, planned[key])
        after.add(key, role, apply(planned[key], key, form), planned[key])
    expected, counted = (b.finish(allow_partial=True) for b in (before, after))
    assert expected.requested_bits == pytest.approx(counted.requested_bits, rel=1e-3)
    assert expected.actual_bits == pytest.approx(counted.actual_bits, rel=1e-3)


@pytest.mark.parametrize("name", [name for name, scheme in schemes().items() if scheme.group])
def test_r104_a_dense_fallback_is_an_offender(name: str) -> None:
    builder = audited(
        name,
        {
            "layers.0.down": (Role.DOWN, dense(64, 4304)),
            "layers.0.q": (Role.ATTN_QKV, dense(64, 512)),
        },
    )
    with pytest.raises(UnavailableError) as caught:
        builder.finish()
    assert "layers.0.down" in caught.value.what
    assert "4304" in caught.value.what
    assert "layers.0.q" not in caught.value.what
    assert "--allow-partial" in caught.value.next_step
    coverage = builder.finish(allow_partial=True)
    assert coverage.partial
    assert coverage.actual_bits > 1.1 * coverage.requested_bits


def test_a_small_dense_share_passes_and_is_listed() -> None:
    weights = {f"big{i}": (Role.DOWN, dense(128, 512)) for i in range(4)}
    weights["odd"] = (Role.GATE_UP, dense(16, 100))
    coverage = audited("int8", weights).finish()
    assert [left.name for left in coverage.unquantized] == ["odd"]
    assert coverage.requested_bits < coverage.actual_bits <= 1.1 * coverage.requested_bits


def test_a_weight_left_dense_against_the_plan_is_refused() -> None:
    builder = CoverageBuilder(find("int4"))
    builder.add("experts", Role.EXPERTS, dense(8, 128, 256), Planned("int4", "groups of 32"))
    with pytest.raises(UnavailableError, match="experts"):
        builder.finish()


def test_the_largest_offenders_are_named_first_and_counted() -> None:
    weights = {f"w{i}": (Role.DOWN, dense(i + 1, 100)) for i in range(8)}
    with pytest.raises(UnavailableError) as caught:
        audited("int4", weights).finish()
    what = caught.value.what
    assert what.index("w7") < what.index("w6") < what.index("w3")
    assert "w2" not in what
    assert "3 more" in what


def test_a_weight_kept_as_the_file_has_it_is_no_offender(oracle: SimpleNamespace) -> None:
    codes, scales = empty(DType.U8, (8, 64)), empty(DType.F16, (8, 2))
    kept = GroupInt(8, 32, codes, scales, None, (8, 64))
    builder = CoverageBuilder(find("int4"))
    builder.add("x", Role.DOWN, kept, Planned(None, "already stored as Q8_0"))
    coverage = builder.finish()
    assert coverage.actual_bits == coverage.requested_bits == 8.5


def test_no_scheme_counts_and_never_refuses() -> None:
    builder = CoverageBuilder(None)
    builder.add("x", Role.DOWN, dense(8, 64), Planned(None, "no scheme"))
    coverage = builder.finish()
    assert coverage.actual_bits == coverage.requested_bits == 16
    assert coverage.unquantized[0].reason == "no scheme"


def test_nothing_in_scope() -> None:
    assert CoverageBuilder(find("int4")).finish().total.parameters == 0


def test_counted_bytes_equal_numpy(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(3, 64), DType.BF16)
    coverage = audited("nf4", {"x": (Role.DOWN, Dense(host))}).finish()
    assert coverage.total.nbytes == 3 * 64 // 2 + 3 * np.float32().nbytes + 64


def test_a_mixed_recipe_is_held_against_its_own_bits() -> None:
    widened = {Unit(1, Role.DOWN)}
    weights = {
        f"model.layers.{layer}.mlp.down_proj.weight": (Role.DOWN, (128, 256), "bf16")
        for layer in range(2)
    }
    planned = plan(find("int4"), weights, resident=False, widened=widened)
    builder = CoverageBuilder(find("int4"))
    for name, (role, shape, _) in weights.items():
        builder.add(name, role, apply(planned[name], name, dense(*shape)), planned[name])
    coverage = builder.finish()
    assert coverage.requested_bits == coverage.actual_bits == (4.5 + 8.125) / 2
