"""Weights of the CPU backend: storage forms packed into panels of 16 rows (docs/cpu-kernels.md)."""

import ctypes
from dataclasses import dataclass

from llmrun.errors import UnavailableError
from llmrun.kernels.cpu import abi
from llmrun.kernels.cpu.library import library
from llmrun.kernels.cpu.memory import Arena, address_of
from llmrun.kernels.forms import ROW, Dense, Form, GroupInt, Lut16
from llmrun.kernels.host import DType, HostArray

ROWS = 16
ROW_PADDING = 128
"""Columns are padded to a multiple of this where one scale covers the whole row."""

TYPES = {DType.F16: abi.F16, DType.BF16: abi.BF16, DType.F32: abi.F32}


@dataclass(frozen=True, eq=False)
class CpuWeight:
    """A packed weight; ``native`` is what ops point at."""

    shape: tuple[int, int]
    nbytes: int
    kind: str
    native: abi.Weight

    @property
    def address(self) -> int:
        """Address of the native description."""
        return ctypes.addressof(self.native)


def pack(form: Form, arena: Arena, context: int) -> CpuWeight:
    """Pack a 2-D weight. UnavailableError for a form no kernel serves."""
    n, k = form.shape
    native = _describe(form, n, k)
    padded = native.panels * ROWS
    parts = {"codes": _code_bytes(native)}
    scale_bytes = 4 if native.type == abi.F32 else 2
    if native.kind != abi.DENSE:
        parts["scales"] = padded * (native.k_padded // native.group) * scale_bytes
    if isinstance(form, GroupInt) and form.mins is not None:
        parts["mins"] = parts["scales"]
    if isinstance(form, Lut16):
        parts["table"] = 64
    for name, nbytes in parts.items():
        setattr(native, name, arena.take(nbytes))
    sources = [(None, None) if a is None else address_of(a) for a in _arrays(form)]
    library().llmr_pack(context, native, *(address for address, _ in sources))
    if isinstance(form, Lut16):
        ctypes.memmove(native.table, bytes(form.table.data), 64)
    return CpuWeight((n, k), sum(parts.values()), form.kind, native)


def refusal(kind: str) -> str | None:
    """Why a storage form's kind (``Form.kind``) is not served; None if it is."""
    if kind.startswith("int4 g16"):
        return "4-bit codes need groups of 32 columns or more"
    return None


def _describe(form: Form, n: int, k: int) -> abi.Weight:
    native = abi.Weight(n=n, k=k, k_padded=k, panels=-(-n // ROWS))
    if isinstance(form, Dense):
        native.kind, native.type, native.group = abi.DENSE, TYPES[form.w.dtype], k
        return native
    native.type = TYPES[form.scales.dtype]
    native.group = form.group
    native.kind = abi.LUT4 if isinstance(form, Lut16) else abi.W4 if form.bits == 4 else abi.W8
    if form.group == ROW:
        step = min(ROW_PADDING, -(-k // 32) * 32)
        native.k_padded = native.group = -(-k // step) * step
    reason = refusal(form.kind)
    if reason is None and native.kind != abi.W8 and k % 8:
        reason = "4-bit rows need a multiple of 8 columns"
    if reason is None and isinstance(form, GroupInt) and form.mins is not None:
        reason = None if form.mins.dtype is form.scales.dtype else "minima differ in type"
    if reason is not None:
        raise UnavailableError(
            f"the CPU kernels do not serve a {form.kind} weight of shape {n} x {k}: {reason}",
            "choose another scheme with -q",
        )
    return native


def _arrays(form: Form) -> tuple[HostArray, HostArray | None, HostArray | None]:
    if isinstance(form, Dense):
        return form.w, None, None
    return form.codes, form.scales, form.mins if isinstance(form, GroupInt) else None


def _code_bytes(native: abi.Weight) -> int:
    columns = native.panels * ROWS * native.k_padded
    if native.kind == abi.DENSE:
        return columns * (4 if native.type == abi.F32 else 2)
    return int(columns if native.kind == abi.W8 else columns // 2)
