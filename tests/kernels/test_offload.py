"""A backend made of two: the same logits wherever the layers lie."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from llmrun.engine.cache import KvCache
from llmrun.errors import DoesNotFitError, InternalError, UnavailableError
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.library import problem
from llmrun.kernels.forms import Form
from llmrun.kernels.offload import OffloadBackend
from llmrun.kernels.ops import Backend, PickRequest, Sampling, Sizes, Span
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.kernels.sides import Side
from llmrun.model.decoder import Decoder, build
from llmrun.model.parameters import EMBEDDING, layer_of
from llmrun.model.spec import DecoderSpec, LayerSpec, MixtureSpec

D, H = Side.DEVICE, Side.HOST
PLACES = [(H, D, D), (H, H, D), (D, H, H), (D, H, D), (H, D, H), (D, D, D), (H, H, H)]


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    """Random decoders in any storage form."""
    path = Path(__file__).parent / "cpu/tiny.py"
    spec = importlib.util.spec_from_file_location("llmrun_test_tiny", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def native(threads: int = 2) -> Any:
    if reason := problem():
        pytest.skip(reason)
    return CpuBackend(threads, huge_pages=False)


def spread(
    spec: DecoderSpec,
    forms: dict[str, Form],
    backend: OffloadBackend,
    embedding: Side,
    head: Side = D,
) -> Decoder:
    """The decoder of a composed backend, each weight on its layer's side."""

    def tensors() -> Iterator[tuple[str, Form]]:
        for name, form in forms.items():
            layer = layer_of(name)
            outer = embedding if name == EMBEDDING else head
            backend.place(outer if layer is None else backend.layers[layer])
            yield name, form

    return build(spec, tensors(), cast(Backend, backend), max_tokens=64, max_rows=4)


def answered(model: Decoder, ids: Sequence[int], steps: int = 5) -> torch.Tensor:
    """Logits of a prompt's end and of some greedy steps behind it, some of them replayed."""
    cache = KvCache(model.backend, model.spec, 2, 128, "f32")
    rows, fed, position = [], list(ids), 0
    for _ in range(1 + steps):
        span = Span(1, 0, len(fed), position)
        logits = model.forward(fed, [span], cache.layers, [len(fed) - 1])
        rows.append(as_tensor(model.backend.to_host(logits, 1)).clone())
        position += len(fed)
        fed = [
            model.backend.pick(logits, [PickRequest(Sampling(), 0, model.spec.vocab)])[0].token_id
        ]
    return torch.cat(rows)


def whole(spec: DecoderSpec, forms: dict[str, Form], backend: Any) -> Decoder:
    return build(spec, forms.items(), backend, max_tokens=64, max_rows=4)


@pytest.mark.parametrize("layers", PLACES, ids=lambda sides: "".join(s.name[0] for s in sides))
def test_two_native_backends_compute_what_one_does(layers: Any, tiny: ModuleType) -> None:
    forms, ids = tiny.forms("int4 g32"), tiny.ids(30)
    want = answered(whole(tiny.SPEC, forms, native()), ids)
    backend = OffloadBackend(native(), native(), layers)
    assert torch.equal(answered(spread(tiny.SPEC, forms, backend, H), ids), want)


@pytest.mark.parametrize("layers", PLACES[:4], ids=lambda sides: "".join(s.name[0] for s in sides))
@pytest.mark.parametrize("tied", [False, True])
def test_the_reference_as_a_device_beside_the_native_cpu(
    layers: Any, tied: bool, tiny: ModuleType
) -> None:
    spec = replace(tiny.SPEC, tied=tied)
    forms, ids = tiny.forms("f16", spec), tiny.ids(30)
    device, host = cast(Any, TorchBackend("cpu", 1)), native()
    made = spread(spec, forms, OffloadBackend(device, host, layers), D if tied else H)
    got = answered(made, ids)
    want = answered(whole(spec, forms, TorchBackend("cpu", 1)), ids)
    assert float((got - want).norm() / want.norm()) < 2e-3
    assert made.backend.device == "cpu+cpu"
    assert made.backend.name == "reference+cpu"


@pytest.mark.parametrize("layers", [(H, D), (D, H)], ids=lambda s: "".join(x.name[0] for x in s))
def test_mixtures_of_experts_and_norms_behind(layers: Any, tiny: ModuleType) -> None:
    rope = tiny.SPEC.layers[0].rope
    mixture = MixtureSpec(n_experts=4, top_k=2, intermediate=64, normalize=True)
    experts = replace(
        tiny.SPEC, layers=(LayerSpec(rope, experts=True), LayerSpec(rope)), mixture=mixture
    )
    sandwich = replace(
        tiny.SPEC, layers=(LayerSpec(rope), LayerSpec(rope, window=7)),
        norm=replace(tiny.SPEC.norm, after=True), sinks=True, tied=True,
    )  # fmt: skip
    for spec in (experts, sandwich):
        forms, ids = tiny.forms("f16", spec), tiny.ids(20)
        pair = (cast(Any, TorchBackend("cpu", 1)) for _ in range(2))
        made = spread(spec, forms, OffloadBackend(*pair, layers), D if spec.tied else H)
        want = answered(whole(spec, forms, TorchBackend("cpu", 1)), ids)
        assert torch.equal(answered(made, ids), want)


class Counting(TorchBackend):
    """Counts what crosses from and to it, and what is run."""

    def __init__(self, fail_from: int = 1 << 30) -> None:
        super().__init__("cpu", 1)
        self.stretches: list[tuple[int, object]] = []
        self.rows_out: list[int] = []
        self.kv_made = 0
        self.fail_from = fail_from

    def run_layers(self, step: Any, kv: Any, key: object, emit: Any, interrupt: Any) -> bool:
        self.stretches.append((len(kv), key))
        return super().run_layers(step, kv, key, emit, interrupt)

    def to_host(self, array: Any, n_rows: int) -> Any:
        self.rows_out.append(n_rows)
        return super().to_host(array, n_rows)

    def kv_layer(self, n_slots: int, capacity: int, heads: Any, form: str) -> Any:
        self.kv_made += 1
        if self.kv_made > self.fail_from:
            raise DoesNotFitError("full")
        return super().kv_layer(n_slots, capacity, heads, form)


def composed(tiny: ModuleType, layers: Sequence[Side]) -> tuple[Decoder, Counting, Counting]:
    device, host = Counting(), Counting()
    backend = OffloadBackend(cast(Any, device), cast(Any, host), layers)
    return spread(tiny.SPEC, tiny.forms("f16"), backend, H), device, host


def test_the_hidden_state_crosses_once_and_stretches_are_run_by_their_side(
    tiny: ModuleType,
) -> None:
    model, device, host = composed(tiny, (H, H, D))
    cache = KvCache(model.backend, model.spec, 1, 32)
    assert model.forward([1, 2, 3], [Span(0, 0, 3, 0)], cache.layers, [2]) is not None
    assert model.forward([4], [Span(0, 0, 1, 3)], cache.layers, [0]) is not None
    assert (host.stretches, device.stretches) == (
        [(2, ((True, 0), 0))] * 2, [(1, ((True, 0), 1))] * 2,
    )  # fmt: skip
    assert (host.rows_out, device.rows_out) == ([3, 1], [])  # what is in use, no more
    assert [layer.nbytes for layer in cache.layers] == [2 * 2 * 2 * 32 * 32] * 3
    assert (host.kv_made, device.kv_made) == (2, 1)


def test_ops_are_asked_for_once_and_replayed(tiny: ModuleType) -> None:
    model, _, _ = composed(tiny, (H, D, D))
    cache = KvCache(model.backend, model.spec, 1, 32)
    issued = []
    emit = model._issue

    def counting(*arguments: Any) -> Iterator[None]:
        issued.append(arguments)
        return emit(*arguments)

    model._issue = counting  # type: ignore[method-assign]
    for position in range(4):
        model.forward([1], [Span(0, 0, 1, position)], cache.layers, [0])
    assert len(issued) == 1
    other = KvCache(model.backend, model.spec, 1, 32)
    model.forward([1], [Span(0, 0, 1, 0)], other.layers, [0])
    assert len(issued) == 2


def test_an_interrupt_is_heard_between_the_sides(tiny: ModuleType) -> None:
    model, device, host = composed(tiny, (H, H, D))
    cache = KvCache(model.backend, model.spec, 1, 32)
    asked: list[int] = []

    def third() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert model.forward([1, 2], [Span(0, 0, 2, 0)], cache.layers, [1], third) is None
    assert (len(host.stretches), len(device.stretches)) == (1, 0)
    assert model.forward([1, 2], [Span(0, 0, 2, 0)], cache.layers, [1]) is not None


def test_r056_after_a_cache_that_did_not_fit_the_next_one_lies_right(tiny: ModuleType) -> None:
    model, device, _ = composed(tiny, (H, D, D))
    device.fail_from = 1
    with pytest.raises(DoesNotFitError):
        KvCache(model.backend, model.spec, 1, 32)
    device.fail_from = 1 << 30
    cache = KvCache(model.backend, model.spec, 1, 32)
    assert [cast(Any, layer).side for layer in cache.layers] == [H, D, D]
    assert model.forward([1], [Span(0, 0, 1, 0)], cache.layers, [0]) is not None
    with pytest.raises(InternalError, match="other sides"):
        model.forward([1], [Span(0, 0, 1, 0)], [*cache.layers[1:], cache.layers[0]], [0])


def test_a_forked_slot_goes_on_as_its_source(tiny: ModuleType) -> None:
    model, _, _ = composed(tiny, (H, D, H))
    cache = KvCache(model.backend, model.spec, 2, 32)
    model.forward([5, 6, 7], [Span(0, 0, 3, 0)], cache.layers, [2])
    cache.append(0, [5, 6, 7])
    cache.fork(0, 1)
    spans = [Span(0, 0, 1, 3), Span(1, 1, 1, 3)]
    logits = model.forward([8, 8], spans, cache.layers, [0, 1])
    first, second = as_tensor(model.backend.to_host(logits, 2))
    torch.testing.assert_close(first, second)


def test_a_form_the_host_does_not_serve_is_its_refusal(tiny: ModuleType) -> None:
    backend = OffloadBackend(cast(Any, TorchBackend("cpu", 1)), native(1), (H,))
    with pytest.raises(UnavailableError, match="int8"):
        backend.kv_layer(1, 8, tiny.SPEC.heads, "int8")


def test_ops_outside_of_run_layers_run_at_once(tiny: ModuleType) -> None:
    device, host = TorchBackend("cpu", 1), native()
    backend = OffloadBackend(cast(Any, device), host, (H, D))
    made = {}
    for side in Side:
        backend.place(side)
        made[side] = backend.weight(tiny.weight("f16", 64, 64, 1))
    h, step = backend.empty((4, 64)), backend.step(4)
    step.set([3, 1], [Span(0, 0, 2, 0)], [0])
    backend.embed(step, made[H], 2.0, h)
    want = as_tensor(backend.to_host(h, 2)).clone()
    other = backend.empty((4, 64))
    backend.norm_linear(step, h, None, [cast(Any, _linear(made[D]))], other)
    dense = as_tensor(tiny.weight("f16", 64, 64, 1).w).float()
    torch.testing.assert_close(as_tensor(backend.to_host(other, 2)), want @ dense.T)
    backend.load(other, backend.to_host(h, 2))
    assert torch.equal(as_tensor(backend.to_host(other, 2)), want)


def _linear(weight: Any) -> Any:
    from llmrun.kernels.ops import Linear

    return Linear(weight)


class Rated(TorchBackend):
    """Claims to have a card's memory and speed."""

    def __init__(self, bandwidth: float) -> None:
        super().__init__("cpu", 1)
        self._bandwidth = bandwidth

    def measure_bandwidth(self) -> float:
        return self._bandwidth

    def measure_flops(self) -> float:
        return 100 * self._bandwidth

    def free_bytes(self) -> int | None:
        return 17

    def workspace_bytes(self, sizes: Sizes) -> int | None:
        return 5

    def widening(self, kind: str) -> int:
        return int(self._bandwidth)


def test_ceilings_and_memory(tiny: ModuleType) -> None:
    backend = OffloadBackend(cast(Any, Rated(8.0)), cast(Any, Rated(2.0)), (H, D))
    assert backend.measure_bandwidth() == 2.0  # of nothing: the slower one
    for side, rows in ((D, 96), (H, 32)):
        backend.place(side)
        backend.weight(tiny.weight("f16", rows, 64, 0))
        assert backend.widening("int4 g32") == (8 if side is D else 2)
    assert backend.measure_bandwidth() == pytest.approx(4 / (3 / 8 + 1 / 2))
    assert backend.measure_flops() == pytest.approx(400 / (3 / 8 + 1 / 2))
    assert (backend.free_bytes(), backend.workspace_bytes(cast(Any, None))) == (17, 5)
    backend.synchronize()
    backend.release()


@pytest.mark.slow
def test_the_kernels_of_a_gpu_beside_the_native_cpu(tiny: ModuleType) -> None:
    """In Triton's interpreter: nobody prepared what crosses for the kernel that reads it."""
    from llmrun.kernels.gpu.backend import GpuBackend

    forms, ids = tiny.forms("int8 g128"), tiny.ids(5)
    want = answered(whole(tiny.SPEC, forms, TorchBackend("cpu", 1)), ids, 2)
    pair = cast(Any, GpuBackend("cpu")), native()
    got = answered(spread(tiny.SPEC, forms, OffloadBackend(*pair, (H, D, H)), H), ids, 2)
    assert float((got - want).norm() / want.norm()) < 2e-2
