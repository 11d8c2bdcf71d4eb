"""The text for calibration: its form, and what it is made of."""

import re
from pathlib import Path

import pytest

from llmrun.formats.open import open_checkpoint
from llmrun.text.message import Message
from llmrun.text.passages import FILE, Passage, encode_passage, passages
from llmrun.text.template import ChatTemplate
from llmrun.text.tokenizer import Tokenizer


def test_passages_and_conversations_are_told_apart() -> None:
    document = (
        "%% text prose\nOne.\n\nTwo.\n\n%% chat\n%% system\nBe brief.\n%% user\nHi\n"
        "%% assistant\nHello.\n%% chat more\n%% user\nBye\n%% assistant\nSo long.\n%% text\n%d\n"
    )
    assert list(passages(document)) == [
        Passage("One.\n\nTwo."),
        Passage("", (Message("system", "Be brief."), Message("user", "Hi"),
                     Message("assistant", "Hello."))),
        Passage("", (Message("user", "Bye"), Message("assistant", "So long."))),
        Passage("%d"),
    ]  # fmt: skip


FULL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + FULL


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (FULL, "<system>Be brief.<user>Hi<assistant>Hello."),
        (NO_SYSTEM, "<user>Hi<assistant>Hello."),
        ("{{ raise_exception('never') }}", "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello."),
        (None, "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello."),
    ],
)
def test_conversations_that_a_template_refuses_are_still_read(
    source: str | None, text: str, starter_gguf: Path
) -> None:
    tokenizer = Tokenizer.from_gguf(open_checkpoint(starter_gguf).config)
    turns = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello."))
    template = None if source is None else ChatTemplate(source)
    ids = encode_passage(tokenizer, template, Passage("", turns))
    if template is not None:
        template.close()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("document", ["words first\n%% text\nx", "%% poem\nx"])
def test_another_form_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match=r"heading|poem"):
        list(passages(document))


def test_the_bundled_text_is_large_and_mixed_from_its_beginning_on() -> None:
    document = FILE.read_text(encoding="utf-8")
    assert 100_000 <= len(document.encode()) <= 250_000
    found = list(passages(document))
    beginning = found[: len(found) // 4]
    for some in (beginning, found):
        text = "".join(passage.text for passage in some)
        assert any(passage.turns for passage in some)
        for script in ("a-z", "\u0430-\u044f", "\u4e00-\u9fff", "\u3040-\u30ff", "\u0600-\u06ff"):
            assert re.search(f"[{script}]", text), script
        for sign in ("def ", "#include", "SELECT", "fn ", '{"'):
            assert sign in text, sign
    for passage in found:
        if passage.turns:
            roles = [turn.role for turn in passage.turns if turn.role != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert all(turn.content for turn in passage.turns)
        else:
            assert passage.text


def test_it_is_not_what_fidelity_is_measured_on() -> None:
    other: Path = FILE.with_name("evaluation.txt")
    if not other.exists():
        pytest.skip("no evaluation text")
    ours, theirs = (" ".join(path.read_text("utf-8").split()) for path in (FILE, other))
    length, step = 60, 20
    beginnings = {ours[start : start + length] for start in range(len(ours) - length)}
    shared = [
        theirs[start : start + length]
        for start in range(0, len(theirs) - length, step)
        if theirs[start : start + length] in beginnings
    ]
    assert shared == []
