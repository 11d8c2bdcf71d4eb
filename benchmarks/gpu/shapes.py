"""The linears of three models, and those models as decoders.

``qkv`` and ``gate_up`` are several weights in one launch, so their rows are given one by one.
"""

from dataclasses import dataclass

from llmrun.model.architecture import find
from llmrun.model.spec import DecoderSpec

ROLES = ("qkv", "o", "gate_up", "down", "head")


@dataclass(frozen=True)
class Linears:
    """One launch's weights: rows of each [N1, N2, ...], columns K, and how often a step has it."""

    role: str
    rows: tuple[int, ...]
    k: int
    times: int


@dataclass(frozen=True)
class Model:
    """A model by its published config; ``linears`` of one decode step."""

    name: str
    config: dict[str, object]

    @property
    def spec(self) -> DecoderSpec:
        """The decoder."""
        return find(self.config["model_type"]).spec(self.config)

    @property
    def linears(self) -> tuple[Linears, ...]:
        """Its launches by role."""
        spec = self.spec
        heads, layers = spec.heads, len(spec.layers)
        queries, keys = heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
        return (
            Linears("qkv", (queries, keys, keys), spec.hidden, layers),
            Linears("o", (spec.hidden,), queries, layers),
            Linears("gate_up", (spec.intermediate, spec.intermediate), spec.hidden, layers),
            Linears("down", (spec.hidden,), spec.intermediate, layers),
            Linears("head", (spec.vocab,), spec.hidden, 1),
        )


def _llama3(factor: float) -> dict[str, object]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}

MODELS = (
    Model(
        "8B",
        _LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "rope_parameters": _llama3(8.0),
            "tie_word_embeddings": False,
        },
    ),
    Model(
        "1B",
        _LLAMA
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "rope_parameters": _llama3(32.0),
            "tie_word_embeddings": True,
        },
    ),
    Model(
        "0.6B",
        {
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
)
"""Llama 3.1 8B, Llama 3.2 1B, Qwen 3 0.6B."""

TINY = Model(
    "tiny",
    {
        "model_type": "qwen3",
        "vocab_size": 200,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
    },
)
"""What a dry run has instead."""


def models(dry: bool) -> tuple[Model, ...]:
    """The models to measure."""
    return (TINY,) if dry else MODELS
