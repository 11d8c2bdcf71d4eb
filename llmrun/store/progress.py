"""How the store reports a long transfer; the cli draws it, tests count it."""

from typing import Protocol


class Progress(Protocol):
    """Receives one transfer at a time: start, any number of advances, finish."""

    def start(self, label: str, total_bytes: int | None, unit: str = "bytes") -> None:
        """Begin ``label``; the total is None where it cannot be known. Work that moves no bytes
        counts in a ``unit`` of its own."""

    def advance(self, n_bytes: int) -> None:
        """Count bytes now in the store; negative when bytes had to be thrown away."""

    def finish(self) -> None:
        """End the transfer, whether it succeeded or not."""


class SilentProgress:
    """Shows nothing."""

    def start(self, label: str, total_bytes: int | None, unit: str = "bytes") -> None:
        """Ignore the start."""

    def advance(self, n_bytes: int) -> None:
        """Ignore the bytes."""

    def finish(self) -> None:
        """Ignore the end."""
