"""Names of GGUF tensors against the gguf package, for every architecture with a GGUF form.

The converter of the ggml project names tensors by the package's map from Hugging Face names, so
what llmrun makes of a GGUF name must be the parameter that the map calls so.
"""

from collections.abc import Iterator

import gguf
import pytest

from llmrun.model.architecture import Architecture, GgufForm, architectures
from llmrun.model.gguf import GgufFile
from llmrun.model.layout import Layout
from llmrun.model.parameters import expected
from llmrun.model.spec import DecoderSpec

ENDS = (".weight", ".bias")
IDS = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}


def cases() -> Iterator[tuple[str, Architecture]]:
    for name, arch in architectures().items():
        if arch.gguf is not None:
            yield name, arch


def published(layout: Layout, canonical: str) -> str:
    """The name of the Hugging Face tensor that holds a parameter."""
    head, found, part = canonical.partition(".layers.")
    if not found:
        return canonical
    layer, _, part = part.partition(".")
    module, _, end = part.rpartition(".")
    for key, place in layout.places.items():
        if not place.stacked and module in place.parts:
            return f"{head}.layers.{layer}.{key}.{end}"
        if not place.stacked and part in place.parts:
            return f"{head}.layers.{layer}.{key}"
    return canonical


def in_gguf(spec: DecoderSpec, form: GgufForm) -> bool:
    """Whether ggml has files of such a decoder: of many mixtures none with plain layers, too."""
    plain = spec.mixture is not None and not all(layer.experts for layer in spec.layers)
    return not plain or gguf.MODEL_TENSOR.FFN_GATE in gguf.MODEL_TENSORS[IDS[form.name]]


def back(form: GgufForm, layout: Layout, gguf_name: str, arch: Architecture) -> set[str]:
    """The parameters that llmrun finds in a GGUF's tensor."""
    spec = arch.spec(arch.tiny[0])
    file = GgufFile({"general.architecture": form.name}, {}, pytest.fail, form.names)
    pieces, _ = layout.pieces(file.published_name(gguf_name), (8, 8), expected(spec))
    return {piece.canonical for piece in pieces}


@pytest.mark.parametrize("arch", [arch for _, arch in cases()], ids=[name for name, _ in cases()])
def test_every_parameter_has_the_name_that_the_map_gives_it(arch: Architecture) -> None:
    form = arch.gguf
    assert form is not None
    names = gguf.get_tensor_name_map(IDS[form.name], 8)
    for spec in map(arch.spec, arch.tiny):
        if not in_gguf(spec, form):
            continue
        for canonical in expected(spec):
            if ".experts." in canonical:
                continue  # in one tensor for all experts, which the map does not know
            theirs = names.get_name(published(arch.layout, canonical), ENDS)
            assert theirs is not None, canonical
            if not theirs.endswith(ENDS):
                theirs += ".weight"  # as the converter does with parameters that have no end
            assert canonical in back(form, arch.layout, theirs, arch), (theirs, canonical)


def test_names_that_ggml_knows_by_architecture_are_known() -> None:
    assert not {arch.gguf.name for _, arch in cases() if arch.gguf} - IDS.keys()
