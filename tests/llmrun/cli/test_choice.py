"""Which scheme ``-q auto`` takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.cli.choice import choose_scheme
from llmrun.quant.roles import Role


def unquantized(millions: int) -> Any:
    """A source of so many million weights in one matrix."""
    weights = {"x": (Role.DOWN, (1000 * millions, 1000), "bf16")}
    return SimpleNamespace(
        checkpoint=SimpleNamespace(quantization=None), weights=lambda: weights, opened=set
    )


@pytest.mark.parametrize("recommended", [None, "int4"])
@pytest.mark.parametrize(
    ("isa", "name"),
    [(None, "int4"), ("base", "int4"), ("avx2", "int4"), ("avxvnni", "nl4"), ("amx", "nl4")],
)
def test_four_bits_are_levels_where_those_are_as_fast(
    recommended: str | None, isa: str | None, name: str
) -> None:
    choice = choose_scheme("auto", unquantized(1500), recommended, False, isa)
    assert choice.name == name
    assert f"scheme {name} (" in choice.note


@pytest.mark.parametrize("isa", [None, "avx512"])
def test_small_models_get_eight_bits_whatever_the_kernels(isa: str | None) -> None:
    assert choose_scheme("auto", unquantized(500), None, False, isa).name == "int8"
    assert choose_scheme("auto", unquantized(1500), "int8", False, isa).name == "int8"


def test_what_is_asked_for_is_taken() -> None:
    assert choose_scheme("int4", unquantized(1500), None, False, "amx").name == "int4"
