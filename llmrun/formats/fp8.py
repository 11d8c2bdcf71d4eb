"""Folders with ``quant_method: fp8``: E4M3 weights, as DeepSeek-V3 and Qwen3-FP8 are published.

``X.weight`` E4M3 [N, K] with ``X.weight_scale_inv`` (or ``weight_scale``), which multiplies: one
for each block of ``weight_block_size``, the last ones cut at the edge, or one in all. Which module
is converted is seen from its tensors. Quantized activations of the config are not applied.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, Format
from llmrun.formats.config_groups import ALL, FLOATS, WeightScheme, is_block, unapplied_note
from llmrun.formats.damage import shown
from llmrun.formats.float_weight import E4M3, scaled
from llmrun.formats.method_config import MethodConfig, method_config, method_of
from llmrun.formats.parts import Parts, parted_checkpoint
from llmrun.formats.safetensors import open_tensors
from llmrun.formats.safetensors_header import StoredTensor

METHOD = "fp8"
SCALES = ("weight_scale_inv", "weight_scale")
ACTIVATION_SCALES = ("input_scale", "activation_scale")
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale")
"""Last parts of the names of tensors that serve only what is not applied."""

_VALUES = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "kv_cache_scheme": ("dynamic", "static"),
    "dequantize": (False, True),
}
"""Keys by what they may hold besides nothing."""

_LISTS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers")
_ADVICE = (
    "llmrun reads E4M3 weights with a scale per block or per tensor. "
    "Use another quantization of this model, or the unquantized one."
)


def _detect(path: Path) -> bool:
    return method_of(path) == METHOD


def _open(folder: Path) -> Checkpoint:
    config = method_config(folder, _ADVICE)
    scheme = _scheme(config)
    unapplied = _unapplied(config.values)
    unused = {part for parts in unapplied.values() for part in parts}
    stored = {
        name: tensor
        for name, tensor in open_tensors(folder).items()
        if name.rpartition(".")[2] not in unused
    }
    powers = config.values.get("scale_fmt") == "ue8m0"
    weights = []
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and _is_float8(tensor):
            weights.append(scaled(module, tensor, _scale(module, tensor, stored), scheme, powers))
        elif part in SCALES and not _is_float8(stored.get(f"{module}.weight")):
            raise tensor.refused(f"is a scale, but its weight is not {E4M3}")
    checkpoint = parted_checkpoint(folder, METHOD, stored, weights)
    return replace(checkpoint, notes=unapplied_note(unapplied))


def _is_float8(weight: StoredTensor | None) -> bool:
    return weight is not None and weight.dtype.startswith("F8")


def _scheme(config: MethodConfig) -> WeightScheme:
    """Check every key of the config; ModelFileError for what changes the meaning."""
    config.check_keys((*_VALUES, *_LISTS, "weight_block_size"), frozenset())
    for key, values in _VALUES.items():
        config.one_of(key, (None, *values))
    for key in _LISTS:
        config.names(key)
    block = config.values.get("weight_block_size")
    if block is None:
        return WeightScheme(FLOATS, 8, (ALL, ALL))
    if not is_block(block) or not isinstance(block, list):
        raise config.refused("weight_block_size", block)
    return WeightScheme(FLOATS, 8, (block[0], block[1]))


def _scale(module: str, weight: StoredTensor, stored: Parts) -> StoredTensor:
    found = [stored[f"{module}.{part}"] for part in SCALES if f"{module}.{part}" in stored]
    if not found:
        missing = shown(f"{module}.{SCALES[0]}")
        raise weight.refused(f"is {weight.dtype}, but tensor {missing} is missing")
    if len(found) > 1:
        raise found[1].refused(f"and {shown(found[0].name)} both scale one weight")
    return found[0]


def _unapplied(config: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return what the config asks for beyond the weights, and the tensors that serve only that."""
    found: dict[str, tuple[str, ...]] = {}
    if config.get("activation_scheme") is not None:
        static = config["activation_scheme"] == "static"
        found["8-bit activations"] = ACTIVATION_SCALES if static else ()
    if config.get("kv_cache_scheme") is not None:
        found["8-bit KV cache"] = CACHE_SCALES
    return found


FORMAT = Format(METHOD, _detect, _open)
