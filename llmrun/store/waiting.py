"""What a process shows while another one makes the files it needs."""

from llmrun.store.claim import Claim
from llmrun.store.derived import bytes_below
from llmrun.store.progress import Progress


class Waiting:
    """Tells a Progress about the owner of a claim; ``total_bytes`` is what it will write."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._seen_bytes = 0
        self._shown = False

    def look(self, claim: Claim) -> None:
        """Report the bytes the owner of ``claim`` gained since the last look."""
        if not self._shown:
            self._progress.start(f"waiting for {claim.owner}", self._total_bytes)
            self._shown = True
        bytes_now = bytes_below(claim.path) if claim.path.exists() else self._seen_bytes
        self._progress.advance(bytes_now - self._seen_bytes)
        self._seen_bytes = bytes_now

    def end(self) -> None:
        """Finish what was shown."""
        if self._shown:
            self._progress.finish()
        self._shown = False
