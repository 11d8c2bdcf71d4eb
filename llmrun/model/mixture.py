"""What mixtures of experts share: config keys, places of stacked experts, GGUF keys and names.

An architecture file reads a dense decoder first (``llama_family``), then its mixture, and puts the
two together with ``with_mixture``.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from llmrun.errors import ModelFileError
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.gguf import GgufFile
from llmrun.model.layout import Place
from llmrun.model.spec import DecoderSpec, MixtureSpec

MIXTURE_HARMLESS = HARMLESS | {
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
}
"""Harmless keys, and those about the training of routers."""

COUNT_KEYS = ("num_local_experts", "num_experts")
"""What configs call the number of experts; transformers 5 saves either name for one model."""

_GATE_UP = ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight")
_DOWN = ("mlp.experts.*.down_proj.weight",)

STACKED = {
    "mlp.experts.gate_up_proj": Place(_GATE_UP, stacked=True),
    "mlp.experts.down_proj": Place(_DOWN, stacked=True),
}
"""Stacks [E, 2 F, D] and [E, D, F], as transformers 5 holds most mixtures in memory.

It saves them expert by expert, unless told not to.
"""

TINY_MIXTURE: dict[str, object] = {"num_experts_per_tok": 2}
"""What all tiny mixtures add to ``llama_family.TINY``."""


@dataclass(frozen=True)
class MixtureDefaults:
    """What transformers takes for keys that are not there."""

    n_experts: int = 8
    top_k: int = 2


def read_mixture(
    reader: ConfigReader, intermediate: int, defaults: MixtureDefaults, *, normalize: bool
) -> MixtureSpec:
    """Read the number of experts and how many are chosen; experts of width ``intermediate``.

    ModelFileError if more are chosen than there are, or if the two names of their number differ.
    """
    counts = [count for key in COUNT_KEYS if (count := reader.optional_integer(key)) is not None]
    n_experts = counts[0] if counts else defaults.n_experts
    top_k = reader.integer("num_experts_per_tok", defaults.top_k)
    if len(set(counts)) > 1:
        raise _inconsistent(f"has {' and '.join(COUNT_KEYS)}, and they differ")
    if top_k > n_experts:
        raise _inconsistent(f"chooses {top_k} of {n_experts} experts")
    return MixtureSpec(n_experts, top_k, intermediate, normalize)


def _inconsistent(how: str) -> ModelFileError:
    return ModelFileError(
        f"the model's config {how}", "check that config.json is the publisher's own"
    )


def with_mixture(
    spec: DecoderSpec, mixture: MixtureSpec, dense: Collection[int] = ()
) -> DecoderSpec:
    """The spec with the mixture in place of the MLP of all layers but those in ``dense``."""
    layers = (
        replace(layer, experts=number not in dense) for number, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers), mixture=mixture)


GATE_SOFTMAX, GATE_SOFTMAX_OF_CHOSEN = 1, 3
"""GGUF's numbers for routers that are supported; normalized, the two are the same."""


def mixture_config(file: GgufFile, config: dict[str, object], *, normalize: bool) -> None:
    """Add the keys of a mixture to a config read from a GGUF.

    ``normalize``: what the architecture does with the chosen probabilities, which files rarely
    say. ModelFileError for shared or grouped experts and for other routers.
    """
    file.move(
        config, {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
    )
    file.expect("expert_weights_norm", normalize)
    file.expect("expert_weights_scale", 1.0)
    file.expect("expert_shared_count", 0)
    file.expect("expert_shared_feed_forward_length", 0)
    supported = (GATE_SOFTMAX, GATE_SOFTMAX_OF_CHOSEN) if normalize else (GATE_SOFTMAX,)
    file.expect("expert_gating_func", *supported)
    if "blk.0.ffn_gate.0.weight" in file.shapes:
        raise ModelFileError(
            "the file holds every expert in tensors of its own (blk.0.ffn_gate.0.weight), as "
            "converters did until spring 2024",
            "use a newer file of this model, or its safetensors version",
        )


def same_width(file: GgufFile, config: dict[str, object]) -> None:
    """Check the experts' width where an architecture has one name for it and the MLP's."""
    file.expect("expert_feed_forward_length", config.get("intermediate_size"))
