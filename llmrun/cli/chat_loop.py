"""The chat of a person at a terminal: read, answer, show, again.

Ctrl-C stops an answer and keeps what was said; at an empty prompt it tells how to leave, twice
within a second leaves with 130; Ctrl-D and /exit leave with 0.
"""

import contextlib
import time

from llmrun.cli import chat_commands
from llmrun.cli.assemble import LoadedModel
from llmrun.cli.chat import Chat
from llmrun.cli.interrupts import TWICE_S, stops_the_answer
from llmrun.cli.line_editor import LineEditor, Typed
from llmrun.cli.loading import facts, sampling_options
from llmrun.cli.one_shot import Answering
from llmrun.cli.session import Session
from llmrun.cli.transcript import Transcript
from llmrun.text.decode_input import clean_text


def converse(session: Session, loaded: LoadedModel, how: Answering) -> None:
    """Talk until the person leaves. KeyboardInterrupt: left by Ctrl-C twice."""
    system = how.prompting.system
    chat = Chat(
        session=session,
        loaded=loaded,
        how=how,
        cache=loaded.new_cache(),
        transcript=Transcript(None if system is None else clean_text(system).text),
        sampling=sampling_options(loaded, how.sampling),
        max_tokens=how.sampling.max_tokens,
        stats=how.output.stats,
    )
    editor = LineEditor(session, [f"/{name}" for name in chat_commands.COMMANDS])
    session.say(f"{facts(loaded)}\n/help lists the commands, Ctrl-D leaves.")
    pressed_s = float("-inf")
    with contextlib.suppress(EOFError):
        while True:
            try:
                typed = editor.read()
            except KeyboardInterrupt:
                now_s = time.monotonic()
                if now_s - pressed_s <= TWICE_S:
                    raise
                pressed_s = now_s
                session.terminal.say("Ctrl-C again leaves, as do Ctrl-D and /exit.")
                continue
            # All that is done with a line is inside: rendering a prompt can take its time too.
            with session.terminal.silent_keys(), stops_the_answer() as chat.interrupt:
                _obey(chat, typed)


def _obey(chat: Chat, typed: Typed) -> None:
    if not typed.text.strip():
        return
    if typed.is_command:
        chat_commands.run(chat, typed.text)
    else:
        chat.ask(typed.text)
