"""The work both engines do, and how a driver asks for it: the standard library only.

Each engine runs in a process of its own that answers lines of JSON (``serve``). The loops that are
timed are these, for either engine: nothing but the calls into it differs.

Token ids are arbitrary but the same for both, nothing is sampled, no text is made. Each decode step
yields the logits of every sequence, a prefill those of the last token.
"""

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Facts = dict[str, str | int | float | None]
"""What a report says about a machine or an engine."""


class Engine(Protocol):
    """An engine with one model loaded and an empty cache.

    ``facts`` are strings and numbers for the report; ``vocab`` the number of ids.
    """

    facts: Facts
    vocab: int

    def forget(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence in the cache."""

    def feed(self, sequence: int, position: int, ids: Sequence[int]) -> None:
        """Append tokens from ``position`` on, in the engine's own chunks; return when done."""

    def step(self, position: int, token_id: int, sequences: int) -> None:
        """Append one token to each of the first ``sequences`` sequences; return when done."""


def serve(engine: Engine, sequences: int) -> None:
    """Answer requests from stdin until it ends.

    The first line out holds the facts. A request is ``{"work": "prefill", "tokens": N}`` or
    ``{"work": "decode", "tokens": N, "depth": D, "sequences": K}``, the answer
    ``{"seconds": S}``; the clock runs for the N tokens (of each sequence) alone.
    """
    _say(engine.facts)
    depths = [0] * sequences
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        if request["work"] == "prefill":
            depths = [0] * sequences
            seconds = _prefill(engine, sequences, request["tokens"], number)
        else:
            _fill(engine, depths, request["depth"], request["sequences"])
            seconds = _decode(engine, request, number)
        _say({"seconds": seconds})


def ids(n_tokens: int, salt: int, vocab: int) -> list[int]:
    """Ids all over the vocabulary, without the lowest 256 (often special)."""
    return [(i * 7919 + salt * 104729 + 17) % (vocab - 300) + 256 for i in range(n_tokens)]


def compiler(library: Path) -> str | None:
    """What a library was compiled with, as its compiler noted in it; None if it did not."""
    noted = re.search(rb"GCC: \([^)\0]*\) [\d.]+|clang version [\d.]+", library.read_bytes())
    return noted[0].decode("ascii", "replace") if noted else None


def _prefill(engine: Engine, sequences: int, n_tokens: int, salt: int) -> float:
    for sequence in range(sequences):
        engine.forget(sequence, 0)
    prompt = ids(n_tokens, salt, engine.vocab)
    start = time.perf_counter()
    engine.feed(0, 0, prompt)
    return time.perf_counter() - start


def _fill(engine: Engine, depths: list[int], depth: int, sequences: int) -> None:
    """Bring the sequences to ``depth`` tokens; those that hold so many keep them."""
    for sequence in range(len(depths)):
        if sequence < sequences and depths[sequence] == depth:
            engine.forget(sequence, depth)
            continue
        engine.forget(sequence, 0)
        depths[sequence] = depth if sequence < sequences else 0
        if depths[sequence]:
            engine.feed(sequence, 0, ids(depth, sequence, engine.vocab))


def _decode(engine: Engine, request: dict[str, int], salt: int) -> float:
    tokens = ids(request["tokens"], salt, engine.vocab)
    depth, sequences = request["depth"], request["sequences"]
    start = time.perf_counter()
    for number, token_id in enumerate(tokens):
        engine.step(depth + number, token_id, sequences)
    return time.perf_counter() - start


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)
