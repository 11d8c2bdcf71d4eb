"""Sources are found by looking into the folder."""

from collections.abc import Callable

import pytest

from llmrun.errors import InternalError
from llmrun.store.reference import Reference
from llmrun.store.source import find_sources, source_for


def test_each_source_is_found_by_its_module() -> None:
    assert sorted(find_sources()) == ["hub", "local", "pypi"]


@pytest.mark.parametrize("name", ["tiny", "tiny-wheel", "org/name", "org/name/x.gguf", "."])
def test_exactly_one_source_handles_a_reference(
    name: str, reference: Callable[..., Reference]
) -> None:
    found = reference(name)
    assert [s for s in find_sources().values() if s.handles(found)] == [source_for(found)]


def test_an_unknown_kind_is_our_fault() -> None:
    with pytest.raises(InternalError, match="nobody"):
        source_for(Reference(name="x", kind="tape"))
