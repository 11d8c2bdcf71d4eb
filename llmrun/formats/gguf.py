"""GGUF files: one file with metadata and tensors, opened behind llmrun's own header check.

Tensors keep their GGUF names and have shape [N, K]. F32, F16 and BF16 are views of the file;
Q4_0, Q4_1 and Q8_0 become GroupInt without any loss.
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
from llmrun.quant.gguf_blocks import BLOCK_BYTES, unblock


def _detect(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _open(path: Path) -> Checkpoint:
    metadata, table = read_header(map_file(path), path)
    tensors = {tensor.name: tensor for tensor in table}
    kinds = sorted({tensor.kind for tensor in table if tensor.kind in BLOCK_BYTES})
    return Checkpoint(
        path=path,
        layout="gguf",
        config=metadata,
        tensors={
            tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.kind, tensor.data.nbytes)
            for tensor in table
        },
        read=partial(_read, path, tensors),
        quantization=f"GGUF {', '.join(kinds)}" if kinds else None,
    )


def _read(path: Path, tensors: Mapping[str, GgufTensor], name: str) -> Form:
    tensor = tensors[name]
    if tensor.kind not in BLOCK_BYTES:
        return Dense(HostArray(DType[tensor.kind], tensor.shape, tensor.data))
    if len(tensor.shape) != 2:
        problem = f"tensor {shown(name)} is {tensor.kind} with {len(tensor.shape)} dimensions"
        raise damaged(path, problem, "llmrun reads quantized matrices only; use another file.")
    raw = HostArray(DType.U8, (tensor.data.nbytes,), tensor.data)
    form = unblock(tensor.kind, raw, (tensor.shape[0], tensor.shape[1]))
    fault = nonfinite_part(form)
    if fault is not None:
        part, index = fault
        raise damaged(path, f"tensor {shown(name)}: {part} {index:,} is not finite")
    return form


FORMAT = Format("gguf", _detect, _open)
