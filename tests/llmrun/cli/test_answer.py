"""One pass of an answer: text to the sink, measured in the engine."""

import threading
from typing import Any

import pytest

from llmrun.cli.answer import Request, answer
from llmrun.cli.prompting import encode_messages
from llmrun.engine.events import Finish, TokenEvent
from llmrun.engine.sampler import SamplingOptions, resolve
from llmrun.text.message import Message


class Recorder:
    """A terminal that keeps what it is given."""

    on_prefill = None

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.closed = 0

    def token(self, event: TokenEvent, text: str) -> None:
        self.pieces.append(text)

    def tail(self, text: str) -> None:
        self.pieces.append(text)

    def close(self) -> None:
        self.closed += 1


def ask(loaded: Any, text: str, **options: Any) -> Request:
    prompt = encode_messages(loaded, [Message("user", text)])
    return Request(prompt, resolve(SamplingOptions()), **options)


def test_what_the_sink_got_is_the_answer(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Recorder()
    made = answer(loaded, loaded.new_cache(), ask(loaded, "größe 🙂"), sink)
    assert made.text == "".join(sink.pieces) == "You said: größe 🙂."
    assert made.finish is Finish.STOP
    assert made.stats is not None
    assert made.stats.generated_tokens == len(made.text.encode()) + 1
    assert sink.closed == 1


def test_a_slow_sink_does_not_hold_the_engine(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink takes the first token only when the engine has made the last."""
    loaded, finished = fakes.loaded(), threading.Event()
    forward = fakes.Model.forward

    def noted(self: Any, *call: Any) -> Any:
        logits = forward(self, *call)
        if fakes.END in logits:
            finished.set()
        return logits

    class Stalled(Recorder):
        def token(self, event: TokenEvent, text: str) -> None:
            assert finished.wait(timeout=20)
            super().token(event, text)

    monkeypatch.setattr(fakes.Model, "forward", noted)
    made = answer(loaded, loaded.new_cache(), ask(loaded, "hello"), Stalled())
    assert made.text == "You said: hello."


def test_an_interrupt_keeps_what_was_shown(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Recorder()
    made = answer(
        loaded, loaded.new_cache(), ask(loaded, "hello"), sink, lambda: len(sink.pieces) >= 5
    )
    assert made.finish is Finish.INTERRUPTED
    assert made.text == "".join(sink.pieces) == "You s"


def test_an_interrupt_before_the_first_token_measures_nothing(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Recorder()
    made = answer(loaded, loaded.new_cache(), ask(loaded, "hello"), sink, lambda: True)
    assert (made.text, made.stats, made.finish) == ("", None, Finish.INTERRUPTED)


def test_an_interrupt_before_the_first_token_leaves_no_opening_either(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Recorder()
    request = ask(loaded, "hello", opening="You said")
    made = answer(loaded, loaded.new_cache(), request, sink, lambda: True)
    assert made.text == "".join(sink.pieces) == ""


def test_the_sink_is_closed_when_the_engine_fails(fakes: Any) -> None:
    loaded, sink = fakes.loaded(), Recorder()
    with pytest.raises(ZeroDivisionError):
        answer(loaded, loaded.new_cache(), ask(loaded, "CRASH"), sink)
    assert sink.closed == 1


def test_a_stop_that_names_a_special_token_ends_on_its_id(fakes: Any) -> None:
    from dataclasses import replace

    loaded, sink = replace(fakes.loaded(), stop_ids=frozenset()), Recorder()
    request = ask(loaded, "hi", stops=("<end>",), max_tokens=40)
    made = answer(loaded, loaded.new_cache(), request, sink)
    assert (made.text, made.finish) == ("You said: hi.", Finish.STOP)


def test_ignore_eos_keeps_the_users_stop_that_names_a_special_token(fakes: Any) -> None:
    loaded = fakes.loaded()
    request = ask(loaded, "hi", stops=("<end>",), max_tokens=40, ignore_eos=True)
    made = answer(loaded, loaded.new_cache(), request, Recorder())
    assert (made.text, made.finish) == ("You said: hi.", Finish.STOP)


def test_the_next_prompt_reuses_the_cache(fakes: Any) -> None:
    loaded = fakes.loaded()
    cache = loaded.new_cache()
    first = answer(loaded, cache, ask(loaded, "hello"), Recorder())
    messages = [Message("user", "hello"), Message("assistant", first.text), Message("user", "x")]
    request = Request(encode_messages(loaded, messages), resolve(SamplingOptions()))
    second = answer(loaded, cache, request, Recorder())
    fresh = answer(loaded, loaded.new_cache(), request, Recorder())
    assert second.text == fresh.text
    assert second.stats is not None
    assert second.stats.cached_tokens == len(b"user: hello\nassistant: You said: hello.")
