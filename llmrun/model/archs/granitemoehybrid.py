"""Granite 4, the dense models: Granite 3 under the names of its hybrid relatives.

Reference: ``GraniteMoeHybridForCausalLM`` in transformers (IBM 2025). Layers of the hybrid models
that are no attention (Mamba), and mixtures of experts, are refused.
"""

from dataclasses import replace

from llmrun.errors import ModelFileError
from llmrun.model.architecture import Architecture, Config
from llmrun.model.config import HARMLESS, ConfigReader
from llmrun.model.granite_family import SCALED, read_granite
from llmrun.model.layout import Layout, Place
from llmrun.model.llama_family import TINY
from llmrun.model.spec import DecoderSpec

MODEL_TYPE = "granitemoehybrid"

_ATTENTION = ("attention", "full_attention")
"""What configs call the one kind of layer there is; the first is the published name."""

_OF_OTHER_LAYERS = frozenset(
    {
        "init_method",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_expand",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_proj_bias",
        "num_experts_per_tok",
        "output_router_logits",
        "router_aux_loss_coef",
        "time_step_limit",
    }
)


def spec(config: Config) -> DecoderSpec:
    """Read a dense Granite 4 config. ModelFileError names what is not supported."""
    reader = ConfigReader(config)
    result = read_granite(reader, MODEL_TYPE)
    _refuse_other_layers(reader, len(result.layers))
    intermediate = reader.integer("shared_intermediate_size", 1024)
    reader.pinned("normalization_function", "rmsnorm")
    positions = reader.one_of("position_embedding_type", "nope", "nope", "rope")
    reader.finish(HARMLESS | _OF_OTHER_LAYERS)
    layers = result.layers
    if positions == "nope":
        layers = tuple(replace(layer, rope=None) for layer in layers)
    return replace(result, intermediate=intermediate, layers=layers)


def _refuse_other_layers(reader: ConfigReader, n_layers: int) -> None:
    experts = reader.count("num_local_experts", 8)
    types = reader.strings("layer_types") or reader.strings("layers_block_type")
    kinds = types or ["linear_attention"] * n_layers  # the library's default
    strange = sorted(set(kinds) - set(_ATTENTION))
    if strange or experts or len(kinds) != n_layers:
        found = f"{experts} experts" if experts else f"{len(kinds)} layer_types for {n_layers}"
        raise ModelFileError(
            f"the model's config has layers of the type {strange[0]!r} (Mamba)"
            if strange
            else f"the model's config has {found}",
            "of Granite 4 llmrun supports the dense models: granite-4.0-micro, -1b and -350m",
        )


_GRANITE = (
    TINY
    | SCALED
    | {
        "model_type": MODEL_TYPE,
        "layer_types": ["full_attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 80,
        "mamba_n_heads": 4,
        "tie_word_embeddings": True,
    }
)

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("GraniteMoeHybridForCausalLM",),
    spec=spec,
    tiny=(
        _GRANITE | {"position_embedding_type": "rope"},
        _GRANITE | {"attention_bias": True, "tie_word_embeddings": False},
    ),
    layout=Layout(
        {
            "shared_mlp.input_linear": Place(("mlp.gate_proj", "mlp.up_proj")),
            "shared_mlp.output_linear": Place(("mlp.down_proj",)),
        }
    ),
)
