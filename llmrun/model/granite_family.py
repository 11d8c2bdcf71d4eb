"""The multipliers of the Granite models, and what else their configs share."""

from dataclasses import replace

from llmrun.model.config import ConfigReader
from llmrun.model.llama_family import read_spec
from llmrun.model.spec import DecoderSpec

SCALED: dict[str, object] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
"""Multipliers for tiny models, each another number."""

MULTIPLIER_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""GGUF's keys for the multipliers, and the configs'."""


def read_granite(reader: ConfigReader, architecture: str) -> DecoderSpec:
    """Read a dense Granite decoder; its MLP has no biases."""
    bias = reader.flag("attention_bias", False)
    return replace(
        read_spec(reader, architecture),
        attention_scale=reader.number("attention_multiplier", 1.0),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        residual_scale=reader.number("residual_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
        qkv_bias=bias,
        output_bias=bias,
    )
