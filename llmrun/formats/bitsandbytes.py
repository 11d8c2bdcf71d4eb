"""Folders of bitsandbytes: 4-bit tables (``nf4``, ``fp4``) or 8-bit rows.

4 bit: ``X.weight`` holds N * K codes in bytes of any dtype, beside ``X.weight.absmax``,
``.quant_map``, ``.quant_state.bitsandbytes__TYPE`` (JSON) and, where the scales are quantized
too, ``.nested_absmax`` and ``.nested_quant_map``. 8 bit: ``X.weight`` i8 [N, K] and ``X.SCB``.
All become forms without loss, but for 4-bit rows that 32 does not divide: those are opened to F32.
"""

from collections.abc import Set
from functools import partial
from pathlib import Path

from llmrun.formats.bnb_state import QuantState, parse_state
from llmrun.formats.checkpoint import Checkpoint, Format
from llmrun.formats.damage import damaged, shown
from llmrun.formats.method_config import MethodConfig, method_config, method_of
from llmrun.formats.parts import (
    PartedWeight,
    Parts,
    check_finite,
    opened_weight,
    parted_checkpoint,
    weight_of,
)
from llmrun.formats.safetensors import open_tensors
from llmrun.formats.safetensors_header import StoredTensor
from llmrun.formats.stored import expect, extents, need
from llmrun.kernels.forms import ROW, Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray, LaterArray
from llmrun.quant.bnb_blocks import (
    TABLES,
    nested_scales,
    row_scales,
    scales_of_groups,
    straddling,
    swapped,
    table_fits,
)
from llmrun.quant.codes import offset
from llmrun.quant.group_scales import LUT_GROUPS

METHOD = "bitsandbytes"
_METHODS = (METHOD, f"{METHOD}_4bit", f"{METHOD}_8bit")
_STATE = "quant_state.bitsandbytes__"
_NESTED = ("nested_absmax", "nested_quant_map")
_PARTS_4BIT = ("absmax", "quant_map", *_NESTED, *(_STATE + kind for kind in TABLES))
_PARTS_8BIT = ("SCB", "weight_format")
_STORAGE = {
    **{"uint8": "U8", "int8": "I8", "bfloat16": "BF16", "float16": "F16", "float32": "F32"},
    "float64": "F64",
}
_READ = (
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    *("bnb_4bit_quant_storage", "llm_int8_skip_modules"),
)
_INERT = frozenset(
    # The threshold splits the activations of a step; the weights are the same with and without.
    ("bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload")
)
_ADVICE = "Use another quantization of this model, or the unquantized one."


def _detect(path: Path) -> bool:
    return method_of(path) in _METHODS


def _open(folder: Path) -> Checkpoint:
    config = method_config(folder, _ADVICE)
    config.check_keys(_READ, _INERT)
    config.names("llm_int8_skip_modules")
    config.flag("bnb_4bit_use_double_quant", False)
    four = config.flag("load_in_4bit", False)
    if four == config.flag("load_in_8bit", False):
        raise config.refused("load_in_4bit, like load_in_8bit,", four)
    stored = open_tensors(folder)
    four_bit, eight_bit = _parts_4bit(stored), _parts_8bit(stored)
    for parts in (eight_bit if four else four_bit).values():
        raise next(iter(parts.values())).refused(
            f"is not {4 if four else 8}-bit, unlike the config"
        )
    _check_no_lone_codes(stored, four_bit.keys() | eight_bit.keys(), four)
    weights = [_four_bit(name, parts, config, folder) for name, parts in four_bit.items()]
    weights += [_eight_bit(name, parts, folder) for name, parts in eight_bit.items()]
    return parted_checkpoint(folder, f"{METHOD} {4 if four else 8}-bit", stored, weights)


def _parts_4bit(stored: Parts) -> dict[str, dict[str, StoredTensor]]:
    """Return the parts of every 4-bit weight by its name; its codes are the part ``""``."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        for part in _PARTS_4BIT:
            owner = name.removesuffix(f".{part}")
            if owner != name:
                found.setdefault(owner, {})[part] = tensor
    return {owner: {**_codes(stored, owner), **parts} for owner, parts in found.items()}


def _parts_8bit(stored: Parts) -> dict[str, dict[str, StoredTensor]]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in _PARTS_8BIT:
            found.setdefault(f"{module}.weight", {})[part] = tensor
    return {owner: {**_codes(stored, owner), **parts} for owner, parts in found.items()}


def _codes(stored: Parts, owner: str) -> dict[str, StoredTensor]:
    return {"": stored[owner]} if owner in stored else {}


def _check_no_lone_codes(stored: Parts, owners: Set[str], four: bool) -> None:
    """Refuse packed codes of which no scale is left."""
    for name, tensor in stored.items():
        if name.endswith(".weight") and tensor.dtype in ("U8", "I8") and name not in owners:
            lacking = f"{name}.{_STATE}..." if four else f"{name.removesuffix('.weight')}.SCB"
            raise tensor.refused(f"is quantized, but tensor {shown(lacking)} is missing")


def _four_bit(name: str, parts: Parts, config: MethodConfig, folder: Path) -> PartedWeight:
    kinds = [kind for kind in TABLES if _STATE + kind in parts]
    if len(kinds) != 1:
        raise damaged(folder, f"tensor {shown(f'{name}.{_STATE}...')} is missing or there twice")
    kind = config.word("bnb_4bit_quant_type", kinds, kinds[0])
    if "" not in parts:
        raise damaged(folder, f"tensor {shown(name)} is missing")
    for part in ("absmax", "quant_map"):
        need(parts, part, name, folder)
    state = parse_state(parts[_STATE + kind], kind)
    _check_codes(parts[""], state, config)
    expect(parts["absmax"], (state.blocks,), ("U8" if state.nested_block else "F32",))
    expect(parts["quant_map"], (16,), ("F32",))
    if state.nested_block:
        for part in _NESTED:
            need(parts, part, name, folder)
        expect(parts["nested_absmax"], (-(-state.blocks // state.nested_block),), ("F32",))
        expect(parts["nested_quant_map"], (256,), ("F32",))
    else:
        for part in _NESTED:
            if part in parts:
                raise parts[part].refused("is there, but the quant_state is not nested")
    k = state.shape[1]
    group = next((g for g in LUT_GROUPS if k % g == 0 and state.block % g == 0), None)
    if group is None:
        label = f"{kind} blocks that straddle rows, opened to F32"
        return opened_weight(name, state.shape, label, parts, partial(_read_opened, parts, state))
    read = partial(_read_4bit, parts, state, group)
    return weight_of(name, state.shape, f"lut4 g{group}", parts, read)


def _check_codes(codes: StoredTensor, state: QuantState, config: MethodConfig) -> None:
    """Check the packed codes, whose bytes may be stored as a column of any dtype."""
    n, k = state.shape
    storage = config.values.get("bnb_4bit_quant_storage")
    dtypes = tuple(_STORAGE.values())
    if storage is not None:
        dtypes = (_STORAGE[config.word("bnb_4bit_quant_storage", tuple(_STORAGE))],)
    size = -(-n * k // 2)
    if codes.nbytes != size:
        raise codes.refused(f"has {codes.nbytes:,} bytes, but {n} x {k} codes need {size:,}")
    rows = codes.shape[0] if codes.shape else 0
    expect(codes, (rows, 1), dtypes)


def _scales(parts: Parts, state: QuantState) -> HostArray:
    absmax = parts["absmax"].array()
    if state.nested_block:
        table, outer = (parts[part].array() for part in ("nested_quant_map", "nested_absmax"))
        absmax = nested_scales(absmax, table, outer, state.nested_block, state.nested_offset)
    check_finite(parts["absmax"], absmax)
    return absmax


def _table(parts: Parts, state: QuantState) -> HostArray:
    table = parts["quant_map"].array()
    if not table_fits(table, state.kind):
        raise parts["quant_map"].refused(f"is not the table of {state.kind}")
    return table


def _read_4bit(parts: Parts, state: QuantState, group: int) -> Form:
    n, k = state.shape
    scales = scales_of_groups(_scales(parts, state), state.block, group, state.shape)
    codes = swapped(_packed(parts), (n, k // 2))
    return Lut16(group, codes, _table(parts, state), scales, state.shape)


def _read_opened(parts: Parts, state: QuantState) -> Form:
    scales, table = _scales(parts, state), _table(parts, state)
    return Dense(straddling(_packed(parts), table, scales, state.block, state.shape))


def _packed(parts: Parts) -> HostArray:
    data = parts[""].data
    return HostArray(DType.U8, (data.nbytes,), data)


def _eight_bit(name: str, parts: Parts, folder: Path) -> PartedWeight:
    if "" not in parts:
        raise damaged(folder, f"tensor {shown(name)} is missing")
    need(parts, "SCB", name.removesuffix(".weight"), folder)
    weight = parts[""]
    extents(weight, 2)
    n, k = weight.shape
    expect(weight, (n, k), ("I8",))
    expect(parts["SCB"], (n,), ("F32",))
    if "weight_format" in parts:
        expect(parts["weight_format"], (), ("U8",))
        layout = parts["weight_format"].data[0]
        if layout:
            raise parts["weight_format"].refused(f"is {layout}; llmrun reads 0, rows as they are")
    return weight_of(name, (n, k), "int8 row", parts, partial(_read_8bit, parts))


def _read_8bit(parts: Parts) -> Form:
    scales = row_scales(parts["SCB"].array())
    check_finite(parts["SCB"], scales)
    weight = parts[""].array()
    n, k = weight.shape
    codes = LaterArray(DType.U8, (n, k), lambda: offset(weight.data, (n, k)).data)
    return GroupInt(8, ROW, codes, scales, None, (n, k))


FORMAT = Format(METHOD, _detect, _open)
