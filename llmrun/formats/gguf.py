"""GGUF files: one file with metadata and tensors, opened behind llmrun's own header check.

Tensors keep their GGUF names and have shape [N, K]. F32, F16 and BF16 are views of the file;
quantized types become GroupInt with their codes unchanged (``quant.gguf_blocks``).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.formats.checkpoint import Checkpoint, Format, TensorInfo
from llmrun.formats.damage import damaged, shown
from llmrun.formats.finite import nonfinite_part
from llmrun.formats.gguf_header import GgufTensor, read_header
from llmrun.formats.mapping import map_file, passing
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
    view = map_file(path)
    metadata, table = read_header(view, path)
    tensors = {tensor.name: tensor for tensor in table}
    kinds = sorted({tensor.kind for tensor in table if tensor.kind in BLOCK_TYPES})
    return Checkpoint(
        path=path,
        layout="gguf",
        config=metadata,
        tensors={
            tensor.name: TensorInfo(
                tensor.name, tensor.shape, tensor.kind, tensor.end - tensor.start
            )
            for tensor in table
        },
        read=partial(_read, path, view, tensors, exact),
        quantization=f"GGUF {', '.join(kinds)}" if kinds else None,
    )


def _read(
    path: Path, view: memoryview, tensors: Mapping[str, GgufTensor], exact: bool, name: str
) -> Form:
    tensor = tensors[name]
    data = passing(view, tensor.start, tensor.end)
    if tensor.kind not in BLOCK_TYPES:
        return Dense(HostArray(DType[tensor.kind], tensor.shape, data))
    if len(tensor.shape) != 2:
        problem = f"tensor {shown(name)} is {tensor.kind} with {len(tensor.shape)} dimensions"
        raise damaged(path, problem, "llmrun reads quantized matrices only; use another file.")
    raw = HostArray(DType.U8, (data.nbytes,), data)
    shape = (tensor.shape[0], tensor.shape[1])

    def refusal(form: Form) -> ModelFileError:
        part, index = nonfinite_part(form) or ("scales", 0)
        return damaged(path, f"tensor {shown(name)}: {part} {index:,} is not finite")

    return unblock(tensor.kind, raw, shape, refusal, exact=exact)


FORMAT = Format("gguf", _detect, open_gguf)
