"""Every architecture against transformers in fp32: a tiny random model, the same logits.

New files in ``llmrun/model/archs`` are found by themselves, with every tiny config they export.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.arrays import to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import Config, architectures
from llmrun.model.binding import bind_huggingface
from llmrun.model.decoder import Decoder, build

TOLERANCE = 1e-4
LENGTH = 300


def cases() -> Iterator[tuple[str, Config]]:
    for name, arch in architectures().items():
        for number, config in enumerate(arch.tiny):
            yield f"{name}-{number}", config


@dataclass(frozen=True)
class Pair:
    """Our decoder and transformers' logits for the same random weights and ids."""

    decoder: Decoder
    ids: list[int]
    logits: torch.Tensor


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return TorchBackend("cpu", 1)
    if reason := native.problem():
        pytest.skip(reason)
    return CpuBackend(2)


@pytest.fixture(
    scope="module", params=[config for _, config in cases()], ids=[n for n, _ in cases()]
)
def pair(request: pytest.FixtureRequest, backend: Any) -> Pair:
    torch.manual_seed(0)
    tiny = dict(request.param)
    theirs = CONFIG_MAPPING[tiny["model_type"]](**tiny)
    theirs._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, or a lost one goes unseen
            parameter.add_(torch.randn_like(parameter) * 0.1)
    # The config as a checkpoint would carry it: written and read back by transformers itself.
    config = json.loads(theirs.to_json_string(use_diff=False))
    state = dict(model.state_dict())
    if theirs.tie_word_embeddings:
        del state["lm_head.weight"]
    binding = bind_huggingface(config, {name: tuple(t.shape) for name, t in state.items()})

    def read(name: str) -> Form:
        return Dense(to_host(state[name]))

    decoder = build(
        binding.spec, binding.tensors(read), backend, max_tokens=LENGTH, max_rows=LENGTH
    )
    ids = torch.randint(0, tiny["vocab_size"], (LENGTH,)).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return Pair(decoder, ids, logits)


def values(decoder: Decoder, logits: Any, n_rows: int) -> torch.Tensor:
    """A copy of the first rows of logits."""
    host = decoder.backend.to_host(logits, n_rows)
    return torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)


def run(decoder: Decoder, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits at every position, computed chunk by chunk."""
    kv = [
        decoder.backend.kv_layer(1, LENGTH, decoder.spec.heads, "f32") for _ in decoder.spec.layers
    ]
    rows, position = [], 0
    for count in chunks:
        part = ids[position : position + count]
        logits = decoder.forward(part, [Span(0, 0, count, position)], kv, list(range(count)))
        rows.append(values(decoder, logits, count))
        position += count
    return torch.cat(rows)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest relative error over positions."""
    error = (ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1)
    return float(error.max())


def test_prefill(pair: Pair) -> None:
    # 300 positions: past every window (20), max_position (64) and original_max (32), over 4 x 64.
    assert relative(run(pair.decoder, pair.ids, [LENGTH]), pair.logits) < TOLERANCE


def test_chunked_prefill(pair: Pair) -> None:
    chunks = [7, 64, 1, 100, 128]
    assert sum(chunks) == LENGTH
    assert relative(run(pair.decoder, pair.ids, chunks), pair.logits) < TOLERANCE


def test_step_by_step(pair: Pair) -> None:
    assert relative(run(pair.decoder, pair.ids, [1] * LENGTH), pair.logits) < TOLERANCE


def test_sequences_of_different_length_in_one_step(pair: Pair) -> None:
    decoder, ids = pair.decoder, pair.ids
    lengths = (5, 70, 33)
    kv = [decoder.backend.kv_layer(3, 80, decoder.spec.heads, "f32") for _ in decoder.spec.layers]
    spans, batch, rows, start = [], [], [], 0
    for slot, length in enumerate(lengths):
        spans.append(Span(slot, start, length, 0))
        batch += ids[:length]
        start += length
        rows.append(start - 1)
    first = values(decoder, decoder.forward(batch, spans, kv, rows), 3)
    steps = [Span(slot, slot, 1, length) for slot, length in enumerate(lengths)]
    logits = decoder.forward([ids[n] for n in lengths], steps, kv, [0, 1, 2])
    second = values(decoder, logits, 3)
    for slot, length in enumerate(lengths):
        assert relative(first[slot][None], pair.logits[length - 1][None]) < TOLERANCE
        assert relative(second[slot][None], pair.logits[length][None]) < TOLERANCE
