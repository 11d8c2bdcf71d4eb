"""What loading starts first, and that nothing it started is left behind."""

from pathlib import Path
from typing import Any

import pytest

from llmrun.cli import assemble
from llmrun.cli.assemble import LoadOptions, load
from llmrun.cli.settings import read_settings
from llmrun.errors import UnavailableError
from llmrun.kernels.ops import CpuOptions
from llmrun.store.progress import SilentProgress
from llmrun.text.limits import RenderLimits


class Process:
    """A template's process that only notes what is done with it."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def start(self) -> None:
        self._done.append("start")

    def close(self) -> None:
        self._done.append("close")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened in order; loading ends where a backend would be bound."""
    happened: list[str] = []

    def renderer(limits: RenderLimits) -> Process:
        return Process(happened)

    def bind(device: str, threads: int, options: CpuOptions) -> None:
        happened.append("bind")
        raise UnavailableError("no such device")

    monkeypatch.setattr(assemble, "renderer", renderer)
    monkeypatch.setattr(assemble.dispatch, "bind", bind)
    return happened


@pytest.mark.parametrize(
    ("chat", "expected"), [(True, ["start", "bind", "close"]), (False, ["bind", "close"])]
)
def test_the_process_of_the_template_starts_first_and_ends_with_a_failure(
    chat: bool, expected: list[str], done: list[str], tmp_path: Path
) -> None:
    options = LoadOptions("smollm2-135m", device="cpu", chat=chat)
    with pytest.raises(UnavailableError):
        load(options, read_settings({}, home=tmp_path), SilentProgress())
    assert done == expected


def test_a_process_that_was_started_before_is_used_and_ended(
    done: list[str], tmp_path: Path
) -> None:
    given: Any = Process(done)
    with pytest.raises(UnavailableError):
        load(
            LoadOptions("smollm2-135m", device="cpu", chat=False),
            read_settings({}, home=tmp_path),
            SilentProgress(),
            given,
        )
    assert done == ["bind", "close"]


def test_what_was_asked_of_the_processor_reaches_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[object] = []

    def bind(*arguments: object) -> None:
        bound.extend(arguments)
        raise UnavailableError("enough")

    monkeypatch.setattr(assemble.dispatch, "bind", bind)
    options = LoadOptions(
        "smollm2-135m", device="cpu", threads=-1, threads_prefill=1, threads_decode=1,
        cpu_isa="base", huge_pages=False, chat=False,
    )  # fmt: skip
    with pytest.raises(UnavailableError):
        load(options, read_settings({}, home=tmp_path), SilentProgress())
    assert bound == ["cpu", 1, CpuOptions(decode_threads=1, isa="base", huge_pages=False)]
