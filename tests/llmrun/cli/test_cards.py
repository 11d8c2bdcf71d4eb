"""Memory plans for cards that are not here: which models fit, with which context, split how."""

from dataclasses import dataclass

import pytest

from llmrun.cli.memory import DEVICE_SHARE, ROUNDED, Need, Room, fit_context, fits
from llmrun.cli.placement import Footprint, Sizing, place
from llmrun.errors import DoesNotFitError
from llmrun.kernels.cuda import working_bytes
from llmrun.kernels.ops import KV_FORMS, Heads, Sizes
from llmrun.kernels.sides import Side
from llmrun.model.decoder import MAX_ROWS, MAX_TOKENS
from llmrun.model.parameters import EMBEDDING, FINAL_NORM, HEAD, layer_name

GIB = 1 << 30
GB = 10**9


@dataclass(frozen=True)
class Shape:
    """Sizes of a published model, from its config."""

    layers: int
    hidden: int
    intermediate: int
    heads: Heads
    vocab: int
    positions: int
    tied: bool = False


MODELS = {
    "1B": Shape(16, 2048, 8192, Heads(32, 8, 64), 128256, 131072, tied=True),
    "3B": Shape(36, 2048, 11008, Heads(16, 2, 128), 151936, 32768, tied=True),
    "8B": Shape(32, 4096, 14336, Heads(32, 8, 128), 128256, 131072),
    "14B": Shape(48, 5120, 13824, Heads(40, 8, 128), 152064, 32768),
    "32B": Shape(64, 5120, 27648, Heads(40, 8, 128), 152064, 32768),
    "70B": Shape(80, 8192, 28672, Heads(64, 8, 128), 128256, 131072),
}
BITS = {"int4": 4.25, "int8": 8.25, "bf16": 16.0}  # with scales of groups of 64
CARDS = {"24": 23.2, "40": 39.0, "80": 78.8, "141": 139.2}  # GiB free beside a CUDA context


def linears(shape: Shape) -> int:
    """Weights of one layer."""
    heads = shape.heads
    queries, keys = heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
    attention = shape.hidden * (2 * queries + 2 * keys)
    return attention + 3 * shape.hidden * shape.intermediate


def footprint(model: str, scheme: str) -> Footprint:
    shape = MODELS[model]
    layer = linears(shape) * BITS[scheme] / 8
    outer = shape.vocab * shape.hidden * max(BITS[scheme], 8.25) / 8
    layers = (layer,) * shape.layers
    return Footprint(layers, outer, 0 if shape.tied else outer, layers)


def need(model: str, scheme: str, kv: str = "f16") -> Need:
    shape = MODELS[model]
    heads = shape.heads
    per_token = shape.layers * 2 * heads.n_kv_heads * heads.head_dim * KV_FORMS[kv]
    sizes = Sizes(
        MAX_TOKENS, MAX_ROWS, shape.hidden, shape.intermediate, shape.vocab, heads,
        shape.hidden * shape.intermediate,
    )  # fmt: skip
    whole = footprint(model, scheme).scaled(ROUNDED).total
    return Need(int(whole), int(per_token), working_bytes(sizes))


def card(name: str) -> Room:
    return Room("memory of cuda", int(CARDS[name] * GIB), on_device=True)


# In tokens of context, rounded down to thousands; 0: does not fit.
TABLE = {
    ("1B", "int4"): {"24": 131, "40": 131, "80": 131, "141": 131},
    ("1B", "bf16"): {"24": 131, "40": 131, "80": 131, "141": 131},
    ("3B", "int8"): {"24": 32, "40": 32, "80": 32, "141": 32},
    ("8B", "int4"): {"24": 131, "40": 131, "80": 131, "141": 131},
    ("8B", "int8"): {"24": 106, "40": 131, "80": 131, "141": 131},
    ("8B", "bf16"): {"24": 51, "40": 131, "80": 131, "141": 131},
    ("14B", "int4"): {"24": 32, "40": 32, "80": 32, "141": 32},
    ("14B", "int8"): {"24": 32, "40": 32, "80": 32, "141": 32},
    ("14B", "bf16"): {"24": 0, "40": 32, "80": 32, "141": 32},
    ("32B", "int4"): {"24": 17, "40": 32, "80": 32, "141": 32},
    ("32B", "int8"): {"24": 0, "40": 20, "80": 32, "141": 32},
    ("32B", "bf16"): {"24": 0, "40": 0, "80": 32, "141": 32},
    ("70B", "int4"): {"24": 0, "40": 2, "80": 119, "141": 131},
    ("70B", "int8"): {"24": 0, "40": 0, "80": 23, "141": 131},
    ("70B", "bf16"): {"24": 0, "40": 0, "80": 0, "141": 7},
}
CASES = [
    (model, scheme, name, thousands)
    for (model, scheme), row in TABLE.items()
    for name, thousands in row.items()
]


@pytest.mark.parametrize(("model", "scheme", "name", "thousands"), CASES)
def test_an_automatic_context_fits_the_card(
    model: str, scheme: str, name: str, thousands: int
) -> None:
    wanted, positions, room = need(model, scheme), MODELS[model].positions, card(name)
    assert room.free_bytes is not None
    if thousands == 0:
        with pytest.raises(DoesNotFitError) as refused:
            fit_context(wanted, None, positions, room)
        assert refused.value.exit_code == 6
        assert f"{wanted.weight_bytes / GIB:.2f} GiB for its weights" in refused.value.what
        assert f"{CARDS[name]:.2f} GiB of memory of cuda are free" in refused.value.what
        for way in ("-q int4", "--offload", "--device cpu", "smaller model"):
            assert way in refused.value.next_step
        return
    context, note = fit_context(wanted, None, positions, room)
    assert context // 1000 == thousands
    assert (note is None) == (context == positions)
    used = wanted.weight_bytes + wanted.workspace_bytes + context * wanted.kv_bytes_per_token
    assert used <= room.free_bytes
    if note is not None:  # nearly all that is left is used
        left = room.free_bytes - wanted.weight_bytes - wanted.workspace_bytes
        assert context * wanted.kv_bytes_per_token > (DEVICE_SHARE - 0.01) * left


def test_a_wanted_context_may_take_all_there_is_and_no_more() -> None:
    wanted, room = need("8B", "bf16"), card("24")
    most = (int(CARDS["24"] * GIB) - wanted.weight_bytes - wanted.workspace_bytes) // 131072
    assert fit_context(wanted, most, 131072, room) == (most, None)
    assert fits(wanted, most, room)
    assert not fits(wanted, most + 1, room)
    with pytest.raises(DoesNotFitError) as refused:
        fit_context(wanted, most + 1, 131072, room)
    assert f"--ctx {most}" in refused.value.next_step
    assert "--kv int8" in refused.value.next_step


def test_an_int8_cache_holds_nearly_twice_the_context() -> None:
    assert KV_FORMS["int8"] == 1 + 2 / 64
    wide, _ = fit_context(need("8B", "bf16"), None, 1 << 20, card("24"))
    narrow, _ = fit_context(need("8B", "bf16", "int8"), None, 1 << 20, card("24"))
    assert narrow / wide == pytest.approx(2 / KV_FORMS["int8"], rel=1e-3)


SPLITS = [
    ("70B", "int4", "24", 34),
    ("70B", "int4", "40", 0),
    ("70B", "int8", "40", 38),
    ("70B", "bf16", "80", 35),
    ("14B", "bf16", "24", 10),
    ("32B", "bf16", "40", 26),
]


@pytest.mark.parametrize(("model", "scheme", "name", "on_host"), SPLITS)
def test_what_does_not_fit_is_split_so_that_the_card_is_full(
    model: str, scheme: str, name: str, on_host: int
) -> None:
    shape, wanted, room = MODELS[model], need(model, scheme), card(name)
    assert room.free_bytes is not None
    whole = footprint(model, scheme)
    on_device = whole.scaled(ROUNDED)
    kv_layer = wanted.kv_bytes_per_token * 4096 // shape.layers
    sizing = Sizing(kv_layer, wanted.workspace_bytes, GIB // 2)
    split = place(on_device, whole, sizing, room, Room("memory", 256 * GIB))
    assert split.n_host == on_host
    assert split.layers == (Side.HOST,) * on_host + (Side.DEVICE,) * (shape.layers - on_host)

    def on_card(layers: int) -> float:
        outer = on_device.embedding if shape.tied else on_device.head
        return wanted.workspace_bytes + outer + layers * (on_device.layers[0] + kv_layer)

    assert on_card(shape.layers - on_host) <= room.free_bytes
    if on_host:  # else the embedding alone makes room
        assert on_card(shape.layers - on_host + 1) > room.free_bytes
    assert split.host_bytes == pytest.approx(on_host * whole.layers[0] + whole.embedding)
    assert split.side(HEAD) is Side.DEVICE
    assert split.side(EMBEDDING) is (Side.DEVICE if shape.tied else Side.HOST)
    assert split.side(FINAL_NORM) is Side.DEVICE
    assert split.side(layer_name(0, "mlp.up_proj.weight")) is (
        Side.HOST if on_host else Side.DEVICE
    )
    assert split.side(layer_name(shape.layers - 1, "mlp.up_proj.weight")) is Side.DEVICE
    device_s, host_s = split.seconds_per_token(4000 * GB, 50 * GB)
    read = (shape.layers - on_host) * whole.layers[0] + whole.head
    assert device_s == pytest.approx(read / (4000 * GB), rel=0.01)
    assert host_s == pytest.approx(on_host * whole.layers[0] / (50 * GB))


def test_a_tied_embedding_stays_with_its_head() -> None:
    whole = Footprint((4.0,) * 4, 10.0, 0.0, (4.0,) * 4)
    split = place(whole, whole, Sizing(1, 2, 0), Room("m", 22, on_device=True), Room("m", 100))
    assert split.layers == (Side.HOST,) * 2 + (Side.DEVICE,) * 2
    assert split.side(EMBEDDING) is Side.DEVICE
    assert (split.device_read, split.host_read, split.host_bytes) == (18.0, 8.0, 8.0)


def test_of_experts_a_token_reads_some() -> None:
    whole = Footprint((8.0,) * 2, 1.0, 1.0, (2.0,) * 2)
    split = place(whole, whole, Sizing(0, 0, 0), Room("m", 10, on_device=True), Room("m", None))
    assert (split.device_read, split.host_read) == (3.0, 2.0)


def test_a_card_without_room_for_a_layer_and_a_host_without_room_for_the_rest() -> None:
    whole = Footprint((4 * GIB,) * 4, 1 * GIB, 1 * GIB, (4 * GIB,) * 4)
    sizing = Sizing(GIB, GIB, GIB)
    with pytest.raises(DoesNotFitError, match="not one layer fits on the card") as refused:
        place(whole, whole, sizing, Room("cuda", 6 * GIB, on_device=True), Room("m", 99 * GIB))
    assert "5.00 GiB" in refused.value.what
    assert "--device cpu" in refused.value.next_step
    with pytest.raises(DoesNotFitError, match="1 of 4 layers fit on the card") as refused:
        place(whole, whole, sizing, Room("cuda", 7 * GIB, on_device=True), Room("m", 16 * GIB))
    assert "17.00 GiB, and 16.00 GiB of m are free" in refused.value.what
    assert refused.value.exit_code == 6
