"""Rotations against transformers' own: the formula of every type, and queries rotated by them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding, apply_rotary_pos_emb

from llmrun.errors import ModelFileError
from llmrun.kernels.ops import Heads, Rope, Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.config import ConfigReader
from llmrun.model.rope import NTK_REACH, NTK_STEPS, llama3_parameters, read_rope
from llmrun.model.spec import RopeByLength

POSITIONS = 131_072
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 4.0, ORIGINAL: 32_768}


def longrope(head_dim: int, **more: object) -> dict[str, object]:
    pairs = head_dim // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 32.0,
        ORIGINAL: 4096,
        "short_factor": [1.0 + pair / 50 for pair in range(pairs)],
        "long_factor": [1.0 + pair**2 / 10 for pair in range(pairs)],
        **more,
    }


@dataclass(frozen=True)
class Theirs:
    """The frequencies and the attention factor of transformers."""

    inv_freq: torch.Tensor
    attention_factor: float


def theirs(
    parameters: dict[str, object],
    head_dim: int,
    length: int | None = None,
    positions: int = POSITIONS,
) -> Theirs:
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters=dict(parameters),
    )
    kind = str(parameters["rope_type"])
    if kind == "default":
        return Theirs(*LlamaRotaryEmbedding.compute_default_rope_parameters(config))
    return Theirs(*ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length))


def read(parameters: object, head_dim: int = 64, positions: int = POSITIONS) -> Rope | RopeByLength:
    config = ConfigReader({"rope_parameters": parameters})
    return read_rope(config, head_dim, positions, partial=1.0)


def read_one(parameters: object, head_dim: int = 64) -> Rope:
    rope = read(parameters, head_dim)
    assert isinstance(rope, Rope)
    return rope


def assert_equal(ours: Rope, expected: Theirs) -> None:
    """Frequencies within 2 ulp of fp32, the attention factor exactly."""
    ours_bits, their_bits = (
        x.to(torch.float32).view(torch.int32)
        for x in (torch.tensor(ours.inv_freq, dtype=torch.float32), expected.inv_freq)
    )
    assert ours_bits.shape == their_bits.shape
    assert int((ours_bits - their_bits).abs().max()) <= 2
    assert ours.attention_factor == pytest.approx(expected.attention_factor, rel=1e-12)


ONE = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "default", "rope_theta": 500_000.0},
    {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3,
    {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3 | {"factor": 32.0},
    YARN,
    YARN | {"attention_factor": 0.75},
    YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
]
IDS = ["default", "theta 5e5", "linear", "llama3", "r087 factor 32", "yarn", "yarn attention"]
IDS += ["yarn untruncated", "yarn mscale"]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("parameters", ONE, ids=IDS)
def test_frequencies_equal_the_publishers(head_dim: int, parameters: dict[str, object]) -> None:
    assert_equal(read_one(parameters, head_dim), theirs(parameters, head_dim))


@pytest.mark.parametrize("parameters", ONE[2:], ids=IDS[2:])
def test_a_rotated_share_of_a_head_has_frequencies_of_its_own(
    parameters: dict[str, object],
) -> None:
    half = parameters | {"partial_rotary_factor": 0.5}
    assert len(read_one(half).inv_freq) == 16
    assert_equal(read_one(half), theirs(half, 64))


def test_r087_the_factor_is_the_config_s() -> None:
    small, large = (
        read_one({"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3 | {"factor": factor})
        for factor in (8.0, 32.0)
    )
    assert small.inv_freq[0] == large.inv_freq[0]
    assert small.inv_freq[-1] == pytest.approx(4 * large.inv_freq[-1], rel=1e-6)


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.25}, {"factor": None}])
def test_r088_longrope_changes_behind_the_original_length(more: dict[str, object]) -> None:
    parameters = longrope(64, **more)
    rope = read(parameters)
    assert isinstance(rope, RopeByLength)
    assert rope.limits == (4096,)
    for ours, length in zip(rope.ropes, (4096, 4097), strict=True):
        assert_equal(ours, theirs(parameters, 64, length))


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_r091_dynamic_is_the_publishers_formula_at_every_step(factor: float) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": factor}
    rope = read(parameters, positions=2048)
    assert isinstance(rope, RopeByLength)
    assert rope.limits[:3] == (2048, 2048 + 2048 // NTK_STEPS, 2048 + 4096 // NTK_STEPS)
    lengths = (*rope.limits, NTK_REACH * 2048)
    for ours, length in zip(rope.ropes, lengths, strict=True):
        assert_equal(ours, theirs(parameters, 64, length, 2048))
    short = read_one({"rope_type": "default", "rope_theta": 10_000.0})
    assert rope.ropes[0] == short


@pytest.mark.parametrize("kind", ["spiral", "proportional", "Yarn", ""])
def test_r091_an_unknown_type_is_refused(kind: str) -> None:
    with pytest.raises(ModelFileError, match=repr(kind)) as refused:
        read({"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    assert refused.value.exit_code == 5


@pytest.mark.parametrize("parameters", [*ONE, longrope(64)], ids=[*IDS, "longrope"])
def test_a_key_nobody_reads_is_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match="mystery"):
        read(parameters | {"mystery": 2})


def test_both_config_layouts_mean_the_same() -> None:
    old = {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3}
    oldest = {"rope_theta": 500_000.0, "rope_scaling": {"type": "llama3"} | LLAMA3}
    ropes = {read_rope(ConfigReader(config), 64, POSITIONS) for config in (old, new, oldest)}
    assert len(ropes) == 1


def test_two_sections_that_differ_are_refused() -> None:
    both = {
        "rope_scaling": {"rope_type": "llama3"} | LLAMA3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    with pytest.raises(ModelFileError, match="both"):
        read_rope(ConfigReader(both), 64, POSITIONS)


def test_one_rotation_for_each_type_of_layer() -> None:
    sections = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    for kind, parameters in sections.items():
        config = ConfigReader({"rope_parameters": sections})
        assert read_rope(config, 64, POSITIONS, layer_type=kind) == read_one(parameters)
    strange = ConfigReader({"rope_parameters": sections | {"mystery": {}}})
    with pytest.raises(ModelFileError, match="mystery"):
        read_rope(strange, 64, POSITIONS, layer_type="full_attention")


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_parameters_are_found_again_from_the_factors(factor: float) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 500_000.0} | LLAMA3 | {"factor": factor}
    base = read_one({"rope_type": "default", "rope_theta": 500_000.0}).inv_freq
    scaled = read_one(parameters).inv_freq
    factors = tuple(b / s for b, s in zip(base, scaled, strict=True))
    assert llama3_parameters(500_000.0, factors) == parameters
    assert llama3_parameters(500_000.0, (*factors[:-1], factors[-1] * 1.01)) is None


def test_r095_a_share_given_twice_counts_once() -> None:
    inside = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = {"partial_rotary_factor": 0.5, "rope_parameters": inside}
    rope = read_rope(ConfigReader(config), 64, POSITIONS, partial=0.5)
    assert isinstance(rope, Rope)
    assert rope == read_one(inside)
    assert len(rope.inv_freq) == 16
    with pytest.raises(ModelFileError, match="19 dimensions"):
        read(inside | {"partial_rotary_factor": 0.3})


def rotated(rope: Rope, head_dim: int, positions: list[int], q: torch.Tensor) -> torch.Tensor:
    """Queries [T, H, dh], each rotated to its position by the reference."""
    n_tokens, n_heads = q.shape[:2]
    heads = Heads(n_heads, n_heads, head_dim)
    backend = TorchBackend("cpu", 1)
    cache = backend.kv_layer(n_tokens, max(positions) + 1, heads, "f16")
    step = backend.step(n_tokens)
    spans = [Span(slot, slot, 1, position) for slot, position in enumerate(positions)]
    step.set([0] * n_tokens, spans, [])
    y = backend.empty((n_tokens, 3 * n_heads * head_dim))
    y[:] = q.reshape(n_tokens, -1).repeat(1, 3)
    backend.rope_append(step, y, heads, rope, None, None, cache)
    result: torch.Tensor = y[:, : n_heads * head_dim].view(q.shape)
    return result


def test_r096_halves_are_paired_within_the_rotated_share() -> None:
    torch.manual_seed(0)
    q, positions = torch.randn(3, 2, 16), [0, 1, 7]
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = PhiConfig(hidden_size=32, num_attention_heads=2, rope_parameters=parameters)
    tables = PhiRotaryEmbedding(config)(q, torch.tensor([positions]))
    turned, _ = apply_rotary_pos_emb(q[None, ..., :8], q[None, ..., :8], *tables, unsqueeze_dim=2)
    expected = torch.cat((turned[0], q[..., 8:]), dim=-1)
    ours = rotated(read_one(parameters, 16), 16, positions, q)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parameters", ONE[1:], ids=IDS[1:])
def test_r088_queries_far_behind_the_original_length(parameters: dict[str, object]) -> None:
    torch.manual_seed(0)
    q, positions = torch.randn(2, 1, 64), [10, 40_000]
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=POSITIONS,
        rope_parameters=dict(parameters),
    )
    tables: Any = LlamaRotaryEmbedding(config)(q, torch.tensor([positions]))
    expected, _ = apply_rotary_pos_emb(q[None], q[None], *tables, unsqueeze_dim=2)
    ours = rotated(read_one(parameters), 64, positions, q)
    # 2 ulp of a frequency of 1 are 0.01 radians at this position.
    torch.testing.assert_close(ours, expected[0], rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
        longrope(64, **{ORIGINAL: 1}),
    ],
    ids=["theta", "original"],
)
def test_numbers_that_only_fail_together_are_refused(parameters: dict[str, object]) -> None:
    kind = parameters["rope_type"]
    with pytest.raises(ModelFileError, match=f"{kind} rotary embedding give no frequencies"):
        read_rope(ConfigReader({"rope_parameters": parameters}), 64, POSITIONS)


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"rope_type": "dynamic", "factor": 1e300}, "factor"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308}, "beta_fast"),
        (longrope(64, short_factor=[1e-300] * 32), "short_factor"),
    ],
    ids=["ntk", "beta", "factors"],
)
def test_absurd_numbers_are_refused_by_name(parameters: dict[str, object], key: str) -> None:
    with pytest.raises(ModelFileError, match=key):
        read_rope(ConfigReader({"rope_parameters": parameters}), 64, POSITIONS)
