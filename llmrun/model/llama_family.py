"""The config keys that Llama and its dense relatives share, read once.

Architecture files start from ``read_spec`` and replace what differs.
"""

from dataclasses import dataclass

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.config import ConfigReader
from llmrun.model.rope import DEFAULT_THETA, read_rope, stretched_positions
from llmrun.model.spec import DecoderSpec, LayerSpec, NormSpec

TINY: dict[str, object] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}
"""A config small enough for parity tests in milliseconds; architectures vary it."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names that configs give to the activations there are (of ``kernels.ops``)."""


@dataclass(frozen=True)
class Defaults:
    """What transformers takes for keys that are not there, and how an architecture calls some.

    ``kv_heads`` None: as many as query heads; ``head_dim`` None: hidden / heads.
    ``partial`` None: heads are rotated whole. ``layer_type``: the rotation to read where there is
    one for each type of layer.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int = 2048
    theta: float = DEFAULT_THETA
    partial: float | None = None
    eps: float = 1e-6
    eps_key: str = "rms_norm_eps"
    activation: str = "silu"
    activation_key: str = "hidden_act"
    tied: bool = False
    layer_type: str | None = None


LLAMA = Defaults()


def read_spec(reader: ConfigReader, architecture: str, defaults: Defaults = LLAMA) -> DecoderSpec:
    """Read sizes, norm, rope and head of a pre-norm decoder with a gated MLP.

    All layers are alike, with full attention and without biases. ModelFileError names a key that
    is missing or has a value llmrun does not support.
    """
    hidden = reader.integer("hidden_size")
    n_heads = reader.integer("num_attention_heads")
    n_kv_heads = reader.optional_integer("num_key_value_heads", defaults.kv_heads) or n_heads
    head_dim = reader.optional_integer("head_dim", defaults.head_dim) or max(1, hidden // n_heads)
    if n_heads % n_kv_heads or head_dim % 2:
        raise ModelFileError(
            f"the model's config has {n_heads} query heads for {n_kv_heads} key/value heads "
            f"of size {head_dim}; llmrun needs a whole ratio and an even size",
            "check that config.json is the publisher's own",
        )
    activation = reader.one_of(defaults.activation_key, defaults.activation, *ACTIVATIONS)
    reader.pinned("is_encoder_decoder", False)
    n_layers = reader.integer("num_hidden_layers")
    positions = reader.integer("max_position_embeddings", defaults.positions)
    rope = read_rope(
        reader,
        head_dim,
        positions,
        theta=defaults.theta,
        partial=defaults.partial,
        layer_type=defaults.layer_type,
    )
    return DecoderSpec(
        architecture=architecture,
        vocab=reader.integer("vocab_size"),
        hidden=hidden,
        intermediate=reader.integer("intermediate_size"),
        heads=Heads(n_heads, n_kv_heads, head_dim),
        layers=(LayerSpec(rope),) * n_layers,
        norm=NormSpec(reader.number(defaults.eps_key, defaults.eps)),
        activation=ACTIVATIONS[activation],
        attention_scale=head_dim**-0.5,
        max_positions=stretched_positions(reader, positions),
        tied=reader.flag("tie_word_embeddings", defaults.tied),
    )
