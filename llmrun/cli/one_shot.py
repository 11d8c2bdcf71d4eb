"""One prompt, one answer: what ``run`` does, and ``chat`` when stdin is no terminal."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from llmrun.cli.answer import Answer, Request, Sink, answer
from llmrun.cli.assemble import LoadedModel
from llmrun.cli.json_text import json_text
from llmrun.cli.loading import sampling_options, stop_strings
from llmrun.cli.options import OutputFlags, PromptFlags, SamplingFlags
from llmrun.cli.prompting import Prompt, encode_messages, encode_text, lost_note
from llmrun.cli.receipt import Result, answer_json, last_line, receipt
from llmrun.cli.session import Session
from llmrun.cli.sinks import JsonLinesSink, LiveSink, SilentSink, sanitizes
from llmrun.cli.text_sink import measure_step_floor, say_stats, text_sink
from llmrun.engine.sampler import resolve
from llmrun.errors import InternalError, UsageError
from llmrun.measure.coldstart import Stage, process_start_ns, waterfall
from llmrun.text.decode_input import clean_text
from llmrun.text.message import Message


class Shape(Enum):
    """What stdout gets."""

    TEXT = auto()
    JSON = auto()
    JSON_LINES = auto()


@dataclass(frozen=True)
class Answering:
    """How to answer: the option groups a command got, and where the receipt goes.

    ``stages``: what the process did before it loaded the model, each with the stamp of its end,
    the last of them taken just before loading. Without any there is no cold TTFT.
    """

    sampling: SamplingFlags
    prompting: PromptFlags
    output: OutputFlags
    shape: Shape = Shape.TEXT
    receipt: Path | None = None
    stages: tuple[tuple[str, int], ...] = ()


def one_shot(session: Session, loaded: LoadedModel, text: str, how: Answering) -> None:
    """Answer ``text``: the answer to stdout, the statistics to stderr."""
    cache = loaded.new_cache()
    ends = [*_load_stages(loaded, how), ("cache", time.monotonic_ns())]
    step_floor = None
    if how.shape is Shape.TEXT:
        step_floor = measure_step_floor(session, loaded, cache, how.output.stats)
        if step_floor is not None:
            ends.append(("bandwidth", time.monotonic_ns()))
    opening = clean_text(how.prompting.prefill).text
    if note := lost_note(loaded, text):
        session.say(note)
    prompt = _encode(loaded, text, how.prompting, opening)
    request = Request(
        prompt=prompt,
        sampling=resolve(sampling_options(loaded, how.sampling)),
        stops=stop_strings(loaded, how.sampling, raw=how.prompting.raw),
        max_tokens=how.sampling.max_tokens,
        ignore_eos=how.sampling.ignore_eos,
        opening=opening,
    )
    sink = _json_sink(session, prompt, how)
    if sink is None:
        sink = text_sink(session, loaded, prompt, how.output, step_floor)
    keys = session.terminal.silent_keys() if isinstance(sink, LiveSink) else _nothing()
    with keys:
        made = answer(loaded, cache, request, sink)
    cold = _cold(how, ends, made)
    _finish(session, Result(loaded, request, made, how.prompting, cold), how)
    if made.stats is not None:
        say_stats(session, how.output.stats, made.stats, made.finish, cold)


def check_receipt(path: Path | None) -> None:
    """UsageError for a receipt that could not be written, before any work is done for it."""
    if path is None:
        return
    if path.is_dir():
        problem = "is a folder"
    elif not path.parent.is_dir():
        problem = f"cannot be written: there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "cannot be written: permission denied"
    else:
        return
    raise UsageError(
        f"The receipt {path} {problem}.", "Give --receipt a file in a folder you can write to."
    )


def first_messages(system: str | None, user: str) -> Sequence[Message]:
    """A conversation of one question."""
    question = Message("user", user)
    return [question] if system is None else [Message("system", clean_text(system).text), question]


def _load_stages(loaded: LoadedModel, how: Answering) -> list[tuple[str, int]]:
    """The stages up to the end of loading."""
    ends = list(how.stages)
    end_ns = ends[-1][1] if ends else 0
    for part, part_ms in loaded.times.parts_ms.items():
        end_ns += round(part_ms * 1e6)
        ends.append((part, end_ns))
    return ends


def _cold(how: Answering, ends: Sequence[tuple[str, int]], made: Answer) -> tuple[Stage, ...]:
    start_ns = process_start_ns()
    if not how.stages or not made.events or start_ns is None:
        return ()
    return waterfall(start_ns, ends, made.events[0])


def _encode(loaded: LoadedModel, text: str, flags: PromptFlags, opening: str) -> Prompt:
    if flags.raw:
        return encode_text(loaded, text + opening)
    return encode_messages(loaded, first_messages(flags.system, text), opening)


def _json_sink(session: Session, prompt: Prompt, how: Answering) -> Sink | None:
    """What JSON needs while the answer comes; None for an answer as text."""
    if how.shape is Shape.JSON:
        return SilentSink()
    if how.shape is Shape.JSON_LINES:
        for_terminal = sanitizes(how.output.sanitize, session.terminal)
        return JsonLinesSink(session.terminal, prompt, for_terminal=for_terminal)
    return None


def _finish(session: Session, result: Result, how: Answering) -> None:
    """Write what can only be written when the answer is whole."""
    for_terminal = sanitizes(how.output.sanitize, session.terminal)
    if how.shape is Shape.JSON:
        session.terminal.write(json_text(answer_json(result), for_terminal=for_terminal))
    elif how.shape is Shape.JSON_LINES:
        session.terminal.write(json_text(last_line(result), for_terminal=for_terminal))
    if how.receipt is not None:
        _write_receipt(how.receipt, receipt(result))


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
