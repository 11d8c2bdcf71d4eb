"""Every architecture against transformers in fp32: a tiny random model, the same logits.

New files in ``llmrun/model/archs`` are found by themselves, with every tiny config they export. The
model goes through files: transformers writes a checkpoint, llmrun opens it like any other.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from llmrun.cli.source import open_source
from llmrun.engine.cache import KvCache
from llmrun.engine.phases import decode_step, prefill
from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import Config, architectures
from llmrun.model.decoder import Decoder, build

TOLERANCE = 1e-4
LENGTH = 300
"""Past every window (20), twice max_position (64), over 4 times that, and original_max (32)."""


def cases() -> Iterator[tuple[str, Config]]:
    for name, arch in architectures().items():
        for number, config in enumerate(arch.tiny):
            yield f"{name}-{number}", config


@dataclass(frozen=True)
class Pair:
    """Our decoder and transformers' model with the same random weights."""

    decoder: Decoder
    ids: list[int]
    model: Any
    known: dict[int, torch.Tensor]

    def logits(self, length: int) -> torch.Tensor:
        """Theirs [L, V] for a sequence of ``length``; what a rotation by length takes it for.

        Causal attention lets a longer sequence answer for all its beginnings, as long as they
        are rotated like it.
        """
        limits = self.decoder.spec.rope_limits
        stage = self.decoder.spec.rope_stage(length)
        whole = limits[stage] if stage < len(limits) else LENGTH
        whole = min(whole, 2 * LENGTH)
        if whole not in self.known:
            longer = torch.tensor([(self.ids * 2)[:whole]])
            with torch.no_grad():
                self.model(longer[:, :1])  # else a dynamic rotation stays as long as it was
                self.known[whole] = self.model(longer).logits[0]
        return self.known[whole][:length]


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
def theirs(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, Path]:
    torch.manual_seed(0)
    tiny = deepcopy(dict(request.param))  # transformers writes into what it is given
    config = CONFIG_MAPPING[tiny["model_type"]](**tiny)
    config._attn_implementation = "eager"
    kind = AutoModelForImageTextToText if "text_config" in tiny else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, or a lost one goes unseen
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def pair(theirs: tuple[Any, Path], backend: Any) -> Pair:
    model, folder = theirs
    source = open_source(folder)
    decoder = build(
        source.binding.spec,
        source.tensors(lambda _, form: form),
        backend,
        max_tokens=LENGTH,
        max_rows=LENGTH,
    )
    torch.manual_seed(1)
    ids = torch.randint(0, decoder.spec.vocab, (LENGTH,)).tolist()
    return Pair(decoder, ids, model, {})


def values(decoder: Decoder, logits: Any, n_rows: int) -> torch.Tensor:
    """A copy of the first rows of logits."""
    host = decoder.backend.to_host(logits, n_rows)
    return torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)


def run(decoder: Decoder, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits at every position, computed chunk by chunk."""
    cache = KvCache(decoder.backend, decoder.spec, 1, LENGTH, "f32")
    stage = decoder.spec.rope_stage(len(ids))
    rows, position = [], 0
    for count in chunks:
        part = ids[position : position + count]
        spans = [Span(0, 0, count, position)]
        logits = decoder.forward(part, spans, cache.layers, list(range(count)), stage=stage)
        rows.append(values(decoder, logits, count))
        position += count
    return torch.cat(rows)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest relative error over positions."""
    error = (ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1)
    return float(error.max())


def test_prefill(pair: Pair) -> None:
    # A sequence at, and one behind, every length at which something changes.
    limits = pair.decoder.spec.rope_limits
    for length in sorted({LENGTH, *(n for n in limits if n < LENGTH)}):
        got = run(pair.decoder, pair.ids[:length], [length])
        assert relative(got, pair.logits(length)) < TOLERANCE


def test_chunked_prefill(pair: Pair) -> None:
    chunks = [7, 64, 1, 100, 128]
    assert sum(chunks) == LENGTH
    assert relative(run(pair.decoder, pair.ids, chunks), pair.logits(LENGTH)) < TOLERANCE


def test_step_by_step(pair: Pair) -> None:
    # By the engine, which feeds a sequence again where it outgrows the rotation of its keys. Every
    # position, but for the slower backend a stretch where nothing changes goes in one piece.
    decoder = pair.decoder
    cache = KvCache(decoder.backend, decoder.spec, 1, LENGTH, "f32")
    stretch = range(130, 250) if isinstance(decoder.backend, TorchBackend) else range(0)
    position = 0
    while position < LENGTH:
        if position in stretch:
            logits = prefill(decoder, cache, pair.ids[position : stretch.stop])
            position = stretch.stop
        else:
            logits = decode_step(decoder, cache, [0], [pair.ids[position]])
            position += 1
        got = values(decoder, logits, 1)
        assert relative(got, pair.logits(position)[-1:]) < TOLERANCE, position


def test_sequences_of_different_length_in_one_step(pair: Pair) -> None:
    decoder, ids = pair.decoder, pair.ids
    cache = KvCache(decoder.backend, decoder.spec, 3, LENGTH, "f32")
    lengths = (230, 233, 250)
    if decoder.spec.rope_stage(lengths[0] + 1) == decoder.spec.rope_stage(1):
        lengths = (5, 70, 33)
    if len({decoder.spec.rope_stage(n + 1) for n in lengths}) > 1:
        lengths = (241, 244, 246)
    for slot, length in enumerate(lengths):
        got = values(decoder, prefill(decoder, cache, ids[:length], slot), 1)
        assert relative(got, pair.logits(length)[-1:]) < TOLERANCE
    logits = decode_step(decoder, cache, [0, 1, 2], [ids[length] for length in lengths])
    for got, length in zip(values(decoder, logits, 3), lengths, strict=True):
        assert relative(got[None], pair.logits(length + 1)[-1:]) < TOLERANCE


def test_prompts_of_different_length_in_one_step(pair: Pair) -> None:
    decoder, ids = pair.decoder, pair.ids
    cache = KvCache(decoder.backend, decoder.spec, 3, 80, "f32")
    lengths = (5, 30, 22)
    spans, batch, rows, start = [], [], [], 0
    for slot, length in enumerate(lengths):
        spans.append(Span(slot, start, length, 0))
        batch += ids[:length]
        start += length
        rows.append(start - 1)
    logits = values(decoder, decoder.forward(batch, spans, cache.layers, rows), 3)
    for got, length in zip(logits, lengths, strict=True):
        assert relative(got[None], pair.logits(length)[-1:]) < TOLERANCE
