"""Streamed runs: the same logits as the decoder's, and the inputs transformers' linears see."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from llmrun.cli.source import Source, open_source
from llmrun.engine.cache import KvCache
from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.host import HostArray
from llmrun.kernels.ops import Backend, Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import architectures
from llmrun.model.decoder import Decoder, build
from llmrun.model.streaming import LayerStream

CHUNK = 48
LENGTHS = (100, 5, 48)
ARCHITECTURES = (
    "llama",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "cohere2",
    "gpt_oss",
    "mixtral",
)


def tiny(name: str, folder: Path, number: int = 0) -> tuple[Any, Source]:
    torch.manual_seed(0)
    wanted = deepcopy(dict(architectures()[name].tiny[number]))
    config = CONFIG_MAPPING[wanted["model_type"]](**wanted)
    config._attn_implementation = config._experts_implementation = "eager"
    kind = AutoModelForImageTextToText if "text_config" in wanted else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model, open_source(folder)


@pytest.fixture(params=["reference", "cpu"])
def backends(request: pytest.FixtureRequest) -> tuple[Backend, Backend]:
    if request.param == "reference":
        return TorchBackend("cpu", 1), TorchBackend("cpu", 1)
    if reason := native.problem():
        pytest.skip(reason)
    return CpuBackend(2), CpuBackend(2)


def tensor(host: HostArray) -> torch.Tensor:
    return torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)


def decoded(decoder: Decoder, ids: Sequence[int]) -> torch.Tensor:
    """Logits of a whole sequence, in chunks."""
    spec, parts = decoder.spec, []
    cache = KvCache(decoder.backend, spec, 1, len(ids), "f16")
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        spans, stage = [Span(0, 0, len(part), start)], spec.rope_stage(len(ids))
        logits = decoder.forward(part, spans, cache.layers, range(len(part)), stage=stage)
        parts.append(tensor(decoder.backend.to_host(logits, len(part))))
    return torch.cat(parts)


def streamed(stream: LayerStream, source: Source, first: int = 0) -> list[torch.Tensor]:
    """Logits of each sequence from ``first`` on."""
    stream.embed(source.outer())
    for number in range(len(source.binding.spec.layers)):
        stream.run_layer(number, source.layer(number))
    return logits(stream, source, first)


def logits(stream: LayerStream, source: Source, first: int = 0) -> list[torch.Tensor]:
    parts: dict[int, list[torch.Tensor]] = {}
    for rows in stream.logits(stream.ending(source.outer()), first):
        found = parts.setdefault(rows.sequence, [])
        assert rows.positions.start == first + sum(map(len, found))
        found.append(tensor(rows.logits))
    return [torch.cat(parts[number]) for number in sorted(parts)]


def texts(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(0, vocab, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_the_decoders(
    name: str, backends: tuple[Backend, Backend], tmp_path: Path
) -> None:
    _, source = tiny(name, tmp_path)
    spec = source.binding.spec
    sequences = texts(spec.vocab)
    decoder = build(spec, source.tensors(lambda _, form: form), backends[0], max_tokens=CHUNK,
                    max_rows=CHUNK)  # fmt: skip
    stream = LayerStream(spec, backends[1], sequences, max_tokens=CHUNK)
    for ids, got in zip(sequences, streamed(stream, source, first=2), strict=True):
        assert torch.equal(got, decoded(decoder, ids)[2:])


def test_a_fork_goes_its_own_way_and_noise_is_seeded(
    backends: tuple[Backend, Backend], tmp_path: Path
) -> None:
    _, source = tiny("llama", tmp_path)
    sequences = texts(source.binding.spec.vocab)
    stream = LayerStream(source.binding.spec, backends[0], sequences, max_tokens=CHUNK)
    stream.embed(source.outer())
    stream.run_layer(0, source.layer(0))
    one, other = stream.fork(), stream.fork()
    before = [tensor(part.values) for part in stream.states()]
    for noisy in (one, other):
        noisy.add_noise(2**-9, 7, 0)
        noisy.run_layer(1, source.layer(1))
    for part, known in zip(stream.states(), before, strict=True):
        assert torch.equal(tensor(part.values), known)
    stream.run_layer(1, source.layer(1))
    plain, first, second = (logits(each, source) for each in (stream, one, other))
    for a, b, c in zip(plain, first, second, strict=True):
        assert torch.equal(b, c)
        assert 1e-5 < (a - b).norm() / a.norm() < 1e-1


class Seen:
    """Inputs of linears by name, piece by piece."""

    def __init__(self) -> None:
        self.parts: dict[str, list[torch.Tensor]] = {}

    def __call__(self, names: Sequence[str], x: HostArray) -> None:
        for name in names:
            self.add(name, tensor(x))

    def add(self, name: str, x: torch.Tensor) -> None:
        self.parts.setdefault(name, []).append(x.detach().clone().reshape(-1, x.shape[-1]))

    def all(self) -> dict[str, torch.Tensor]:
        return {name: torch.cat(parts) for name, parts in self.parts.items()}


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs transformers' model and returns what its linears see, experts in stacks included."""

    def run(model: Any, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
        seen, linear = Seen(), functional.linear
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(
                    lambda _, args, name=name: seen.add(f"{name}.weight", args[0])
                )
        stacks = {name: p for name, p in model.named_parameters() if ".experts." in name}

        def watched(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
            for name, stack in stacks.items():
                module, _, part = name.rpartition(".")
                for expert, matrix in enumerate(stack):
                    if weight.data_ptr() == matrix.data_ptr():
                        for piece in ("gate", "up") if part == "gate_up_proj" else ("down",):
                            seen.add(f"{module}.{expert}.{piece}_proj.weight", x)
            return linear(x, weight, bias)

        monkeypatch.setattr(functional, "linear", watched)
        for ids in sequences:
            with torch.no_grad():
                model(torch.tensor([ids]))
        return seen.all()

    return run


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral"])
def test_observers_see_what_transformers_linears_see(
    name: str, theirs: Any, backends: tuple[Backend, Backend], tmp_path: Path
) -> None:
    model, source = tiny(name, tmp_path)
    spec, backend = source.binding.spec, backends[0]
    sequences = texts(spec.vocab, (60,))
    stream = LayerStream(spec, backend, sequences, max_tokens=CHUNK, kv_form="f32")
    seen = Seen()
    stream.embed(source.outer())
    for number in range(len(spec.layers)):
        stream.run_layer(number, source.layer(number), seen)
    ours, known = seen.all(), theirs(model, sequences)
    known.pop("lm_head.weight")
    wanted = {name for name, p in source.binding.parameters.items() if len(p.shape) == 2}
    assert ours.keys() <= wanted
    assert known.keys() <= ours.keys()
    assert len(known) > 6 * len(spec.layers)
    for linear, x in known.items():
        assert ours[linear].shape == x.shape
        got = ours[linear]
        if ".experts." in linear:  # theirs come by rank, not by position
            got, x = got[got[:, 0].argsort()], x[x[:, 0].argsort()]
        assert (got - x).norm() < 1e-4 * x.norm(), linear
