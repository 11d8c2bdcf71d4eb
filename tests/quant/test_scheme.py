"""Every scheme that is found: sizes, error, extremes, determinism; and the finding itself."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llmrun.quant
from llmrun.errors import InternalError, ModelFileError, UnavailableError
from llmrun.kernels.forms import ROW, Form, bits_per_weight, nbytes
from llmrun.kernels.host import DType
from llmrun.kernels.reference.arrays import to_host
from llmrun.quant.scheme import Scheme, find, fitting_group, schemes

NAMES = tuple(schemes())
FLOATS = (DType.BF16, DType.F16, DType.F32)
OF_BITSANDBYTES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "bnb-int8")
OF_ROWS = ("bnb-int8",)
ALONE = tuple(name for name in NAMES if not name.endswith("-dq"))
"""Schemes that quantize each row as if it were alone: nested scales depend on all blocks."""

# Relative MSE in percent on Gaussian data: the gates of int8 and int4, 2 % above the simulated
# figures for the others.
CEILINGS = {
    "int8": 0.0045,
    "int4": 0.72,
    "int4-g64": 0.874 * 1.02,
    "int4-g128": 1.04 * 1.02,
    "int4-asym": 0.64,
    "nl4": 0.545,
    "nf4": 0.845 * 1.02,
    "nf4-dq": 0.845 * 1.02,
    "fp4": 1.489 * 1.02,
    "fp4-dq": 1.489 * 1.02,
    "bnb-int8": 0.0065,
}


def parts(form: Form) -> list[bytes]:
    return [bytes(array.data) for array in form.arrays.values()]


def test_the_known_schemes_are_found() -> None:
    assert set(NAMES) >= set(CEILINGS)


@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_describes_itself(name: str) -> None:
    scheme = find(name)
    assert scheme.name == name
    assert scheme.summary
    assert scheme.group in ((ROW,) if name in OF_ROWS else (32, 64, 128))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_relative_mse_on_gaussian_data(
    name: str, dtype: DType, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    host = oracle.make(gaussian(256, 1024), dtype)
    weights = oracle.read(host)
    error = oracle.decode(find(name).quantize(host)) - weights
    relative = 100 * np.square(error).sum() / np.square(weights).sum()
    assert 0 < relative <= CEILINGS.get(name, 2.0)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    n=st.integers(1, 65),
    chunks=st.integers(1, 16),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**16),
)
def test_q014_claimed_bits_equal_counted_bytes(
    name: str,
    n: int,
    chunks: int,
    dtype: DType,
    seed: int,
    oracle: SimpleNamespace,
    gaussian: Callable[..., np.ndarray],
) -> None:
    scheme, k = find(name), 32 * chunks
    host = oracle.make(gaussian(n, k, seed), dtype)
    form = scheme.quantize(host)
    assert form.shape == (n, k)
    assert form.group == fitting_group(scheme.group, k)
    claimed = scheme.bits_per_weight((n, k), dtype)
    assert bits_per_weight(form) == pytest.approx(claimed, rel=1e-12)
    assert nbytes(form) == sum(array.nbytes for array in form.arrays.values())
    restored = oracle.decode(form)
    assert np.isfinite(restored).all()
    # One group's largest magnitude bounds every error in it, for every scheme.
    group = form.group or k
    limit = np.abs(oracle.read(host)).reshape(n, -1, group).max(axis=2)
    error = np.abs(restored - oracle.read(host)).reshape(n, -1, group).max(axis=2)
    assert (error <= 0.31 * limit).all()


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([name for name in NAMES if name not in OF_ROWS]),
    k=st.integers(1, 513).filter(lambda k: k % 32),
)
def test_a_width_no_group_divides_is_refused(
    name: str, k: int, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    with pytest.raises(ValueError, match=f"divides {k}"):
        find(name).quantize(oracle.make(gaussian(2, k)))
    with pytest.raises(ValueError, match=f"divides {k}"):
        find(name).bits_per_weight((2, k))


def extremes() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((3, 128))
    outlier = 1e-3 * noise
    outlier[1, 70] = 50.0
    mixed = noise.copy()
    mixed[0, :64], mixed[1], mixed[2, 64:] = 0.0, 1e-7 * mixed[1], 6e4 * np.sign(mixed[2, 64:])
    return {
        "zeros": np.zeros((3, 128)),
        "negative zeros": -np.zeros((3, 128)),
        "constant": np.full((3, 128), 0.37),
        "negative constant": np.full((3, 128), -1.5),
        "one outlier": outlier,
        "zero, tiny and large groups": mixed,
        "f32 subnormals": 1e-41 * noise,
        "f32 edge of normal": 1.2e-38 * noise,
        "1e-11": 1e-11 * noise,
        "1e-30": 1e-30 * noise,
        "1e25": 1e25 * noise,
        "largest bf16": 3.38e38 * np.sign(noise),
        "f16 subnormals": 6e-8 * noise,
        "largest f16": 65504 * np.sign(noise),
    }


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", extremes())
@pytest.mark.parametrize("name", NAMES)
def test_q011_r106_r107_extremes_stay_finite(
    name: str, case: str, dtype: DType, oracle: SimpleNamespace
) -> None:
    values = extremes()[case].astype(np.float32)
    if dtype is DType.F16:
        values = np.clip(values, -65504, 65504)
    host = oracle.make(values, dtype)
    weights = oracle.read(host)
    largest = {"bnb-int8": 65504}.get(name, 1e38 if name.endswith("-dq") else np.inf)
    if np.abs(weights).max() > largest:
        with pytest.raises(ModelFileError, match="too large"):
            find(name).quantize(host)
        return
    form = find(name).quantize(host)
    scale = oracle.spread(form.scales, 128)
    restored = oracle.decode(form)
    assert np.isfinite(scale).all()
    assert (scale != 0).all()
    assert np.isfinite(restored).all()
    assert (restored[weights == 0] == 0).all()
    # Not worse than a quantizer that gives zero, except by the rounding of a subnormal scale.
    assert (np.abs(restored - weights) <= np.abs(weights) + np.abs(scale)).all()


@pytest.mark.parametrize("name", ALONE)
def test_q011_r106_a_zero_row_leaves_its_neighbours_alone(
    name: str, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    values = gaussian(4, 256)
    values[2] = 0
    form = find(name).quantize(oracle.make(values, DType.BF16))
    restored = oracle.decode(form)
    assert (restored[2] == 0).all()
    alone = find(name).quantize(oracle.make(values[3:], DType.BF16))
    assert (restored[3] == oracle.decode(alone)[0]).all()


@pytest.mark.parametrize("name", NAMES)
def test_q026_r104_the_next_smaller_group_is_used(
    name: str, oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    scheme = find(name)
    for k, fitting in ((4288, 64), (4320, 32)):
        form = scheme.quantize(oracle.make(gaussian(1, k), DType.BF16))
        assert form.group == (ROW if name in OF_ROWS else min(fitting, scheme.group))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_q012_a_weight_that_is_not_finite_is_named(
    name: str, dtype: DType, bad: float, oracle: SimpleNamespace
) -> None:
    values = np.ones((5, 384), np.float32)
    host = oracle.make(values, dtype)
    bits = {DType.F32: np.uint32}.get(dtype, np.uint16)
    raw = {
        DType.F32: np.float32(bad).view(np.uint32),
        DType.F16: np.float16(bad).view(np.uint16),
        DType.BF16: np.float32(bad).view(np.uint32) >> 16,
    }[dtype]
    np.frombuffer(host.data, bits)[3 * 384 + 200] = raw
    with pytest.raises(ModelFileError, match=r"\[3, 200\]"):
        find(name).quantize(host)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_same_bytes_for_any_number_of_threads(
    name: str,
    dtype: DType,
    oracle: SimpleNamespace,
    gaussian: Callable[..., np.ndarray],
    torch_threads: Callable[[int], None],
) -> None:
    host = oracle.make(gaussian(700, 640), dtype)  # 448,000 weights: several blocks, a short one
    results = []
    for threads in (1, 2, 4):  # from four on, blocks are shared
        torch_threads(threads)
        results.append(parts(find(name).quantize(host)))
        assert torch.get_num_threads() == threads
    assert results[0] == results[1] == results[2]


def test_rows_are_independent(oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]) -> None:
    values = gaussian(6, 256)
    for name in ALONE:
        whole = oracle.decode(find(name).quantize(oracle.make(values)))
        for row in (0, 5):
            one = oracle.decode(find(name).quantize(oracle.make(values[row : row + 1])))
            assert (one[0] == whole[row]).all()


def test_q013_scales_keep_the_weights_type(
    oracle: SimpleNamespace, gaussian: Callable[..., np.ndarray]
) -> None:
    for name in NAMES:
        for dtype in FLOATS:
            form = find(name).quantize(oracle.make(gaussian(2, 128), dtype))
            assert form.scales.dtype is (DType.F32 if name in OF_BITSANDBYTES else dtype)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnavailableError) as caught:
        find("int3")
    assert "int3" in caught.value.what
    assert all(name in caught.value.next_step for name in NAMES)


def test_a_name_taken_twice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "impostor.py").write_text("from llmrun.quant.int8 import SCHEME\n")
    monkeypatch.setattr(llmrun.quant, "__path__", [*llmrun.quant.__path__, str(tmp_path)])
    try:
        with pytest.raises(InternalError, match=r"int8 is defined twice"):
            schemes()
    finally:
        sys.modules.pop("llmrun.quant.impostor", None)


def test_a_dropped_in_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "newcomer.py").write_text(
        "import dataclasses\nfrom llmrun.quant import int8\n"
        "SCHEME = dataclasses.replace(int8.SCHEME, name='int8-new')\n"
    )
    monkeypatch.setattr(llmrun.quant, "__path__", [*llmrun.quant.__path__, str(tmp_path)])
    try:
        assert find("int8-new").group == 128
    finally:
        sys.modules.pop("llmrun.quant.newcomer", None)


@pytest.mark.slow
def test_finding_schemes_imports_nothing_heavy() -> None:
    code = (
        "import sys; from llmrun.quant.scheme import schemes; schemes();"
        "import llmrun.quant.recipe, llmrun.quant.audit, llmrun.quant.dequantize;"
        "print(sorted({'torch', 'numpy', 'bitsandbytes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("scheme", schemes().values(), ids=list(schemes()))
@pytest.mark.parametrize("k", [64, 96, 128, 576])
def test_kind_is_that_of_the_form_made(scheme: Scheme, k: int) -> None:
    host = to_host(torch.randn(3, k, generator=torch.Generator().manual_seed(k)).bfloat16())
    assert scheme.kind((3, k)) == scheme.quantize(host).kind
