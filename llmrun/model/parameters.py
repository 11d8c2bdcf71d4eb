"""The parameters of a decoder by canonical name, with shape and role, from its spec alone.

Canonical names are those Hugging Face checkpoints use for most models; GLM 4's where a norm stands
behind attention or MLP, since other models call different norms by the same name.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from llmrun.model.spec import DecoderSpec, LayerSpec
from llmrun.quant.roles import Role

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

INPUT_NORM = "input_layernorm"
ATTENTION_OUT_NORM = "post_self_attn_layernorm"
MLP_NORM = "post_attention_layernorm"
MLP_OUT_NORM = "post_mlp_layernorm"
SINKS = "self_attn.sinks"
ROUTER = "mlp.gate"


@dataclass(frozen=True)
class Parameter:
    """One parameter: its shape ([N, K] or [N]) and what it does in the model."""

    shape: tuple[int, ...]
    role: Role


def layer_name(layer: int, part: str) -> str:
    """Canonical name of a layer's parameter, e.g. part ``self_attn.q_proj.weight``."""
    return f"model.layers.{layer}.{part}"


def layer_of(name: str) -> int | None:
    """The layer a parameter belongs to; None for embedding, final norm and head."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return None if found is None else int(found[1])


def expert_name(expert: int, projection: str) -> str:
    """A projection of one expert, e.g. ``up_proj``, as part of a layer."""
    return f"mlp.experts.{expert}.{projection}"


def expected(spec: DecoderSpec) -> dict[str, Parameter]:
    """All parameters of a decoder by canonical name."""
    wanted = {EMBEDDING: Parameter((spec.vocab, spec.hidden), Role.EMBEDDING)}
    for number, layer in enumerate(spec.layers):
        for part, parameter in _layer(spec, layer):
            wanted[layer_name(number, part)] = parameter
    for part, parameter in _norm(spec, FINAL_NORM.removesuffix(".weight")):
        wanted[part] = parameter
    if not spec.tied:
        wanted[HEAD] = Parameter((spec.vocab, spec.hidden), Role.HEAD)
    return wanted


Parts = Iterator[tuple[str, Parameter]]


def _layer(spec: DecoderSpec, layer: LayerSpec) -> Parts:
    heads, hidden = spec.heads, spec.hidden
    queries, keys = heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
    if spec.norm.before:
        yield from _norm(spec, INPUT_NORM)
    for name, n in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"self_attn.{name}", (n, hidden), Role.ATTN_QKV, spec.qkv_bias)
    yield from _linear("self_attn.o_proj", (hidden, queries), Role.ATTN_OUT, spec.output_bias)
    if spec.qk_norm is not None:
        for name, n in (("q_norm", queries), ("k_norm", keys)):
            width = heads.head_dim if spec.qk_norm == "head" else n
            yield f"self_attn.{name}.weight", Parameter((width,), Role.NORM)
    if spec.sinks:
        yield SINKS, Parameter((heads.n_heads,), Role.OTHER)
    if spec.norm.after:
        yield from _norm(spec, ATTENTION_OUT_NORM)
    if spec.norm.before and not spec.parallel:
        yield from _norm(spec, MLP_NORM)
    yield from _mixture(spec) if layer.experts else _mlp(spec)
    if spec.norm.after:
        yield from _norm(spec, MLP_OUT_NORM)


def _mlp(spec: DecoderSpec) -> Parts:
    inward, outward = (spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate)
    if spec.gated:
        yield from _linear("mlp.gate_proj", inward, Role.GATE_UP, spec.mlp_bias)
    yield from _linear("mlp.up_proj", inward, Role.GATE_UP, spec.mlp_bias)
    yield from _linear("mlp.down_proj", outward, Role.DOWN, spec.mlp_bias)


def _mixture(spec: DecoderSpec) -> Parts:
    mixture = spec.mixture
    assert mixture is not None
    yield from _linear(ROUTER, (mixture.n_experts, spec.hidden), Role.ROUTER, mixture.router_bias)
    inward = (mixture.intermediate, spec.hidden)
    for expert in range(mixture.n_experts):
        for projection, shape in (
            ("gate_proj", inward),
            ("up_proj", inward),
            ("down_proj", inward[::-1]),
        ):
            yield from _linear(expert_name(expert, projection), shape, Role.EXPERTS, mixture.bias)


def _linear(name: str, shape: tuple[int, int], role: Role, biased: bool) -> Parts:
    yield f"{name}.weight", Parameter(shape, role)
    if biased:
        yield f"{name}.bias", Parameter(shape[:1], Role.BIAS)


def _norm(spec: DecoderSpec, name: str) -> Parts:
    yield f"{name}.weight", Parameter((spec.hidden,), Role.NORM)
    if spec.norm.bias:
        yield f"{name}.bias", Parameter((spec.hidden,), Role.NORM)
