"""Conversations become the reference's ids, whatever people write, with exactly one BOS."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.errors import UsageError
from llmrun.text.prompt import Message, encode_chat, encode_raw
from llmrun.text.template import FALLBACK_TEMPLATE, ChatTemplate
from llmrun.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONVERSATIONS = [
    [("user", "Hello!")],
    [("system", "Be brief."), ("user", "What is 12 + 345?")],
    [("user", "  spaces  and\n\nlines "), ("assistant", "Yes."), ("user", "再来一次 🦀👩‍👩‍👧")],
    [("user", ""), ("assistant", ""), ("user", "def f(x):\n\treturn x  # 10")],
    [("system", "You are <b>bold</b> & {{ braces }}"), ("user", "[INST] < | im_start | >")],
    [("user", "ends with a <"), ("assistant", "<|im_"), ("user", "<")],
]


def _messages(turns: list[tuple[str, str]]) -> list[Message]:
    return [Message(role, content) for role, content in turns]


def _dicts(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module")
def starter_template(starter_metadata: dict[str, Any]) -> Iterator[ChatTemplate]:
    source = starter_metadata["tokenizer.chat_template"]
    with ChatTemplate(source, "<|im_start|>", "<|im_end|>") as template:
        yield template


@pytest.fixture(scope="module")
def chatml() -> Iterator[ChatTemplate]:
    with ChatTemplate(CHATML) as template:
        yield template


@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_starter_equals_the_reference(
    turns: list[tuple[str, str]],
    starter: Tokenizer,
    starter_oracle: Any,
    starter_template: ChatTemplate,
) -> None:
    expected = starter_oracle.apply_chat_template(
        _dicts(turns), add_generation_prompt=True, return_dict=False
    )
    assert encode_chat(starter, starter_template, _messages(turns)) == expected


def test_starter_continues_an_answer_as_the_reference(
    starter: Tokenizer, starter_oracle: Any, starter_template: ChatTemplate
) -> None:
    turns = [("user", "Name a colour."), ("assistant", "Sure, I say:")]
    expected = starter_oracle.apply_chat_template(
        _dicts(turns), continue_final_message=True, return_dict=False
    )
    assert encode_chat(starter, starter_template, _messages(turns[:1]), turns[1][1]) == expected


def test_every_family_equals_the_reference(
    family: Any, lines: list[str], chatml: ChatTemplate
) -> None:
    bos = [family.tokenizer.bos_id] if family.tokenizer.add_bos else []
    for a, b in zip(lines[::8], lines[1::8], strict=False):
        turns = [("system", a), ("user", b), ("assistant", a[::-1]), ("user", "ok")]
        expected = family.oracle.apply_chat_template(
            _dicts(turns), chat_template=CHATML, add_generation_prompt=True, return_dict=False
        )
        assert encode_chat(family.tokenizer, chatml, _messages(turns)) == bos + expected, turns


def test_r044_special_strings_in_messages_stay_words(family: Any, chatml: ChatTemplate) -> None:
    tokenizer = family.tokenizer
    unknown = tokenizer.special_tokens.get("<unk>")
    plain = encode_chat(tokenizer, chatml, _messages([("system", "x"), ("user", "x")]))
    markers = [i for i in plain if i in tokenizer.special_ids]
    for string in tokenizer.special_tokens:
        for content in (string, f"a{string}\n{string}b", f" {string} ", string[:-1] + string):
            ids = encode_chat(
                tokenizer, chatml, _messages([("system", content), ("user", content)])
            )
            found = [i for i in ids if i in tokenizer.special_ids and i != unknown]
            assert found == markers, content
            if family.name == "gpt2":
                start = tokenizer.specials.tokens["<|im_start|>"].id
                assert ids.count(start) == 3
                assert tokenizer.decode(ids).count(string) == content.count(string) * 2


def test_r044_every_special_string_of_the_starter(
    starter: Tokenizer, starter_template: ChatTemplate
) -> None:
    for string in starter.special_tokens:
        messages = _messages([("user", f"say {string} now")])
        ids = encode_chat(starter, starter_template, messages, string)
        assert [i for i in ids if i in starter.special_ids] == [1, 2, 1, 2, 1]
        text = starter.decode(ids, skip_special=False)
        assert text.count(f"say {string} now") == 1
        assert text.endswith(f"assistant\n{string}")


def test_r044_two_messages_cannot_make_a_special_string_together(starter: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    with ChatTemplate(source) as template:
        for cut in range(1, 10):
            turns = [("user", "<|im_end|>"[:cut] + " \n"), ("user", "<|im_end|>"[cut:])]
            ids = encode_chat(starter, template, _messages(turns))
            assert not starter.special_ids & set(ids)
            assert starter.decode(ids) == "<|im_end|>"


def test_r044_random_pieces_of_special_strings_stay_words(
    starter: Tokenizer, starter_template: ChatTemplate
) -> None:
    strings = list(starter.special_tokens)
    part = st.one_of(
        st.sampled_from(strings),
        st.sampled_from(["<", "|", ">", "\ufdd0", "\ufdd1", "im_end", "<|", "|>"]),
        st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=3),
    )

    @settings(max_examples=150, deadline=None)
    @given(st.lists(part, max_size=8).map("".join))
    def check(content: str) -> None:
        ids = encode_chat(starter, starter_template, _messages([("user", content)]))
        assert [i for i in ids if i in starter.special_ids] == [1, 2, 1, 2, 1]
        # Through plain encoding, since the starter's vocabulary has no piece for some bytes.
        words = starter.encode_plain("user\n" + content.replace("\ufdd0", "\ufffd"))
        shown = starter.decode(ids, skip_special=False)
        assert starter.decode(words) + "<|im_end|>" in shown

    check()


def test_templates_can_drop_old_reasoning_from_answers(make_family: Any) -> None:
    """The model's own visible tags stay whole for the template; a person's do not."""
    tokenizer = make_family("qwen2").tokenizer
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    think = tokenizer.special_tokens["<think>"]
    with ChatTemplate(source + "<think>") as template:
        ids = encode_chat(
            tokenizer,
            template,
            _messages([("user", "<think>"), ("assistant", "<think>a</think>b"), ("user", "c")]),
        )
    assert ids.count(think) == 1
    assert tokenizer.decode(ids) == "<think>bc<think>"
    assert ids[-1] == think


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("name", ["llama3", "llama2", "mistral"])
def test_r036_r037_exactly_one_bos(name: str, add_bos: bool, make_family: Any) -> None:
    tokenizer = make_family(name).tokenizer
    before, tokenizer.add_bos = tokenizer.add_bos, add_bos
    try:
        for source in ("{{ bos_token }}" + CHATML, "{{ bos_token }}{{ bos_token }}" + CHATML):
            with ChatTemplate(source, "<s>") as template:
                ids = encode_chat(tokenizer, template, _messages([("user", "<s>hi")]))
                assert ids[0] == tokenizer.bos_id
                assert ids.count(tokenizer.bos_id) == 1
        assert encode_raw(tokenizer, "<s>hi")[:1] == [tokenizer.bos_id]
        assert encode_raw(tokenizer, "<s>hi").count(tokenizer.bos_id) == 1
        assert encode_raw(tokenizer, "hi").count(tokenizer.bos_id) == int(add_bos)
    finally:
        tokenizer.add_bos = before


def test_a_template_without_bos_gets_one_where_the_tokenizer_wants_it(
    make_family: Any, chatml: ChatTemplate
) -> None:
    for name, count in (("llama3", 1), ("qwen2", 0)):
        tokenizer = make_family(name).tokenizer
        ids = encode_chat(tokenizer, chatml, _messages([("user", "hi")]))
        assert ids.count(tokenizer.bos_id) == count


def test_r038_the_fallback_template_starts_with_bos(make_family: Any) -> None:
    tokenizer = make_family("mistral").tokenizer
    assert not tokenizer.add_bos
    with ChatTemplate(FALLBACK_TEMPLATE, "<s>") as template:
        ids = encode_chat(tokenizer, template, _messages([("user", "hi")]))
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1


def test_raw_text_parses_special_strings(make_family: Any) -> None:
    family = make_family("qwen2")
    text = "<|im_start|>user\nhi<|im_end|>"
    expected = family.oracle(text, add_special_tokens=False)["input_ids"]
    assert encode_raw(family.tokenizer, text) == expected


@pytest.mark.parametrize("role", ["<|im_end|>", "endoftext", "", "User"])
def test_unknown_roles_are_refused(
    role: str, starter: Tokenizer, starter_template: ChatTemplate
) -> None:
    with pytest.raises(UsageError, match="unknown role"):
        encode_chat(starter, starter_template, [Message(role, "x")])
