"""The text that comes with llmrun for calibration: short passages of many kinds.

The file's beginning is as mixed as the whole. A line ``%% text`` begins a passage that is read as
it stands, ``%% chat`` a conversation, whose turns begin with ``%% user`` and the like; what stands
behind those words describes the passage and is not part of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from llmrun.errors import ModelFileError, UsageError
from llmrun.text.message import Message
from llmrun.text.prompt import encode_chat
from llmrun.text.template import ChatTemplate
from llmrun.text.tokenizer import Tokenizer

FILE = Path(__file__).with_name("data") / "calibration.txt"

MARK = "%% "
ROLES = ("system", "user", "assistant")

NOW = datetime(2026, 1, 1, 12)
"""What templates that write the date are told, so that the same model always reads the same."""


@dataclass(frozen=True)
class Passage:
    """A passage: its text, or the turns of a conversation that ends with an answer."""

    text: str
    turns: tuple[Message, ...] = ()


def passages(document: str) -> Iterator[Passage]:
    """The passages of a document in the form of ``FILE``. ValueError if it has another."""
    turns: list[Message] = []
    for heading, body in _parts(document):
        if heading in ROLES:
            turns.append(Message(heading, body))
            continue
        if turns:
            yield Passage("", tuple(turns))
        turns = []
        if heading == "text":
            yield Passage(body)
        elif heading != "chat":
            raise ValueError(f"a passage is called {heading!r}")
    if turns:
        yield Passage("", tuple(turns))


def encode_passage(
    tokenizer: Tokenizer, template: ChatTemplate | None, passage: Passage
) -> list[int]:
    """Ids of a passage, without a BOS before plain text; conversations go through the template.

    One that a template refuses goes without its system message, as some models have none; if that
    does not help either (and without a template), it is plain text.
    """
    if not passage.turns:
        return tokenizer.encode_plain(passage.text)
    if template is not None:
        *asked, answer = passage.turns
        for messages in (asked, [turn for turn in asked if turn.role != "system"]):
            try:
                return encode_chat(tokenizer, template, messages, answer.content, now=NOW)
            except (UsageError, ModelFileError):
                continue
    words = (f"{turn.role.capitalize()}: {turn.content}" for turn in passage.turns)
    return tokenizer.encode_plain("\n\n".join(words))


def _parts(document: str) -> Iterator[tuple[str, str]]:
    heading, lines = "", list[str]()
    for line in [*document.splitlines(), f"{MARK}end"]:
        if not line.startswith(MARK):
            lines.append(line)
            continue
        if heading:
            yield heading, "\n".join(lines).strip("\n")
        elif "".join(lines).strip():
            raise ValueError("the first passage has no heading")
        heading, lines = line.removeprefix(MARK).split(maxsplit=1)[0], []
