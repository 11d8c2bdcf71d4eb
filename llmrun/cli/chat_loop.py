"""The chat of a person at a terminal: read, answer, show, again.

An error of a turn (a prompt that does not fit, memory) is shown and the turn forgotten; the chat
goes on. Ctrl-C stops an answer and keeps what was said; at an empty prompt it tells how to leave,
twice within a second leaves with 130; Ctrl-D and /exit leave with 0.
"""

import contextlib
import time
from dataclasses import dataclass, field, replace

from llmrun.cli import chat_commands
from llmrun.cli.answer import Answer, Request, answer
from llmrun.cli.assemble import LoadedModel
from llmrun.cli.exits import complain, named, survivable
from llmrun.cli.interrupts import TWICE_S, stops_the_answer
from llmrun.cli.line_editor import LineEditor, Typed
from llmrun.cli.loading import facts, sampling_options, stop_strings
from llmrun.cli.one_shot import Answering
from llmrun.cli.options import Stats
from llmrun.cli.prompting import Prompt, encode_messages, encode_text
from llmrun.cli.session import Session
from llmrun.cli.text_sink import StepFloor, measure_step_floor, say_stats, text_sink
from llmrun.cli.transcript import Transcript
from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish
from llmrun.engine.generate import Interrupt, never
from llmrun.engine.sampler import SamplingOptions, resolve
from llmrun.text.decode_input import clean_text

WARN_AT = 0.8
"""Share of the context from which on the person is warned."""


@dataclass
class Chat:
    """The state of one chat; slash commands read and change it.

    ``interrupt`` tells whether Ctrl-C was pressed since the line being worked on was sent.
    """

    session: Session
    loaded: LoadedModel
    how: Answering
    cache: KvCache
    transcript: Transcript
    sampling: SamplingOptions
    max_tokens: int | None
    stats: Stats
    last: Answer | None = None
    warned: bool = field(default=False)
    interrupt: Interrupt = field(default=never)
    step_floor: StepFloor | None = field(default=None)

    def ask(self, question: str) -> None:
        """One turn."""
        self._turn(self.transcript.ask(question))

    def again(self) -> None:
        """The last question once more."""
        self._turn(self.transcript.without_reply())

    def _turn(self, transcript: Transcript) -> None:
        """Answer the transcript's last question; it becomes ours only if that worked."""
        try:
            made = self._answer(transcript)
        except survivable() as err:
            complain(named(err))
            self.session.say("The last message was not kept; the chat goes on.")
            return
        interrupted = made.finish is Finish.INTERRUPTED
        self.transcript = transcript.answered(made.text, interrupted=interrupted)
        self.last = made
        if made.stats is not None:
            say_stats(self.session, self.stats, made.stats, made.finish)
        elif interrupted:
            self.session.terminal.say("interrupted before the first token", dim=True)
        self._warn_if_nearly_full()

    def _answer(self, transcript: Transcript) -> Answer:
        if self.step_floor is None:
            self.step_floor = measure_step_floor(self.session, self.loaded, self.cache, self.stats)
        opening = clean_text(self.how.prompting.prefill).text
        prompt = self.encode(transcript, opening)
        request = Request(
            prompt=prompt,
            sampling=resolve(self.sampling),
            stops=stop_strings(self.loaded, self.how.sampling, raw=self.how.prompting.raw),
            max_tokens=self.max_tokens,
            ignore_eos=self.how.sampling.ignore_eos,
            opening=opening,
        )
        output = replace(self.how.output, stats=self.stats)
        sink = text_sink(self.session, self.loaded, prompt, output, self.step_floor)
        return answer(self.loaded, self.cache, request, sink, self.interrupt)

    def encode(self, transcript: Transcript, opening: str = "") -> Prompt:
        """The whole conversation as ids: what the cache holds of it is not computed again."""
        if self.how.prompting.raw:
            said = "".join(turn.question + (turn.reply or "") for turn in transcript.turns)
            return encode_text(self.loaded, said + opening)
        return encode_messages(self.loaded, transcript.messages(), opening)

    @property
    def used_tokens(self) -> int:
        """Tokens of the context in use."""
        return self.cache.length(0)

    def _warn_if_nearly_full(self) -> None:
        share = self.used_tokens / self.loaded.context
        if share >= WARN_AT and not self.warned:
            self.session.say(
                f"warning: {share:.0%} of the context is used ({self.used_tokens:,} of "
                f"{self.loaded.context:,} tokens). /clear or /undo make room; --ctx N gives more."
            )
        self.warned = share >= WARN_AT


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
