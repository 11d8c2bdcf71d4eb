"""Patterns mean what Python's engine means, but never take exponential time."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from llmrun.formats.patterns import compile_pattern

NAMES = [
    "",
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.mlp.down_proj",
    "model.layers.3.mlp.experts.17.up_proj",
    "model.layers.3.mlp.gate",
    "model.layers.3.mlp.gate_proj",
    "a-b[c]",
]


@pytest.mark.parametrize(
    "pattern",
    [
        r".*self_attn\.(q|k|v|o|qkv)_proj$",
        r".*experts\.\d+\.(gate|up|down)_proj$",
        r".*layers\.(0|1|30|31)\.mlp\.down_proj$",
        r".*mlp\.gate$",
        r"^model\.layers\.[0-9]+\.",
        r"model.layers.[^0].*?(?:down|up)_proj",
        r".*gate",
        r"(a|b)?-?b\[c\]",
        r"^$",
        r"",
        r"lm_head|.*q_proj",
        r"\w+\.[a-z\-]+",
    ],
)
def test_same_answer_as_the_backtracking_engine(pattern: str) -> None:
    matches = compile_pattern(pattern)
    for name in NAMES:
        assert matches(name) == (re.match(pattern, name) is not None), name


_piece = some.sampled_from(
    ["a", "b", ".", "a*", "b+", "a?", "[ab]", "[^a]", "(a|b)", "(ab)*", "|", "$"]
)


@settings(max_examples=300, deadline=None)
@given(pieces=some.lists(_piece, max_size=7), name=some.text("ab", max_size=7))
def test_same_answer_for_any_pattern(pieces: list[str], name: str) -> None:
    pattern = "".join(pieces)
    assert compile_pattern(pattern)(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(a*)*b", "a?" * 30 + "a" * 30, "(.*)*x"])
def test_evil_patterns_end(pattern: str) -> None:
    start = time.process_time()
    compile_pattern(pattern)("a" * 60 + "c")
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)",
        "(a",
        "*a",
        "a**",
        "[a",
        "[]",
        "a{2}",
        "(?=a)",
        "(?!a)",
        "(?P<n>a)",
        r"\1",
        r"\b",
        "\\",
        "(" * 40 + ")" * 40,
        "a" * 1025,
    ],
)
def test_everything_else_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        compile_pattern(pattern)
