"""One pass of an answer: text to the sink, measured in the engine."""

import time
from typing import Any

import pytest

from llmrun.cli.answer import Request, answer
from llmrun.cli.prompting import encode_messages
from llmrun.engine.events import Finish, TokenEvent
from llmrun.engine.sampler import SamplingOptions, resolve
from llmrun.text.message import Message


class Slow:
    """A terminal that takes its time."""

    on_prefill = None

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.pieces: list[str] = []
        self.closed = 0

    def token(self, event: TokenEvent, text: str) -> None:
        time.sleep(self.delay_s)
        self.pieces.append(text)

    def tail(self, text: str) -> None:
        self.pieces.append(text)

    def close(self) -> None:
        self.closed += 1


def ask(loaded: Any, text: str, **options: Any) -> Request:
    prompt = encode_messages(loaded, [Message("user", text)])
    return Request(prompt, resolve(SamplingOptions()), **options)


def test_what_the_sink_got_is_the_answer(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Slow()
    made = answer(loaded, loaded.new_cache(), ask(loaded, "größe 🙂"), sink)
    assert made.text == "".join(sink.pieces) == "You said: größe 🙂."
    assert made.finish is Finish.STOP
    assert made.stats is not None
    assert made.stats.generated_tokens == len(made.text.encode()) + 1
    assert sink.closed == 1


def test_a_slow_sink_is_not_slow_decode(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Slow(0.02)
    made = answer(loaded, loaded.new_cache(), ask(loaded, "hello"), sink)
    assert made.stats is not None
    assert made.stats.decode_ns < 0.1 * 0.02e9 * len(made.stats.gaps)


def test_an_interrupt_keeps_what_was_shown(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Slow()
    made = answer(
        loaded, loaded.new_cache(), ask(loaded, "hello"), sink, lambda: len(sink.pieces) >= 5
    )
    assert made.finish is Finish.INTERRUPTED
    assert made.text == "".join(sink.pieces) == "You s"


def test_an_interrupt_before_the_first_token_measures_nothing(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Slow()
    made = answer(loaded, loaded.new_cache(), ask(loaded, "hello"), sink, lambda: True)
    assert (made.text, made.stats, made.finish) == ("", None, Finish.INTERRUPTED)


def test_the_sink_is_closed_when_the_engine_fails(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Slow()
    with pytest.raises(ZeroDivisionError):
        answer(loaded, loaded.new_cache(), ask(loaded, "CRASH"), sink)
    assert sink.closed == 1


def test_a_stop_that_names_a_special_token_ends_on_its_id(fakes: Any) -> None:
    from dataclasses import replace

    loaded, sink = replace(fakes.loaded(), stop_ids=frozenset()), Slow()
    request = ask(loaded, "hi", stops=("<end>",), max_tokens=40)
    made = answer(loaded, loaded.new_cache(), request, sink)
    assert (made.text, made.finish) == ("You said: hi.", Finish.STOP)


def test_the_next_prompt_reuses_the_cache(fakes: Any) -> None:
    loaded = fakes.loaded()
    cache = loaded.new_cache()
    first = answer(loaded, cache, ask(loaded, "hello"), Slow())
    messages = [Message("user", "hello"), Message("assistant", first.text), Message("user", "x")]
    request = Request(encode_messages(loaded, messages), resolve(SamplingOptions()))
    second = answer(loaded, cache, request, Slow())
    fresh = answer(loaded, loaded.new_cache(), request, Slow())
    assert second.text == fresh.text
    assert second.stats is not None
    assert second.stats.cached_tokens == len(b"user: hello\nassistant: You said: hello.")
