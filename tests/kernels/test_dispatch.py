"""Binding a device to a backend, with reasons."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from llmrun.errors import UnavailableError
from llmrun.kernels import dispatch
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.ops import OPS, BackendInfo, CpuOptions
from llmrun.kernels.reference import BACKEND as REFERENCE


def backend(name: str, why_not: str | None = None) -> BackendInfo:
    """A backend that creates its own name."""
    return BackendInfo(name, lambda device: why_not, lambda op, kind: None, lambda *_: name)  # type: ignore[arg-type,return-value]


class Room:
    """Backends in place of those of this machine; ``imported``: those that were, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, BackendInfo] = {}
        self.imported: list[str] = []

    def add(self, name: str, info: BackendInfo) -> None:
        (self.folder / f"{name}.py").touch()
        self.found[name] = info

    def import_module(self, name: str) -> SimpleNamespace:
        last = name.rpartition(".")[2]
        self.imported.append(last)
        return SimpleNamespace(BACKEND=self.found[last])


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    made = Room(tmp_path)
    monkeypatch.setattr(dispatch.room, "__path__", [str(tmp_path)])
    monkeypatch.setattr(dispatch, "import_module", made.import_module)
    return made


def test_the_cpu_is_always_served() -> None:
    first = next(c for c in dispatch.candidates("cpu") if c.reason is None)
    bound = dispatch.bind("cpu", threads=1)
    assert (bound.name, bound.device, bound.threads) == (first.info.name, "cpu", 1)
    rows = list(dispatch.table("cpu"))
    assert {row.op for row in rows} == set(OPS)
    assert all(row.backend for row in rows)


@pytest.mark.parametrize("device", ["mps", "tpu", "cuda:x", "cuda:99"])
def test_an_unusable_device_is_refused_with_every_reason(device: str) -> None:
    reasons = [candidate.reason or "" for candidate in dispatch.candidates(device)]
    assert all(reasons)
    with pytest.raises(UnavailableError) as refused:
        dispatch.bind(device, threads=1)
    assert all(reason in str(refused.value) for reason in reasons)
    assert "--device cpu" in refused.value.next_step
    assert all(reason in str(dispatch.problem(device)) for reason in reasons)
    assert dispatch.problem("cpu") is None


def test_auto_takes_what_this_machine_has() -> None:
    usable = any(candidate.reason is None for candidate in dispatch.candidates("cuda"))
    assert dispatch.choose_device("auto") == ("cuda" if usable else "cpu")
    assert dispatch.choose_device("cuda:1") == "cuda:1"


def test_backends_come_in_order_of_preference(room: Room) -> None:
    for name in ("zebra", "abacus", *reversed(dispatch.PREFERENCE)):
        room.add(name, backend(name))
    names = [info.name for info in dispatch.backends()]
    assert names == [*dispatch.PREFERENCE, "abacus", "zebra"]


def test_what_stands_behind_the_bound_one_is_not_imported(room: Room) -> None:
    first, second = dispatch.PREFERENCE[:2]
    room.add(first, backend(first))
    room.add(second, backend(second))
    assert dispatch.bind("cpu", 1) == first
    assert dispatch.problem("cpu") is None
    assert set(room.imported) == {first}
    room.add(first, backend(first, "broken"))
    assert dispatch.bind("cpu", 1) == second


def test_two_backends_of_one_name_are_an_error(room: Room) -> None:
    for name in ("one", "two"):
        room.add(name, backend("same"))
    with pytest.raises(ValueError, match="same name"):
        dispatch.backends()


@pytest.mark.parametrize(("driver", "device"), [(False, "cpu"), (True, "cuda")])
def test_without_a_driver_auto_asks_nobody(
    driver: bool, device: str, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.add("reference", backend("reference"))
    monkeypatch.setattr(dispatch, "has_nvidia_driver", lambda: driver)
    assert dispatch.choose_device("auto") == device
    assert room.imported == (["reference"] if driver else [])


def test_an_instruction_set_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(UnavailableError) as refused:
        dispatch.bind("cpu", 1, CpuOptions(isa="abacus"))
    assert "'abacus'" in refused.value.what
    assert "--cpu-isa" in refused.value.next_step
    assert refused.value.exit_code == 9


def test_a_chosen_instruction_set_is_used() -> None:
    if (reason := problem()) is not None:
        pytest.skip(f"no native library: {reason}")
    bound = dispatch.bind("cpu", 1, CpuOptions(decode_threads=1, isa="base", huge_pages=False))
    assert bound.isa == "base"
    with pytest.raises(UnavailableError) as refused:
        dispatch.bind("cpu", 1, CpuOptions(isa="abacus"))
    assert "base" in refused.value.next_step


def test_torch_chooses_its_instruction_set_itself() -> None:
    with pytest.raises(UnavailableError, match="torch"):
        REFERENCE.create("cpu", 1, CpuOptions(isa="avx2"))
