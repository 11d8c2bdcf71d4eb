"""AWQ folders of version ``gemm``: 4-bit codes packed along the output features.

``X.weight`` [N, K] is stored as ``X.qweight`` i32 [K, N/8], ``X.scales`` [K/g, N] and
``X.qzeros`` i32 [K/g, N/8]; w = s * (q - z). Codes, scales and zero points become GroupInt
unchanged (beside scales of 32 bits, its minima -s * z).
"""

from functools import partial
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, Format
from llmrun.formats.method_config import FROM_AUTOROUND, MethodConfig, method_config, method_of
from llmrun.formats.parts import (
    FLOAT_NAMES,
    PartedWeight,
    Parts,
    check_products,
    gathered,
    parted_checkpoint,
    weight_of,
)
from llmrun.formats.safetensors import open_tensors
from llmrun.formats.stored import expect, extents, need
from llmrun.kernels.forms import ROW, GroupInt
from llmrun.kernels.host import DType, LaterArray
from llmrun.quant.group_scales import scales_and_minima, shared_group, shift_of
from llmrun.quant.packed_words import AWQ_ORDER, codes_along_outputs, transposed, zero_points

METHOD = "awq"
BITS = 4
_PARTS = ("qweight", "qzeros", "scales")
# Three tools' names of one thing.
_VERSIONS = ("version", "format", "checkpoint_format")
_READ = ("bits", "group_size", "zero_point", *_VERSIONS, "method", "modules_to_not_convert")
_INERT = frozenset(
    (
        *("block_name_to_quantize", "cache_block_outputs", "damp_percent", "desc_act"),
        *("do_fuse", "exllama_config", "fuse_max_seq_len"),
        *("lm_head", "max_input_length", "model_seqlen", "modules_in_block_to_quantize"),
        *("modules_to_fuse", "pad_token_id", "sym", "tokenizer", "true_sequential"),
        *("act_group_aware", "module_name_preceding_first_block", "pack_dtype"),
    )
)
_ADVICE = (
    "llmrun reads AWQ of version gemm with 4 bits in groups that 16 divides, or a row. "
    "Use another quantization of this model, or the unquantized one."
)


def _detect(path: Path) -> bool:
    return method_of(path) == METHOD


def _open(folder: Path) -> Checkpoint:
    config = method_config(folder, _ADVICE)
    config.check_keys(_READ, _INERT | FROM_AUTOROUND)
    config.integer("bits", (BITS,))
    config.word("method", (METHOD,), METHOD)
    for key in _VERSIONS:
        config.word(key, ("gemm",), "gemm")
    config.names("modules_to_not_convert")
    stored = open_tensors(folder)
    weights = [
        _weight(module, parts, config, folder) for module, parts in gathered(stored, _PARTS).items()
    ]
    return parted_checkpoint(folder, METHOD, stored, weights)


def _weight(module: str, parts: Parts, config: MethodConfig, folder: Path) -> PartedWeight:
    qweight, scales = (need(parts, part, module, folder) for part in ("qweight", "scales"))
    if config.flag("zero_point", True):
        need(parts, "qzeros", module, folder)
    extents(qweight, 2)
    k, n = qweight.shape[0], qweight.shape[1] * 8
    if k % 8:
        raise qweight.refused(f"has {k} rows, which 8 does not divide")
    size = config.integer("group_size", range(-1, 1 << 31), 128)
    stored_group = ROW if size == -1 else size
    group = shared_group(stored_group, k) if size else None
    if group is None:
        raise config.refused("group_size", size)
    groups = 1 if stored_group == ROW else -(-k // stored_group)
    expect(qweight, (k, n // 8), ("I32",))
    expect(scales, (groups, n), FLOAT_NAMES)
    if "qzeros" in parts:
        expect(parts["qzeros"], (groups, n // 8), ("I32",))
    shift = f" +{shift_of(scales.dtype)}" if "qzeros" in parts else ""
    kind = f"int4 {f'g{group}' if group else 'row'}{shift}"
    read = partial(_read, parts, stored_group, group, (n, k))
    return weight_of(f"{module}.weight", (n, k), kind, parts, read)


def _read(parts: Parts, stored_group: int, group: int, shape: tuple[int, int]) -> GroupInt:
    n, k = shape
    words = parts["qweight"].array()
    codes = LaterArray(DType.U8, (n, k // 2), lambda: codes_along_outputs(words).data)
    zeros = None
    if "qzeros" in parts:
        zeros = zero_points(parts["qzeros"].array(), BITS, AWQ_ORDER)
    stored_scales = transposed(parts["scales"].array())
    check_products(parts["scales"], stored_scales, 2**BITS)
    scales, mins = scales_and_minima(stored_scales, zeros, stored_group, group, k)
    return GroupInt(BITS, group, codes, scales, mins, shape)


FORMAT = Format(METHOD, _detect, _open)
