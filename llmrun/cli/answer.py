"""One pass of an answer, shared by everything that answers: prompt in, text out to a sink.

The engine runs in its own thread and stamps what it makes; here its ids become text, stop strings
are cut off, and each piece goes to the sink. A sink decides what is shown; it cannot slow the
engine down.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llmrun.cli.assemble import LoadedModel
from llmrun.cli.prompting import Prompt
from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish, TokenEvent
from llmrun.engine.generate import generate
from llmrun.engine.phases import Progress
from llmrun.engine.sampler import Sampler
from llmrun.engine.stream import Events, drain
from llmrun.kernels.ops import Interrupt, Sampling, never
from llmrun.measure.statistics import RequestStats, summarize
from llmrun.text.detokenizer import Detokenizer
from llmrun.text.stop import StopMatcher, stop_token_ids


@dataclass(frozen=True)
class Request:
    """What is asked. ``opening`` is text the answer starts with and the prompt already holds.

    ``ignore_eos`` goes past the model's own end, not past ``stops``, special tokens or not.
    """

    prompt: Prompt
    sampling: Sampling
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    opening: str = ""


class Sink(Protocol):
    """Shows an answer while it comes."""

    on_prefill: Progress | None
    """Called in the engine's thread with prompt ids done and in all, before the first token."""

    def token(self, event: TokenEvent, text: str) -> None:
        """One id, and the text that may be shown now because of it (maybe none)."""

    def tail(self, text: str) -> None:
        """The text that was held back, when the answer is over."""

    def close(self) -> None:
        """Leave the stream as the next writer needs it; called however the answer ended."""


@dataclass(frozen=True)
class Answer:
    """What came. Stopped before its first token: no text, the opening neither, and no stats."""

    text: str
    finish: Finish
    events: tuple[TokenEvent, ...]
    stats: RequestStats | None


def answer(
    loaded: LoadedModel,
    cache: KvCache,
    request: Request,
    sink: Sink,
    interrupt: Interrupt = never,
) -> Answer:
    """Generate, show, measure. Raises what the engine raises, after what came before it.

    ``interrupt`` ends the answer with the text shown so far, whatever the engine has ahead.
    """
    detokenizer = Detokenizer(loaded.tokenizer)
    stop = StopMatcher(request.stops)
    start = _starter(loaded, cache, request, sink.on_prefill, interrupt)
    events: list[TokenEvent] = []
    pieces: list[str] = []
    opening = request.opening
    with contextlib.closing(sink), contextlib.closing(drain(start)) as stream:
        for event in stream:
            events.append(event)
            is_end = event.finish is Finish.STOP
            piece = opening + ("" if is_end else stop.push(detokenizer.push(event.token_id)))
            opening = ""
            pieces.append(piece)
            sink.token(event, piece)
            if stop.stopped or interrupt():
                break
        rest = stop.push(detokenizer.flush()) + stop.flush()
        sink.tail(rest)
    return Answer(
        text="".join(pieces) + rest,
        finish=_finish(events, stop.stopped),
        events=tuple(events),
        stats=_measure(events, request.prompt),
    )


def _starter(
    loaded: LoadedModel,
    cache: KvCache,
    request: Request,
    on_prefill: Progress | None,
    interrupt: Interrupt,
) -> Callable[[Interrupt], Events]:
    """What the engine's thread runs; it stops when the consumer left or the user interrupts."""
    own_stop_ids = frozenset() if request.ignore_eos else loaded.stop_ids
    stop_ids = own_stop_ids | stop_token_ids(loaded.tokenizer, request.stops)
    n_ids = min(loaded.tokenizer.n_ids, loaded.spec.vocab)

    def start(left: Interrupt) -> Events:
        return generate(
            loaded.decoder,
            cache,
            request.prompt.ids,
            Sampler(request.sampling, n_ids),
            stop_ids=stop_ids,
            max_tokens=request.max_tokens,
            interrupt=lambda: left() or interrupt(),
            on_progress=on_prefill,
        )

    return start


def _finish(events: list[TokenEvent], stop_string: bool) -> Finish:
    if stop_string:
        return Finish.STOP
    return (events[-1].finish if events else None) or Finish.INTERRUPTED


def _measure(events: list[TokenEvent], prompt: Prompt) -> RequestStats | None:
    if not events:
        return None
    return summarize(events, t_submit_ns=prompt.t_submit_ns, tokenize_ns=prompt.tokenize_ns)
