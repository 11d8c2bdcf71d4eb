"""Building a decoder from a stream of tensors."""

from collections.abc import Iterator

import pytest
import torch

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.arrays import to_host
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import architectures
from llmrun.model.decoder import Decoder, build
from llmrun.model.parameters import expected

ARCH = architectures()["llama"]
SPEC = ARCH.spec(ARCH.tiny[0])
TIED = ARCH.spec(ARCH.tiny[1])


def tensors(spec: object = SPEC, skip: str = "") -> Iterator[tuple[str, Form]]:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in expected(spec).items():
        if name != skip:
            yield name, Dense(to_host(torch.randn(parameter.shape, generator=generator) * 0.1))


def decoder(spec: object = SPEC) -> Decoder:
    return build(spec, tensors(spec), TorchBackend("cpu", 1))


def test_a_missing_or_doubled_tensor_is_refused() -> None:
    backend = TorchBackend("cpu", 1)
    with pytest.raises(ModelFileError, match=r"missing: model\.norm\.weight"):
        build(SPEC, tensors(skip="model.norm.weight"), backend)
    name, form = next(tensors())
    with pytest.raises(ModelFileError, match="came twice"):
        build(SPEC, [(name, form), (name, form)], backend)
    with pytest.raises(ModelFileError, match="unknown"):
        build(SPEC, [("model.extra", form)], backend)


def test_bytes_and_parameters_are_counted() -> None:
    hidden, inner, vocab, keys = 64, 96, 131, 32
    per_layer = 2 * hidden * hidden + 2 * keys * hidden + 3 * inner * hidden
    plain, tied = decoder(), decoder(TIED)
    assert plain.linear_parameters == tied.linear_parameters == 2 * per_layer
    assert plain.weight_bytes == 4 * (2 * per_layer + 2 * vocab * hidden)
    assert tied.weight_bytes == 4 * (2 * per_layer + vocab * hidden)
    per_token = 4 * (2 * per_layer + vocab * hidden + hidden)
    assert plain.weight_bytes_per_token == tied.weight_bytes_per_token == per_token


def test_launches_are_the_linears_of_a_step_in_order() -> None:
    made = decoder()
    launches = made.launches
    assert [len(linears) for linears in launches] == [3, 1, 2, 1] * len(SPEC.layers) + [1]
    weights = [linear.weight for linears in launches for linear in linears]
    assert sum(weight.shape[0] * weight.shape[1] for weight in weights[:-1]) == (
        made.linear_parameters
    )
    assert weights[-1].shape == (SPEC.vocab, SPEC.hidden)


def test_the_head_runs_for_wanted_rows_only() -> None:
    model = decoder()
    kv = [model.backend.kv_layer(1, 8, SPEC.heads, "f32") for _ in SPEC.layers]
    whole = model.forward([5, 6, 7], [Span(0, 0, 3, 0)], kv, [0, 1, 2])[:3].clone()
    last = model.forward([5, 6, 7], [Span(0, 0, 3, 0)], kv, [2])[:1].clone()
    torch.testing.assert_close(last[0], whole[2])
    model.forward([5], [Span(0, 0, 1, 3)], kv, [])
