"""``quantization_config`` of GPTQ folders: how the weight of a module is packed.

``dynamic`` overrides it by pattern, the first match deciding: ``-:PATTERN`` leaves a module plain,
``+:PATTERN`` or ``PATTERN`` changes bits, group_size, sym or desc_act.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.formats.damage import shown
from llmrun.formats.limits import PATTERNS
from llmrun.formats.method_config import FROM_AUTOROUND, MethodConfig, method_config
from llmrun.formats.patterns import compile_pattern
from llmrun.kernels.forms import ROW

_BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
_OVERRIDES = ("bits", "group_size", "sym", "desc_act")
_READ = (*_OVERRIDES, "checkpoint_format", "format", "lm_head", "dynamic", "pack_dtype", "method")
_RECIPE = frozenset(
    (
        *("act_group_aware", "damp_auto_increment", "damp_percent", "fail_safe", "failsafe"),
        *("gptaq", "gptaq_alpha", "gptaq_memory_device", "hyb_act", "mse", "static_groups"),
        *("true_sequential", "v2", "v2_alpha", "v2_memory_device"),
    )
)
_OF_LOADERS = frozenset(
    (
        *("block_name_to_quantize", "cache_block_outputs", "device", "disable_exllama"),
        *("exllama_config", "max_input_length", "model_file_base_name", "model_name_or_path"),
        *("model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
        *("offload_to_disk", "offload_to_disk_path", "pack_impl", "pad_token_id"),
        *("parallel_packing", "tokenizer", "use_cuda_fp16", "use_exllama"),
    )
)
_ADVICE = (
    "llmrun reads GPTQ of 2, 4 or 8 bits in groups that 16 divides, or a row. "
    "Use another quantization of this model, or the unquantized one."
)


@dataclass(frozen=True)
class Packing:
    """How a module's weight is packed; ``group`` as stored, ``ROW`` for one per row.

    ``zeros_less_one``: as for ``packed_words.zero_points``. ``act_order``: columns were quantized
    in another order, so that the weight needs its ``g_idx``.
    """

    bits: int
    group: int
    symmetric: bool
    act_order: bool
    zeros_less_one: str


@dataclass(frozen=True)
class GptqConfig:
    """The packing of all modules, and the overrides in the order of the file.

    ``overrides``: test, pattern as written, and the packing, None for a module that stays plain.
    ``head``: whether the head is packed.
    """

    keys: MethodConfig
    default: Packing
    overrides: Sequence[tuple[Callable[[str], bool], str, Packing | None]]
    head: bool

    def packing(self, module: str) -> Packing:
        """Return how a packed module is packed; ModelFileError if it should be plain."""
        for matches, pattern, packing in self.overrides:
            if matches(module):
                if packing is None:
                    claim = f"{shown(pattern)} leaves out {shown(module)}, which is packed"
                    raise self.keys.refused("dynamic", claim)
                return packing
        return self.default


def parse_gptq_config(folder: Path) -> GptqConfig:
    """Check and return the config of a folder; ModelFileError for what llmrun cannot read."""
    keys = method_config(folder, _ADVICE)
    keys.check_keys(_READ, _RECIPE | FROM_AUTOROUND | _OF_LOADERS)
    keys.word("method", ("gptq",), "gptq")
    keys.word("pack_dtype", ("int32", "torch.int32"), "int32")
    # transformers calls the same thing ``format``; where both are given they must agree.
    layout = keys.word("checkpoint_format", _FORMATS, _text(keys.values.get("format"), "gptq"))
    keys.word("format", (layout,), layout)
    default = _packing(keys, Packing(0, 128, True, False, _zeros_less_one(keys, layout)))
    return GptqConfig(keys, default, _overrides(keys, default), keys.flag("lm_head", False))


def _packing(keys: MethodConfig, base: Packing) -> Packing:
    size = keys.integer("group_size", range(-1, 1 << 31), base.group or -1)
    if size == 0:
        raise keys.refused("group_size", size)
    return replace(
        base,
        bits=keys.integer("bits", _BITS, base.bits),
        group=ROW if size == -1 else size,
        symmetric=keys.flag("sym", base.symmetric),
        act_order=keys.flag("desc_act", base.act_order),
    )


def _zeros_less_one(keys: MethodConfig, layout: str) -> str:
    """How ``gptq`` took 1 off the zero points. GPTQModel subtracts from whole words, so that a
    zero point of 0 borrows from its neighbour; all others meant each field by itself."""
    if layout == "gptq_v2":
        return ""
    meta = keys.values.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, Mapping) else None
    first = tools[0] if isinstance(tools, list) and tools else tools
    return "word" if isinstance(first, str) and first.startswith("gptqmodel") else "field"


def _overrides(
    keys: MethodConfig, default: Packing
) -> list[tuple[Callable[[str], bool], str, Packing | None]]:
    dynamic = keys.values.get("dynamic")
    if dynamic is None:
        return []
    if not isinstance(dynamic, dict):
        raise keys.refused("dynamic", dynamic)
    if len(dynamic) > PATTERNS:
        raise keys.refused("dynamic", f"{len(dynamic):,} patterns, over {PATTERNS}")
    found: list[tuple[Callable[[str], bool], str, Packing | None]] = []
    for pattern, changes in dynamic.items():
        if not isinstance(changes, dict):
            raise keys.refused(f"dynamic {shown(pattern)}", changes)
        try:
            matches = compile_pattern(pattern.removeprefix("-:").removeprefix("+:"))
        except ValueError as error:
            raise keys.refused("dynamic", pattern) from error
        if pattern.startswith("-:"):
            found.append((matches, pattern, None))
            continue
        own = MethodConfig(changes, keys.path, keys.advice)
        own.check_keys(_OVERRIDES, _RECIPE)
        found.append((matches, pattern, _packing(own, default)))
    return found


def _text(value: object, default: str) -> str:
    return value if isinstance(value, str) else default
