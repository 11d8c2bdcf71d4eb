"""Reading foreign configs: typed, bounded, and nothing ignored that changes the mathematics.

``ConfigReader`` hands out values and remembers what was asked for; ``finish`` refuses every key
that is neither read, known to be harmless, nor null. Numbers are checked before any tensor
exists. Every refusal is a ModelFileError that names the key.
"""

from collections.abc import Mapping
from typing import cast

from llmrun.errors import ModelFileError

HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "keys_to_ignore_at_inference",
        "label2id",
        "mlp_dropout",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "residual_dropout",
        "resid_pdrop",
        "return_dict",
        "task_specific_params",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
        "unsloth_fixed",
        "unsloth_version",
        "use_flash_attn",
    }
)
"""Keys that say nothing about the value of the logits: training, generation, bookkeeping."""

LIMITS = {
    "vocab_size": 4_194_304,
    "hidden_size": 131_072,
    "intermediate_size": 1_048_576,
    "num_hidden_layers": 1_024,
    "num_attention_heads": 1_024,
    "num_key_value_heads": 1_024,
    "head_dim": 2_048,
    "max_position_embeddings": 134_217_728,
    "sliding_window": 134_217_728,
    "original_max_position_embeddings": 134_217_728,
    "num_local_experts": 4_096,
    "num_experts": 4_096,
    "num_experts_per_tok": 4_096,
    "moe_intermediate_size": 1_048_576,
}
"""Largest value believed for a size; anything above is damage, not a model."""

SMALLEST = 1e-30
"""No number of a model is smaller, or larger than its reciprocal."""


class ConfigReader:
    """Typed access to one config mapping. null counts as absent, unless a method says otherwise."""

    def __init__(self, config: Mapping[str, object], prefix: str = "") -> None:
        self._config = {key: value for key, value in config.items() if value is not None}
        self._null = config.keys() - self._config.keys()
        self._asked: set[str] = set()
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None) -> int:
        """A size from 1 to its limit."""
        value = self._take(key, default)
        limit = LIMITS.get(key, 2**31 - 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise self._bad(key, value, f"a whole number from 1 to {limit}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A size from 1 to its limit; None if null, ``default`` if the key is not there.

        Saved configs leave out what equals the library's default, so the two differ.
        """
        self._asked.add(key)
        if key in self._config:
            return self.integer(key)
        return None if key in self._null else default

    def count(self, key: str, default: int) -> int:
        """A whole number that may be 0."""
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise self._bad(key, value, "a whole number from 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._take(key, default)
        if not _is_positive(value):
            raise self._bad(key, value, "a number above 0, of a size that models have")
        return float(cast(float, value))

    def optional_number(self, key: str) -> float | None:
        """A finite number above zero; None if absent or 0, which configs write for "off"."""
        self._asked.add(key)
        return self.number(key) if self._config.get(key) else None

    def numbers(self, key: str, count: int) -> list[float]:
        """``count`` finite numbers above zero."""
        value = self._take(key, None)
        fits = isinstance(value, list) and len(value) == count
        if not fits or not all(map(_is_positive, cast("list[object]", value))):
            raise self._bad(key, value, f"{count} numbers above 0, of a size that models have")
        return [float(number) for number in cast("list[float]", value)]

    def flags(self, key: str, count: int) -> list[bool] | None:
        """``count`` values that are 0 or 1 (or false and true); None if absent."""
        self._asked.add(key)
        value = self._config.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != count
            or any(v not in (0, 1) for v in value)
        ):
            raise self._bad(key, value, f"{count} values of 0 or 1")
        return [bool(item) for item in value]

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._take(key, default)
        if not isinstance(value, str):
            raise self._bad(key, value, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings, empty if absent."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._bad(key, value, "a list of strings")
        return value

    def counts(self, key: str) -> list[int]:
        """A list of whole numbers that may be 0, empty if absent."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31
            for item in value
        ):
            raise self._bad(key, value, "a list of whole numbers from 0")
        return value

    def section(self, key: str) -> "ConfigReader | None":
        """A nested object, or None if absent."""
        self._asked.add(key)
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._bad(key, value, "an object")
        return ConfigReader(value, f"{self._prefix}{key}.")

    def pinned(self, key: str, *supported: object) -> None:
        """Accept a key that llmrun supports with some values only (the first is the default)."""
        value = self._take(key, supported[0])
        if value not in supported:
            shown = " or ".join(repr(item) for item in supported)
            raise self._bad(key, value, f"{shown}; other values are not supported")

    def one_of(self, key: str, default: str, *supported: str) -> str:
        """A string llmrun knows."""
        value = self._take(key, default)
        if not isinstance(value, str) or value not in supported:
            shown = " or ".join(repr(item) for item in supported)
            raise self._bad(key, value, f"{shown}; others are not supported")
        return value

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        """Refuse keys nobody asked for: they may change the mathematics."""
        unknown = sorted(
            key
            for key in self._config.keys() - self._asked - harmless
            if not key.startswith("_")  # the library's own notes, e.g. _name_or_path
        )
        if unknown:
            names = ", ".join(f"{self._prefix}{key} = {self._config[key]!r}" for key in unknown)
            raise ModelFileError(
                f"the model's config has keys llmrun does not know: {names}",
                "they may change the computation, so the model is not loaded; "
                "a newer llmrun may know them",
            )

    def _take(self, key: str, default: object) -> object:
        self._asked.add(key)
        value = self._config.get(key, default)
        if value is None:
            raise ModelFileError(
                f"the model's config lacks {self._prefix}{key}",
                "the file is damaged or of another kind; download it again with `llmrun pull`",
            )
        return value

    def _bad(self, key: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(
            f"the model's config says {self._prefix}{key} = {value!r}; expected {wanted}",
            "use another model, or check that config.json is the publisher's own",
        )


def _is_positive(value: object) -> bool:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return fits and SMALLEST <= cast(float, value) <= 1 / SMALLEST


def positive_integer(value: object) -> int | None:
    """A whole number above zero, or None for anything else."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return cast(int, value) if fits else None
