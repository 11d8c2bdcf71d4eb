"""Loading on a card that is not here: the reference claims to be one, with little memory."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmrun.cli import assemble, memory
from llmrun.cli.assemble import LoadedModel, LoadOptions, load
from llmrun.cli.settings import Settings
from llmrun.errors import DoesNotFitError, UnavailableError, UsageError
from llmrun.kernels.dispatch import Candidate
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import BackendInfo, Sizes, Span
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.store.progress import SilentProgress

WORKING = 10_000
MIB = 1 << 20


class Card(TorchBackend):
    """A card of ``free`` bytes; it reads 100 bytes in the time the host reads one."""

    def __init__(self, free: int) -> None:
        super().__init__("cpu", 1)
        self.device = "cuda"
        self._free = free
        self.forms: list[weakref.ref[Form]] = []
        self.most_alive = 0  # of those handed over, while another was read
        self.sizes: Sizes | None = None

    def weight(self, form: Form) -> Any:
        self.forms.append(weakref.ref(form))
        return super().weight(form)

    def widening(self, kind: str) -> int:
        """Asked when a weight was read, before it is handed over."""
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.forms))
        return 0

    def free_bytes(self) -> int | None:
        return self._free

    def workspace_bytes(self, sizes: Sizes) -> int | None:
        self.sizes = sizes
        return WORKING

    def measure_bandwidth(self) -> float:
        return 100 * MIB


class Host(TorchBackend):
    """The host, of which it is known how fast it is."""

    def __init__(self) -> None:
        super().__init__("cpu", 1)

    def measure_bandwidth(self) -> float:
        return 1 * MIB


Install = Callable[[int], Card]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a card with so many free bytes into this machine."""

    def install(free: int) -> Card:
        made = Card(free)
        hosts = {"cuda": lambda: made, "cpu": Host}
        monkeypatch.setattr(assemble.dispatch, "bind", lambda device, *_: hosts[device]())
        monkeypatch.setattr(assemble.dispatch, "candidates", lambda device: ())
        return made

    return install


def opened(model: Path, settings: Settings, said: list[str] | None = None, **options: Any) -> Any:
    wanted = LoadOptions(str(model), quant="none", device="cuda", threads=1, chat=False, **options)
    heard = (lambda _: None) if said is None else said.append
    return load(wanted, settings, SilentProgress(), None, heard)


def logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    cache = loaded.new_cache()
    made = loaded.decoder.forward(ids, [Span(0, 0, len(ids), 0)], cache.layers, [len(ids) - 1])
    return as_tensor(loaded.backend.to_host(made, 1)).clone()


def weights_bytes(loaded: LoadedModel) -> int:
    return loaded.coverage.total.nbytes


def test_all_that_fits_lies_on_the_card(folder: Any, settings: Settings, card: Install) -> None:
    model, made = folder(num_hidden_layers=4), card(MIB * 4)
    said: list[str] = []
    loaded = opened(model, settings, said, offload=True)
    assert (loaded.backend, said, loaded.notes) == (made, [], ())
    assert loaded.context == 128
    assert made.sizes is not None
    assert (made.sizes.hidden, made.sizes.intermediate, made.sizes.vocab) == (64, 128, 260)
    assert made.sizes.largest == 64 * 128


def test_one_tensor_at_a_time_is_in_host_memory(
    folder: Any, settings: Settings, card: Install
) -> None:
    made = card(MIB * 4)
    opened(folder(num_hidden_layers=4), settings)
    assert len(made.forms) == 4 * 7 + 2
    assert made.most_alive == 0


def test_what_does_not_fit_is_refused_with_numbers_and_ways_out(
    folder: Any, settings: Settings, card: Install
) -> None:
    made = card(200_000)
    with pytest.raises(DoesNotFitError, match="of memory of cuda are free") as refused:
        opened(folder(num_hidden_layers=4), settings)
    assert "--offload" in refused.value.next_step
    assert made.forms == []


def test_layers_that_do_not_fit_stay_on_the_host_and_the_price_is_said_before(
    folder: Any, settings: Settings, card: Install
) -> None:
    model = folder(num_hidden_layers=4)
    layer = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64)
    head, cache = 2 * 260 * 64, 2 * 2 * 2 * 16 * 128
    made = card(int(1.03 * (head + 2 * layer)) + 2 * cache + WORKING + layer // 2)
    said: list[str] = []
    loaded = opened(model, settings, said, offload=True)
    assert loaded.backend.device == "cuda+cpu"
    assert [layer.side.name for layer in loaded.new_cache().layers] == ["HOST"] * 2 + ["DEVICE"] * 2
    assert len(made.forms) == 2 * 7 + 1  # two layers and the head
    milliseconds = 1000 * 2 * layer / MIB + 1000 * (2 * layer + 1.03 * head) / (100 * MIB)
    (price,) = said
    assert price.startswith("offload: 2 of 4 layers and the embedding (")
    assert f"{milliseconds:.0f} ms per token" in price
    assert "on cuda and" in price
    whole = load(
        LoadOptions(str(model), quant="none", device="cpu", threads=1, chat=False), settings,
        SilentProgress(),
    )  # fmt: skip
    ids = list(range(20))
    assert torch.equal(logits(loaded, ids), logits(whole, ids))
    assert any("1 threads" in decision for decision in loaded.decisions)


def test_the_price_is_said_before_the_first_weight(
    folder: Any, settings: Settings, card: Install
) -> None:
    model = folder(num_hidden_layers=4)
    made = card(280_000)
    seen: list[int] = []
    wanted = LoadOptions(
        str(model), quant="none", device="cuda", threads=1, chat=False, offload=True
    )
    load(wanted, settings, SilentProgress(), None, lambda _: seen.append(len(made.forms)))
    assert seen == [0]


def test_neither_side_has_room(
    folder: Any, settings: Settings, card: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(280_000)
    monkeypatch.setattr(memory, "free_bytes", lambda: memory.WORKSPACE_BYTES)
    with pytest.raises(DoesNotFitError, match="layers fit on the card; the others need"):
        opened(folder(num_hidden_layers=4), settings, offload=True)


def test_offload_without_a_card_changes_nothing_and_says_so(
    folder: Any, settings: Settings, card: Install
) -> None:
    card(0)
    options = LoadOptions(
        str(folder()), quant="none", device="cpu", threads=1, chat=False, offload=True
    )
    loaded = load(options, settings, SilentProgress())
    assert any("--offload changes nothing" in note for note in loaded.notes)


def test_a_context_the_model_was_not_trained_for_is_refused_with_offload_too(
    folder: Any, settings: Settings, card: Install
) -> None:
    card(280_000)
    with pytest.raises(UsageError, match="128 tokens"):
        opened(folder(num_hidden_layers=4), settings, offload=True, ctx=129)


def test_an_int8_cache_needs_a_backend_that_has_it(
    folder: Any, settings: Settings, card: Install
) -> None:
    made = card(MIB * 4)

    def refuse(*_: object) -> None:
        raise UnavailableError("no int8 here")

    made.kv_layer = refuse  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="no int8"):
        opened(folder(), settings, kv="int8")
    assert made.forms == []


def test_a_cache_that_the_cpu_lacks_is_refused_for_layers_there_not_for_want_of_a_gpu(
    folder: Any, settings: Settings, card: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = folder(num_hidden_layers=4), card(280_000)

    def refuse(self: object, n_slots: int, capacity: int, heads: object, form: str) -> None:
        raise UnavailableError(f"there is no {form}", "use a GPU with --device cuda")

    monkeypatch.setattr(Host, "kv_layer", refuse)
    with pytest.raises(UnavailableError, match="on the CPU: there is no int8") as refused:
        opened(model, settings, kv="int8", offload=True)
    assert "--device cuda" not in refused.value.next_step
    assert "--kv f16" in refused.value.next_step
    assert made.forms == []
    with pytest.raises(UnavailableError) as refused:
        opened(model, settings, kv="f16", offload=True)
    assert "--kv" not in refused.value.next_step


def test_torch_in_place_of_our_kernels_is_said_with_the_reason(
    folder: Any, settings: Settings, card: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(MIB * 4)
    info: Any = BackendInfo("gpu", *(None,) * 3)  # type: ignore[arg-type]
    old = (Candidate(info, "cuda", "compute capability 7.5"),)
    monkeypatch.setattr(assemble.dispatch, "candidates", lambda device: old)
    notes = opened(folder(), settings).notes
    assert any("several times faster" in note and "7.5" in note for note in notes)
