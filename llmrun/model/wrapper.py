"""Models that see or hear, of which only the language model is read.

Their configs hold the decoder's in ``text_config``; their checkpoints hold its tensors behind one
of two prefixes (``language_model.model.`` as published, ``model.language_model.`` in memory).
"""

from collections.abc import Mapping

from llmrun.model.config import HARMLESS, ConfigReader

PREFIXES = ("language_model.model.", "model.language_model.")

IGNORED: Mapping[str, str] = {
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\.": "images are not read",
}
"""Tensors of the other parts, with the reason for leaving them out."""

_SAID_OUTSIDE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")

_ABOUT_IMAGES = frozenset({"vision_config", "image_token_index", "image_token_id"})


def read_wrapper(
    config: Mapping[str, object], model_types: tuple[str, ...], harmless: frozenset[str]
) -> Mapping[str, object]:
    """The decoder's own config, which is of one of ``model_types`` (the first if it does not say).

    Whether the head is tied and which ids end an answer is said outside or, if not, inside.
    ``harmless``: keys outside that are about images. ModelFileError names other keys.
    """
    reader = ConfigReader(config)
    section = reader.section("text_config")
    text = config.get("text_config") or {}
    assert isinstance(text, dict)
    if section is not None:
        section.one_of("model_type", model_types[0], *model_types)
    reader.pinned("is_encoder_decoder", False)
    reader.flag("tie_word_embeddings", False)
    reader.finish(HARMLESS | _ABOUT_IMAGES | harmless)
    said = {key: config[key] for key in _SAID_OUTSIDE if config.get(key) is not None}
    return {"model_type": model_types[0], **text, **said}
