"""Gemma 3 with eyes, from 4B up: its text model alone; images are not read.

Reference: ``Gemma3ForConditionalGeneration`` in transformers (Gemma Team 2025).
"""

from dataclasses import replace

from llmrun.model.architecture import Architecture, Config
from llmrun.model.archs import gemma3_text
from llmrun.model.gemma_family import PLACES
from llmrun.model.layout import Layout
from llmrun.model.spec import DecoderSpec
from llmrun.model.wrapper import IGNORED, PREFIXES, read_wrapper

MODEL_TYPE = "gemma3"

ABOUT_IMAGES = frozenset({"mm_tokens_per_image", "boi_token_index", "eoi_token_index"})


def text(config: Config) -> Config:
    """The config of the text model."""
    return read_wrapper(config, (gemma3_text.MODEL_TYPE,), ABOUT_IMAGES)


def spec(config: Config) -> DecoderSpec:
    """Read the text part of a Gemma 3 config. ModelFileError names what is not supported."""
    return replace(gemma3_text.spec(text(config)), architecture=MODEL_TYPE)


ARCH = Architecture(
    model_type=MODEL_TYPE,
    class_names=("Gemma3ForConditionalGeneration",),
    spec=spec,
    tiny=(
        {
            "model_type": MODEL_TYPE,
            "text_config": dict(gemma3_text.ARCH.tiny[0]),
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    layout=Layout(PLACES, PREFIXES, IGNORED),
    text=text,
)
