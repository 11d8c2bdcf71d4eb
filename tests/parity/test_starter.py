"""The starter's real weights: our logits against transformers', and one text from two formats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmrun.cli.source import open_source
from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.decoder import Decoder, build
from llmrun.model.parameters import EMBEDDING

pytestmark = pytest.mark.slow

TEXT_IDS = [504, 3575, 282, 4649, 314, 28, 284, 260, 2240, 282, 3807, 5116, 198, 1, 17, 49151]
"""Ids of ordinary text, a newline, a control id and the last id of the vocabulary."""


@pytest.fixture(scope="module")
def theirs(starter_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(starter_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return TorchBackend("cpu", 2)
    if reason := native.problem():
        pytest.skip(reason)
    return CpuBackend(2)


@pytest.fixture(scope="module")
def ours(starter_folder: Path, backend: Any) -> Decoder:
    source = open_source(starter_folder)
    tensors = source.tensors(lambda _, form: form)
    return build(source.binding.spec, tensors, backend, max_rows=64)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    drawn = torch.randint(0, 49152, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    return TEXT_IDS + drawn


@pytest.fixture(scope="module")
def logits(theirs: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([ids])).logits[0]


def values(decoder: Decoder, logits: Any, n_rows: int) -> torch.Tensor:
    """A copy of the first rows of logits."""
    host = decoder.backend.to_host(logits, n_rows)
    return torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)


def runs(decoder: Decoder, ids: list[int], chunks: list[int]) -> torch.Tensor:
    kv = [decoder.backend.kv_layer(1, 64, decoder.spec.heads, "f32") for _ in decoder.spec.layers]
    rows, position = [], 0
    for count in chunks:
        span = Span(0, 0, count, position)
        part = decoder.forward(ids[position : position + count], [span], kv, list(range(count)))
        rows.append(values(decoder, part, count))
        position += count
    return torch.cat(rows)


@pytest.mark.parametrize("chunks", [[64], [1] * 64, [30, 1, 33]], ids=["prefill", "step", "chunks"])
def test_logits_equal_transformers(
    ours: Decoder, ids: list[int], logits: torch.Tensor, chunks: list[int]
) -> None:
    got = runs(ours, ids, chunks)
    error = (got - logits).norm(dim=-1) / logits.norm(dim=-1)
    assert float(error.max()) < 1e-4
    assert float((got - logits).abs().max() / logits.abs().max()) < 1e-4


def greedy(decoder: Decoder, prompt: list[int], n: int) -> Iterator[int]:
    kv = [decoder.backend.kv_layer(1, 128, decoder.spec.heads, "f32") for _ in decoder.spec.layers]
    logits = decoder.forward(prompt, [Span(0, 0, len(prompt), 0)], kv, [len(prompt) - 1])
    for position in range(len(prompt), len(prompt) + n):
        token_id = int(values(decoder, logits, 1).argmax())
        yield token_id
        logits = decoder.forward([token_id], [Span(0, 0, 1, position)], kv, [0])


def test_the_gguf_itself_gives_transformers_text(
    theirs: PreTrainedModel, starter_gguf: Path, starter_state: dict[str, torch.Tensor]
) -> None:
    # The folder holds the weights rounded to bf16, so the oracle gets the exact ones here.
    exact = AutoModelForCausalLM.from_config(theirs.config, dtype=torch.float32).eval()
    exact.load_state_dict(starter_state | {"lm_head.weight": starter_state[EMBEDDING]})
    source = open_source(starter_gguf)
    decoder = build(source.binding.spec, source.tensors(lambda _, f: f), TorchBackend("cpu", 2))
    prompt = TEXT_IDS[:12]
    with torch.no_grad():
        made = exact.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
    want = made[0, len(prompt) :].tolist()
    assert list(greedy(decoder, prompt, len(want))) == want
