"""llmrun's own folders, for what no other tool's format can say: tables, minima, mixes of them.

A weight ``X`` [N, K] is stored as the arrays of its form: ``X_codes`` u8, ``X_scale`` (f16, bf16
or f32), and where it has them ``X_table`` f32 [16], ``X_min`` like the scales or ``X_zero`` u8,
``X_columns`` i32 [K]. The config lists names by the ``kind`` of their form:
``{"quant_method": "llmrun", "version": 1, "weights": {"lut4 g32": [...]}}``. Reading and writing
are here together: they must agree.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from llmrun.errors import InternalError
from llmrun.formats.checkpoint import Checkpoint, Format
from llmrun.formats.damage import damaged, shown
from llmrun.formats.method_config import MethodConfig, method_config, method_of
from llmrun.formats.parts import (
    FLOAT_NAMES,
    PartedWeight,
    Parts,
    check_finite,
    parted_checkpoint,
    weight_of,
)
from llmrun.formats.planned import Kind, Part, Planned, Writing, of_type, parse_kind, part
from llmrun.formats.safetensors import open_tensors
from llmrun.formats.stored import expect, extents
from llmrun.kernels.forms import ROW, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray

METHOD = "llmrun"
VERSION = 1
_GROUPS = (ROW, 16, 32, 64, 128)
_PARTS = ("codes", "scale", "table", "min", "zero", "columns")
_ADVICE = "Update llmrun, or quantize the model again with this version."


def _detect(path: Path) -> bool:
    return method_of(path) == METHOD


def _open(folder: Path) -> Checkpoint:
    config = method_config(folder, _ADVICE)
    config.check_keys(("version", "weights"), frozenset())
    config.integer("version", (VERSION,))
    stored = open_tensors(folder)
    kinds = _kinds(config)
    weights = [_weight(name, kind, stored, folder) for name, kind in kinds.items()]
    for name in stored:
        owner, _, last = name.rpartition("_")
        if last in _PARTS and owner.endswith(".weight") and owner not in kinds:
            raise stored[name].refused("is part of a quantized weight that the config lacks")
    return parted_checkpoint(folder, METHOD, stored, weights)


def _kinds(config: MethodConfig) -> dict[str, str]:
    """Return the kind of each weight; ModelFileError for one llmrun has no form for."""
    listed = config.values.get("weights")
    if not isinstance(listed, dict):
        raise config.refused("weights", listed)
    kinds: dict[str, str] = {}
    for kind, names in listed.items():
        parsed = parse_kind(kind)
        if parsed is None or not _is_known(parsed):
            raise config.refused("a kind of weights", kind)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise config.refused(f"weights of kind {kind}", names)
        for name in names:
            if kinds.setdefault(name, kind) != kind:
                raise config.refused(f"kind of {shown(name)}, which is listed twice,", kind)
    return kinds


def _is_known(kind: Kind) -> bool:
    if kind.is_lookup:
        return kind.bits == 4 and kind.group in (32, 64, 128) and not kind.shift
    return kind.group in _GROUPS


def _weight(name: str, named: str, stored: Parts, folder: Path) -> PartedWeight:
    kind = parse_kind(named)
    assert kind is not None
    found = {own: stored[f"{name}_{own}"] for own in _PARTS if f"{name}_{own}" in stored}
    wanted = {"codes", "scale", "table" if kind.is_lookup else "", kind.shift} - {""}
    for own in sorted(wanted - found.keys()):
        raise damaged(folder, f"tensor {shown(f'{name}_{own}')} is missing")
    for own in found.keys() - wanted - (set() if kind.is_lookup else {"columns"}):
        raise found[own].refused(f"is no part of a weight stored as {named}")
    codes = found["codes"]
    extents(codes, 2)
    n, k = codes.shape[0], codes.shape[1] * 8 // kind.bits
    expect(codes, (n, k * kind.bits // 8), (DType.U8.name,))
    if k % (kind.group or k):
        raise codes.refused(f"does not divide into groups of {kind.group}")
    groups = (n, k // (kind.group or k))
    expect(found["scale"], groups, FLOAT_NAMES)
    for own, shape, dtypes in (
        ("table", (16,), (DType.F32.name,)),
        ("min", groups, FLOAT_NAMES),
        ("zero", groups, (DType.U8.name,)),
        ("columns", (k,), (DType.I32.name,)),
    ):
        if own in found:
            expect(found[own], shape, dtypes)
    return weight_of(name, (n, k), named, found, partial(_read, found, kind, (n, k)))


def _read(found: Parts, kind: Kind, shape: tuple[int, int]) -> Form:
    arrays = {own: stored.array() for own, stored in found.items()}
    for own, array in arrays.items():
        check_finite(found[own], array)
    codes, scales = arrays["codes"], arrays["scale"]
    if kind.is_lookup:
        return Lut16(kind.group, codes, arrays["table"], scales, shape)
    columns = arrays.get("columns")
    if columns is not None and not _is_order(columns):
        raise found["columns"].refused("does not name each column once")
    mins = arrays.get(kind.shift)
    return GroupInt(kind.bits, kind.group, codes, scales, mins, shape, None, columns)


def _is_order(columns: HostArray) -> bool:
    numbers = sorted(memoryview(bytes(columns.data)).cast("i"))
    return numbers == list(range(columns.size))


def _holds(quantized: Sequence[Planned]) -> bool:
    return all(_kind_of(tensor) is not None and tensor.is_matrix for tensor in quantized)


def _kind_of(tensor: Planned) -> Kind | None:
    kind = parse_kind(tensor.kind)
    return kind if kind is not None and _is_known(kind) else None


def _parts(tensor: Planned, scale_dtype: DType) -> tuple[Part, ...]:
    kind = _kind_of(tensor)
    if kind is None:
        raise InternalError(f"{tensor.name} {tensor.kind} cannot be stored.")
    name, (n, k) = tensor.name, tensor.shape
    groups, scale = (n, k // (kind.group or k)), (tensor.scale or scale_dtype).name
    parts = [
        part(f"{name}_codes", "U8", (n, k * kind.bits // 8)),
        part(f"{name}_scale", scale, groups),
    ]
    if kind.is_lookup:
        parts.append(part(f"{name}_table", "F32", (16,)))
    if kind.shift:
        parts.append(part(f"{name}_{kind.shift}", "U8" if kind.shift == "zero" else scale, groups))
    if tensor.columns:
        parts.append(part(f"{name}_columns", "I32", (k,)))
    return tuple(parts)


def _contents(form: Form, tensor: Planned, scale_dtype: DType) -> Mapping[str, memoryview]:
    assert isinstance(form, GroupInt | Lut16)
    kind = _kind_of(tensor)
    assert kind is not None
    arrays = {"codes": form.codes, "scale": form.scales}
    if isinstance(form, Lut16):
        arrays["table"] = form.table
    else:
        more = {kind.shift: form.mins, "columns": form.columns}
        arrays |= {own: array for own, array in more.items() if array is not None}
    dtypes = {own.key: DType[own.dtype] for own in _parts(tensor, scale_dtype)}
    keys = {own: f"{tensor.name}_{own}" for own in arrays}
    for own, key in keys.items():
        if key not in dtypes:
            raise InternalError(f"{key} was not planned.")
        of_type(arrays[own], dtypes[key], key)
    return {keys[own]: array.data for own, array in arrays.items()}


def _config(planned: Sequence[Planned], scale_dtype: DType) -> Mapping[str, object]:
    weights: dict[str, list[str]] = {}
    for tensor in planned:
        if not tensor.is_plain:
            weights.setdefault(tensor.kind, []).append(tensor.name)
    return {"quant_method": METHOD, "version": VERSION, "weights": weights}


WRITING = Writing(METHOD, ("llmrun",), _holds, _parts, _contents, _config)
FORMAT = Format(METHOD, _detect, _open)
