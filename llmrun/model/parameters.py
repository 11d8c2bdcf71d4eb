"""The parameters a spec asks for: canonical names (as in Hugging Face's Llama), shapes, roles.

A checkpoint loads only if its tensors and these match one to one: every tensor used, every
parameter filled (a tied head is declared by the spec, not assumed).
"""

from dataclasses import dataclass

from llmrun.model.spec import DecoderSpec
from llmrun.quant.roles import Role

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Parameter:
    """One parameter: its shape ([N, K] or [N]) and what it does in the model."""

    shape: tuple[int, ...]
    role: Role


def layer_name(layer: int, part: str) -> str:
    """Canonical name of a layer's parameter, e.g. part ``self_attn.q_proj.weight``."""
    return f"model.layers.{layer}.{part}"


def expected(spec: DecoderSpec) -> dict[str, Parameter]:
    """All parameters of a decoder by canonical name."""
    wanted = {EMBEDDING: Parameter((spec.vocab, spec.hidden), Role.EMBEDDING)}
    for layer in range(len(spec.layers)):
        for part, parameter in _layer(spec).items():
            wanted[layer_name(layer, part)] = parameter
    wanted[FINAL_NORM] = Parameter((spec.hidden,), Role.NORM)
    if not spec.tied:
        wanted[HEAD] = Parameter((spec.vocab, spec.hidden), Role.HEAD)
    return wanted


def _layer(spec: DecoderSpec) -> dict[str, Parameter]:
    heads, hidden, inner = spec.heads, spec.hidden, spec.intermediate
    queries, keys = heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
    linears = {
        "self_attn.q_proj": ((queries, hidden), Role.ATTN_QKV, spec.qkv_bias),
        "self_attn.k_proj": ((keys, hidden), Role.ATTN_QKV, spec.qkv_bias),
        "self_attn.v_proj": ((keys, hidden), Role.ATTN_QKV, spec.qkv_bias),
        "self_attn.o_proj": ((hidden, queries), Role.ATTN_OUT, spec.output_bias),
        "mlp.gate_proj": ((inner, hidden), Role.GATE_UP, spec.mlp_bias),
        "mlp.up_proj": ((inner, hidden), Role.GATE_UP, spec.mlp_bias),
        "mlp.down_proj": ((hidden, inner), Role.DOWN, spec.mlp_bias),
    }
    wanted: dict[str, Parameter] = {"input_layernorm.weight": Parameter((hidden,), Role.NORM)}
    for name, (shape, role, biased) in linears.items():
        wanted[f"{name}.weight"] = Parameter(shape, role)
        if biased:
            wanted[f"{name}.bias"] = Parameter(shape[:1], Role.BIAS)
    if spec.qk_norm:
        for name in ("q_norm", "k_norm"):
            wanted[f"self_attn.{name}.weight"] = Parameter((heads.head_dim,), Role.NORM)
    wanted["post_attention_layernorm.weight"] = Parameter((hidden,), Role.NORM)
    return wanted
