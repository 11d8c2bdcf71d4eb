"""What the Gemma models have in common: their config keys and the names of their tensors.

Norms stand before and behind attention and MLP and multiply by ``1 + w``; the embedding is scaled
by the root of its width; the gate is GELU. GGUF files hold ``1 + w`` itself, which no published
config says: configs made from them carry ``norm_offset`` "stored".
"""

from collections.abc import Mapping
from dataclasses import replace

from llmrun.model.config import ConfigReader, positive_integer
from llmrun.model.gguf import GgufFile, head_dim_of
from llmrun.model.layout import Place
from llmrun.model.llama_family import Defaults, read_spec
from llmrun.model.parameters import ATTENTION_OUT_NORM, MLP_NORM, MLP_OUT_NORM
from llmrun.model.spec import DecoderSpec

PLACES: Mapping[str, Place] = {
    "post_attention_layernorm": Place((ATTENTION_OUT_NORM,)),
    "pre_feedforward_layernorm": Place((MLP_NORM,)),
    "post_feedforward_layernorm": Place((MLP_OUT_NORM,)),
}
"""Published names of the norms that others call differently."""

GGUF_NAMES: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, the only ones whose queries are not scaled by their head size."""


def read_gemma(
    reader: ConfigReader, architecture: str, positions: int, theta: float
) -> DecoderSpec:
    """Read what Gemma 2 and 3 share; the layers are alike, with full attention and no caps.

    ``positions`` and ``theta`` are taken where the config does not say.
    """
    defaults = Defaults(
        kv_heads=4,
        head_dim=256,
        positions=positions,
        theta=theta,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        tied=True,
        layer_type="full_attention",
    )
    # Early configs name the activation twice; the library reads the other key.
    reader.pinned("hidden_act", "gelu_pytorch_tanh")
    reader.pinned("use_bidirectional_attention", False)
    added = reader.one_of("norm_offset", "added", "added", "stored") == "added"
    bias = reader.flag("attention_bias", False)
    spec = read_spec(reader, architecture, defaults)
    return replace(
        spec,
        norm=replace(spec.norm, offset=1.0 if added else 0.0, after=True),
        attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=spec.hidden**0.5,
        qkv_bias=bias,
        output_bias=bias,
    )


def finish_gguf(file: GgufFile, config: dict[str, object]) -> None:
    """Add to the config of a GGUF file what its converter dropped or changed."""
    n_heads, hidden, n_layers = (
        positive_integer(config.get(key)) or 1
        for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    config["head_dim"] = head_dim_of(config)
    largest = n_layers == _LARGEST[str(file.metadata["general.architecture"])]
    config["query_pre_attn_scalar"] = hidden // n_heads if largest else config["head_dim"]
    config["norm_offset"] = "stored"
    file.inexpressible = "its norm weights have 1 added, which cannot be undone without rounding"
