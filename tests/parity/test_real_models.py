"""Real weights against transformers in fp32: the same 64 greedy tokens, from a GGUF and from the
same weights as a safetensors checkpoint, loaded as ``-q none`` loads them.

The weights are gguf's own reading of the file; transformers computes with them and writes them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config

from llmrun.cli.source import open_source
from llmrun.engine.cache import KvCache
from llmrun.engine.phases import decode_step, prefill
from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.decoder import Decoder, build
from llmrun.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

N_TOKENS = 64
LONG_PROMPT = 600
"""Tokens: longer than Gemma 3's sliding window of 512."""


@dataclass(frozen=True)
class Case:
    """A model's file, the checkpoint of the same weights, prompts, and transformers' model."""

    gguf: Path
    folder: Path
    prompts: list[list[int]]
    model: Any
    written: dict[tuple[int, ...], list[int]]
    theirs: dict[tuple[int, ...], list[int]]

    def chosen(self, ids: list[int]) -> list[int]:
        """What transformers would choose, greedily, before each of the last N_TOKENS ids."""
        key = tuple(ids)
        if key not in self.theirs:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids]), logits_to_keep=N_TOKENS + 1).logits[0]
            self.theirs[key] = logits[:-1].argmax(dim=-1).tolist()
        return self.theirs[key]


CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "starter_gguf": (
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
            rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
        ),
        {"paired_heads": 64},
    ),
    "gemma_gguf": (
        Gemma3TextConfig(
            vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
            num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
            max_position_embeddings=32768, query_pre_attn_scalar=256, tie_word_embeddings=True,
        ),
        {"norms_above": 1.0},
    ),
    "qwen_gguf": (
        Qwen2Config(
            vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
            num_attention_heads=12, num_key_value_heads=2, max_position_embeddings=32768,
            rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=False,
        ),
        {},
    ),
}  # fmt: skip
"""As the publishers have them, and how the files differ from the published weights."""


@pytest.fixture(
    scope="module",
    params=[
        "starter_gguf",
        "gemma_gguf",
        pytest.param("qwen_gguf", marks=[pytest.mark.large, pytest.mark.timeout(1800)]),
    ],
)
def case(
    request: pytest.FixtureRequest, real_models: Any, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    gguf: Path = request.getfixturevalue(request.param)
    config, stored = CONFIGS[request.param]
    if "gemma" in request.param:
        stored = stored | {"blocks": real_models.GEMMA_BLOCKS}
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = real_models.state_of(gguf, **stored)
    model.load_state_dict(state, strict=not config.tie_word_embeddings, assign=True)
    model.tie_weights()
    folder = tmp_path_factory.mktemp("real")
    model.save_pretrained(folder, max_shard_size="500MB")
    tokenizer = Tokenizer.from_gguf(open_source(gguf).checkpoint.config)
    prompts = [tokenizer.encode_plain("The history of the bicycle began in")]
    if "gemma" in request.param:
        licence = Path(__file__).parents[2].joinpath("LICENSE").read_text()
        prompts.append(tokenizer.encode_plain(licence)[:LONG_PROMPT])
        assert len(prompts[1]) == LONG_PROMPT
    return Case(gguf, folder, prompts, model, {}, {})


@pytest.fixture(params=["cpu", "reference"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return TorchBackend("cpu", 2)
    if reason := native.problem():
        pytest.skip(reason)
    return CpuBackend(2, exact=True)


def choices(decoder: Decoder, logits: Any, n_rows: int) -> list[int]:
    host = decoder.backend.to_host(logits, n_rows)
    rows = torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(n_rows, -1)
    return [int(choice) for choice in rows.argmax(dim=-1)]


def greedy(decoder: Decoder, prompt: list[int]) -> list[int]:
    """The ids a decoder writes, one step after the other."""
    cache = KvCache(decoder.backend, decoder.spec, 1, len(prompt) + N_TOKENS, "f32")
    made = choices(decoder, prefill(decoder, cache, prompt), 1)
    while len(made) < N_TOKENS:
        made += choices(decoder, decode_step(decoder, cache, [0], made[-1:]), 1)
    return made


def chosen(decoder: Decoder, ids: list[int]) -> list[int]:
    """What a decoder would choose before each of the last N_TOKENS ids."""
    cache = KvCache(decoder.backend, decoder.spec, 1, len(ids), "f32")
    read = ids[: -N_TOKENS - 1]
    if read:
        prefill(decoder, cache, read)
    spans = [Span(0, 0, N_TOKENS, len(read))]
    rows = list(range(N_TOKENS))
    logits = decoder.forward(ids[len(read) : -1], spans, cache.layers, rows)
    return choices(decoder, logits, N_TOKENS)


@pytest.mark.parametrize("form", ["gguf", "checkpoint"])
def test_64_greedy_tokens_are_those_of_transformers(case: Case, backend: Any, form: str) -> None:
    source = open_source(case.gguf if form == "gguf" else case.folder, exact=True)
    tensors = source.tensors(lambda _, form: form)
    decoder = build(source.binding.spec, tensors, backend, max_rows=N_TOKENS)
    for prompt in case.prompts:
        # The native backend writes; the slower one says what it would write after each beginning,
        # and transformers does the same. If all choices are the same, the texts are.
        if not isinstance(backend, TorchBackend) or tuple(prompt) not in case.written:
            case.written[tuple(prompt)] = greedy(decoder, prompt)
        made = case.written[tuple(prompt)]
        assert case.chosen(prompt + made) == made
        assert chosen(decoder, prompt + made) == made
