"""How nf4 and fp4 weights are written: bitsandbytes' 4-bit layout, as transformers saves it.

Per weight ``X``: ``X`` u8 [N * K / 2, 1] (high nibble first), ``X.absmax``, ``X.quant_map``,
``X.quant_state.bitsandbytes__TYPE`` (JSON) and, nested, ``X.nested_absmax``,
``X.nested_quant_map``. The JSON is padded with spaces where its numbers are not known beforehand.
"""

import json
from collections.abc import Mapping, Sequence

from llmrun.errors import InternalError
from llmrun.formats.planned import Kind, Part, Planned, Writing, linears, of_type, parse_kind, part
from llmrun.kernels.bnb import NESTED_BLOCK
from llmrun.kernels.forms import Form, Lut16
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.bnb_blocks import TABLES, NestedScales, scales_of_blocks, swapped, table_fits

METHOD = "bitsandbytes"
_BLOCK = 64
_DTYPES = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}
_OFFSET_CHARS = 25
"""The longest that Python writes a float: sign, 17 digits, point, exponent."""


def _kind(tensor: Planned) -> Kind | None:
    kind = parse_kind(tensor.kind)
    fits = kind is not None and kind.is_lookup and tensor.table in TABLES and tensor.is_matrix
    # Experts are one stacked parameter in transformers, which bitsandbytes' layout does not know.
    return kind if fits and not tensor.is_expert else None


def _holds(quantized: Sequence[Planned]) -> bool:
    alike = {(tensor.table, tensor.nested) for tensor in quantized}
    return len(alike) == 1 and all(_kind(tensor) is not None for tensor in quantized)


def _block(tensor: Planned) -> int:
    """Weights that share a scale. Where 64 does not divide a row, blocks of 64 straddle rows,
    and the form has each scale twice."""
    kind = _kind(tensor)
    if kind is None:
        raise InternalError(f"{tensor.name} {tensor.kind} is not of bitsandbytes.")
    return _BLOCK if kind.group < _BLOCK and tensor.shape[1] % _BLOCK else kind.group


def _state(tensor: Planned, scale_dtype: DType, offset: float) -> bytes:
    state: dict[str, object] = {
        "quant_type": tensor.table,
        "blocksize": _block(tensor),
        "dtype": _DTYPES[scale_dtype],
        "shape": list(tensor.shape),
    }
    if not tensor.nested:
        return json.dumps(state).encode()
    nested = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state | nested).encode()
    return text.ljust(len(json.dumps(state | nested | {"nested_offset": 0})) - 1 + _OFFSET_CHARS)


def _parts(tensor: Planned, scale_dtype: DType) -> tuple[Part, ...]:
    name, (n, k) = tensor.name, tensor.shape
    blocks = -(-n * k // _block(tensor))
    parts = [
        part(name, "U8", (n * k // 2, 1)),
        part(f"{name}.absmax", "U8" if tensor.nested else "F32", (blocks,)),
    ]
    if tensor.nested:
        parts.append(part(f"{name}.nested_absmax", "F32", (-(-blocks // NESTED_BLOCK),)))
        parts.append(part(f"{name}.nested_quant_map", "F32", (256,)))
    length = len(_state(tensor, scale_dtype, 0.0))
    parts.append(part(f"{name}.quant_map", "F32", (16,)))
    parts.append(part(f"{name}.quant_state.bitsandbytes__{tensor.table}", "U8", (length,)))
    return tuple(parts)


def _contents(form: Form, tensor: Planned, scale_dtype: DType) -> Mapping[str, memoryview]:
    assert isinstance(form, Lut16)
    name = tensor.name
    of_type(form.scales, DType.F32, f"{name}.absmax")
    if not table_fits(form.table, tensor.table):
        raise InternalError(f"{name} was planned with the table of {tensor.table}.")
    contents = {
        name: swapped(form.codes, form.codes.shape).data,
        f"{name}.quant_map": form.table.data,
    }
    if tensor.nested:
        stored, offset = _nested(form.scales, name)
    else:
        stored, offset = {"absmax": _absmax(form, tensor)}, 0.0
    contents |= {f"{name}.{own}": array.data for own, array in stored.items()}
    state = _state(tensor, scale_dtype, offset)
    contents[f"{name}.quant_state.bitsandbytes__{tensor.table}"] = memoryview(state)
    return contents


def _absmax(form: Lut16, tensor: Planned) -> HostArray:
    absmax = scales_of_blocks(form.scales, form.group, _block(tensor))
    if absmax is None:
        raise InternalError(f"{tensor.name}: groups of one block have different scales.")
    return absmax


def _nested(scales: HostArray, name: str) -> tuple[dict[str, HostArray], float]:
    """What nested scales were made from; there is no other way to write them unchanged."""
    if not isinstance(scales, NestedScales):
        raise InternalError(f"{name} was planned with nested scales, its own are not.")
    made = scales.nested
    stored = {
        "absmax": made.codes,
        "nested_absmax": made.absmax,
        "nested_quant_map": made.table,
    }
    return stored, made.offset


def _config(planned: Sequence[Planned], scale_dtype: DType) -> Mapping[str, object]:
    first = next(tensor for tensor in planned if not tensor.is_plain)
    return {
        "quant_method": METHOD,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": first.table,
        "bnb_4bit_use_double_quant": first.nested,
        "bnb_4bit_compute_dtype": _DTYPES[scale_dtype],
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": sorted({"lm_head", *linears(planned)}),
    }


WRITING = Writing(METHOD, ("transformers", "llmrun"), _holds, _parts, _contents, _config)
