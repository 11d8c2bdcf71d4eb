"""bitsandbytes' operators, which have bodies for the CPU too, beside the reference."""

import pytest
import torch

from llmrun.errors import UnavailableError
from llmrun.kernels import bnb, bnb_cuda, cuda, dispatch
from llmrun.kernels.bnb_cuda.backend import BnbBackend, BnbWeight, table_of
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import CpuOptions, Linear, Span
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.quant.scheme import find

TOLERANCE = 1e-5


def form_of(scheme: str, n: int, k: int) -> Form:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 0.05
    return find(scheme).quantize(to_host(weight.bfloat16()))


def close(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((ours - wanted).norm() / wanted.norm()) < TOLERANCE


@pytest.mark.parametrize("m", [1, 2, 33])
@pytest.mark.parametrize(
    ("scheme", "k"), [("nf4", 256), ("fp4", 192), ("nf4", 96), ("nf4-dq", 128)]
)
def test_products_are_those_of_the_reference(scheme: str, k: int, m: int) -> None:
    form = form_of(scheme, 48, k)
    results = []
    for backend in (TorchBackend("cpu", 1), BnbBackend("cpu", 1)):
        weight = backend.weight(form)
        x, y = backend.empty((m, k)), backend.empty((m, 48))
        backend.load(x, to_host(torch.randn(m, k, generator=torch.Generator().manual_seed(1))))
        step = backend.step(m)
        step.set(list(range(m)), [Span(0, 0, m, 0)], [])
        backend.norm_linear(step, x, None, [Linear(weight)], y)
        results.append(as_tensor(backend.to_host(y, m)).clone())
    assert isinstance(weight, BnbWeight)
    assert weight.nbytes == form.shape[0] * form.shape[1] // 2 + form.scales.nbytes  # type: ignore[union-attr]
    assert close(results[1], results[0])


@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_rows_are_looked_up(scheme: str) -> None:
    form, index = form_of(scheme, 40, 128), torch.tensor([39, 0, 7, 7])
    rows = [
        backend.weight(form).gather_rows(index, torch.empty(4, 128))
        for backend in (TorchBackend("cpu", 1), BnbBackend("cpu", 1))
    ]
    assert torch.equal(*rows)


@pytest.mark.parametrize("scheme", ["int4", "int8", "nl4", "bnb-int8"])
def test_other_forms_are_left_to_the_reference(scheme: str) -> None:
    form = form_of(scheme, 32, 128)
    assert table_of(form) is None
    assert not isinstance(BnbBackend("cpu", 1).weight(form), BnbWeight)


def test_it_serves_gpus_that_ours_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NVIDIA GPUs only" in str(bnb_cuda.BACKEND.available("cpu"))
    asked: list[tuple[str, tuple[int, int] | None]] = []

    def why_not(device: str, least: tuple[int, int] | None = None) -> str | None:
        asked.append((device, least))
        return None

    monkeypatch.setattr(bnb_cuda, "why_not", why_not)
    monkeypatch.setattr(bnb, "unavailable_on_gpu", lambda: "no library")
    assert bnb_cuda.BACKEND.available("cuda:1") == "no library"
    assert asked == [("cuda:1", (7, 5))]
    assert bnb_cuda.LEAST < cuda.KERNELS_NEED
    order = dispatch.PREFERENCE
    assert order.index("gpu") < order.index("bnb_cuda") < order.index("reference")


def test_without_a_library_for_cuda_that_is_the_reason() -> None:
    reason = bnb.unavailable_on_gpu()
    if torch.version.cuda is None:
        assert reason == "bitsandbytes has no library for this version of CUDA"
    else:
        assert reason is None


def test_an_instruction_set_is_refused() -> None:
    with pytest.raises(UnavailableError):
        bnb_cuda.BACKEND.create("cuda", 1, CpuOptions(isa="avx2"))
