"""The frozen description of a decoder: all that its mathematics depends on.

An architecture file turns a foreign config into one of these; nothing below reads a config.
"""

from dataclasses import dataclass

from llmrun.kernels.ops import Heads, Rope


@dataclass(frozen=True)
class LayerSpec:
    """One layer. ``rope`` None: no positional encoding; ``window`` None: full attention."""

    rope: Rope | None
    window: int | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer (sizes as in the Hugging Face configs).

    ``qk_norm``: RMSNorm per head on queries and keys. ``tied``: the head is the embedding.
    ``attention_scale`` multiplies q.k. ``max_positions``: the context the model was trained for.
    """

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    heads: Heads
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    activation: str
    attention_scale: float
    max_positions: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
