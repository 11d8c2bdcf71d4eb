"""One child process that answers requests within bounds of time and memory, or is killed.

Requests and answers are JSON objects, each behind its length as four bytes. The child gets no
environment, no terminal and no signals of ours. It lives on between requests; after a broken bound
the next request starts a new one.
"""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from llmrun.errors import InternalError
from llmrun.text.limits import MIB, RenderLimits

_POLL_SECONDS = 0.05
# JSON may write a byte of text as up to six characters.
_JSON_GROWTH = 6


class OutOfBoundsError(Exception):
    """The child was stopped or died; the message says which bound it broke."""


def write_frame(stream: IO[bytes], value: Mapping[str, object]) -> None:
    """Writes one JSON object behind its length."""
    data = json.dumps(value).encode("ascii")
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def read_frame(stream: IO[bytes], limit: int = 2**32 - 1) -> dict[str, object] | None:
    """Reads one JSON object; None at the end of the stream or past ``limit`` bytes."""
    head = stream.read(4)
    length = int.from_bytes(head, "big")
    if len(head) < 4 or length > limit:
        return None
    data = stream.read(length)
    if len(data) < length:
        return None
    value = json.loads(data)
    return value if isinstance(value, dict) else None


class RenderProcess:
    """Runs ``arguments`` with this Python in isolated mode (``-I``)."""

    def __init__(self, arguments: Sequence[str], limits: RenderLimits) -> None:
        self._command = [sys.executable, "-I", *arguments]
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._memory_limit = 0
        self._frame_limit = MIB

    def start(self) -> None:
        """Starts the child if there is none; returns at once."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._memory_limit = 0
        self._answers = queue.SimpleQueue()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Nothing of ours to read there; Windows cannot start Python without this one.
            env={"SYSTEMROOT": r"C:\Windows"} if sys.platform == "win32" else {},
            start_new_session=True,  # Ctrl-C stops an answer, not this process
        )
        arguments = (self._process, self._answers)
        threading.Thread(target=self._read_answers, args=arguments, daemon=True).start()

    def ask(self, request: Mapping[str, object], output_bytes: int) -> dict[str, object]:
        """Sends ``request`` and returns the answer, of at most ``output_bytes`` bytes of text.

        OutOfBoundsError past the limits, InternalError if it cannot start; it is dead then.
        """
        self.start()
        process = self._process
        assert process is not None
        self._frame_limit = output_bytes * _JSON_GROWTH + MIB
        if not self._memory_limit:
            self._await_ready(process)
            self._memory_limit = _resident_bytes(process.pid) + self._limits.memory_bytes
        threading.Thread(target=_send, args=(process, request), daemon=True).start()
        return self._receive(process, self._limits.seconds)

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        try:
            self._receive(process, self._limits.startup_seconds)
        except OutOfBoundsError as error:
            raise InternalError(
                f"The process that renders chat templates did not start: {error}.",
                "Check that llmrun is installed in the Python that runs it (llmrun doctor).",
            ) from error

    def close(self) -> None:
        """Ends the child."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            with suppress(OSError):  # closing flushes, and nobody reads any more
                process.stdin.close()

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, object]:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self.close()
                raise OutOfBoundsError(f"it did not end within {seconds:g} s")
            try:
                answer = self._answers.get(timeout=min(_POLL_SECONDS, left))
            except queue.Empty:
                if self._memory_limit and _resident_bytes(process.pid) > self._memory_limit:
                    self.close()
                    raise OutOfBoundsError(memory_reason(self._limits)) from None
                continue
            if answer is None:
                self.close()
                raise OutOfBoundsError(f"its process ended by itself (status {process.returncode})")
            return answer

    def _read_answers(
        self,
        process: subprocess.Popen[bytes],
        answers: "queue.SimpleQueue[dict[str, object] | None]",
    ) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            while (answer := read_frame(stream, self._frame_limit)) is not None:
                answers.put(answer)
        answers.put(None)


def memory_reason(limits: RenderLimits) -> str:
    """The words for a broken memory bound."""
    return f"it needed more than {limits.memory_bytes // MIB} MiB of memory"


def _send(process: subprocess.Popen[bytes], request: Mapping[str, object]) -> None:
    assert process.stdin is not None
    try:
        write_frame(process.stdin, request)
    except (OSError, ValueError):
        return  # the child is gone; the reader reports it


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process, 0 if it is gone."""
    if sys.platform == "win32":
        return 0
    if sys.platform == "linux":
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return 0
        kib = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    else:
        listing = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        kib = listing.stdout.split()
    return int(kib[0]) * 1024 if kib else 0
