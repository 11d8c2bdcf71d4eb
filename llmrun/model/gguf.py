"""What GGUF files share across architectures: tensor names, metadata keys, rotary row order.

Keys and names as in the GGUF specification of the ggml project.
"""

from collections.abc import Mapping, Sequence

from llmrun.errors import ModelFileError

ROPE_FACTORS = "rope_freqs.weight"
"""A vector that divides the rotary frequencies: how GGUF files carry Llama 3's scaling."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def canonical_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name comes back unchanged."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return name


def half_split_rows(n_heads: int, head_dim: int) -> list[int]:
    """Row order that turns interleaved rotary pairs into halves.

    Row ``h*D + p*D/2 + i`` of the result is row ``h*D + 2i + p`` of the file (D = head_dim).
    """
    half = head_dim // 2
    return [
        head * head_dim + 2 * i + p for head in range(n_heads) for p in (0, 1) for i in range(half)
    ]


_CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_CHECKED_KEYS = {
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "expert_count",
    "expert_used_count",
}
_HARMLESS_KEYS = {"rope.scaling.original_context_length", "rope.scaling.finetuned"}
"""Without a scaling type, which is refused, these two say nothing."""


def common_config(metadata: Mapping[str, object], model_type: str) -> dict[str, object]:
    """The Hugging Face config of a dense decoder.

    ModelFileError for a key of the architecture that nobody reads (it may change the
    mathematics), and for scaling, partial rotation or experts, which are not supported.
    """
    prefix = f"{metadata['general.architecture']}."
    values = {key.removeprefix(prefix): key for key in metadata if key.startswith(prefix)}
    known = _CONFIG_KEYS.keys() | _CHECKED_KEYS | _HARMLESS_KEYS
    unknown = sorted(values.keys() - known)
    if unknown:
        names = ", ".join(f"{prefix}{key} = {metadata[values[key]]!r}" for key in unknown)
        raise ModelFileError(
            f"the file has keys llmrun does not know: {names}",
            "they may change the computation, so the model is not loaded; "
            "a newer llmrun may know them",
        )
    config: dict[str, object] = {"model_type": model_type}
    for key, name in _CONFIG_KEYS.items():
        if key in values:
            config[name] = metadata[values[key]]
    if "vocab_size" not in config:
        tokens = metadata.get("tokenizer.ggml.tokens")  # made when they are asked for, in 20 ms
        if isinstance(tokens, Sequence):
            config["vocab_size"] = len(tokens)
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[name] = token_id
    _check({key: metadata[values[key]] for key in values.keys() & _CHECKED_KEYS}, config)
    return config


def _check(checked: Mapping[str, object], config: Mapping[str, object]) -> None:
    hidden, n_heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(n_heads, int) and n_heads > 0:
        head_dim = hidden // n_heads
    supported = {
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "rope.scaling.type": ("none",),
        "rope.scaling.factor": (1.0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
    }
    for key, value in checked.items():
        if value not in supported[key] and not (
            key == "rope.scaling.type" and checked.get("rope.scaling.factor") == 1.0
        ):
            raise ModelFileError(
                f"the file says {key} = {value!r}; llmrun supports {supported[key][0]!r}",
                "use another file of this model, or its safetensors version",
            )
