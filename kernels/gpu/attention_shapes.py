"""How attention is cut into programs, by heads and the cache's form and capacity; and what is
compiled ahead.

Nothing here depends on a step, so a row's bits do not depend on the rows beside it.
"""

import math

import torch
import triton

from llmrun.kernels.gpu.arrays import SMALL, GpuKvLayer, Workspace
from llmrun.kernels.gpu.attention_kernels import few_kernel, many_kernel
from llmrun.kernels.gpu.mode import Specialization
from llmrun.kernels.gpu.rope_kernel import rope_kernel
from llmrun.kernels.gpu.variants import variant
from llmrun.kernels.ops import Attention, Heads

SCALE_COLUMNS = 64
"""Values of a head that share a scale in form int8."""

PART = 128
"""Fewest tokens of context that are worth a program of their own in a decode step."""

TILE_BYTES = 8 << 10
"""Bytes of a tile of keys or values; a decode step's program has some on their way at any time."""

GATHERED = 4096
"""Partial sums that the program which adds them up loads at a time, 32 in each thread."""

FEW_STAGES, MANY_STAGES = 3, 2
"""Tiles between a load and its use, in a decode step and in prefill."""


def scaled(head_dim: int) -> int:
    """Values of a head of this size that share a scale in form int8."""
    return SCALE_COLUMNS if head_dim % SCALE_COLUMNS == 0 else head_dim


def head_constants(heads: Heads) -> dict[str, int]:
    """What all kernels want to know of a head's size."""
    size = heads.head_dim
    return {"D": size, "D_PAD": max(16, _power(size)), "SCALED": scaled(size)}


def few_constants(kv: GpuKvLayer, heads: Heads, splits: int) -> dict[str, int]:
    """What the kernel of a decode step wants to know beyond a head's size."""
    return _few_constants(heads, kv.keys.element_size(), splits)


def _few_constants(heads: Heads, element_size: int, splits: int) -> dict[str, int]:
    per_kv = heads.n_heads // heads.n_kv_heads
    padded = _power(per_kv)
    return {
        "HKV": heads.n_kv_heads,
        "G": per_kv,
        "G_PAD": padded,
        "ROWS": max(16, padded),  # a tensor core multiplies no fewer
        "BLOCK": _tile_tokens(heads.head_dim, element_size),
        "SPLITS": splits,
        "PART": PART,
        "CHUNK": max(1, min(splits, GATHERED // (padded * _power(heads.head_dim)))),
        **head_constants(heads),
    }


def _power(size: int) -> int:
    power: int = triton.next_power_of_2(size)
    return power


def _tile_tokens(head_dim: int, element_size: int) -> int:
    """Tokens that a program of a decode step looks at together; PART is a multiple."""
    if element_size == 4:  # products of fp32 run outside of tensor cores, out of registers
        return 16
    size = _power(head_dim) * 2  # int8 is multiplied as f16
    return min(PART, max(16, TILE_BYTES // size))


def many_shape(kv: GpuKvLayer) -> tuple[int, int, int]:
    """Query tokens, cache tokens and warps of a program in prefill: registers decide."""
    return _many_shape(kv.heads.head_dim, kv.keys.element_size())


def _many_shape(head_dim: int, element_size: int) -> tuple[int, int, int]:
    wide = head_dim > 128
    if element_size == 4:
        return 16, 16, 4
    if element_size == 1:
        return 32 if wide else 64, 32, 8
    return 64, 32 if wide else 64, 8 if wide else 4


def splits_of(capacity: int, attention: Attention, work: Workspace) -> int:
    """Most parts that the context of a row is cut into, a power of two, for a cache's capacity.

    A full one has parts of PART tokens or more; there are at most two programs for each processor
    with one row, and room for the partial sums of all rows that a step may have.
    """
    heads = attention.heads
    most_seen = capacity if attention.window is None else min(capacity, attention.window)
    record = SMALL * heads.n_heads * (heads.head_dim + 2)
    most = min(
        most_seen // PART,
        2 * _processors(work.partials.device) // heads.n_kv_heads,
        work.partials.shape[0] // record,
    )
    return 1 << (max(most, 1).bit_length() - 1)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # interpreted: enough to see parts
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def query_scale(attention: Attention) -> float:
    """What queries are multiplied by, so that scores come out as powers of two, or as twice what
    the soft-cap's tanh is taken of."""
    if attention.softcap is None:
        return attention.scale * math.log2(math.e)
    return attention.scale * 2 / attention.softcap


_CACHES = {"f16": ("*fp16", 2), "f32": ("*fp32", 4), "int8": ("*i8", 1)}


def specializations() -> list[Specialization]:
    """The variants that are compiled ahead: head sizes, cache forms and options in use."""
    plain, wide = Heads(32, 8, 128), Heads(8, 4, 256)
    small, many = Heads(64, 8, 64), Heads(40, 8, 128)
    return [
        _rope("rope f16 128", plain, "f16", norms=True),
        _rope("rope f16 128, norms of all heads", many, "f16", norms=True, whole=True),
        _rope("rope int8 128", plain, "int8", norms=False),
        _few("attend_few f16 128", plain, "f16", 32),
        _few("attend_few f16 256, soft-cap", wide, "f16", 16, softcap=True),
        _few("attend_few f16 64, sinks, one part", small, "f16", 1, sinks=True),
        _few("attend_few int8 128", plain, "int8", 32),
        _few("attend_few f32 128", plain, "f32", 32),
        _many("attend_many f16 128", plain, "f16"),
        _many("attend_many f16 256, soft-cap", wide, "f16", softcap=True),
        _many("attend_many f16 64, sinks", small, "f16", sinks=True),
        _many("attend_many int8 128", plain, "int8"),
        _many("attend_many f32 128", plain, "f32"),
    ]


def _rope(
    name: str, heads: Heads, form: str, *, norms: bool, whole: bool = False
) -> Specialization:
    cache, _ = _CACHES[form]
    types = {
        "y": "*fp32", "positions": "*i32", "slots": "*i32", "frequencies": "*fp32",
        "q_gamma": "*fp32" if norms else None, "q_offset": "fp32", "q_eps": "fp32",
        "k_gamma": "*fp32" if norms else None, "k_offset": "fp32", "k_eps": "fp32",
        "keys": cache, "values": cache, **_scale_types(form), "attention_factor": "fp32",
        "capacity": "i32", "y_stride": "i32",
    }  # fmt: skip
    constants = {
        "H": heads.n_heads, "HKV": heads.n_kv_heads, "HALF": heads.head_dim // 2,
        "Q_WHOLE": whole, "K_WHOLE": whole,
        "Q_HEADS": _power(heads.n_heads) if whole else 1,
        "K_HEADS": _power(heads.n_kv_heads) if whole else 1,
        **head_constants(heads),
    }  # fmt: skip
    return variant(
        name, rope_kernel, types, constants, warps=8 if whole else 1, multiples_of_16=("y_stride",)
    )


def _few(
    name: str, heads: Heads, form: str, splits: int, *, softcap: bool = False, sinks: bool = False
) -> Specialization:
    cache, size = _CACHES[form]
    types = {
        "y": "*fp32", "positions": "*i32", "slots": "*i32", "keys": cache, "values": cache,
        **_scale_types(form), "sinks": "*fp32" if sinks else None, "o": "*fp32", "u": "*bf16",
        "partials": "*fp32", "counters": "*i32", "scale": "fp32",
        "softcap": "fp32" if softcap else None, "window": "i32" if softcap or sinks else None,
        "capacity": "i32", "y_stride": "i32", "o_stride": "i32", "u_stride": "i32",
    }  # fmt: skip
    constants = _few_constants(heads, size, splits)
    multiples = ("y_stride", "o_stride", "u_stride")
    return variant(name, few_kernel, types, constants, stages=FEW_STAGES, multiples_of_16=multiples)


def _many(
    name: str, heads: Heads, form: str, *, softcap: bool = False, sinks: bool = False
) -> Specialization:
    cache, size = _CACHES[form]
    types = {
        "y": "*fp32", "keys": cache, "values": cache, **_scale_types(form),
        "sinks": "*fp32" if sinks else None, "o": "*fp32", "scale": "fp32",
        "softcap": "fp32" if softcap else None, "window": "i32" if softcap or sinks else None,
        "count": "i32", "position": "i32", "capacity": "i32", "y_stride": "i32",
        "o_stride": "i32",
    }  # fmt: skip
    rows, block, warps = _many_shape(heads.head_dim, size)
    constants = {
        "G": heads.n_heads // heads.n_kv_heads, "ROWS": rows, "BLOCK": block,
        **head_constants(heads),
    }  # fmt: skip
    multiples = ("y_stride", "o_stride")
    return variant(name, many_kernel, types, constants, warps=warps, multiples_of_16=multiples)


def _scale_types(form: str) -> dict[str, str | None]:
    kind = "*fp16" if form == "int8" else None
    return {"key_scales": kind, "value_scales": kind}
