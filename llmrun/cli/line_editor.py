"""Reading what the person types: editing, history on disk, several lines.

Enter sends; Alt-Enter makes a new line; a text that starts with triple quotes goes on until it ends
with them; pasted lines stay together. ``read`` raises EOFError for Ctrl-D at an empty prompt and
KeyboardInterrupt for Ctrl-C there; Ctrl-C elsewhere drops what was typed.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from llmrun.cli.session import Session
from llmrun.text.decode_input import clean_text

QUOTES = '"""'
PROMPT = "\n> "  # an empty line between turns


@dataclass(frozen=True)
class Typed:
    """What was sent. In triple quotes it is a message, whatever it starts with."""

    text: str
    is_command: bool


class LineEditor:
    """One per chat."""

    def __init__(self, session: Session, words: Sequence[str]) -> None:
        self._terminal = session.terminal
        # The answer's stream may be a file: the prompt then stands on stderr.
        stream = sys.stdout if session.terminal.stdout_is_terminal else sys.stderr
        self._prompt: PromptSession[str] = PromptSession(
            PROMPT,
            history=_history(session),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation=". ",
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            output=create_output(stdout=stream),
            enable_history_search=True,
        )

    def read(self) -> Typed:
        """One message or command, without surrogates and without triple quotes around it."""
        self._terminal.lend()
        return typed(clean_text(self._prompt.prompt()).text)


def typed(text: str) -> Typed:
    """Tell messages and commands apart; the quotes go."""
    if _is_quoted(text):
        return Typed(text.strip()[len(QUOTES) : -len(QUOTES)].strip("\n"), is_command=False)
    return Typed(text, is_command=text.startswith("/"))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(QUOTES) and not _is_quoted(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def drop_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    return keys


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) >= 2 * len(QUOTES) and text.startswith(QUOTES) and text.endswith(QUOTES)


class _CleanHistory(FileHistory):
    """A file that always stays readable: no surrogates get into it."""

    def store_string(self, string: str) -> None:
        super().store_string(clean_text(string).text)


def _history(session: Session) -> History:
    """The history file, for its owner only; said if there can be none."""
    path: Path = session.settings.history_file
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
    except OSError as err:
        session.say(f"note: no history is kept: {path}: {err.strerror or err}")
        return InMemoryHistory()
    return _CleanHistory(str(path))
