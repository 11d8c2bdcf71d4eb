"""What is kept of a chat, and what the next prompt holds."""

from llmrun.cli.transcript import Transcript, Turn


def said(transcript: Transcript) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in transcript.messages()]


def test_turns_alternate_behind_the_system_message() -> None:
    talk = Transcript("Be kind.").ask("one").answered("1", interrupted=False).ask("two")
    assert said(talk) == [
        ("system", "Be kind."), ("user", "one"), ("assistant", "1"), ("user", "two"),
    ]  # fmt: skip


def test_r005_an_interrupted_reply_is_kept_marked_and_rendered() -> None:
    talk = Transcript().ask("one").answered("par", interrupted=True)
    assert talk.turns == (Turn("one", "par", interrupted=True),)
    assert said(talk.ask("go on")) == [
        ("user", "one"), ("assistant", "par"), ("user", "go on"),
    ]  # fmt: skip


def test_a_question_without_any_reply_joins_the_next() -> None:
    talk = Transcript().ask("one").answered("", interrupted=True).ask("two")
    assert said(talk) == [("user", "one\n\ntwo")]


def test_an_empty_reply_that_ended_by_itself_is_a_reply() -> None:
    talk = Transcript().ask("one").answered("", interrupted=False).ask("two")
    assert said(talk) == [("user", "one"), ("assistant", ""), ("user", "two")]


def test_undo_and_regen() -> None:
    talk = Transcript().ask("one").answered("1", interrupted=False)
    assert said(talk.without_reply()) == [("user", "one")]
    assert talk.without_last() == Transcript()
    assert talk.turns, "a transcript is never changed in place"
