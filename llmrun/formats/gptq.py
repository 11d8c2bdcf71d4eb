"""GPTQ folders, checkpoint formats ``gptq`` and ``gptq_v2``: codes packed along the inputs.

``X.weight`` [N, K] is stored as ``X.qweight`` i32 [K * bits / 32, N], ``X.scales`` [K/g, N],
``X.qzeros`` i32 [K/g, N * bits / 32] and ``X.g_idx`` i32 [K]; w = s * (q - z). Codes and scales
become GroupInt unchanged (2-bit codes in 4 bits), and so do zero points other than the middle
(beside scales of 32 bits they become its minima).
Where ``g_idx`` scatters the groups over the columns (``desc_act``), codes are brought together
group by group, and the form says which input each column multiplies; where groups are of unequal
size no form fits, and the weight is opened to F32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, Format
from llmrun.formats.gptq_config import GptqConfig, Packing, parse_gptq_config
from llmrun.formats.method_config import method_of
from llmrun.formats.parts import (
    FLOAT_NAMES,
    PartedWeight,
    Parts,
    check_products,
    gathered,
    opened_weight,
    parted_checkpoint,
    weight_of,
)
from llmrun.formats.safetensors import open_tensors
from llmrun.formats.safetensors_header import StoredTensor
from llmrun.formats.stored import expect, extents, need
from llmrun.kernels.forms import ROW, Dense, Form, GroupInt
from llmrun.kernels.host import DType, HostArray, LaterArray
from llmrun.quant.group_scales import (
    all_equal,
    reordered,
    scales_and_minima,
    shared_group,
    shift_of,
)
from llmrun.quant.packed_words import (
    codes_along_inputs,
    codes_in_order,
    sorted_columns,
    transposed,
    zero_points,
)

METHOD = "gptq"
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_Order = Callable[[int, int], bytes]


@dataclass(frozen=True)
class _Weight:
    """The checked parts of one weight [N, K]; ``group``: that of its form."""

    packing: Packing
    shape: tuple[int, int]
    group: int
    parts: Parts

    @property
    def kind(self) -> str:
        bits = max(4, self.packing.bits)
        group = f"g{self.group}" if self.group else "row"
        shift = shift_of(self.parts["scales"].dtype)
        return f"int{bits} {group}{'' if self.packing.symmetric else f' +{shift}'}"


def _detect(path: Path) -> bool:
    return method_of(path) == METHOD


def _open(folder: Path) -> Checkpoint:
    config = parse_gptq_config(folder)
    stored = open_tensors(folder)
    in_order = cache(_in_order)
    modules = gathered(stored, _PARTS)
    packed_head = "lm_head" in modules
    if packed_head != config.head and (packed_head or "lm_head.weight" in stored):
        raise config.keys.refused("lm_head, which is stored otherwise,", config.head)
    weights = [
        _weight(module, parts, config, in_order, folder) for module, parts in modules.items()
    ]
    return parted_checkpoint(folder, METHOD, stored, weights)


def _weight(
    module: str, parts: Parts, config: GptqConfig, in_order: _Order, folder: Path
) -> PartedWeight:
    packing = config.packing(module)
    qweight, qzeros, scales = (need(parts, part, module, folder) for part in _PARTS[:3])
    extents(qweight, 2)
    k, n = qweight.shape[0] * 32 // packing.bits, qweight.shape[1]
    groups = 1 if packing.group == ROW else -(-k // packing.group)
    expect(qweight, (k * packing.bits // 32, n), ("I32",))
    expect(scales, (groups, n), FLOAT_NAMES)
    expect(qzeros, (groups, -(-n * packing.bits // 32)), ("I32",))
    if "g_idx" in parts:
        expect(parts["g_idx"], (k,), ("I32",))
    if n * packing.bits % 32:
        raise qzeros.refused(f"packs {n} zero points of {packing.bits} bits into broken words")
    group = shared_group(packing.group, k)
    if group is None:
        raise config.keys.refused("group_size", packing.group)
    weight = _Weight(packing, (n, k), group, parts)
    name = f"{module}.weight"
    if _is_scattered(weight, config, in_order, module, folder):
        order = sorted_columns(weight.parts["g_idx"].array(), packing.group)
        if order is None:
            label = f"int{packing.bits} with scattered columns, opened to F32"
            read = partial(_read_scattered, weight, groups)
            return opened_weight(name, (n, k), label, parts, read)
        return weight_of(name, (n, k), weight.kind, parts, partial(_read, weight, order))
    return weight_of(name, (n, k), weight.kind, parts, partial(_read, weight))


def _is_scattered(
    weight: _Weight, config: GptqConfig, in_order: _Order, module: str, folder: Path
) -> bool:
    """Whether the columns of a group are not neighbours; K numbers of the file tell."""
    k = weight.shape[1]
    if "g_idx" not in weight.parts:
        if weight.packing.act_order:
            need(weight.parts, "g_idx", module, folder)
        return False
    return bytes(weight.parts["g_idx"].data) != in_order(k, weight.packing.group)


def _in_order(k: int, group: int) -> bytes:
    numbers = (0 if group == ROW else column // group for column in range(k))
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def _codes(weight: _Weight, *, symmetric: bool) -> HostArray:
    (n, k), packing = weight.shape, weight.packing
    words = weight.parts["qweight"].array()
    return LaterArray(
        DType.U8,
        (n, k * max(4, packing.bits) // 8),
        lambda: codes_along_inputs(words, packing.bits, symmetric=symmetric).data,
    )


def _read(weight: _Weight, order: HostArray | None = None) -> Form:
    packing, (_, k) = weight.packing, weight.shape
    zeros = zero_points(
        weight.parts["qzeros"].array(), packing.bits, less_one=packing.zeros_less_one
    )
    if packing.symmetric:
        _check_middle(zeros, packing.bits, weight.parts["qzeros"])
    stored_scales = transposed(weight.parts["scales"].array())
    check_products(weight.parts["scales"], stored_scales, 2**packing.bits)
    scales, mins = scales_and_minima(
        stored_scales, None if packing.symmetric else zeros, packing.group, weight.group, k
    )
    codes, bits = _codes(weight, symmetric=packing.symmetric), max(4, packing.bits)
    if order is not None:
        plain = codes
        codes = LaterArray(
            plain.dtype, plain.shape, lambda: codes_in_order(plain, bits, order).data
        )
    return GroupInt(
        bits, weight.group, codes, scales, mins, weight.shape, blocks=None, columns=order
    )


def _check_middle(zeros: HostArray, bits: int, part: StoredTensor) -> None:
    if not all_equal(zeros, 2 ** (bits - 1)):
        raise part.refused(
            f"holds zero points other than {2 ** (bits - 1)}, but the config says symmetric"
        )


def _read_scattered(weight: _Weight, groups: int) -> Form:
    packing, parts = weight.packing, weight.parts
    order = parts["g_idx"].array()
    numbers = memoryview(order.data).cast("B").cast("i")
    outside = next((at for at, group in enumerate(numbers) if not 0 <= group < groups), None)
    if outside is not None:
        raise parts["g_idx"].refused(f"names group {numbers[outside]} of {groups} at {outside}")
    zeros = zero_points(parts["qzeros"].array(), packing.bits, less_one=packing.zeros_less_one)
    if packing.symmetric:
        _check_middle(zeros, packing.bits, parts["qzeros"])
    scales = transposed(parts["scales"].array())
    check_products(parts["scales"], scales, 2**packing.bits)
    codes = _codes(weight, symmetric=False)
    return Dense(reordered(codes, max(4, packing.bits), scales, zeros, order))


FORMAT = Format(METHOD, _detect, _open)
