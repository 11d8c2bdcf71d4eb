"""A checkpoint loads only if every tensor is used and every parameter filled."""

import pytest
import torch

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Dense
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.model.architecture import architectures
from llmrun.model.binding import bind_gguf, bind_huggingface
from llmrun.model.config import ConfigReader
from llmrun.model.layout import half_split_rows
from llmrun.model.parameters import HEAD, expected
from llmrun.model.rope import read_rope

CONFIG = dict(architectures()["llama"].tiny[0])
SHAPES = {n: p.shape for n, p in expected(architectures()["llama"].spec(CONFIG)).items()}
Q = "model.layers.1.self_attn.q_proj.weight"


def unread(name: str) -> Dense:
    raise AssertionError(name)


def test_names_go_one_to_one() -> None:
    binding = bind_huggingface(CONFIG, SHAPES, unread)
    assert {n: h.pieces[0].canonical for n, h in binding.held.items()} == {n: n for n in SHAPES}
    assert binding.unused == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra.weight": (3,)}, "not used by this architecture: extra.weight"),
        ({Q: None}, f"missing: {Q}"),
        ({Q: (63, 64)}, f"of the wrong shape: {Q} is \\(63, 64\\)"),
        ({HEAD: None}, f"missing: {HEAD}"),
    ],
    ids=["surplus", "missing", "shape", "r100 head"],
)
def test_any_mismatch_names_the_tensor(change: dict[str, object], message: str) -> None:
    shapes = {n: s for n, s in (SHAPES | change).items() if s is not None}
    with pytest.raises(ModelFileError, match=message):
        bind_huggingface(CONFIG, shapes, unread)


def test_r101_a_bias_that_is_not_needed_may_only_be_zeros() -> None:
    # As GPTQ's tools write one for every linear they pack.
    shapes = SHAPES | {(name := "model.layers.1.self_attn.q_proj.bias"): (64,)}
    values = torch.zeros(64)
    binding = bind_huggingface(CONFIG, shapes, lambda _: Dense(to_host(values)))
    assert name not in binding.held
    assert "zeros" in binding.unused[name]
    values[-1] = 1e-3
    with pytest.raises(ModelFileError, match=f"not used by this architecture: {name}"):
        bind_huggingface(CONFIG, shapes, lambda _: Dense(to_host(values)))


def test_a_tied_head_in_the_file_is_left_out_with_a_reason() -> None:
    same = Dense(to_host(torch.ones(131, 64)))
    binding = bind_huggingface(CONFIG | {"tie_word_embeddings": True}, SHAPES, lambda _: same)
    assert binding.spec.tied
    assert HEAD not in binding.held
    assert "ties" in binding.unused[HEAD]


def test_a_head_of_its_own_counts_whatever_the_config_says() -> None:
    def weights(name: str) -> Dense:
        values = torch.ones(131, 64)
        values[-1, -1] = 2.0 if name == HEAD else 1.0
        return Dense(to_host(values))

    binding = bind_huggingface(CONFIG | {"tie_word_embeddings": True}, SHAPES, weights)
    assert not binding.spec.tied
    assert HEAD in binding.held
    assert binding.unused == {}


def test_recomputed_buffers_are_an_explicit_list() -> None:
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    binding = bind_huggingface(CONFIG, {**SHAPES, buffer: (8,)}, unread)
    assert set(binding.unused) == {buffer}


METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.vocab_size": 131,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 1,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    "llama.rope.dimension_count": 16,
}
GGUF_SHAPES = {
    "token_embd.weight": (131, 64),
    "output_norm.weight": (64,),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.ffn_norm.weight": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.0.attn_k.weight": (32, 64),
    "blk.0.attn_v.weight": (32, 64),
    "blk.0.attn_output.weight": (64, 64),
    "blk.0.ffn_gate.weight": (96, 64),
    "blk.0.ffn_up.weight": (96, 64),
    "blk.0.ffn_down.weight": (64, 96),
}


def read(name: str) -> Dense:
    n, *rest = GGUF_SHAPES[name]
    rows = torch.arange(n, dtype=torch.float32)
    return Dense(to_host(rows[:, None].expand(n, rest[0]).contiguous() if rest else rows))


def test_gguf_names_and_head_follow_from_the_file() -> None:
    assert bind_gguf(METADATA, GGUF_SHAPES, read).spec.tied
    untied = GGUF_SHAPES | {"output.weight": (131, 64)}
    binding = bind_gguf(METADATA, untied, read)
    assert not binding.spec.tied
    assert binding.published["blk.0.ffn_down.weight"] == "model.layers.0.mlp.down_proj.weight"


def test_gguf_rotary_pairs_are_put_back_into_halves() -> None:
    tensors = dict(bind_gguf(METADATA, GGUF_SHAPES, read).tensors(read))
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(q, Dense)
    # Row h*16 + p*8 + i of the result is the file's row h*16 + 2i + p.
    want = [h * 16 + 2 * i + p for h in range(4) for p in range(2) for i in range(8)]
    assert as_tensor(q.w)[:, 0].int().tolist() == want == half_split_rows(4, 16)
    v = tensors["model.layers.0.self_attn.v_proj.weight"]
    assert isinstance(v, Dense)
    assert as_tensor(v.w)[:, 0].int().tolist() == list(range(32))


def test_gguf_rope_factors_divide_the_frequencies() -> None:
    plain = bind_gguf(METADATA, GGUF_SHAPES, read).spec.layers[0].rope
    shapes = GGUF_SHAPES | {"rope_freqs.weight": (8,)}

    def with_factors(name: str) -> Dense:
        if name == "rope_freqs.weight":
            return Dense(to_host(torch.tensor([1.0] * 6 + [8.0, 32.0])))
        return read(name)

    scaled = bind_gguf(METADATA, shapes, with_factors).spec.layers[0].rope
    assert plain is not None
    assert scaled is not None
    assert scaled.inv_freq[:6] == plain.inv_freq[:6]
    assert scaled.inv_freq[7] == plain.inv_freq[7] / 32

    def with_zero(name: str) -> Dense:
        return Dense(to_host(torch.zeros(8)))

    with pytest.raises(ModelFileError, match="rope_freqs"):
        bind_gguf(METADATA, shapes, with_zero)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.dimension_count", 7),
        ("llama.block_count", -1),
        ("general.architecture", "mamba"),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_refused(key: str, value: object) -> None:
    with pytest.raises(ModelFileError):
        bind_gguf(METADATA | {key: value}, GGUF_SHAPES, read)


@pytest.mark.parametrize(
    "key",
    [
        "llama.logit_scale",
        "llama.attention.scale",
        "llama.attention.sliding_window",
        "llama.attention.value_length",
    ],
)
def test_gguf_keys_nobody_reads_are_refused_by_name(key: str) -> None:
    with pytest.raises(ModelFileError) as refused:
        bind_gguf(METADATA | {key: 7}, GGUF_SHAPES, read)
    assert key.removeprefix("llama.") in refused.value.what


def test_llama3_factors_become_a_config_that_means_the_same() -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    base = read_rope(ConfigReader({"rope_theta": 500_000.0}), 16, 64).inv_freq
    scaled = read_rope(ConfigReader({"rope_parameters": parameters}), 16, 64).inv_freq
    factors = torch.tensor([b / s for b, s in zip(base, scaled, strict=True)])

    def with_factors(name: str) -> Dense:
        return Dense(to_host(factors)) if name == "rope_freqs.weight" else read(name)

    shapes = GGUF_SHAPES | {"rope_freqs.weight": (8,)}
    binding = bind_gguf(METADATA | {"llama.rope.freq_base": 500_000.0}, shapes, with_factors)
    assert binding.inexpressible is None
    assert binding.config["rope_parameters"] == parameters
    assert architectures()["llama"].spec(binding.config) == binding.spec
    assert binding.spec.layers[0].rope.inv_freq == scaled
