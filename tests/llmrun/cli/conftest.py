"""A fake model behind the real commands: in this process, as a program, and in a terminal."""

import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from llmrun.cli import app, assemble

PROGRAM = Path(__file__).with_name("fake_program.py")
WORDS_OF_OURS = ("LLMRUN_", "HF_", "FAKE_", "XDG_")


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The module of the fake program."""
    spec = importlib.util.spec_from_file_location("fake_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment that knows nothing of whoever runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(WORDS_OF_OURS)}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        kept.pop(name, None)
    return {**kept, "HOME": str(tmp_path), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}


@pytest.fixture
def llmrun(
    fakes: ModuleType,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Command:
    """Run a command in this process; nothing is a terminal. ``env`` adds to the environment."""
    monkeypatch.setattr(assemble, "load", fakes.load)
    for name in list(os.environ):
        if name not in environment:
            monkeypatch.delenv(name)

    def run(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
        for name, value in {**environment, **(env or {})}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as left:
            app.main(list(arguments))
        out, err = capfdbinary.readouterr()
        return Result(int(left.value.code or 0), out.decode(), err.decode())

    return run


@pytest.fixture
def program(environment: dict[str, str]) -> Callable[..., subprocess.Popen[bytes]]:
    """Start the fake program with pipes; ``env`` adds to the environment."""

    def start(*arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, **(env or {})},
        )

    return start


class Window:
    """The fake program in a terminal of its own: what it wrote, and what a person sees."""

    def __init__(
        self, arguments: list[str], env: dict[str, str], columns: int = 80, lines: int = 24
    ) -> None:
        import pexpect
        import pyte

        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.child = pexpect.spawn(
            sys.executable,
            [str(PROGRAM), *arguments],
            env=env,
            dimensions=(lines, columns),
            timeout=20,
        )
        self.modes_before: list[object] | None = None

    def wait(self, text: str, timeout_s: float = 20) -> str:
        """Read until the screen shows ``text``; return the screen."""
        import time

        import pexpect

        end = time.monotonic() + timeout_s
        while text not in self.text():
            assert time.monotonic() < end, f"no {text!r} on the screen:\n{self.text()}"
            try:
                self._take(self.child.read_nonblocking(4096, timeout=0.1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert text in self.text(), f"it ended without {text!r}:\n{self.text()}"
        return self.text()

    def end(self) -> int:
        """Read to the end; return the exit code, negative for a signal."""
        import pexpect

        while True:
            try:
                self._take(self.child.read_nonblocking(4096, timeout=20))
            except pexpect.EOF:
                break
        self.child.close()
        code, signal = self.child.exitstatus, self.child.signalstatus
        return -signal if code is None else code

    def send(self, text: str) -> None:
        self.child.send(text)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def _take(self, data: bytes) -> None:
        self.raw += data
        self.stream.feed(data)


@pytest.fixture
def window(environment: dict[str, str]) -> Iterator[Callable[..., Window]]:
    """Open terminals; all are closed at the end."""
    opened: list[Window] = []

    def make(
        *arguments: str, env: dict[str, str] | None = None, columns: int = 80, lines: int = 24
    ) -> Window:
        opened.append(Window(list(arguments), {**environment, **(env or {})}, columns, lines))
        return opened[-1]

    yield make
    for one in opened:
        one.child.close(force=True)
