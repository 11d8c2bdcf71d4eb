"""Binding a device to a backend, with reasons."""

import pytest

from llmrun.errors import UnavailableError
from llmrun.kernels import dispatch
from llmrun.kernels.ops import OPS


def test_the_cpu_is_always_served() -> None:
    backend = dispatch.bind("cpu", threads=1)
    assert (backend.name, backend.device, backend.threads) == ("reference", "cpu", 1)
    rows = list(dispatch.table("cpu"))
    assert {row.op for row in rows} == set(OPS)
    assert all(row.backend == "reference" for row in rows)


@pytest.mark.parametrize("device", ["mps", "tpu", "cuda:x", "cuda:99"])
def test_an_unusable_device_is_refused_with_the_reason(device: str) -> None:
    (candidate,) = dispatch.candidates(device)
    assert candidate.reason
    with pytest.raises(UnavailableError) as refused:
        dispatch.bind(device, threads=1)
    assert candidate.reason in str(refused.value)
    assert "--device cpu" in refused.value.next_step
    assert candidate.reason in str(dispatch.problem(device))
    assert dispatch.problem("cpu") is None


def test_auto_takes_what_this_machine_has() -> None:
    usable = dispatch.candidates("cuda")[0].reason is None
    assert dispatch.choose_device("auto") == ("cuda" if usable else "cpu")
    assert dispatch.choose_device("cuda:1") == "cuda:1"
