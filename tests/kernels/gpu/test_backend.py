"""Whole decoders on the GPU kernels (in Triton's interpreter) against the reference backend.

Random weights in every storage form, tiny configs of architectures that between them use every op
and attribute. The kernels round the inputs of products to bf16, the reference does not.
"""

import itertools
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from llmrun.engine.cache import KvCache
from llmrun.engine.generate import generate
from llmrun.engine.phases import decode_step, prefill
from llmrun.engine.sampler import Sampler
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.gpu.backend import GpuBackend
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.ops import PickRequest, Sampling, Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.kernels.reference.sampling import pick as reference_pick
from llmrun.model.architecture import architectures
from llmrun.model.decoder import Decoder, build
from llmrun.model.parameters import expected
from llmrun.model.spec import DecoderSpec
from llmrun.quant.roles import QUANTIZED_ROLES
from llmrun.quant.scheme import find

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-2
"""Of logits: each of about a dozen products in a row adds an input rounding of up to 2^-9."""

ARCHS = ("llama", "gemma2", "cohere2", "gpt_oss", "starcoder2", "olmo2")
LENGTH = 50


def spec_of(name: str) -> DecoderSpec:
    arch = architectures()[name]
    return arch.spec(deepcopy(dict(arch.tiny[0])))


def dense(values: np.ndarray) -> Dense:
    data = memoryview(values.astype(np.float32)).cast("B")
    return Dense(HostArray(DType.F32, values.shape, data))


def tensors(spec: DecoderSpec, scheme: str | None) -> list[tuple[str, Form]]:
    """Random parameters; linears in a scheme."""
    rng = np.random.default_rng(3)
    made: list[tuple[str, Form]] = []
    for name, parameter in expected(spec).items():
        size = parameter.shape[-1]
        values = rng.standard_normal(parameter.shape) / np.sqrt(
            size if len(parameter.shape) > 1 else 9
        )
        form = dense(values + (1 if len(parameter.shape) == 1 else 0))
        if scheme is not None and parameter.role in QUANTIZED_ROLES:
            form = find(scheme).quantize(form.w)  # type: ignore[assignment]
        made.append((name, form))
    return made


def pair(name: str, scheme: str | None) -> tuple[Decoder, Decoder]:
    spec = spec_of(name)
    forms = tensors(spec, scheme)
    ours = build(spec, iter(forms), GpuBackend("cpu"), max_tokens=64)  # type: ignore[arg-type]
    return ours, build(spec, iter(forms), TorchBackend("cpu", 1), max_tokens=64)  # type: ignore[arg-type]


def values(decoder: Decoder, logits: Any, n_rows: int) -> torch.Tensor:
    host = decoder.backend.to_host(logits, n_rows)
    return torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)


def logits_of(decoder: Decoder, prompts: Sequence[int], more: Sequence[int]) -> list[torch.Tensor]:
    """Logits behind prompts of some lengths, then of steps that feed an id to all of them."""
    rng = np.random.default_rng(7)
    cache = KvCache(decoder.backend, decoder.spec, len(prompts), LENGTH + 10, "f32")
    found = []
    for slot, length in enumerate(prompts):
        ids = rng.integers(0, decoder.spec.vocab, length).tolist()
        found.append(values(decoder, prefill(decoder, cache, ids, slot), 1))
    for n_slots in more:
        ids = rng.integers(0, decoder.spec.vocab, n_slots).tolist()
        logits = decode_step(decoder, cache, list(range(n_slots)), ids)
        found.append(values(decoder, logits, n_slots))
    return found


def check(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for got, wanted in zip(ours, theirs, strict=True):
        assert got.isfinite().all()
        error = (got.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
        assert float(error.max()) < TOLERANCE


@pytest.mark.parametrize("name", ARCHS)
def test_architectures(name: str) -> None:
    ours, theirs = pair(name, None)
    work = ((33, 2), (2, 1))  # a long prompt and a short one, then steps of two and of one
    check(logits_of(ours, *work), logits_of(theirs, *work))


@pytest.mark.parametrize("scheme", ["int4", "int4-g128", "int4-asym", "int8", "nl4", "nf4"])
def test_storage_forms(scheme: str) -> None:
    ours, theirs = pair("llama", scheme)
    work = ((2,), (1,))
    check(logits_of(ours, *work), logits_of(theirs, *work))


def test_behind_few_rows_there_is_room_for_those_of_a_bucket() -> None:
    backend = GpuBackend("cpu")
    array = backend.empty((3, 5))
    assert array.values.shape == (3, 5)
    assert array.values.untyped_storage().nbytes() == 4 * 32 * 5
    host = np.arange(15, dtype=np.float32).reshape(3, 5)
    backend.load(array, HostArray(DType.F32, host.shape, memoryview(host).cast("B")))
    assert backend.to_host(array, 3).shape == (3, 5)
    assert bytes(backend.to_host(array, 3).data) == host.tobytes()
    assert backend.empty((40, 5)).values.untyped_storage().nbytes() == 4 * 40 * 5


def test_a_row_has_the_same_bits_in_steps_of_any_size() -> None:
    decoder, _ = pair("llama", "int4")
    rng = np.random.default_rng(5)
    ids = rng.integers(0, decoder.spec.vocab, 32).tolist()
    seen = []
    for count in (1, 2, 8):
        cache = KvCache(decoder.backend, decoder.spec, count, 8, "f16")
        spans = [Span(slot, slot, 1, 0) for slot in range(count)]
        logits = decoder.forward(ids[:count], spans, cache.layers, [0])
        seen.append(values(decoder, logits, 1))
    for one, other in itertools.pairwise(seen):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.9, top_k=20, seed=5)],
)
def test_a_chain_chooses_what_the_host_would(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, _ = pair("llama", "int8")
    chained = answer(decoder, sampling)
    monkeypatch.setattr(GpuBackend, "chain", lambda *_: None)
    by_host = answer(decoder, sampling)
    assert [pick for pick, _ in chained] == [pick for pick, _ in by_host]
    np.testing.assert_allclose(
        [logprob for _, logprob in chained], [logprob for _, logprob in by_host], atol=1e-5
    )


def test_a_greedy_step_of_a_chain_has_three_launches_beside_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, _ = pair("llama", "int8")
    launched: list[object] = []
    run = InterpretedFunction.run

    def counted(kernel: object, *args: object, **options: object) -> object:
        launched.append(kernel)
        return run(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    more = []
    for sampling in (
        Sampling(),
        Sampling(repeat_penalty=1.3),
        Sampling(temperature=0.9),
        Sampling(temperature=0.9, top_k=20),
    ):
        cache = KvCache(decoder.backend, decoder.spec, 1, 16, "f16")
        request = PickRequest(sampling, 0, decoder.spec.vocab, [3])
        chain = decoder.chain([3], [Span(0, 0, 1, 0)], cache.layers, [request])
        assert chain is not None
        assert launched == []  # planning launches nothing
        chain.queue()
        more.append(len(launched) - 6 * len(decoder.spec.layers))
        launched.clear()
    assert more == [3, 4, 4, 6]


def test_greedy_choices_of_a_chain_of_several_sequences() -> None:
    decoder, _ = pair("llama", None)
    vocab = decoder.spec.vocab - 5  # the last ids are padding
    cache = KvCache(decoder.backend, decoder.spec, 3, 16, "f16")
    spans = [Span(slot, slot, 1, 0) for slot in range(3)]
    fed = [3, 14, 15]
    chain = decoder.chain(fed, spans, cache.layers, [PickRequest(Sampling(), 0, vocab)] * 3)
    assert chain is not None
    said = []
    for _ in range(3):
        chain.queue()
        said.append(chain.read())
    for length, picks in enumerate(said):
        at = [Span(slot, slot, 1, length) for slot in range(3)]
        logits = values(decoder, decoder.forward(fed, at, cache.layers, range(3)), 3)
        wanted = [reference_pick(row, PickRequest(Sampling(), 0, vocab)) for row in logits]
        fed = [pick.token_id for pick in picks]
        assert fed == [pick.token_id for pick in wanted]
        np.testing.assert_allclose(
            [pick.logprob for pick in picks], [pick.logprob for pick in wanted], atol=1e-5
        )


def test_a_mixture_has_no_chain() -> None:
    decoder, _ = pair("mixtral", None)
    cache = KvCache(decoder.backend, decoder.spec, 1, 16, "f16")
    request = PickRequest(Sampling(), 0, decoder.spec.vocab)
    assert decoder.chain([3], [Span(0, 0, 1, 0)], cache.layers, [request]) is None


def answer(decoder: Decoder, sampling: Sampling) -> list[tuple[int, float]]:
    cache = KvCache(decoder.backend, decoder.spec, 1, 16, "f16")
    sampler = Sampler(sampling, decoder.spec.vocab)
    events = generate(decoder, cache, [3, 14], sampler, stop_ids=(), max_tokens=5)
    return [(event.token_id, event.logprob) for event in events]
