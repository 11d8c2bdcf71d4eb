"""``quantization_config`` of pack-quantized checkpoints: which module is stored how.

Read: groups with targets (module names, ``re:`` patterns, the class ``Linear``) and an ignore
list. Written: one fixed template, with patterns for what a model has and nothing else; the
result is read back and every module must fall where it was meant to.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import InternalError
from llmrun.formats.damage import damaged, shown
from llmrun.formats.patterns import compile_pattern
from llmrun.kernels.forms import ROW

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
GROUPS = (32, 64, 128)

_TARGETS = (
    r"re:.*self_attn\.(q|k|v|o|qkv)_proj$",
    r"re:.*(mlp|shared_experts?)\.(gate|up|gate_up|down)_proj$",
    r"re:.*experts\.\d+\.(gate|up|down)_proj$",
)
_IGNORE = ("lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$")
_LAYER = re.compile(r".*\blayers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Packing:
    """How a module's weight is packed; ``group`` as in GroupInt."""

    bits: int
    group: int
    symmetric: bool = True


@dataclass(frozen=True)
class Targets:
    """Names, patterns and classes as the config lists them; call ``names`` for all but classes."""

    literal: frozenset[str]
    patterns: tuple[Callable[[str], bool], ...]

    @property
    def any_linear(self) -> bool:
        """Whether the class ``Linear`` is listed."""
        return "Linear" in self.literal

    def names(self, module: str) -> bool:
        """Whether a module is matched by name or pattern."""
        return module in self.literal or any(match(module) for match in self.patterns)


@dataclass(frozen=True)
class PackConfig:
    """The groups by name and what they leave out."""

    groups: Mapping[str, tuple[Packing, Targets]]
    ignore: Targets

    def owners(self, module: str, linear: bool = True) -> list[str]:
        """Return the groups that claim a module; ``linear`` lets the class ``Linear`` count."""
        if self.ignore.names(module):
            return []
        return [
            name
            for name, (_, targets) in self.groups.items()
            if targets.names(module) or (linear and targets.any_linear)
        ]


def parse_pack_config(config: Mapping[str, object], path: Path) -> PackConfig:
    """Check and return a ``quantization_config``; ModelFileError for what llmrun cannot read."""
    if config.get("format") not in (PACKED, "mixed-precision"):
        raise _refused(path, "format", config.get("format"))
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key) not in (None, {}):
            raise _refused(path, key, config[key])
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused(path, "config_groups", groups)
    parsed = {}
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise _refused(path, f"config_groups.{name}", group)
        for key in ("input_activations", "output_activations"):
            if group.get(key) is not None:
                raise _refused(path, key, group[key])
        if group.get("format") not in (None, PACKED):
            raise _refused(path, "format", group["format"])
        targets = _targets(group.get("targets"), path)
        parsed[name] = (_packing(group.get("weights"), path), targets)
    return PackConfig(parsed, _targets(config.get("ignore") or [], path))


def write_pack_config(packed: Mapping[str, Packing], others: Iterable[str]) -> dict[str, object]:
    """Return the ``quantization_config`` for the packed modules; ``others``: the other linears.

    Raises InternalError if a module would not be read back as it was packed.
    """
    kept = list(others)
    packings = sorted(set(packed.values()), key=lambda p: (p.bits, p.group))
    listed = (
        [_plain_targets(packed)]
        if len(packings) == 1
        else [_layer_targets(packed, packing) for packing in packings]
    )
    base = _targets(list(_IGNORE), Path("config.json"))
    config: dict[str, object] = {
        "quant_method": METHOD,
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": _group(packing, targets)
            for number, (packing, targets) in enumerate(zip(packings, listed, strict=True))
        },
        "ignore": [*_IGNORE, *(module for module in kept if not base.names(module))],
        "kv_cache_scheme": None,
    }
    read = parse_pack_config(config, Path("config.json"))
    for module, packing in packed.items():
        owners = read.owners(module, linear=False)
        if len(owners) != 1 or read.groups[owners[0]][0] != packing:
            raise InternalError(f"The checkpoint's config would not describe {shown(module)}.")
    return config


def _group(packing: Packing, targets: list[str]) -> dict[str, object]:
    return {
        "targets": targets,
        "weights": {
            "num_bits": packing.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if packing.group == ROW else "group",
            "group_size": None if packing.group == ROW else packing.group,
            "dynamic": False,
            "observer": "minmax",
        },
        "input_activations": None,
        "output_activations": None,
        "format": PACKED,
    }


def _plain_targets(modules: Iterable[str]) -> list[str]:
    """Return the template's patterns that match something, then names that no pattern matches."""
    matchers = {target: compile_pattern(target.removeprefix("re:")) for target in _TARGETS}
    rest = list(modules)
    targets = []
    for target, match in matchers.items():
        if any(match(module) for module in rest):
            targets.append(target)
            rest = [module for module in rest if not match(module)]
    return targets + rest


def _layer_targets(packed: Mapping[str, Packing], packing: Packing) -> list[str]:
    """Return patterns with layer numbers for the modules of one packing among several."""
    names = []
    layers: dict[str, list[str]] = {}
    for module, own in packed.items():
        if own != packing:
            continue
        place = _LAYER.fullmatch(module)
        if place is None:
            names.append(module)
            continue
        parts = (r"\d+" if part.isdigit() else re.escape(part) for part in place[2].split("."))
        numbers = layers.setdefault(r"\.".join(parts), [])
        if place[1] not in numbers:
            numbers.append(place[1])
    return [
        f"re:.*layers\\.({'|'.join(numbers)})\\.{module}$" for module, numbers in layers.items()
    ] + names


def _targets(value: object, path: Path) -> Targets:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _refused(path, "targets or ignore", value)
    patterns = []
    for item in value:
        if item.startswith("re:"):
            try:
                patterns.append(compile_pattern(item.removeprefix("re:")))
            except ValueError as error:
                raise damaged(path, f"pattern {shown(item)}: {error}") from error
    literal = frozenset(item for item in value if not item.startswith("re:"))
    return Targets(literal, tuple(patterns))


def _packing(weights: object, path: Path) -> Packing:
    if not isinstance(weights, dict):
        raise _refused(path, "weights", weights)
    bits, strategy, size = (weights.get(k) for k in ("num_bits", "strategy", "group_size"))
    if weights.get("type", "int") != "int" or bits not in (4, 8) or not isinstance(bits, int):
        raise _refused(path, "weights", weights)
    if weights.get("dynamic") not in (None, False) or weights.get("block_structure") is not None:
        raise _refused(path, "weights", weights)
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise _refused(path, "symmetric", symmetric)
    if strategy == "channel":
        return Packing(bits, ROW, symmetric)
    if strategy != "group" or size not in GROUPS or not isinstance(size, int):
        raise _refused(path, f"strategy {shown(strategy)} with group_size", size)
    return Packing(bits, size, symmetric)


def _refused(path: Path, key: str, value: object) -> Exception:
    return damaged(
        path,
        f"quantization_config: {key} is {shown(value)}, which llmrun does not read",
        "llmrun reads pack-quantized weights of 4 or 8 bits in groups of 32, 64, 128 or a row. "
        "Use another quantization of this model, or the unquantized one.",
    )
