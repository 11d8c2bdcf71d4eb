"""What GGUF files share across architectures: tensor names, metadata keys, rotary row order.

Keys and names as in the GGUF specification of the ggml project.
"""

from collections.abc import Mapping

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


def common_config(metadata: Mapping[str, object], model_type: str) -> dict[str, object]:
    """The part of a Hugging Face config that all dense decoders share.

    Rotary scaling other than the factors tensor must be absent or linear by 1.
    """
    name = str(metadata["general.architecture"])

    def value(key: str) -> object:
        return metadata.get(f"{name}.{key}")

    config: dict[str, object] = {
        "model_type": model_type,
        "vocab_size": value("vocab_size") or _length(metadata.get("tokenizer.ggml.tokens")),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    scaling, factor = value("rope.scaling.type"), value("rope.scaling.factor")
    if scaling not in (None, "none") and factor != 1.0:
        raise ModelFileError(
            f"the file scales its rotary embedding by {scaling!r} (factor {factor})",
            "this llmrun supports GGUF files without scaling or with a rope_freqs tensor",
        )
    _check_rope_dims(value("rope.dimension_count"), config)
    return {key: item for key, item in config.items() if item is not None}


def _length(tokens: object) -> object:
    return len(tokens) if hasattr(tokens, "__len__") else None


def _check_rope_dims(rotated: object, config: dict[str, object]) -> None:
    hidden, n_heads = config["hidden_size"], config["num_attention_heads"]
    full = config["head_dim"]
    if full is None and isinstance(hidden, int) and isinstance(n_heads, int) and n_heads:
        full = hidden // n_heads
    if rotated is not None and rotated != full:
        raise ModelFileError(
            f"the file rotates {rotated} of {full} dimensions of each head",
            "partial rotary embeddings are not supported for this architecture",
        )
