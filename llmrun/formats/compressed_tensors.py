"""Folders of compressed-tensors' ``pack-quantized``: packed integer weights with scales.

A logical tensor ``X.weight`` is stored as ``X.weight_packed``, ``X.weight_scale``,
``X.weight_shape`` and, asymmetric, ``X.weight_zero_point``; it is listed once. The packed words
are GroupInt's code bytes, so a weight is a view of the file. Every part is checked against the
config before any weight is read.
"""

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, Format, TensorInfo
from llmrun.formats.damage import damaged, shown
from llmrun.formats.finite import nonfinite_part
from llmrun.formats.pack_config import METHOD, PackConfig, Packing, parse_pack_config
from llmrun.formats.safetensors import (
    CONFIG_NAME,
    dense,
    info,
    open_tensors,
    quantization_config,
    read_config,
)
from llmrun.formats.safetensors_header import StoredTensor
from llmrun.kernels.forms import FLOATS, Form, GroupInt
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.zero_points import minima

PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class PackedWeight:
    """The checked parts of one logical weight [N, K]."""

    packing: Packing
    shape: tuple[int, int]
    parts: Mapping[str, StoredTensor]

    @property
    def kind(self) -> str:
        """As GroupInt's ``kind``."""
        group = f"g{self.packing.group}" if self.packing.group else "row"
        return f"int{self.packing.bits} {group}{'' if self.packing.symmetric else ' +min'}"


def _detect(path: Path) -> bool:
    if not (path / CONFIG_NAME).exists():
        return False
    quantization = quantization_config(path)
    return quantization is not None and quantization.get("quant_method") == METHOD


def _open(folder: Path) -> Checkpoint:
    path = folder / CONFIG_NAME
    pack_config = parse_pack_config(quantization_config(folder) or {}, path)
    stored = open_tensors(folder)
    packed = _packed_weights(stored, pack_config, path)
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part not in PARTS:
            _check_plain(module, part, tensor, pack_config)
            tensors[name] = info(tensor)
        elif f"{module}.weight" not in tensors:
            weight = packed[f"{module}.weight"]
            size = sum(p.data.nbytes for p in weight.parts.values())
            logical = TensorInfo(f"{module}.weight", weight.shape, weight.kind, size)
            tensors[logical.name] = logical
    kinds = sorted({weight.kind for weight in packed.values()})
    return Checkpoint(
        path=folder,
        layout="huggingface",
        config=read_config(folder),
        tensors=tensors,
        read=partial(_read, stored, packed),
        quantization=f"compressed-tensors {', '.join(kinds)}",
    )


def _packed_weights(
    stored: Mapping[str, StoredTensor], config: PackConfig, path: Path
) -> dict[str, PackedWeight]:
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in PARTS:
            parts.setdefault(module, {})[part] = tensor
    weights = {}
    for module, found in parts.items():
        if f"{module}.weight" in stored:
            raise damaged(path.parent, f"{shown(module)} is stored both packed and plain")
        owners = config.owners(module)
        if len(owners) != 1:
            claim = f"{len(owners)} groups" if owners else "no group"
            raise damaged(path, f"{shown(module)} is packed, but {claim} of the config match it")
        packing, _ = config.groups[owners[0]]
        weights[f"{module}.weight"] = _packed_weight(module, packing, found, path.parent)
    return weights


def _packed_weight(
    module: str, packing: Packing, parts: Mapping[str, StoredTensor], folder: Path
) -> PackedWeight:
    """Check dtype and shape of every part against the config."""
    needed = PARTS[:3] if packing.symmetric else PARTS[:4]
    for part in needed:
        if part not in parts:
            raise damaged(folder, f"tensor {shown(f'{module}.{part}')} is missing")
    if packing.symmetric and "weight_zero_point" in parts:
        zero_point = parts["weight_zero_point"]
        raise zero_point.refused("is a zero point, but the config says symmetric")
    extents = parts["weight_shape"]
    _expect(extents, (2,), ("I64", "I32"))
    width = extents.data.nbytes // 2
    n, k = (
        int.from_bytes(extents.data[at : at + width], "little", signed=True) for at in (0, width)
    )
    group = packing.group or k
    if n < 1 or k < 1 or k % group or k * packing.bits % 32:
        raise extents.refused(f"says {n} x {k}, which does not divide into groups of {group}")
    _expect(parts["weight_packed"], (n, k * packing.bits // 32), ("I32",))
    _expect(parts["weight_scale"], (n, k // group), tuple(dtype.name for dtype in FLOATS))
    if "weight_zero_point" in parts:
        rows = -(-n * packing.bits // 32)
        _expect(parts["weight_zero_point"], (rows, k // group), ("I32",))
    if "weight_g_idx" in parts:
        _expect(parts["weight_g_idx"], (k,), ("I32",))
        _check_in_order(parts["weight_g_idx"], k, group)
    return PackedWeight(packing, (n, k), parts)


def _expect(stored: StoredTensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if stored.shape != shape or stored.dtype not in dtypes:
        wanted = f"{' or '.join(dtypes)} {shape}"
        raise stored.refused(f"is {stored.dtype} {shown(stored.shape)}, expected {wanted}")


def _check_in_order(stored: StoredTensor, k: int, group: int) -> None:
    """Refuse weights whose columns were reordered; unset indices (all -1) mean they were not."""
    indices = array("i", bytes(stored.data))
    if sys.byteorder == "big":
        indices.byteswap()
    if indices not in (array("i", (i // group for i in range(k))), array("i", [-1]) * k):
        raise stored.refused("reorders the columns, which llmrun does not read")


def _check_plain(module: str, part: str, stored: StoredTensor, config: PackConfig) -> None:
    """Refuse a plain weight that the config names as packed."""
    if part == "weight" and config.owners(module, linear=False):
        raise stored.refused(
            f"is stored plain, but the config names it as packed: "
            f"tensor {shown(f'{module}.weight_packed')} is missing"
        )


def _read(
    stored: Mapping[str, StoredTensor], packed: Mapping[str, PackedWeight], name: str
) -> Form:
    weight = packed.get(name)
    if weight is None:
        return dense(stored[name])
    n, k = weight.shape
    bits = weight.packing.bits
    codes = HostArray(DType.U8, (n, k * bits // 8), weight.parts["weight_packed"].data)
    scales = weight.parts["weight_scale"].array()
    mins = None
    if not weight.packing.symmetric:
        mins = minima(weight.parts["weight_zero_point"].array(), scales, bits)
    form = GroupInt(bits, weight.packing.group, codes, scales, mins, weight.shape)
    fault = nonfinite_part(form)
    if fault is not None:
        raise weight.parts["weight_scale"].refused(f"is not finite at element {fault[1]}")
    return form


FORMAT = Format(METHOD, _detect, _open)
