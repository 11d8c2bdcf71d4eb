"""The chat with the real starter on a pseudo-terminal, as a person has it."""

import sys
import time
from pathlib import Path

import pexpect
import pytest
from pyte import HistoryScreen, Stream

pytestmark = pytest.mark.slow


class Person:
    """Types into a chat and looks at the screen."""

    def __init__(self, child: "pexpect.spawn[str]") -> None:
        self.child = child
        self.screen = HistoryScreen(100, 30, history=2000)
        self.stream = Stream(self.screen)
        self.raw = ""

    def look(self, wanted: str, seconds: float = 100) -> str:
        """Wait until the screen shows something; return all of it."""
        end = time.monotonic() + seconds
        while wanted not in "".join(self.screen.display):
            assert time.monotonic() < end, f"no {wanted!r} on:\n" + "\n".join(self.screen.display)
            try:
                piece = self.child.read_nonblocking(4096, timeout=0.2)
            except pexpect.TIMEOUT:
                continue
            self.raw += piece
            self.stream.feed(piece)
        return "".join(self.screen.display)

    def type(self, text: str) -> None:
        self.child.send(text + "\r")


def test_prompt_stream_live_line_ctrl_c_and_exit(
    home: dict[str, str], starter_gguf: Path, tmp_path: Path
) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "llmrun", "chat", str(starter_gguf), "--temperature", "0"],
        env=home | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"},
        dimensions=(30, 100),
        encoding="utf-8",
        cwd=str(tmp_path),
    )
    person = Person(child)
    person.look("/help lists the commands")
    person.type("What is the capital of France?")
    shown = person.look("tok/s · prefill")
    assert "Paris" in shown
    assert "TTFT" in shown
    person.type("Count from one to one hundred in words.")
    live = person.look("last ")  # the live line while the answer streams
    assert "ITL p50" in live
    assert "context" in live
    child.sendintr()
    person.look("interrupted")
    person.type("/exit")
    child.expect(pexpect.EOF, timeout=20)
    child.close()
    assert child.exitstatus == 0
    assert "Traceback" not in person.raw
    assert "Traceback" not in (child.before or "")
