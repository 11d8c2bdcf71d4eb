"""The frozen description of a decoder: all that its mathematics depends on.

An architecture file turns a foreign config into one of these; nothing below reads a config.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from llmrun.kernels.ops import Heads, Rope


@dataclass(frozen=True)
class RopeByLength:
    """A rotation that depends on how long the whole sequence is.

    Sequences of up to ``limits[i]`` tokens are rotated by ``ropes[i]``, longer ones by the last:
    there is one rope more than limits. All tokens of a sequence are rotated alike, so its keys are
    computed anew when it outgrows a limit.
    """

    limits: tuple[int, ...]
    ropes: tuple[Rope, ...]

    def __post_init__(self) -> None:
        if len(self.ropes) != len(self.limits) + 1 or list(self.limits) != sorted(self.limits):
            raise ValueError(f"{len(self.ropes)} ropes for the limits {self.limits}")


@dataclass(frozen=True)
class LayerSpec:
    """One layer. ``rope`` None: no positional encoding; ``window`` None: full attention.

    ``experts``: a mixture of experts stands in place of the MLP.
    """

    rope: Rope | RopeByLength | None
    window: int | None = None
    experts: bool = False

    def rope_at(self, stage: int) -> Rope | None:
        """The rotation of sequences of this stage."""
        return self.rope.ropes[stage] if isinstance(self.rope, RopeByLength) else self.rope


@dataclass(frozen=True)
class NormSpec:
    """How a decoder norms: RMSNorm, or LayerNorm if ``centered``; see ``kernels.ops.Norm``.

    ``before`` and ``after``: whether attention and MLP have a norm on their input, on their output.
    """

    eps: float
    offset: float = 0.0
    centered: bool = False
    bias: bool = False
    before: bool = True
    after: bool = False


@dataclass(frozen=True)
class MixtureSpec:
    """A mixture of experts: ``top_k`` of ``n_experts`` MLPs of width ``intermediate`` per token.

    ``normalize``: the chosen experts' probabilities are divided by their sum.
    """

    n_experts: int
    top_k: int
    intermediate: int
    normalize: bool
    router_bias: bool = False
    bias: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer (sizes as in the Hugging Face configs).

    ``tied``: the head is the embedding. ``attention_scale`` multiplies q.k. ``max_positions``: the
    context the model was trained for. ``gated``: the MLP has a gate beside its up projection.
    ``qk_norm``: RMSNorm on queries and keys, per ``head`` or over the ``whole`` row. ``sinks``: one
    learned logit per head that takes no value. ``parallel``: attention and MLP read the same input
    and norm, and are added together. The scales multiply the embedding, what each attention and
    MLP adds, and the logits; a cap c makes ``c * tanh(x / c)`` of x.
    """

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    heads: Heads
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    activation: str
    attention_scale: float
    max_positions: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    qk_norm: str | None = None
    qk_norm_eps: float | None = None
    sinks: bool = False
    parallel: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    attention_cap: float | None = None
    mixture: MixtureSpec | None = None

    def __post_init__(self) -> None:
        limits = {r.limits for r in self._ropes_by_length()}
        if len(limits) > 1:
            raise ValueError(f"layers change their rotation at different lengths: {limits}")
        if self.mixture is not None and (self.parallel or self.norm.after or not self.norm.before):
            raise ValueError("a mixture of experts has a norm before it, and none behind")

    @cached_property
    def rope_limits(self) -> tuple[int, ...]:
        """Lengths behind which a sequence is rotated in another way; empty for most models."""
        return next((rope.limits for rope in self._ropes_by_length()), ())

    def rope_stage(self, length: int) -> int:
        """Which of its rotations a sequence of ``length`` tokens needs."""
        return bisect_left(self.rope_limits, length)

    def _ropes_by_length(self) -> list[RopeByLength]:
        return [layer.rope for layer in self.layers if isinstance(layer.rope, RopeByLength)]
