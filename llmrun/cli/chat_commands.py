"""What can be typed in a chat besides messages: ``/name argument``.

``COMMANDS`` is the whole list; a command gets the chat and its argument. EOFError leaves the chat.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from llmrun.cli.chat import Chat
from llmrun.cli.exits import complain
from llmrun.cli.loading import facts
from llmrun.cli.options import Stats
from llmrun.cli.summary import full_account
from llmrun.engine.sampler import SamplingOptions, resolve
from llmrun.errors import LlmrunError, UsageError

Run = Callable[[Chat, str], None]


@dataclass(frozen=True)
class SlashCommand:
    """``argument`` as shown in the help."""

    run: Run
    argument: str
    help: str


def run(chat: Chat, text: str) -> None:
    """Run ``/name argument``; an unknown name or a bad argument is said, nothing more."""
    name, _, argument = text[1:].partition(" ")
    command = COMMANDS.get(name.strip())
    try:
        if command is None:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"Did you mean /{near[0]}? " if near else ""
            raise UsageError(f"There is no command /{name}.", f"{hint}/help lists them.")
        command.run(chat, argument.strip())
    except LlmrunError as err:
        complain(err)


def _help(chat: Chat, argument: str) -> None:
    usage = {f"/{name} {c.argument}".rstrip(): c.help for name, c in COMMANDS.items()}
    width = max(map(len, usage))
    lines = [f"{call:<{width}}  {text}" for call, text in usage.items()]
    lines.append('Alt-Enter makes a new line; """ opens and closes a text of several lines.')
    chat.session.terminal.say("\n".join(lines))


def _clear(chat: Chat, argument: str) -> None:
    chat.transcript = replace(chat.transcript, turns=())
    chat.cache.truncate(0, 0)
    chat.last, chat.warned = None, False
    chat.session.say("The conversation is empty.")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.transcript = replace(chat.transcript, system=argument)
        chat.session.say("The system message is set, from the next message on.")
    else:
        chat.session.terminal.say(chat.transcript.system or "There is no system message.")


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        _show_sampling(chat)
        return
    known = {field.name.replace("_", "-"): field.name for field in fields(SamplingOptions)}
    del known["top-logprobs"]
    if name == "max-tokens":
        chat.max_tokens = None if value == "off" else _positive(name, value)
    elif name not in known:
        raise UsageError(
            f"There is no setting {name!r}.", f"Set one of: {', '.join([*known, 'max-tokens'])}."
        )
    else:
        change: dict[str, Any] = {known[name]: _number(name, value)}
        wanted = replace(chat.sampling, **change)
        resolve(wanted)
        chat.sampling = wanted
    _show_sampling(chat)


def _show_sampling(chat: Chat) -> None:
    s = chat.sampling
    seed = "drawn anew" if s.seed is None else str(s.seed)
    longest = "off" if chat.max_tokens is None else str(chat.max_tokens)
    chat.session.terminal.say(
        f"temperature {s.temperature:g} · top-k {s.top_k} · top-p {s.top_p:g} · "
        f"min-p {s.min_p:g} · repeat-penalty {s.repeat_penalty:g} · seed {seed} · "
        f"max-tokens {longest}"
    )


def _number(name: str, value: str) -> float | int | None:
    if name == "seed" and value == "off":
        return None
    whole = name in ("top-k", "seed")
    try:
        return int(value) if whole else float(value)
    except ValueError as err:
        kind = "a whole number" if whole else "a number"
        raise UsageError(f"{name} {value!r} is not {kind}.", f"Type /set {name} NUMBER.") from err


def _positive(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{name} {value!r} is no number from 1 on.", f"Type /set {name} NUMBER.")
    return int(value)


def _show(chat: Chat, argument: str) -> None:
    turns = chat.transcript.turns
    stopped = sum(turn.interrupted for turn in turns)
    chat.session.terminal.say(
        f"{facts(chat.loaded)}\n{len(turns)} questions so far, {stopped} replies interrupted"
    )
    _show_sampling(chat)


def _stats(chat: Chat, argument: str) -> None:
    if argument:
        if argument not in {mode.value for mode in Stats}:
            raise UsageError(f"There is no --stats {argument!r}.", "Type /stats off, line or full.")
        chat.stats = Stats(argument)
    if chat.last is None or chat.last.stats is None:
        chat.session.terminal.say("Nothing has been measured yet.")
    else:
        chat.session.terminal.say(full_account(chat.last.stats, chat.last.finish))


def _regen(chat: Chat, argument: str) -> None:
    _need_turn(chat)
    chat.again()


def _undo(chat: Chat, argument: str) -> None:
    _need_turn(chat)
    chat.transcript = chat.transcript.without_last()
    chat.session.say("The last question and its reply are gone.")


def _need_turn(chat: Chat) -> None:
    if not chat.transcript.turns:
        raise UsageError("Nothing has been asked yet.", "Type a message first.")


def _tokens(chat: Chat, argument: str) -> None:
    n_ids = len(chat.encode(chat.transcript).ids) if chat.transcript.turns else 0
    chat.session.terminal.say(
        f"The conversation has {n_ids:,} tokens, the context holds {chat.loaded.context:,}; "
        f"{chat.used_tokens:,} are in the cache."
    )


def _exit(chat: Chat, argument: str) -> None:
    raise EOFError


COMMANDS = {
    "help": SlashCommand(_help, "", "this list"),
    "clear": SlashCommand(_clear, "", "start over; the system message stays"),
    "system": SlashCommand(_system, "[TEXT]", "show or set the system message"),
    "set": SlashCommand(_set, "[NAME VALUE]", "show or change sampling, e.g. /set temperature 0"),
    "show": SlashCommand(_show, "", "the model and what is in use"),
    "stats": SlashCommand(
        _stats, "[off|line|full]", "all numbers of the last answer; how much to show"
    ),
    "regen": SlashCommand(_regen, "", "answer the last question again"),
    "undo": SlashCommand(_undo, "", "take back the last question and its reply"),
    "tokens": SlashCommand(_tokens, "", "how full the context is"),
    "exit": SlashCommand(_exit, "", "leave"),
}
