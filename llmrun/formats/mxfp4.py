"""gpt-oss folders of method ``mxfp4``: stacks of expert matrices as 4-bit floats.

A logical tensor (E, N, K) is stored as ``X_blocks`` u8 [E, N, K/32, 16] (low nibble: even k) and
``X_scales`` u8 [E, N, K/32] (powers of two); rows are output features, in the file's order. It
becomes one Lut16 form [E * N, K] whose codes are a view of the file. It keeps the name
``X_blocks``, because a plain X of the same shape holds the transposed matrices.
"""

from functools import partial
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, Format
from llmrun.formats.damage import damaged, shown
from llmrun.formats.method_config import method_config, method_of
from llmrun.formats.parts import PartedWeight, Parts, parted_checkpoint, weight_of
from llmrun.formats.safetensors import open_tensors
from llmrun.formats.safetensors_header import StoredTensor
from llmrun.formats.stored import expect, extents
from llmrun.kernels.forms import Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.microscaling import GROUP, scales, table, too_large

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = GROUP // 2
_ADVICE = "llmrun reads mxfp4 as gpt-oss publishes it. Use another copy or version of this model."


def _detect(path: Path) -> bool:
    return method_of(path) == METHOD


def _open(folder: Path) -> Checkpoint:
    config = method_config(folder, _ADVICE)
    config.check_keys(("modules_to_not_convert",), frozenset())
    config.names("modules_to_not_convert")
    stored = open_tensors(folder)
    weights = []
    for name, tensor in stored.items():
        if name.endswith(_BLOCKS):
            base = name.removesuffix(_BLOCKS)
            if base in stored:
                raise damaged(folder, f"{shown(base)} is stored both packed and plain")
            weights.append(_weight(base, tensor, stored, folder))
        elif name.endswith(_SCALES):
            blocks = name.removesuffix(_SCALES) + _BLOCKS
            if blocks not in stored:
                raise damaged(folder, f"tensor {shown(blocks)} is missing")
    return parted_checkpoint(folder, METHOD, stored, weights)


def _weight(name: str, blocks: StoredTensor, stored: Parts, folder: Path) -> PartedWeight:
    if name + _SCALES not in stored:
        raise damaged(folder, f"tensor {shown(name + _SCALES)} is missing")
    scale_bytes = stored[name + _SCALES]
    extents(blocks, 4)
    experts, n, groups = blocks.shape[:3]
    expect(blocks, (experts, n, groups, _BLOCK_BYTES), ("U8",))
    expect(scale_bytes, (experts, n, groups), ("U8",))
    rows = (experts * n, groups * GROUP)
    parts = {_BLOCKS: blocks, _SCALES: scale_bytes}
    shape = (experts, n, groups * GROUP)
    return weight_of(blocks.name, shape, f"lut4 g{GROUP}", parts, partial(_read, parts, rows))


def _read(parts: Parts, shape: tuple[int, int]) -> Lut16:
    n, k = shape
    exponents = parts[_SCALES].array()
    index = too_large(exponents)
    if index is not None:
        raise parts[_SCALES].refused(f"is not finite at element {index}")
    codes = HostArray(DType.U8, (n, k // 2), parts[_BLOCKS].data)
    return Lut16(GROUP, codes, table(), scales(exponents, (n, k // GROUP)), shape)


FORMAT = Format(METHOD, _detect, _open)
