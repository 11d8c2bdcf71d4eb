"""The ``quantization_config`` that is written: pack-quantized, groups or rows.

One fixed template, with patterns for what a model has and nothing else; the result is read back
and every module must fall where it was meant to.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import InternalError
from llmrun.formats.config_groups import (
    METHOD,
    PACKED,
    WeightScheme,
    parse_config_groups,
    parse_targets,
)
from llmrun.formats.damage import shown
from llmrun.formats.patterns import compile_pattern
from llmrun.kernels.forms import ROW

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

    @property
    def scheme(self) -> WeightScheme:
        """What a reader of the config must understand."""
        return WeightScheme(PACKED, self.bits, (1, self.group), self.symmetric)


def write_pack_config(packed: Mapping[str, Packing], others: Iterable[str]) -> dict[str, object]:
    """Return the ``quantization_config`` for the packed modules; ``others``: the other linears.

    Raises InternalError if a module would not be read back as it was packed.
    """
    kept = list(others)
    experts = {packing for module, packing in packed.items() if ".experts." in module}
    # transformers takes the first group in which it finds the word "experts" for all of them.
    packings = sorted(
        set(packed.values()), key=lambda p: (p not in experts, p.bits, p.group, p.symmetric)
    )
    listed = (
        [_plain_targets(packed)]
        if len(packings) == 1
        else [_layer_targets(packed, packing) for packing in packings]
    )
    base = parse_targets(list(_IGNORE), Path("config.json"))
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
    read = parse_config_groups(config, Path("config.json"))
    for module, packing in packed.items():
        # Other engines take the first group that matches, so exactly one must.
        owners = [name for name, (_, targets) in read.groups.items() if targets.names(module)]
        own = len(owners) == 1 and read.groups[owners[0]][0] == packing.scheme
        if not own or read.ignore.names(module):
            raise InternalError(f"The checkpoint's config would not describe {shown(module)}.")
    return config


def _group(packing: Packing, targets: list[str]) -> dict[str, object]:
    return {
        "targets": targets,
        "weights": {
            "num_bits": packing.bits,
            "type": "int",
            "symmetric": packing.symmetric,
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
