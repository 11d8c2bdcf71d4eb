"""Mistral Small 3.1 and Ministral 3 as published, with eyes: the text model alone.

Reference: ``Mistral3ForConditionalGeneration`` in transformers; the text model is that of
``mistral`` or ``ministral3``.
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config
from llmrun.model.archs import ministral3, mistral
from llmrun.model.layout import Layout
from llmrun.model.spec import DecoderSpec
from llmrun.model.wrapper import IGNORED, PREFIXES, read_wrapper

MODEL_TYPE = "mistral3"
ABOUT_IMAGES = frozenset(
    {
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "vision_feature_layer",
    }
)


_READERS = {mistral.MODEL_TYPE: mistral.spec, ministral3.MODEL_TYPE: ministral3.spec}


def text(config: Config) -> Config:
    """The config of the text model."""
    return read_wrapper(config, tuple(_READERS), ABOUT_IMAGES)


def spec(config: Config) -> DecoderSpec:
    """Read the text part of a Mistral 3 config. ModelFileError names what is not supported."""
    inner = text(config)
    result = _READERS[str(inner["model_type"])](inner)
    return replace(result, architecture=MODEL_TYPE)


_VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 8,
    "patch_size": 4,
}

ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Mistral3ForConditionalGeneration",),
    spec=spec,
    tiny=(
        {
            "model_type": MODEL_TYPE,
            "text_config": dict(ministral3.ARCH.tiny[0]),
            "vision_config": _VISION,
            "tie_word_embeddings": False,
        },
    ),
    layout=Layout(prefixes=PREFIXES, ignored=IGNORED),
    text=text,
)
