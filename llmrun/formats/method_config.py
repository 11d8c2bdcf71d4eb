"""``quantization_config`` of tools that quantize: every key is read, known to be without meaning
for the stored numbers, or refused by name.

A key nobody knows is let through only if its value switches something off (null, false, empty).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import ModelFileError
from llmrun.formats.damage import damaged, shown
from llmrun.formats.safetensors import CONFIG_NAME, quantization_config

COMMON = frozenset(("quant_method", "backend", "meta"))
"""Keys that any method may carry and that say nothing about the numbers."""

FROM_AUTOROUND = frozenset(
    (
        *("amp", "autoround_version", "batch_size", "data_type", "dataset"),
        *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input"),
        *("gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr"),
        *("nsamples", "provider", "quant_block_list", "scale_dtype", "seqlen", "super_bits"),
        *("super_group_size", "to_quant_block_names", "train_bs"),
    )
)
"""How AutoRound found the numbers it exports in another tool's layout."""


@dataclass(frozen=True)
class MethodConfig:
    """The keys of one config; ``advice`` ends every refusal: what llmrun does read."""

    values: Mapping[str, object]
    path: Path
    advice: str

    def refused(self, key: str, value: object) -> ModelFileError:
        """Return the error that names a key and its value."""
        said = f"quantization_config: {key} is {shown(value)}, which llmrun does not read"
        return damaged(self.path, said, self.advice)

    def check_keys(self, read: Sequence[str], inert: frozenset[str]) -> None:
        """Refuse keys outside the two lists (and ``COMMON``), unless they are switched off."""
        for key, value in self.values.items():
            known = key in read or key in inert or key in COMMON or key.startswith("_")
            if not known and not is_off(value):
                raise self.refused(shown(key), value)

    def _value(self, key: str, default: object) -> object:
        """Return a value; the default where the key is absent or null, which means not set."""
        value = self.values.get(key)
        return default if value is None else value

    def one_of(self, key: str, allowed: Sequence[object], default: object = None) -> object:
        """Return a value that must be one of ``allowed``."""
        value = self._value(key, default)
        if not any(value == known and type(value) is type(known) for known in allowed):
            raise self.refused(key, value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        return self.one_of(key, (True, False), default) is True

    def integer(self, key: str, allowed: Sequence[int] | range, default: int | None = None) -> int:
        """Return an integer that must be one of ``allowed``."""
        value = self._value(key, default)
        if type(value) is not int or value not in allowed:
            raise self.refused(key, value)
        return value

    def word(self, key: str, allowed: Sequence[str], default: str | None = None) -> str:
        """Return a word in lower case that must be one of ``allowed``."""
        value = self._value(key, default)
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.refused(key, value)
        return value.lower()

    def names(self, key: str) -> None:
        """Check that a value, if there is one, is a list of names. What is stored how shows from
        the tensors, so the names themselves are not needed."""
        value = self.values.get(key)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            raise self.refused(key, value)


def method_config(folder: Path, advice: str) -> MethodConfig:
    """Return the config of a folder."""
    return MethodConfig(quantization_config(folder) or {}, folder / CONFIG_NAME, advice)


def method_of(path: Path) -> str | None:
    """Return the name of the method a folder is quantized with, None if it is not."""
    if not (path / CONFIG_NAME).exists():
        return None
    config = quantization_config(path)
    name = None if config is None else config.get("quant_method")
    return name if isinstance(name, str) else None


def is_off(value: object) -> bool:
    """Whether a value switches a key off."""
    return value is None or value is False or value in ("", [], {})
