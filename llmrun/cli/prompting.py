"""From what the user typed and piped to prompt ids, with the stamps the measures need.

The parts of a prompt join in one order: the argument, the files of ``-f``, standard input, with a
blank line between them. Newlines at the end of a part are dropped; all else stays as it is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from llmrun.cli.options import PromptFlags
from llmrun.errors import UsageError
from llmrun.text.decode_input import DecodedText, clean_text, decode_bytes
from llmrun.text.message import Message

if TYPE_CHECKING:
    from llmrun.cli.assemble import LoadedModel


@dataclass(frozen=True)
class Prompt:
    """Ids ready for the engine; ``t_submit_ns`` was read just before they were made."""

    ids: Sequence[int]
    t_submit_ns: int
    tokenize_ns: int


def gather(argument: str | None, files: Sequence[Path], stdin: BinaryIO | None) -> DecodedText:
    """Join the parts. UsageError for a file that cannot be read."""
    parts = [clean_text(argument)] if argument is not None else []
    parts += [decode_bytes(_read(path)) for path in files]
    if stdin is not None:
        parts.append(decode_bytes(stdin.read()))
    texts = [text for part in parts if (text := part.text.rstrip("\r\n"))]
    return DecodedText("\n\n".join(texts), sum(part.replaced for part in parts))


def damage_note(decoded: DecodedText) -> str | None:
    """The one warning about bytes that were no text."""
    if not decoded.replaced:
        return None
    places = "place" if decoded.replaced == 1 else "places"
    return f"warning: the input is not valid UTF-8 in {decoded.replaced} {places}; replaced by �"


def lost_note(loaded: "LoadedModel", text: str) -> str | None:
    """The warning about characters the model's vocabulary cannot spell: they are left out."""
    lost = loaded.tokenizer.unencodable(text)
    if not lost:
        return None
    names = ", ".join(f"U+{ord(character):04X}" for character in sorted(lost)[:5])
    more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    return f"warning: the model's vocabulary cannot spell {names}{more}; left out of the prompt"


def check_raw(prompting: PromptFlags) -> None:
    """UsageError for options that need a template which ``--raw`` leaves out."""
    if prompting.raw and (prompting.system is not None or prompting.template is not None):
        raise UsageError(
            "--raw uses no chat template, so --system and --template have no place.",
            "Leave out --raw, or write the whole prompt yourself.",
        )


def encode_messages(
    loaded: "LoadedModel", messages: Sequence[Message], answer_start: str = ""
) -> Prompt:
    """Through the chat template; ``answer_start`` begins the answer."""
    from llmrun.text.prompt import encode_chat

    return _timed(lambda: encode_chat(loaded.tokenizer, loaded.template, messages, answer_start))


def encode_text(loaded: "LoadedModel", text: str) -> Prompt:
    """As it stands, control tokens parsed (``--raw``)."""
    from llmrun.text.prompt import encode_raw

    return _timed(lambda: encode_raw(loaded.tokenizer, text))


def _timed(encode: Callable[[], Sequence[int]]) -> Prompt:
    t_submit_ns = time.monotonic_ns()
    ids = encode()
    return Prompt(ids, t_submit_ns, time.monotonic_ns() - t_submit_ns)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise UsageError(
            f"The file {path} cannot be read: {err.strerror or err}.", "Check the name after -f."
        ) from err
