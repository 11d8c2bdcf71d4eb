"""Folders of compressed-tensors: integer and float weights with scales, several ways of storing.

A logical tensor ``X.weight`` is stored as several parts (codes, scales, zero points) and listed
once. Every part is checked against the config before any weight is read. Quantized activations
and caches that a config asks for are not applied, which ``notes`` says.
"""

from dataclasses import replace
from pathlib import Path

from llmrun.formats.checkpoint import Checkpoint, Format
from llmrun.formats.config_groups import (
    FLOATS,
    INTEGERS,
    METHOD,
    NVFP4,
    PACKED,
    ConfigGroups,
    WeightScheme,
    parse_config_groups,
    unapplied_note,
)
from llmrun.formats.damage import damaged, shown
from llmrun.formats.float_weight import float8_weight, nvfp4_weight
from llmrun.formats.integer_weight import packed_weight, plain_weight
from llmrun.formats.method_config import method_of
from llmrun.formats.parts import FLOAT_NAMES, PartedWeight, Parts, parted_checkpoint
from llmrun.formats.safetensors import CONFIG_NAME, open_tensors, quantization_config
from llmrun.formats.safetensors_header import StoredTensor

PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
)
READERS = {
    PACKED: packed_weight,
    INTEGERS: plain_weight,
    FLOATS: float8_weight,
    NVFP4: nvfp4_weight,
}


def _detect(path: Path) -> bool:
    return method_of(path) == METHOD


def _open(folder: Path) -> Checkpoint:
    path = folder / CONFIG_NAME
    config = parse_config_groups(quantization_config(folder) or {}, path)
    stored = {
        name: tensor
        for name, tensor in open_tensors(folder).items()
        if name.rpartition(".")[2] not in config.unused
    }
    parts = _parts(stored)
    weights = [_weight(module, found, config, path) for module, found in parts.items()]
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and module not in parts:
            _check_plain(module, tensor, config)
    checkpoint = parted_checkpoint(folder, METHOD, stored, weights)
    return replace(checkpoint, notes=unapplied_note(config.unapplied))


def _parts(stored: Parts) -> dict[str, dict[str, StoredTensor]]:
    """Return the parts of each quantized module; a plain weight in integers or F8 is one."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in PARTS or (part == "weight" and tensor.dtype not in FLOAT_NAMES):
            parts.setdefault(module, {})[part] = tensor
    for module, found in parts.items():
        plain = stored.get(f"{module}.weight")
        if plain is not None and "weight_packed" not in found:
            found["weight"] = plain
    return parts


def _weight(module: str, parts: Parts, config: ConfigGroups, path: Path) -> PartedWeight:
    scheme = _scheme(module, config, path)
    return READERS[scheme.format](module, scheme, parts, path.parent)


def _scheme(module: str, config: ConfigGroups, path: Path) -> WeightScheme:
    owners = config.owners(module)
    schemes = {config.groups[owner][0] for owner in owners}
    if len(schemes) != 1:
        claim = f"{len(owners)} groups" if owners else "no group"
        raise damaged(path, f"{shown(module)} is quantized, but {claim} of the config match it")
    return schemes.pop()


def _check_plain(module: str, stored: StoredTensor, config: ConfigGroups) -> None:
    """Refuse a plain matrix that the config names as quantized; patterns may fit norms as well."""
    owners = config.owners(module, linear=False)
    if owners and len(stored.shape) == 2:
        scheme = config.groups[owners[0]][0]
        missing = "weight_packed" if scheme.format in (PACKED, NVFP4) else "weight_scale"
        raise stored.refused(
            f"is stored plain, but the config names it as {scheme.format}: "
            f"tensor {shown(f'{module}.{missing}')} is missing"
        )


FORMAT = Format(METHOD, _detect, _open)
