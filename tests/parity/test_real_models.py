"""Real weights against transformers in fp32: the same 64 greedy tokens, from a GGUF and from the
same weights as a safetensors checkpoint.

transformers reads the GGUF by its own means and writes the checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrun.cli.source import open_source
from llmrun.engine.cache import KvCache
from llmrun.engine.generate import decode_step, prefill
from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.decoder import Decoder, build

pytestmark = pytest.mark.slow

N_TOKENS = 64
LONG_PROMPT = 600
"""Tokens: longer than Gemma 3's sliding window of 512."""


@dataclass(frozen=True)
class Case:
    """A model's file, the checkpoint of the same weights, prompts and transformers' answers."""

    gguf: Path
    folder: Path
    answers: list[tuple[list[int], list[int]]]


@pytest.fixture(
    scope="module",
    params=[
        "starter_gguf",
        "gemma_gguf",
        pytest.param("qwen_gguf", marks=[pytest.mark.large, pytest.mark.timeout(1800)]),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    gguf: Path = request.getfixturevalue(request.param)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.hf_quantizer = None  # it is no longer quantized, and may be written
    del model.config.quantization_config
    folder = tmp_path_factory.mktemp("real")
    model.save_pretrained(folder, max_shard_size="500MB")
    prompts = [tokenizer("The history of the bicycle began in").input_ids]
    if "gemma" in request.param:
        article = Path(__file__).parents[2].joinpath("LICENSE").read_text()
        prompts.append(tokenizer(article).input_ids[:LONG_PROMPT])
        assert len(prompts[1]) == LONG_PROMPT
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            made = model.generate(
                torch.tensor([prompt]), min_new_tokens=N_TOKENS, max_new_tokens=N_TOKENS,
                do_sample=False,
            )  # fmt: skip
        answers.append((prompt, made[0, len(prompt) :].tolist()))
    return Case(gguf, folder, answers)


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return TorchBackend("cpu", 2)
    if reason := native.problem():
        pytest.skip(reason)
    return CpuBackend(2)


def greedy(decoder: Decoder, prompt: list[int]) -> Iterator[int]:
    cache = KvCache(decoder.backend, decoder.spec, 1, len(prompt) + N_TOKENS, "f32")
    logits = prefill(decoder, cache, prompt)
    while True:
        host = decoder.backend.to_host(logits, 1)
        token_id = int(torch.frombuffer(bytearray(host.data), dtype=torch.float32).argmax())
        yield token_id
        logits = decode_step(decoder, cache, [0], [token_id])


@pytest.mark.parametrize("form", ["gguf", "checkpoint"])
def test_64_greedy_tokens_are_those_of_transformers(case: Case, backend: Any, form: str) -> None:
    source = open_source(case.gguf if form == "gguf" else case.folder, exact=True)
    decoder = build(source.binding.spec, source.tensors(lambda _, form: form), backend)
    for prompt, want in case.answers:
        steps = zip(greedy(decoder, prompt), range(N_TOKENS), strict=False)
        assert [token_id for token_id, _ in steps] == want
