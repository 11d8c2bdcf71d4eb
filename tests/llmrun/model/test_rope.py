"""Rotary frequencies against transformers' own initialisers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmrun.errors import ModelFileError
from llmrun.model.config import ConfigReader
from llmrun.model.rope import llama3_parameters, read_rope

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3,
        {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3 | {"factor": 32.0},
    ],
    ids=["default", "theta 5e5", "llama3", "r087 factor 32"],
)
def test_frequencies_equal_the_publishers(head_dim: int, parameters: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=dict(parameters),
    )
    theirs = LlamaRotaryEmbedding(config).inv_freq
    ours = read_rope(ConfigReader({"rope_parameters": dict(parameters)}), head_dim)
    torch.testing.assert_close(torch.tensor(ours.inv_freq), theirs, rtol=2e-7, atol=0)
    assert ours.attention_factor == 1.0


def test_both_config_layouts_mean_the_same() -> None:
    old = {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3}
    assert read_rope(ConfigReader(old), 64) == read_rope(ConfigReader(new), 64)
    oldest = {"rope_theta": 500_000.0, "rope_scaling": {"type": "llama3"} | LLAMA3}
    assert read_rope(ConfigReader(oldest), 64) == read_rope(ConfigReader(new), 64)


def test_two_sections_that_differ_are_refused() -> None:
    both = {
        "rope_scaling": {"rope_type": "llama3"} | LLAMA3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    with pytest.raises(ModelFileError, match="both"):
        read_rope(ConfigReader(both), 64)
    with pytest.raises(ModelFileError, match="yarn"):
        read_rope(ConfigReader(both | {"rope_scaling": {"rope_type": "yarn"}}), 64)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_parameters_are_found_again_from_the_frequencies(factor: float) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3 | {"factor": factor}
    scaled = read_rope(ConfigReader({"rope_parameters": parameters}), 64).inv_freq
    assert llama3_parameters(500_000.0, scaled) == parameters
    assert llama3_parameters(500_000.0, (*scaled[:-1], scaled[-1] * 1.01)) is None
