"""What was said in a chat, as turns of a question and its reply.

A reply that was stopped stays, marked, and is part of the next prompt. A question whose reply was
stopped before its first word stays too: what is asked next joins it, so that roles alternate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmrun.text.message import Message


@dataclass(frozen=True)
class Turn:
    """A question, and its reply: None while there is none."""

    question: str
    reply: str | None = None
    interrupted: bool = False


@dataclass(frozen=True)
class Transcript:
    """All turns, oldest first; each change makes a new one, so a failed turn is easy to forget."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()

    def ask(self, question: str) -> "Transcript":
        """Add a question, or join it to one that got no reply."""
        if self.turns and self.turns[-1].reply is None:
            joined = Turn(f"{self.turns[-1].question}\n\n{question}")
            return replace(self, turns=(*self.turns[:-1], joined))
        return replace(self, turns=(*self.turns, Turn(question)))

    def answered(self, reply: str, *, interrupted: bool) -> "Transcript":
        """Record the reply to the last question; one stopped before its first word is none."""
        told = None if interrupted and not reply else reply
        last = replace(self.turns[-1], reply=told, interrupted=interrupted)
        return replace(self, turns=(*self.turns[:-1], last))

    def without_reply(self) -> "Transcript":
        """Take the last reply back, to ask again."""
        return replace(self, turns=(*self.turns[:-1], Turn(self.turns[-1].question)))

    def without_last(self) -> "Transcript":
        """Take the last question and its reply back."""
        return replace(self, turns=self.turns[:-1])

    def messages(self) -> Sequence[Message]:
        """As the chat template wants it."""
        messages = [] if self.system is None else [Message("system", self.system)]
        for turn in self.turns:
            messages.append(Message("user", turn.question))
            if turn.reply is not None:
                messages.append(Message("assistant", turn.reply))
        return messages
