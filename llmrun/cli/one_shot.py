"""One prompt, one answer: what ``run`` does, and ``chat`` when stdin is no terminal."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from llmrun.cli.answer import Request, Sink, answer
from llmrun.cli.assemble import LoadedModel
from llmrun.cli.loading import sampling_options, stop_strings
from llmrun.cli.options import OutputFlags, PromptFlags, SamplingFlags, Stats
from llmrun.cli.prompting import Prompt, encode_messages, encode_text
from llmrun.cli.receipt import answer_json, receipt
from llmrun.cli.session import Session
from llmrun.cli.sinks import JsonLinesSink, LiveSink, PlainSink, SilentSink, text_filter
from llmrun.cli.summary import answer_line, full_account
from llmrun.engine.events import Finish
from llmrun.engine.sampler import resolve
from llmrun.errors import InternalError
from llmrun.measure.statistics import RequestStats
from llmrun.text.decode_input import clean_text
from llmrun.text.message import Message


class Shape(Enum):
    """What stdout gets."""

    TEXT = auto()
    JSON = auto()
    JSON_LINES = auto()


@dataclass(frozen=True)
class Answering:
    """How to answer: the option groups a command got, and where the receipt goes."""

    sampling: SamplingFlags
    prompting: PromptFlags
    output: OutputFlags
    shape: Shape = Shape.TEXT
    receipt: Path | None = None


def one_shot(session: Session, loaded: LoadedModel, text: str, how: Answering) -> None:
    """Answer ``text``: the answer to stdout, the statistics to stderr."""
    opening = clean_text(how.prompting.prefill).text
    prompt = _encode(loaded, text, how.prompting, opening)
    request = Request(
        prompt=prompt,
        sampling=resolve(sampling_options(loaded, how.sampling)),
        stops=stop_strings(loaded, how.sampling),
        max_tokens=how.sampling.max_tokens,
        ignore_eos=how.sampling.ignore_eos,
        opening=opening,
    )
    sink = _sink(session, loaded, prompt, how)
    keys = session.terminal.silent_keys() if isinstance(sink, LiveSink) else _nothing()
    with keys:
        made = answer(loaded, loaded.new_cache(), request, sink)
    if how.shape is Shape.JSON:
        document = answer_json(loaded, request, made)
        session.terminal.write(json.dumps(document, ensure_ascii=False) + "\n")
    if how.receipt is not None:
        _write_receipt(how.receipt, receipt(loaded, request, made))
    if made.stats is not None:
        say_stats(session, how.output.stats, made.stats, made.finish)


def say_stats(session: Session, wanted: Stats, stats: RequestStats, finish: Finish) -> None:
    """The statistics on stderr, as much as is wanted."""
    if session.quiet or wanted is Stats.OFF:
        return
    account = answer_line if wanted is Stats.LINE else full_account
    session.terminal.say(account(stats, finish), dim=True)


def first_messages(system: str | None, user: str) -> Sequence[Message]:
    """A conversation of one question."""
    question = Message("user", user)
    return [question] if system is None else [Message("system", clean_text(system).text), question]


def _encode(loaded: LoadedModel, text: str, flags: PromptFlags, opening: str) -> Prompt:
    if flags.raw:
        return encode_text(loaded, text + opening)
    return encode_messages(loaded, first_messages(flags.system, text), opening)


def _sink(session: Session, loaded: LoadedModel, prompt: Prompt, how: Answering) -> Sink:
    if how.shape is Shape.JSON:
        return SilentSink()
    if how.shape is Shape.JSON_LINES:
        return JsonLinesSink(session.terminal, prompt)
    return text_sink(session, loaded, prompt, how.output)


def text_sink(
    session: Session, loaded: LoadedModel, prompt: Prompt, output: OutputFlags
) -> PlainSink | LiveSink:
    """Live on a terminal, unless nothing but the text is wanted; else plain."""
    terminal = session.terminal
    clean = text_filter(output.sanitize, terminal)
    shows = not session.quiet and output.stats is not Stats.OFF
    if terminal.is_live and shows:
        return LiveSink(terminal, clean, prompt, loaded.context)
    return PlainSink(terminal, clean, shows_prefill=terminal.draws and shows)


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _write_receipt(path: Path, document: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
    except OSError as err:
        raise InternalError(
            f"The receipt {path} cannot be written: {err.strerror or err}.",
            "Give --receipt a file in a folder you can write to.",
        ) from err
