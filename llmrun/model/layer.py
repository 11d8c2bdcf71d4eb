"""One layer of a decoder: its arrays, bound by name, and the ops they go through."""

from collections.abc import Mapping
from dataclasses import dataclass

from llmrun.kernels.ops import (
    Array,
    Attention,
    Backend,
    Expert,
    KvLayer,
    Linear,
    Norm,
    Rope,
    Step,
    Weight,
)
from llmrun.model.parameters import (
    ATTENTION_OUT_NORM,
    INPUT_NORM,
    MLP_NORM,
    MLP_OUT_NORM,
    ROUTER,
    SINKS,
    expert_name,
    layer_name,
)
from llmrun.model.spec import DecoderSpec, LayerSpec


@dataclass(frozen=True, eq=False)
class Mlp:
    """The feed-forward part; ``gate`` None: up, activation, down."""

    gate: Linear | None
    up: Linear
    down: Linear


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of experts in place of an MLP."""

    router: Linear
    experts: tuple[Expert, ...]


@dataclass(frozen=True, eq=False)
class Layer:
    """The bound arrays of one layer; norms are None where the architecture has none."""

    spec: LayerSpec
    attention: Attention
    input_norm: Norm | None
    qkv: tuple[Linear, Linear, Linear]
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear
    out_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Mixture
    mlp_out_norm: Norm | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linears that every token passes."""
        if isinstance(self.mlp, Mixture):
            return (*self.qkv, self.out, self.mlp.router)
        gate = () if self.mlp.gate is None else (self.mlp.gate,)
        return (*self.qkv, self.out, *gate, self.mlp.up, self.mlp.down)

    @property
    def experts(self) -> tuple[Expert, ...]:
        """Its experts, of which every token passes some."""
        return self.mlp.experts if isinstance(self.mlp, Mixture) else ()


@dataclass(frozen=True, eq=False)
class Workspace:
    """Activations of a step: hidden states ``h`` [T, D], queries, keys and values ``y``,
    attention's output ``o`` [T, H dh] and the MLP's inner activations ``a`` [T, F]."""

    h: Array
    y: Array
    o: Array
    a: Array


def issue(
    ops: Backend,
    step: Step,
    spec: DecoderSpec,
    layer: Layer,
    rope: Rope | None,
    cache: KvLayer,
    work: Workspace,
) -> None:
    """Run the layer on the hidden states in ``work``, in place."""
    h, scale = work.h, spec.residual_scale
    ops.norm_linear(step, h, layer.input_norm, layer.qkv, work.y)
    ops.rope_append(step, work.y, spec.heads, rope, layer.q_norm, layer.k_norm, cache)
    ops.attend(step, work.y, layer.attention, cache, work.o)
    if spec.parallel:  # the MLP reads h before attention is added to it
        assert isinstance(layer.mlp, Mlp)
        _open_mlp(ops, step, spec, layer, layer.mlp, work)
    ops.linear_add(step, work.o, layer.out, layer.out_norm, h, scale)
    if isinstance(layer.mlp, Mixture):
        mixture = spec.mixture
        assert mixture is not None
        assert layer.mlp_norm is not None
        ops.moe_add(
            step, h, layer.mlp_norm, layer.mlp.router, layer.mlp.experts,
            mixture.top_k, mixture.normalize, spec.activation, scale,
        )  # fmt: skip
        return
    if not spec.parallel:
        _open_mlp(ops, step, spec, layer, layer.mlp, work)
    ops.linear_add(step, work.a, layer.mlp.down, layer.mlp_out_norm, h, scale)


def _open_mlp(
    ops: Backend, step: Step, spec: DecoderSpec, layer: Layer, mlp: Mlp, work: Workspace
) -> None:
    ops.norm_gate_up(step, work.h, layer.mlp_norm, mlp.gate, mlp.up, spec.activation, work.a)


@dataclass(frozen=True)
class LayerBinder:
    """Finds a layer's arrays among all parameters, by canonical name."""

    spec: DecoderSpec
    weights: Mapping[str, Weight]
    vectors: Mapping[str, Array]

    def norm(self, name: str) -> Norm:
        """The norm whose parameters are called ``name.weight`` and ``name.bias``."""
        norm = self.spec.norm
        gamma, beta = self.vectors[f"{name}.weight"], self.vectors.get(f"{name}.bias")
        return Norm(gamma, norm.eps, norm.offset, norm.centered, beta)

    def layer(self, number: int) -> Layer:
        """The layer of that number."""
        spec, layer = self.spec, self.spec.layers[number]

        def linear(part: str) -> Linear:
            return self._linear(layer_name(number, part))

        def norm(part: str, exists: bool) -> Norm | None:
            return self.norm(layer_name(number, part)) if exists else None

        before, after = spec.norm.before, spec.norm.after
        sinks = self.vectors[layer_name(number, SINKS)] if spec.sinks else None
        input_norm = norm(INPUT_NORM, before)
        return Layer(
            spec=layer,
            attention=Attention(
                spec.heads, spec.attention_scale, layer.window, spec.attention_cap, sinks
            ),
            input_norm=input_norm,
            qkv=(
                linear("self_attn.q_proj"),
                linear("self_attn.k_proj"),
                linear("self_attn.v_proj"),
            ),
            q_norm=self._qk_norm(layer_name(number, "self_attn.q_norm.weight")),
            k_norm=self._qk_norm(layer_name(number, "self_attn.k_norm.weight")),
            out=linear("self_attn.o_proj"),
            out_norm=norm(ATTENTION_OUT_NORM, after),
            mlp_norm=input_norm if spec.parallel else norm(MLP_NORM, before),
            mlp=self._mixture(number) if layer.experts else self._mlp(number),
            mlp_out_norm=norm(MLP_OUT_NORM, after),
        )

    def _linear(self, name: str) -> Linear:
        return Linear(self.weights[f"{name}.weight"], self.vectors.get(f"{name}.bias"))

    def _qk_norm(self, name: str) -> Norm | None:
        spec = self.spec
        if spec.qk_norm is None:
            return None
        eps = spec.norm.eps if spec.qk_norm_eps is None else spec.qk_norm_eps
        return Norm(self.vectors[name], eps, spec.norm.offset, whole=spec.qk_norm == "whole")

    def _mlp(self, number: int) -> Mlp:
        gate, up, down = (layer_name(number, f"mlp.{part}_proj") for part in ("gate", "up", "down"))
        return Mlp(
            self._linear(gate) if self.spec.gated else None, self._linear(up), self._linear(down)
        )

    def _mixture(self, number: int) -> Mixture:
        assert self.spec.mixture is not None

        def expert(index: int) -> Expert:
            gate, up, down = (
                self._linear(layer_name(number, expert_name(index, f"{part}_proj")))
                for part in ("gate", "up", "down")
            )
            return Expert(gate, up, down)

        return Mixture(
            self._linear(layer_name(number, ROUTER)),
            tuple(expert(index) for index in range(self.spec.mixture.n_experts)),
        )
