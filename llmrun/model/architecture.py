"""What an architecture file exports, and how one is found by a config's ``model_type``.

Each module of ``llmrun.model.archs`` exports ``ARCH``. Adding an architecture is adding a file;
the parity tests pick it up by themselves.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module

import llmrun.model.archs as archs
from llmrun.errors import ModelFileError
from llmrun.model.gguf import GgufFile
from llmrun.model.layout import Layout
from llmrun.model.spec import DecoderSpec

Config = Mapping[str, object]


@dataclass(frozen=True)
class GgufForm:
    """How GGUF files hold this architecture.

    ``name``: value of ``general.architecture``. ``config(file)`` gives the same config a Hugging
    Face checkpoint would have. ``interleaved``: query and key rows were stored with rotary pairs
    next to each other and are put back into the published order at load. ``names``: what a layer's
    tensors are called in the published checkpoint where ``model.gguf`` says otherwise.
    ``applies(metadata)``: whether a file of this name is of this architecture, if several are.
    """

    name: str
    config: Callable[[GgufFile], dict[str, object]]
    interleaved: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    applies: Callable[[Config], bool] = lambda metadata: True


@dataclass(frozen=True)
class Architecture:
    """One family of decoders.

    ``model_type`` and ``class_names`` as configs name it; ``spec`` reads a config (ModelFileError
    for values it does not support); ``tiny``: configs of small models for the parity tests, each
    exercising another corner; ``layout``: where its checkpoints keep the parameters; ``text``:
    the language model's own config inside that of a model that does more.
    """

    model_type: str
    class_names: tuple[str, ...]
    spec: Callable[[Config], DecoderSpec]
    tiny: tuple[dict[str, object], ...]
    layout: Layout = field(default_factory=Layout)
    gguf: GgufForm | None = None
    text: Callable[[Config], Config] | None = None


def architectures() -> dict[str, Architecture]:
    """All architectures by model_type."""
    return {arch.model_type: arch for arch in _walk()}


def find(model_type: object) -> Architecture:
    """The architecture of a config's ``model_type``; ModelFileError names the known ones."""
    if model_type is None:
        raise _none_named()
    for arch in _walk(first=str(model_type)):
        if arch.model_type == model_type:
            return arch
    raise _unsupported(str(model_type), sorted(architectures()))


def find_gguf(metadata: Config) -> tuple[Architecture, GgufForm]:
    """The architecture of a GGUF, by its ``general.architecture``."""
    name = metadata.get("general.architecture")
    known = set()
    for arch in _walk(first=str(name)):
        form = arch.gguf
        if form is None:
            continue
        if form.name == name and form.applies(metadata):
            return arch, form
        known.add(form.name)
    raise _unsupported(str(name), sorted(known))


def _walk(first: str = "") -> Iterator[Architecture]:
    """Architectures, each imported when it is asked for; the one of the module ``first`` before
    all. A module is called as the model_type it reads."""
    modules = [module.name for module in pkgutil.iter_modules(archs.__path__)]
    for name in sorted(modules, key=lambda name: name != first):
        arch: Architecture = import_module(f"{archs.__name__}.{name}").ARCH
        if arch.model_type != name:
            raise ValueError(f"module {name} holds the architecture {arch.model_type!r}")
        yield arch


def _none_named() -> ModelFileError:
    return ModelFileError(
        "the model's config names no architecture (model_type)",
        "check that config.json is the publisher's own",
    )


def _unsupported(name: str, known: list[str]) -> ModelFileError:
    return ModelFileError(
        f"models of architecture {name!r} are not supported",
        f"supported: {', '.join(known)}; `llmrun list --catalog` shows models that work",
    )
