"""Where parameters lie: fused, stacked, woven and transposed tensors come apart as they were made.

The oracle packs known matrices with torch as a publisher would; our pieces must give them back.
"""

from dataclasses import replace

import pytest
import torch

from llmrun.kernels.forms import Blocks, Dense, Form, GroupInt, Lut16, matrix, rows
from llmrun.kernels.host import DType, HostArray
from llmrun.kernels.reference.arrays import as_tensor, to_host
from llmrun.model.layout import Layout, Piece, Place, half_split_rows, n_rows
from llmrun.model.parameters import Parameter
from llmrun.quant.dequantize import dequantize
from llmrun.quant.roles import Role

LAYER = "model.layers.3"
GATE, UP, DOWN = (f"mlp.experts.*.{name}_proj.weight" for name in ("gate", "up", "down"))
N_EXPERTS, WIDTH, HIDDEN = 3, 6, 64


def parameters(**shapes: tuple[int, ...]) -> dict[str, Parameter]:
    return {
        f"{LAYER}.self_attn.{name}.weight": Parameter(shape, Role.ATTN_QKV)
        for name, shape in shapes.items()
    }


def test_names_that_are_not_mentioned_are_canonical() -> None:
    layout = Layout()
    for name in (f"{LAYER}.mlp.experts.11.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        assert layout.pieces(name, (8, 8), {}) == ((Piece(name),), False)


def test_names_nobody_knows_come_back_as_they_are() -> None:
    pieces, _ = Layout(prefixes=("model.",)).pieces("vision.layers.0.q", (8, 8), {})
    assert pieces == (Piece("vision.layers.0.q"),)


def test_prefixes_and_renames() -> None:
    layout = Layout(
        {
            "mlp.router": Place(("mlp.gate",)),
            "moe.experts.*.w1": Place(("mlp.experts.*.gate_proj",)),
        },
        prefixes=("model.text.", "model."),
    )
    renamed = {
        "model.text.layers.3.mlp.router.weight": f"{LAYER}.mlp.gate.weight",
        "model.layers.3.mlp.router.bias": f"{LAYER}.mlp.gate.bias",
        "model.layers.3.moe.experts.12.w1.weight": f"{LAYER}.mlp.experts.12.gate_proj.weight",
        "model.text.lm_head.weight": "model.lm_head.weight",
        "text.lm_head.weight": "lm_head.weight",
    }
    for name, canonical in renamed.items():
        assert layout.pieces(name, (8, 8), {})[0] == (Piece(canonical),), name


def test_fused_rows_follow_each_other() -> None:
    qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
    layout = Layout({"self_attn.qkv_proj": Place(qkv)})
    wanted = parameters(q_proj=(8, 4), k_proj=(2, 4), v_proj=(2, 4))
    pieces, transposed = layout.pieces(f"{LAYER}.self_attn.qkv_proj.weight", (12, 4), wanted)
    assert not transposed
    assert [piece.rows for piece in pieces] == [range(8), range(8, 10), range(10, 12)]


def test_a_stack_by_its_module_and_a_tensor_by_its_name_do_not_meet() -> None:
    # GGUF calls a stack of experts down_proj.weight; publishers call another one down_proj.
    layout = Layout({"mlp.experts.down_proj": Place((DOWN,), stacked=True, transposed=True)})
    shape = (N_EXPERTS, HIDDEN, WIDTH)
    for name, turned in (("down_proj", True), ("down_proj.weight", False)):
        pieces, transposed = layout.pieces(f"{LAYER}.mlp.experts.{name}", shape, {})
        assert transposed == turned, name
        names = [piece.canonical for piece in pieces]
        assert names == [f"{LAYER}.mlp.experts.{e}.down_proj.weight" for e in range(N_EXPERTS)]
    biases, _ = layout.pieces(f"{LAYER}.mlp.experts.down_proj.bias", (N_EXPERTS, HIDDEN), {})
    assert biases[2] == Piece(
        f"{LAYER}.mlp.experts.2.down_proj.bias", range(2 * HIDDEN, 3 * HIDDEN)
    )


def packed(gate: torch.Tensor, up: torch.Tensor, place: Place) -> torch.Tensor:
    """Experts [E, F, ..] in one tensor, as the place says."""
    joined = torch.stack((gate, up), 2).flatten(1, 2) if place.woven else torch.cat((gate, up), 1)
    return joined.transpose(1, 2).contiguous() if place.transposed else joined


def unpacked(form: Form, place: Place, shape: tuple[int, ...]) -> dict[str, Form]:
    layout = Layout({"stack": place})
    pieces, transposed = layout.pieces(f"{LAYER}.stack", shape, {})
    vector = len(shape) == 2
    whole = matrix(form, vector=vector, transposed=transposed)
    assert whole.shape[0] == n_rows(shape, vector=vector, transposed=transposed)
    parts = {}
    for piece in pieces:
        assert piece.rows is not None
        parts[piece.canonical.removeprefix(f"{LAYER}.")] = rows(whole, piece.rows)
    return parts


@pytest.mark.parametrize("woven", [False, True], ids=["halves", "woven"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_stacks_come_apart(woven: bool, transposed: bool, dtype: torch.dtype) -> None:
    place = Place((GATE, UP), woven=woven, stacked=True, transposed=transposed)
    torch.manual_seed(0)
    gate, up = (torch.randn(N_EXPERTS, WIDTH, HIDDEN).to(dtype) for _ in range(2))
    file = packed(gate, up, place)
    found = unpacked(Dense(to_host(file)), place, tuple(file.shape))
    assert len(found) == 2 * N_EXPERTS
    for name, wanted in ((GATE, gate), (UP, up)):
        for expert in range(N_EXPERTS):
            form = found[name.replace("*", str(expert))]
            assert isinstance(form, Dense)
            assert form.shape == (WIDTH, HIDDEN)
            assert torch.equal(as_tensor(form.w), wanted[expert]), (name, expert)


@pytest.mark.parametrize("woven", [False, True], ids=["halves", "woven"])
def test_stacks_of_biases_come_apart(woven: bool) -> None:
    place = Place((GATE, UP), woven=woven, stacked=True)
    gate, up = torch.randn(N_EXPERTS, WIDTH), torch.randn(N_EXPERTS, WIDTH)
    file = packed(gate, up, place)
    found = unpacked(Dense(to_host(file)), place, tuple(file.shape))
    for name, wanted in ((GATE, gate), (UP, up)):
        for expert in range(N_EXPERTS):
            form = found[name.replace("*", str(expert))]
            assert isinstance(form, Dense)
            assert torch.equal(as_tensor(form.w), wanted[expert])


def noise(*shape: int) -> HostArray:
    return to_host(torch.randint(0, 256, shape, dtype=torch.uint8))


def quantized(kind: str, n: int, k: int) -> GroupInt | Lut16:
    scales = to_host(torch.rand(n, k // 32))
    if kind == "lut4":
        return Lut16(32, noise(n, k // 2), to_host(torch.randn(16)), scales, (n, k))
    mins = to_host(torch.randn(n, k // 32))
    bits = int(kind[3])
    return GroupInt(bits, 32, noise(n, k * bits // 8), scales, mins, (n, k))


@pytest.mark.parametrize("woven", [False, True], ids=["halves", "woven"])
@pytest.mark.parametrize("kind", ["int4", "int8", "lut4"])
def test_quantized_stacks_come_apart(kind: str, woven: bool) -> None:
    place = Place((GATE, UP), woven=woven, stacked=True)
    shape = (N_EXPERTS, 2 * WIDTH, HIDDEN)
    form = quantized(kind, N_EXPERTS * 2 * WIDTH, HIDDEN)
    values = as_tensor(dequantize(form)).view(shape)
    for name, part in unpacked(form, place, shape).items():
        expert, first = int(name.split(".")[2]), "gate" in name
        mine = values[expert, (0 if first else 1) :: 2]
        if not woven:
            mine = values[expert, :WIDTH] if first else values[expert, WIDTH:]
        assert torch.equal(as_tensor(dequantize(part)), mine), name


def test_an_expert_of_a_stack_is_a_view_and_not_a_copy() -> None:
    place = Place((GATE, UP), stacked=True)
    file = to_host(torch.randn(N_EXPERTS, 2 * WIDTH, HIDDEN))
    for part in unpacked(Dense(file), place, file.shape).values():
        assert isinstance(part, Dense)
        assert part.w.data.obj is file.data.obj
    form = quantized("int4", N_EXPERTS * 2 * WIDTH, HIDDEN)
    for part in unpacked(form, place, file.shape).values():
        for name, array in part.arrays.items():
            assert array.data.obj is form.arrays[name].data.obj


def test_of_a_transposed_stack_only_what_is_asked_for_is_made() -> None:
    looked_at = []

    class Watched(HostArray):
        @property
        def data(self) -> memoryview:  # type: ignore[override]
            looked_at.append(True)
            return content.data

    content = to_host(torch.randn(N_EXPERTS, HIDDEN, 2 * WIDTH))
    file = object.__new__(Watched)
    file.__dict__.update(dtype=content.dtype, shape=content.shape)
    place = Place((GATE, UP), woven=True, stacked=True, transposed=True)
    parts = unpacked(Dense(file), place, content.shape)
    assert not looked_at
    part = next(iter(parts.values()))
    assert isinstance(part, Dense)
    assert part.w.data.nbytes == WIDTH * HIDDEN * 4
    assert len(part.w.data.obj) == WIDTH * HIDDEN * 4  # nothing larger stands behind it
    assert len(looked_at) == 1


def test_blocks_of_a_gguf_keep_up_with_the_rows() -> None:
    form = quantized("int4", 24, HIDDEN)
    assert isinstance(form, GroupInt)
    blocks = Blocks(2, noise(24, 36), 2, lambda: None)
    picked = rows(rows(replace(form, blocks=blocks), range(8, 16)), range(1, 8, 2))
    assert isinstance(picked, GroupInt)
    assert picked.blocks is not None
    assert picked.blocks.order is not None
    assert list(picked.blocks.order) == [9, 11, 13, 15]


def test_quantized_matrices_cannot_be_transposed() -> None:
    with pytest.raises(ValueError, match="cannot be transposed"):
        matrix(quantized("int8", 8, HIDDEN), transposed=True)


def test_a_matrix_stays_what_it_is() -> None:
    form = Dense(HostArray(DType.F32, (2, 3), memoryview(bytearray(24))))
    assert matrix(form) is form
    turned = matrix(Dense(to_host(torch.arange(6.0).view(2, 3))), transposed=True)
    assert isinstance(turned, Dense)
    assert torch.equal(as_tensor(turned.w), torch.arange(6.0).view(2, 3).T)


def test_rotary_rows_of_a_part_of_each_head() -> None:
    order = half_split_rows(2, 6, 4)
    assert order == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
