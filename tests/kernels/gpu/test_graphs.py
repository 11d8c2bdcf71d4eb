"""Graphs and chains on a device that does what it is asked only when it is waited for."""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from llmrun.errors import InternalError
from llmrun.kernels.gpu.arrays import GpuStep
from llmrun.kernels.gpu.chain import RING, Chains, GpuChain
from llmrun.kernels.gpu.device import HostDevice, device_of
from llmrun.kernels.gpu.graphs import Graphs, Launches, shape_of
from llmrun.kernels.gpu.linear import Best
from llmrun.kernels.ops import PickRequest, Sampling, Span
from llmrun.kernels.reference import sampling as reference

CPU = torch.device("cpu")
VOCAB = 40


class FakeDevice:
    """Notes what is asked. A copy arrives when an event behind it is waited for, no sooner."""

    captures = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pending: list[Callable[[], object]] = []
        self.error: Exception | None = None

    def warm_up(self, launches: Sequence[Callable[[], object]]) -> None:
        self.log.append("eager")
        for launch in launches:
            launch()

    def capture(self, launches: Sequence[Callable[[], object]]) -> Callable[[], object]:
        if self.error is not None:
            raise self.error
        self.log.append("capture")

        def replay() -> None:
            self.log.append("replay")
            for launch in launches:
                launch()

        return replay

    def event(self) -> "FakeEvent":
        return FakeEvent(self)

    def on_host(self, like: torch.Tensor, count: int) -> torch.Tensor:
        return torch.full((count, *like.shape), math.nan, dtype=like.dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        value = source.clone()
        self.pending.append(lambda: target.copy_(value))


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.behind: list[Callable[[], object]] = []

    def record(self) -> None:
        self.device.log.append("record")
        self.behind = list(self.device.pending)

    def wait(self) -> None:
        self.device.log.append("wait")
        for arrive in self.behind:
            if arrive in self.device.pending:
                self.device.pending.remove(arrive)
                arrive()


class Model:
    """Each row's logits favour the id that ids and positions on the device say; it counts plans."""

    def __init__(self, n_rows: int = 1, position: int = 5) -> None:
        self.step = GpuStep(8, CPU)
        self.kv: Any = [SimpleKv()]
        self.logits = torch.zeros(n_rows, VOCAB)
        self.plans = 0
        self.n_rows = n_rows
        self.position = position
        self.capturable = True
        self.bests: list[Best | None] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        spans = [Span(row, row, 1, self.position + 3 * row) for row in range(self.n_rows)]
        self.step.set(token_ids, spans, range(self.n_rows))

    def planned(self, best: Best | None) -> Launches:
        self.plans += 1
        self.bests.append(best)
        return Launches([lambda: self.head(best)], self.capturable)

    def head(self, best: Best | None) -> None:
        self.run()
        if best is None:
            return
        for row, logits in enumerate(self.logits[:, : best.vocab]):
            place = int(logits.argmax())  # VOCAB is one tile
            best.ids[row, 0], best.values[row, 0] = place, logits[place]
            best.sums[row, 0] = (logits - logits[place]).exp().sum()

    def run(self) -> None:
        for row in range(self.n_rows):
            self.logits[row] = self.row(int(self.step.ids[row]), int(self.step.positions[row]))

    @staticmethod
    def row(token_id: int, position: int) -> torch.Tensor:
        seed = torch.Generator().manual_seed(1000 * position + token_id)
        return torch.randn(VOCAB, generator=seed)

    def oracle(self, token_id: int, row: int, sampling: Sampling, count: int) -> list[int]:
        """What a loop through the host would say."""
        said = [token_id]
        position = self.position + 3 * row
        for draw in range(count):
            request = PickRequest(sampling, 1 + draw, VOCAB, said)
            logits = self.row(said[-1], position + draw)
            said.append(reference.pick(logits, request).token_id)
        return said[1:]


class SimpleKv:
    """Stands for a layer's cache."""


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def start(
    device: FakeDevice,
    model: Model,
    sampling: Sampling | None = None,
    chains: Chains | None = None,
) -> GpuChain:
    chains = chains or Chains(device, Graphs(device))
    sampling = sampling or Sampling()
    model.begin([7] * model.n_rows)
    requests = [PickRequest(sampling, 1, VOCAB, [7])] * model.n_rows
    chain = chains.start(model.step, model.kv, "key", model.planned, model.logits, requests)
    assert chain is not None
    return chain


# --- graphs -----------------------------------------------------------------------------------


def run(graphs: Graphs, model: Model, key: object, log: list[str]) -> None:
    plan = Launches([lambda: log.append("ran")], model.capturable)
    graphs.run(model.step, model.kv, key, lambda: plan)


def test_a_key_is_run_then_captured_once_then_replayed(device: FakeDevice) -> None:
    graphs, model, ran = Graphs(device), Model(), list[str]()
    for _ in range(4):
        run(graphs, model, "a", ran)
    assert device.log == ["eager", "capture", "replay", "replay", "replay"]
    assert len(ran) == 4  # every call is one real step
    device.log.clear()
    run(graphs, model, "b", ran)
    run(graphs, Model(), "a", ran)  # other memory: other addresses
    assert device.log == ["eager", "eager"]


def test_the_buckets_of_a_step_make_its_shape() -> None:
    step = GpuStep(8, CPU)

    def shape(count: int, position: int, rows: Sequence[int]) -> object:
        step.set([1] * count, [Span(0, 0, count, position)], rows)
        return shape_of(step)

    assert shape(3, 0, [2]) == shape(4, 90, [3])
    assert shape(1, 0, [0]) == shape(1, 100_000, [0])
    assert len({shape(1, 0, [0]), shape(2, 0, [0]), shape(1, 0, [])}) == 3


def test_nothing_is_captured_when_eager_or_decided_on_the_host(device: FakeDevice) -> None:
    model, ran = Model(), list[str]()
    eager = Graphs(device, eager=True)
    for _ in range(3):
        run(eager, model, "a", ran)
    model.capturable = False
    graphs = Graphs(device)
    for _ in range(3):
        run(graphs, model, "a", ran)
    assert device.log == ["eager"] * 6
    assert len(ran) == 6


def test_a_failed_capture_is_an_error_and_tried_again(device: FakeDevice) -> None:
    graphs, model, ran = Graphs(device), Model(), list[str]()
    run(graphs, model, "a", ran)
    device.error = InternalError("not recorded", "report it")
    with pytest.raises(InternalError):
        run(graphs, model, "a", ran)
    device.error = None
    run(graphs, model, "a", ran)
    assert device.log == ["eager", "capture", "replay"]


def test_graphs_keep_neither_steps_nor_caches_alive(device: FakeDevice) -> None:
    graphs = Graphs(device)
    step, layer = GpuStep(4, CPU), SimpleKv()
    gone = [weakref.ref(step), weakref.ref(layer)]
    kept = torch.zeros(1)
    for _ in range(3):
        graphs.run(step, [layer], "a", lambda: Launches([lambda: kept.add_(1)]))  # type: ignore[list-item]
    del step, layer
    gc.collect()
    assert [one() for one in gone] == [None, None]


# --- chains -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.9, top_k=8, top_p=0.9, repeat_penalty=1.3, seed=5)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_chain_says_what_a_host_loop_says(
    device: FakeDevice, sampling: Sampling, n_rows: int
) -> None:
    model = Model(n_rows)
    chain = start(device, model, sampling)
    chain.queue()
    said: list[list[int]] = []
    for _ in range(5):
        chain.queue()  # before the one ahead of it was read
        said.append([one.token_id for one in chain.read()])
    want = [model.oracle(7, row, sampling, 5) for row in range(n_rows)]
    assert [list(row) for row in zip(*said, strict=True)] == want


def test_a_step_is_issued_before_the_one_ahead_is_waited_for(device: FakeDevice) -> None:
    chain = start(device, Model())
    chain.queue()
    for _ in range(3):
        chain.queue()
        chain.read()
    steps = [word for word in device.log if word in ("record", "wait")]
    assert steps == ["record", "record", "wait", "record", "wait", "record", "wait"]


def test_one_capture_serves_all_chains_of_a_step(device: FakeDevice) -> None:
    model = Model()
    chains = Chains(device, Graphs(device))
    answers = []
    for _ in range(3):
        chain = start(device, model, Sampling(temperature=1.0, seed=len(answers)), chains)
        for _ in range(4):
            chain.queue()
        answers.append([chain.read()[0].token_id for _ in range(4)])
        chain.close()
    assert device.log.count("eager") == device.log.count("capture") == 1
    for seed, said in enumerate(answers):
        assert said == model.oracle(7, 0, Sampling(temperature=1.0, seed=seed), 4)


@pytest.mark.parametrize("position", [1021, 4093])
def test_an_answer_of_any_length_is_one_graph(device: FakeDevice, position: int) -> None:
    model = Model(position=position)
    chain = start(device, model)
    for _ in range(6):
        chain.queue()
    assert [chain.read()[0].token_id for _ in range(6)] == model.oracle(7, 0, Sampling(), 6)
    assert [word for word in device.log if word != "record"][:7] == [
        "eager", "capture", *["replay"] * 5,
    ]  # fmt: skip


def test_closing_drops_what_was_not_read(device: FakeDevice) -> None:
    model = Model()
    chains = Chains(device, Graphs(device))
    first = start(device, model, chains=chains)
    for _ in range(3):
        first.queue()
    first.read()
    waits = device.log.count("wait")
    first.close()
    first.close()
    assert device.log.count("wait") == waits
    assert not first.open
    for misuse in (first.queue, first.read):
        with pytest.raises(ValueError, match="closed"):
            misuse()
    again = start(device, model, chains=chains)
    again.queue()
    assert again.read()[0].token_id == model.oracle(7, 0, Sampling(), 1)[0]


def test_no_more_is_issued_than_the_ring_holds(device: FakeDevice) -> None:
    chain = start(device, Model())
    with pytest.raises(ValueError, match="nothing to read"):
        chain.read()
    for _ in range(RING):
        chain.queue()
    with pytest.raises(ValueError, match="unread"):
        chain.queue()


def test_r108_logits_that_are_not_finite_are_an_error_of_their_step(device: FakeDevice) -> None:
    model = Model()
    chain = start(device, model)
    chain.queue()
    good = model.run
    model.run = lambda: model.logits.fill_(math.nan)  # type: ignore[method-assign,assignment]
    chain.queue()
    model.run = good  # type: ignore[method-assign]
    chain.read()
    with pytest.raises(InternalError, match="not finite"):
        chain.read()


def test_an_error_of_a_launch_passes_and_leaves_the_device_usable(device: FakeDevice) -> None:
    model = Model()
    chains = Chains(device, Graphs(device))
    chain = start(device, model, chains=chains)

    def fail() -> None:
        raise KeyboardInterrupt

    good = model.run
    model.run = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        chain.queue()
    chain.close()
    model.run = good  # type: ignore[method-assign]
    again = start(device, model, chains=chains)
    again.queue()
    assert again.read()[0].token_id == model.oracle(7, 0, Sampling(), 1)[0]


@pytest.mark.parametrize(
    "more", [{"bias": [(3, 1.0)]}, {"allowed": [1]}, {"sampling": Sampling(top_logprobs=2)}]
)
def test_what_the_kernels_do_not_choose_has_no_chain(device: FakeDevice, more: Any) -> None:
    model = Model()
    model.begin([7])
    request = PickRequest(**{"sampling": Sampling(), "draw": 0, "vocab": VOCAB, **more})
    chains = Chains(device, Graphs(device))
    assert chains.start(model.step, model.kv, "k", model.planned, model.logits, [request]) is None


def test_steps_that_choose_in_other_ways_are_other_graphs(device: FakeDevice) -> None:
    model = Model()
    chains = Chains(device, Graphs(device))
    hot = Sampling(temperature=1.0, seed=4)
    for sampling in (Sampling(), hot, Sampling(), hot, Sampling(), hot):
        chain = start(device, model, sampling, chains)
        chain.queue()
        assert chain.read()[0].token_id == model.oracle(7, 0, sampling, 1)[0]
        chain.close()
    words = [word for word in device.log if word not in ("record", "wait")]
    assert words == ["eager"] * 2 + ["capture", "replay"] * 2 + ["replay"] * 2
    first, *others = model.bests[1:]  # behind the plan that only tells whether it is captured
    assert first is not None
    assert [one is None for one in others] == [True, False, True]
    assert others[1] is not None
    assert others[1].values is first.values  # a graph holds its address


def test_steps_in_which_the_host_decides_have_no_chain(device: FakeDevice) -> None:
    model = Model()
    model.capturable = False
    model.begin([7])
    chains = Chains(device, Graphs(device))
    request = PickRequest(Sampling(), 0, VOCAB)
    for _ in range(2):
        chain = chains.start(model.step, model.kv, "k", model.planned, model.logits, [request])
        assert chain is None
    assert model.plans == 1
    assert device.log == []


def test_chains_of_two_models_do_not_disturb_each_other(device: FakeDevice) -> None:
    chains = Chains(device, Graphs(device))
    models = [Model(), Model(position=30)]
    samplings = [Sampling(temperature=1.0, seed=1), Sampling(temperature=0.5, seed=2)]
    both = [start(device, m, s, chains) for m, s in zip(models, samplings, strict=True)]
    said: list[list[int]] = [[], []]
    for _ in range(4):
        for number, chain in enumerate(both):
            chain.queue()
            said[number].append(chain.read()[0].token_id)
    assert said == [m.oracle(7, 0, s, 4) for m, s in zip(models, samplings, strict=True)]


def test_a_closed_chain_lets_the_model_go(device: FakeDevice) -> None:
    model = Model()
    chain = start(device, model)
    chain.queue()
    chain.close()
    gone = weakref.ref(model)
    gc.disable()  # nothing but the count of references may be needed: it is a GPU's memory
    try:
        model.step = None  # type: ignore[assignment]
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_the_host_has_nothing_to_wait_for() -> None:
    device = device_of(CPU)
    assert isinstance(device, HostDevice)
    graphs, model = Graphs(device), Model()
    chains = Chains(device, graphs)
    chain = start(device, model, chains=chains)  # type: ignore[arg-type]
    chain.queue()
    chain.queue()
    said = [chain.read()[0].token_id, chain.read()[0].token_id]
    assert said == model.oracle(7, 0, Sampling(), 2)
    with pytest.raises(InternalError, match="cannot be recorded"):
        device.capture([])
