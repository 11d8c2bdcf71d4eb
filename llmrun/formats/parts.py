"""Weights that a file stores in parts: which parts there are, and the checkpoint they make.

A logical weight ``X.weight`` is listed once, where its first part lies; other tensors are plain.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, TensorInfo
from llmrun.formats.damage import damaged, shown
from llmrun.formats.finite import first_nonfinite
from llmrun.formats.safetensors import CONFIG_NAME, dense, info, read_config
from llmrun.formats.safetensors_header import StoredTensor
from llmrun.kernels.forms import Form
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.arrays import first_overflow

Parts = Mapping[str, StoredTensor]
FLOAT_NAMES = (DType.F16.name, DType.BF16.name, DType.F32.name)


@dataclass(frozen=True)
class PartedWeight:
    """A weight as its checked parts describe it, and how to make its form.

    ``label``: how it is stored, for the line that describes the whole file.
    """

    info: TensorInfo
    label: str
    parts: Parts
    read: Callable[[], Form]


def weight_of(
    name: str, shape: tuple[int, ...], kind: str, parts: Parts, read: Callable[[], Form]
) -> PartedWeight:
    """Describe a weight that is read as the form ``kind``; its bytes are those of its parts."""
    size = sum(part.nbytes for part in parts.values())
    return PartedWeight(TensorInfo(name, shape, kind, size), kind, parts, read)


def opened_weight(
    name: str, shape: tuple[int, int], label: str, parts: Parts, read: Callable[[], Form]
) -> PartedWeight:
    """Describe a weight that no form holds as it is stored, so that it is read as plain numbers."""
    size = sum(part.nbytes for part in parts.values())
    return PartedWeight(TensorInfo(name, shape, label, size, opened=True), label, parts, read)


def gathered(stored: Parts, names: Iterable[str]) -> dict[str, dict[str, StoredTensor]]:
    """Return the parts ``X.part`` of every module X that has at least one of ``names``."""
    wanted = frozenset(names)
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in wanted:
            modules.setdefault(module, {})[part] = tensor
    return modules


def parted_checkpoint(
    folder: Path, title: str, stored: Parts, weights: Iterable[PartedWeight]
) -> Checkpoint:
    """Return the checkpoint of a folder whose ``weights`` are stored in parts.

    ModelFileError if there are none, though the config says so, or if one is stored plain too.
    """
    by_name: dict[str, PartedWeight] = {}
    owners: dict[str, str] = {}
    for weight in weights:
        by_name[weight.info.name] = weight
        owners |= dict.fromkeys((part.name for part in weight.parts.values()), weight.info.name)
    if not by_name:
        raise damaged(folder / CONFIG_NAME, f"says {title}, but no tensor is stored like that")
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in stored.items():
        owner = owners.get(name)
        if owner is not None:
            tensors[owner] = by_name[owner].info
        elif name in by_name:
            raise damaged(folder, f"{shown(name)} is stored both packed and plain")
        else:
            tensors[name] = info(tensor)

    def read(name: str) -> Form:
        weight = by_name.get(name)
        return dense(stored[name]) if weight is None else weight.read()

    labels = sorted({weight.label for weight in by_name.values()})
    return Checkpoint(
        path=folder,
        layout="huggingface",
        config=read_config(folder),
        tensors=tensors,
        read=read,
        quantization=f"{title} {', '.join(labels)}",
    )


def check_products(part: StoredTensor, scales: HostArray, largest: float) -> None:
    """Refuse scales made from ``part`` that are not finite times the largest code."""
    index = first_overflow(scales, largest)
    if index is not None:
        raise part.refused(f"is not finite, or too large, at element {index}")


def check_finite(part: StoredTensor, *arrays: HostArray | None) -> None:
    """Refuse scales and minima made from ``part`` that are not finite."""
    for array in arrays:
        index = None if array is None else first_nonfinite(array)
        if index is not None:
            raise part.refused(f"is not finite at element {index}")
