"""The text that predictions are compared on, and the windows it is cut into.

As llama.cpp's perplexity tool does it, so that figures are comparable: windows of C tokens follow
each other from the start of the text, the second half of each is scored (positions C/2 to C - 2,
each predicting the next token), and a model whose tokenizer puts a BOS before texts reads one in
place of each window's first token.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.cli.eval_lockstep import Windows
from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun.text.tokenizer import Tokenizer

BUNDLED = "bundled"
"""What reports call the text that comes with llmrun."""

DEFAULT_TOKENS, FULL_TOKENS = 8 * 1024, 64 * 1024
"""Tokens read, of which about half are scored."""

SHORTEST = 4
"""A window of fewer tokens scores nothing."""

CHARACTERS_PER_TOKEN = 12
"""Of a longer text only the beginning is looked at, if it holds enough tokens."""


@dataclass(frozen=True)
class EvalText:
    """A text by name, with the sha256 of its bytes in UTF-8."""

    name: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Extent:
    """How much is asked for: windows of ``context`` tokens, as many as make ``scored`` positions,
    or as hold ``read`` tokens if that is None."""

    context: int = 512
    scored: int | None = None
    read: int = DEFAULT_TOKENS

    @property
    def windows(self) -> int:
        """Number of windows."""
        if self.scored is None:
            return max(1, self.read // self.context)
        return -(-self.scored // (self.context - 1 - self.context // 2))


@dataclass(frozen=True)
class Cut:
    """Windows of a text. ``bos``: the id each begins with, None if the model needs none.

    ``ids_sha256``: of all ids that are read, as little-endian 32-bit numbers: it stands for text,
    tokenizer and BOS at once. ``text_tokens``: what there was, as far as it was looked at.
    """

    windows: Windows
    bos: int | None
    ids_sha256: str
    text_tokens: int

    @property
    def tokens_read(self) -> int:
        """Tokens of all windows."""
        return sum(map(len, self.windows.sequences))


def read_text(path: Path | None) -> EvalText:
    """A file's text, or the bundled one. UsageError for a file that is not UTF-8 text."""
    if path is None:
        from importlib.resources import files

        data = (files("llmrun") / "text" / "data" / "evaluation.txt").read_bytes()
        return EvalText(BUNDLED, data.decode("utf-8"), hashlib.sha256(data).hexdigest())
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The text {path} cannot be read: {error}.", "Give --text a UTF-8 text file."
        ) from error
    return EvalText(path.name, text, hashlib.sha256(data).hexdigest())


def cut(text: EvalText, extent: Extent, tokenizer: "Tokenizer", vocab: int) -> Cut:
    """Windows of a text, as many of those wanted as there are.

    ``vocab``: ids of the model. UsageError if it is too short for one.
    """
    context, wanted = extent.context, extent.windows * extent.context
    ids = _encoded(text.text, wanted, tokenizer)
    count = min(extent.windows, len(ids) // context)
    if count == 0:
        raise UsageError(
            f"The text {text.name} makes {len(ids):,} tokens; one window takes {context:,}.",
            f"Give a longer --text, or --context {max(SHORTEST, len(ids) // 2)}."
            if len(ids) >= SHORTEST
            else "Give a longer --text.",
        )
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    sequences = [tuple(ids[i * context : (i + 1) * context]) for i in range(count)]
    if bos is not None:
        sequences = [(bos, *window[1:]) for window in sequences]
    data = b"".join(i.to_bytes(4, "little") for window in sequences for i in window)
    return Cut(
        Windows(tuple(sequences), context // 2, min(tokenizer.n_ids, vocab)),
        bos,
        hashlib.sha256(data).hexdigest(),
        len(ids),
    )


def _encoded(text: str, wanted: int, tokenizer: "Tokenizer") -> list[int]:
    part = CHARACTERS_PER_TOKEN * (wanted + 1)
    ids = tokenizer.encode_plain(text[:part])
    if len(ids) > wanted or part >= len(text):  # else a token at the cut may be a part of one
        return ids
    return tokenizer.encode_plain(text)
