"""The JSON in which bitsandbytes says how a 4-bit weight is stored; it lies in a U8 tensor."""

from dataclasses import dataclass

from llmrun.errors import ModelFileError
from llmrun.formats.bounded_json import parse_object
from llmrun.formats.damage import shown
from llmrun.formats.limits import JsonLimits
from llmrun.formats.safetensors_header import StoredTensor

LIMITS = JsonLimits(4_096, braces=1, brackets=2, commas=32)
_KEYS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_KEYS = {"nested_blocksize", "nested_dtype", "nested_offset"}
_MOST_BLOCK = 1 << 16


@dataclass(frozen=True)
class QuantState:
    """How the weight of ``shape`` [N, K] is stored: blocks of ``block`` weights with one scale.

    ``nested_block``: 0, or blocks of that many scales, which are quantized themselves; then
    ``nested_offset`` is added to each.
    """

    kind: str
    block: int
    shape: tuple[int, int]
    nested_block: int = 0
    nested_offset: float = 0.0

    @property
    def blocks(self) -> int:
        """Number of blocks; the last one may be short."""
        n, k = self.shape
        return -(-n * k // self.block)


def parse_state(stored: StoredTensor, kind: str) -> QuantState:
    """Check and return the state of a weight of the type ``kind``; ModelFileError naming it."""
    if stored.dtype != "U8" or len(stored.shape) != 1:
        raise stored.refused(f"is {stored.dtype} {shown(stored.shape)}, expected U8 of JSON text")
    what = f"tensor {shown(stored.name)}"
    state = parse_object(bytes(stored.data[: LIMITS.max_bytes + 1]), LIMITS, stored.path, what)
    keys = state.keys()
    is_nested = bool(keys & _NESTED_KEYS)
    if keys != (_KEYS | _NESTED_KEYS if is_nested else _KEYS):
        raise stored.refused(f"has the keys {shown(', '.join(sorted(keys)))}")
    if state["quant_type"] != kind:
        raise _refused(stored, "quant_type", state["quant_type"])
    block = _block(stored, "blocksize", state["blocksize"])
    shape = state["shape"]
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_extent, shape)):
        raise _refused(stored, "shape", shape)
    if not is_nested:
        return QuantState(kind, block, (shape[0], shape[1]))
    offset = state["nested_offset"]
    if type(offset) is not float and type(offset) is not int:
        raise _refused(stored, "nested_offset", offset)
    if state["nested_dtype"] != "float32" or abs(offset) > 1e38:
        raise _refused(stored, "nested_dtype or nested_offset", (state["nested_dtype"], offset))
    nested = _block(stored, "nested_blocksize", state["nested_blocksize"])
    return QuantState(kind, block, (shape[0], shape[1]), nested, float(offset))


def _block(stored: StoredTensor, key: str, value: object) -> int:
    if type(value) is not int or not 2 <= value <= _MOST_BLOCK or value % 2:
        raise _refused(stored, key, value)
    return value


def _is_extent(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _refused(stored: StoredTensor, key: str, value: object) -> ModelFileError:
    return stored.refused(f"says {key} {shown(value)}, which llmrun does not read")
