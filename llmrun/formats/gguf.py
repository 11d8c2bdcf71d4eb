"""GGUF files: one file with metadata and tensors, opened behind llmrun's own header check.

Tensors keep their GGUF names and have shape [N, K]. F32, F16 and BF16 are views of the file;
quantized types become GroupInt with their codes unchanged (``quant.gguf_blocks``).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, Format, TensorInfo
from llmrun.formats.damage import damaged, shown
from llmrun.formats.finite import nonfinite_part
from llmrun.formats.gguf_header import GgufTensor, read_header
from llmrun.formats.mapping import map_file
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.gguf_blocks import BLOCK_TYPES, unblock


def _detect(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def open_gguf(path: Path, *, exact: bool = False) -> Checkpoint:
    """Open a GGUF file. ``exact``: scales of the K types in F32, as the file's products are,
    instead of rounded to F16. ModelFileError names what is damaged or not supported."""
    metadata, table = read_header(map_file(path), path)
    tensors = {tensor.name: tensor for tensor in table}
    kinds = sorted({tensor.kind for tensor in table if tensor.kind in BLOCK_TYPES})
    return Checkpoint(
        path=path,
        layout="gguf",
        config=metadata,
        tensors={
            tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.kind, tensor.data.nbytes)
            for tensor in table
        },
        read=partial(_read, path, tensors, exact),
        quantization=f"GGUF {', '.join(kinds)}" if kinds else None,
    )


def _read(path: Path, tensors: Mapping[str, GgufTensor], exact: bool, name: str) -> Form:
    tensor = tensors[name]
    if tensor.kind not in BLOCK_TYPES:
        return Dense(HostArray(DType[tensor.kind], tensor.shape, tensor.data))
    if len(tensor.shape) != 2:
        problem = f"tensor {shown(name)} is {tensor.kind} with {len(tensor.shape)} dimensions"
        raise damaged(path, problem, "llmrun reads quantized matrices only; use another file.")
    raw = HostArray(DType.U8, (tensor.data.nbytes,), tensor.data)
    shape = (tensor.shape[0], tensor.shape[1])
    form, finite = unblock(tensor.kind, raw, shape, exact=exact)
    fault = None if finite else nonfinite_part(form)
    if fault is not None:
        part, index = fault
        raise damaged(path, f"tensor {shown(name)}: {part} {index:,} is not finite")
    return form


FORMAT = Format("gguf", _detect, open_gguf)
