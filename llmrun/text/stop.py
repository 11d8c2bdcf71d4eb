"""Stop strings: found across token borders, cut exactly, and never shown in part.

``push`` returns what may be shown. Text is held back only while it is a true prefix of a stop
string. The match that ends first wins (of those, the longest), so the result does not depend on
where the text was cut into chunks.
"""

from collections.abc import Sequence

from llmrun.errors import UsageError
from llmrun.text.tokenizer import Tokenizer


class StopMatcher:
    """Streams text until one of ``stops`` appears (none: everything passes)."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("A stop string is empty.", "Give --stop at least one character.")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Takes the next piece of the answer and returns what may be shown now."""
        if self.stopped:
            return ""
        text = self._held + text
        cut = self._first_stop(text)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        held = self._prefix_at_end(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The answer is over: what was held back did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        found = [(start + len(s), start) for s in self._stops if (start := text.find(s)) >= 0]
        return min(found)[1] if found else None

    def _prefix_at_end(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def stop_token_ids(tokenizer: Tokenizer, stops: Sequence[str]) -> frozenset[int]:
    """Ids of the stops that name a special token: these never appear in text, only as ids."""
    specials = tokenizer.special_tokens
    return frozenset(specials[stop] for stop in stops if stop in specials)
