"""Reading compressed-tensors' ``quantization_config``: which module's weight is stored how.

Groups have targets (module names, ``re:`` patterns, class names such as ``Linear``), a format and
the weights' arithmetic; an ignore list takes modules out. What the config says about activations
and the KV cache changes no weight: it is collected, to be told. Every key is known here, so that a
new one that changes the meaning is refused by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.formats.damage import damaged, shown
from llmrun.formats.limits import PATTERNS
from llmrun.formats.method_config import is_off
from llmrun.formats.patterns import compile_pattern

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
INTEGERS = "int-quantized"
FLOATS = "float-quantized"
NVFP4 = "nvfp4-pack-quantized"
FORMATS = (PACKED, INTEGERS, FLOATS, NVFP4)
EITHER = "naive-quantized"
"""Older name of both ``int-quantized`` and ``float-quantized``."""

MIXED = "mixed-precision"
ALL = 0
"""As an extent of a block: all rows, or all columns, share a scale."""

GROUPS = (16, 32, 64, 128)

_KEYS = {
    *("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "version"),
    *("quantization_status", "global_compression_ratio", "sparsity_config", "transform_config"),
    *("moe_sparsity_config", "run_compressed"),
    "provider",  # AutoRound signs with it
}
_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
_WEIGHT_KEYS = {
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic"),
    *("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}


@dataclass(frozen=True)
class WeightScheme:
    """How a module's weight is stored.

    ``block``: rows and columns that share a scale, ``ALL`` for all of them. ``reordered``: columns
    belong to groups by an index of their own.
    """

    format: str
    bits: int
    block: tuple[int, int]
    symmetric: bool = True
    reordered: bool = False

    @property
    def span(self) -> str:
        """What shares a scale, in words of ``kind``: ``g128``, ``row``, ``tensor`` or a block."""
        rows, columns = self.block
        if rows == columns == ALL:
            return "tensor"
        if rows == 1:
            return f"g{columns}" if columns else "row"
        return f"block {rows}x{columns}"


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
class ConfigGroups:
    """The groups by name, what they leave out, and what of the config is not applied.

    ``unused``: last parts of the names of tensors that serve only what is not applied.
    """

    groups: Mapping[str, tuple[WeightScheme, Targets]]
    ignore: Targets
    unapplied: tuple[str, ...] = ()
    unused: frozenset[str] = frozenset()

    def owners(self, module: str, linear: bool = True) -> list[str]:
        """Return the groups that claim a module: by name, else by pattern, else by class.

        More than one is ambiguous. ``linear`` lets the class ``Linear`` count.
        """
        if self.ignore.names(module):
            return []
        targets = {name: group[1] for name, group in self.groups.items()}
        named = [name for name, own in targets.items() if module in own.literal]
        matched = [name for name, own in targets.items() if own.names(module)]
        by_class = [name for name, own in targets.items() if linear and own.any_linear]
        return named or matched or by_class


def parse_config_groups(config: Mapping[str, object], path: Path) -> ConfigGroups:
    """Check and return a ``quantization_config``; ModelFileError for what llmrun cannot read."""
    # The library refuses unknown keys of a group, not of the whole.
    _check_keys({key: v for key, v in config.items() if not is_off(v)}, _KEYS, "", path)
    format = config.get("format")
    if format not in (*FORMATS, EITHER, MIXED):
        raise refused(path, "format", format)
    _check_sparsity(config, path)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refused(path, "config_groups", groups)
    if len(groups) > PATTERNS:
        raise damaged(path, f"config_groups has {len(groups):,} groups, over {PATTERNS}")
    parsed = {}
    unapplied: dict[str, None] = {}
    unused: set[str] = set()
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise refused(path, f"config_groups.{name}", group)
        _check_keys(group, _GROUP_KEYS, f"config_groups.{name}.", path)
        for key, side in (("input_activations", "input"), ("output_activations", "output")):
            bits = _bits(group.get(key), key, path)
            if bits is not None:
                unapplied[f"{bits}-bit activations"] = None
                unused |= {f"{side}_{part}" for part in ("scale", "zero_point", "global_scale")}
        own = group.get("format") or format
        targets = parse_targets(group.get("targets"), path)
        parsed[name] = (_scheme(own, group.get("weights"), path), targets)
    bits = _bits(config.get("kv_cache_scheme"), "kv_cache_scheme", path)
    if bits is not None:
        unapplied[f"{bits}-bit KV cache"] = None
        kinds = ("scale", "zero_point", "global_scale")
        unused |= {f"{side}_{kind}" for side in ("q", "k", "v", "output") for kind in kinds}
    ignore = parse_targets(config.get("ignore") or [], path)
    return ConfigGroups(parsed, ignore, tuple(unapplied), frozenset(unused))


def unapplied_note(unapplied: Iterable[str]) -> tuple[str, ...]:
    """What of a checkpoint's config is not applied, as its ``notes``."""
    what = " and ".join(unapplied)
    return (f"{what} that the model's config asks for are not applied",) if what else ()


def _check_keys(config: Mapping[str, object], known: set[str], where: str, path: Path) -> None:
    for key in sorted(config.keys() - known):
        raise refused(path, f"{where}{key}", config[key])


def _check_sparsity(config: Mapping[str, object], path: Path) -> None:
    for key in ("transform_config", "moe_sparsity_config"):
        if config.get(key) not in (None, {}):
            raise refused(path, key, config[key])
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        return  # a description of zeros that are stored like other weights
    if sparsity not in (None, {}):
        raise refused(path, "sparsity_config", sparsity)


def _bits(value: object, key: str, path: Path) -> int | None:
    """Return the bits of quantized activations, None if there are none."""
    if value is None:
        return None
    bits = value.get("num_bits", 8) if isinstance(value, dict) else None
    if type(bits) is not int:
        raise refused(path, key, value)
    return bits


def _scheme(format: object, weights: object, path: Path) -> WeightScheme:
    if not isinstance(weights, dict):
        raise refused(path, "weights", weights)
    _check_keys(weights, _WEIGHT_KEYS, "weights.", path)
    bits, kind = weights.get("num_bits", 8), str(weights.get("type", "int")).lower()
    symmetric = weights.get("symmetric", True)
    if weights.get("dynamic") not in (None, False):
        raise refused(path, "weights.dynamic", weights["dynamic"])
    if not isinstance(symmetric, bool):
        raise refused(path, "symmetric", symmetric)
    if format == EITHER:
        format = INTEGERS if kind == "int" else FLOATS
    if format not in FORMATS or not isinstance(format, str):
        raise refused(path, "format", format)
    widths = {PACKED: range(2, 9), INTEGERS: range(2, 9), FLOATS: (8,), NVFP4: (4,)}
    expected = "int" if format in (PACKED, INTEGERS) else "float"
    if type(bits) is not int or bits not in widths[format] or kind != expected:
        raise refused(path, f"weights of {format}", f"{kind} of {bits} bits")
    if expected == "float" and not symmetric:
        raise refused(path, f"symmetric of {format}", symmetric)
    order = weights.get("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise refused(path, "weights.actorder", order)
    block = _block(format, weights, path)
    return WeightScheme(format, bits, block, symmetric, order in (True, "group", "dynamic"))


def _block(format: str, weights: Mapping[str, object], path: Path) -> tuple[int, int]:
    strategy, size, block = (
        weights.get(key) for key in ("strategy", "group_size", "block_structure")
    )
    if strategy is None:  # as the library infers it
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    strategies = {"tensor": (ALL, ALL), "channel": (1, ALL)}
    if format != NVFP4 and isinstance(strategy, str) and strategy in strategies and block is None:
        return strategies[strategy]
    if format == FLOATS and strategy == "block" and is_block(block):
        assert isinstance(block, list)
        return block[0], block[1]
    # The library calls groups under a global scale tensor_group; older files just say group.
    named = strategy == "group" or (format == NVFP4 and strategy == "tensor_group")
    if not named or type(size) is not int or block is not None:
        raise refused(path, f"strategy {shown(strategy)} with group_size", size)
    fits = size > 0 if format == FLOATS else size in ((16,) if format == NVFP4 else GROUPS)
    if not fits:
        raise refused(path, f"strategy {shown(strategy)} with group_size", size)
    return 1, size


def is_block(value: object) -> bool:
    """Whether a config's value is a block's extents: two positive integers."""
    return (
        isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value)
    )


def parse_targets(value: object, path: Path) -> Targets:
    """Return a config's list of names, classes and ``re:`` patterns; else ModelFileError."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refused(path, "targets or ignore", value)
    written = [item for item in value if item.startswith("re:")]
    if len(written) > PATTERNS:
        raise damaged(path, f"a list of targets has {len(written):,} patterns, over {PATTERNS}")
    patterns = []
    for item in written:
        try:
            patterns.append(compile_pattern(item.removeprefix("re:")))
        except ValueError as error:
            raise damaged(path, f"pattern {shown(item)}: {error}") from error
    return Targets(frozenset(value).difference(written), tuple(patterns))


def refused(path: Path, key: str, value: object) -> ModelFileError:
    """Return the error for a key or value of a ``quantization_config``."""
    return damaged(
        path,
        f"quantization_config: {key} is {shown(value)}, which llmrun does not read",
        f"llmrun reads compressed-tensors' {', '.join(FORMATS)}. "
        "Use another quantization of this model, or the unquantized one.",
    )
