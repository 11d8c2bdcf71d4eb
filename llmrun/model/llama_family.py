"""The config keys that Llama and its dense relatives share, read once."""

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads
from llmrun.model.config import ConfigReader
from llmrun.model.rope import read_rope
from llmrun.model.spec import DecoderSpec, LayerSpec

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


def read_spec(
    reader: ConfigReader,
    architecture: str,
    *,
    kv_heads: int | None = None,
    positions: int = 2048,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] | None = None,
) -> DecoderSpec:
    """Read sizes, norm, rope and head of a pre-norm decoder with a gated MLP.

    ``windows`` gives each layer's sliding window (None: full attention everywhere).
    ``kv_heads``, ``head_dim`` and ``positions`` are what transformers takes when the keys are not
    there (None: as many as query heads; hidden / heads).
    """
    hidden = reader.integer("hidden_size")
    n_heads = reader.integer("num_attention_heads")
    n_kv_heads = reader.optional_integer("num_key_value_heads", kv_heads) or n_heads
    head_dim = reader.optional_integer("head_dim", head_dim) or max(1, hidden // n_heads)
    if n_heads % n_kv_heads or head_dim % 2:
        raise ModelFileError(
            f"the model's config has {n_heads} query heads for {n_kv_heads} key/value heads "
            f"of size {head_dim}; llmrun needs a whole ratio and an even size",
            "check that config.json is the publisher's own",
        )
    reader.pinned("hidden_act", "silu")
    reader.pinned("is_encoder_decoder", False)
    n_layers = reader.integer("num_hidden_layers")
    rope = read_rope(reader, head_dim)
    return DecoderSpec(
        architecture=architecture,
        vocab=reader.integer("vocab_size"),
        hidden=hidden,
        intermediate=reader.integer("intermediate_size"),
        heads=Heads(n_heads, n_kv_heads, head_dim),
        layers=tuple(LayerSpec(rope, window) for window in windows or (None,) * n_layers),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        activation="silu",
        attention_scale=head_dim**-0.5,
        max_positions=reader.integer("max_position_embeddings", positions),
        tied=reader.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
