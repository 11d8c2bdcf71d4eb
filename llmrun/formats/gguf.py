"""GGUF files: metadata and tensors in one file or several, behind llmrun's own header check.

Tensors keep their GGUF names and have shape [N, K], stacks of expert matrices [E, N, K]. F32, F16
and BF16 are views of the file; quantized types become GroupInt or Lut16 with their codes unchanged
(``quant.gguf_blocks``), a stack as one matrix [E * N, K].
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.formats.checkpoint import Checkpoint, Format, TensorInfo
from llmrun.formats.damage import damaged, shown
from llmrun.formats.finite import nonfinite_part
from llmrun.formats.gguf_header import GgufTensor
from llmrun.formats.gguf_split import Part, read_parts
from llmrun.formats.mapping import passing
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
    """Open a GGUF file, or all parts of a split model by any one of them.

    ``exact``: scales of the K types and IQ4_XS in F32, as the file's products are, instead of
    rounded to F16. ModelFileError names what is damaged or not supported.
    """
    parts = read_parts(path)
    places = {tensor.name: (part, tensor) for part in parts for tensor in part.tensors}
    kinds = sorted({tensor.kind for _, tensor in places.values() if tensor.kind in BLOCK_TYPES})
    return Checkpoint(
        path=path,
        layout="gguf",
        config=parts[0].metadata,
        tensors={
            name: TensorInfo(name, tensor.shape, tensor.kind, tensor.end - tensor.start)
            for name, (_, tensor) in places.items()
        },
        read=partial(_read, places, exact),
        quantization=f"GGUF {', '.join(kinds)}" if kinds else None,
    )


def _read(places: Mapping[str, tuple[Part, GgufTensor]], exact: bool, name: str) -> Form:
    part, tensor = places[name]
    data = passing(part.view, tensor.start, tensor.end)
    if tensor.kind not in BLOCK_TYPES:
        return Dense(HostArray(DType[tensor.kind], tensor.shape, data))
    if len(tensor.shape) not in (2, 3):
        problem = f"tensor {shown(name)} is {tensor.kind} with {len(tensor.shape)} dimensions"
        raise damaged(part.path, problem, "llmrun reads quantized matrices only; use another file.")
    raw = HostArray(DType.U8, (data.nbytes,), data)
    *rows, k = tensor.shape

    def refusal(form: Form) -> ModelFileError:
        array, index = nonfinite_part(form) or ("scales", 0)
        return damaged(part.path, f"tensor {shown(name)}: {array} {index:,} is not finite")

    return unblock(tensor.kind, raw, (math.prod(rows), k), refusal, exact=exact)


FORMAT = Format("gguf", _detect, open_gguf, partial(open_gguf, exact=True))
