"""One chat: its state, a turn, and what becomes of a turn that fails.

An error of a turn (a prompt that does not fit, memory) is shown and the turn forgotten; the chat
goes on.
"""

from dataclasses import dataclass, field, replace

from llmrun.cli.answer import Answer, Request, answer
from llmrun.cli.assemble import LoadedModel
from llmrun.cli.exits import complain, is_survivable, named
from llmrun.cli.loading import stop_strings
from llmrun.cli.one_shot import Answering
from llmrun.cli.options import Stats
from llmrun.cli.prompting import Prompt, encode_messages, encode_text, lost_note
from llmrun.cli.session import Session
from llmrun.cli.text_sink import StepFloor, measure_step_floor, say_stats, text_sink
from llmrun.cli.transcript import Transcript
from llmrun.engine.cache import KvCache
from llmrun.engine.events import Finish
from llmrun.engine.sampler import SamplingOptions, resolve
from llmrun.errors import LlmrunError
from llmrun.kernels.ops import Interrupt, never
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
        if note := lost_note(self.loaded, question):
            self.session.say(note)
        self._turn(self.transcript.ask(question))

    def again(self) -> None:
        """The last question once more."""
        self._turn(self.transcript.without_reply())

    def _turn(self, transcript: Transcript) -> None:
        """Answer the transcript's last question; it becomes ours only if that worked."""
        try:
            made = self._answer(transcript)
        except (LlmrunError, MemoryError, RuntimeError) as err:  # of which torch's are some
            if not is_survivable(err):
                raise
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
