"""vLLM's rules, each broken by a plan that keeps all others."""

import pytest

from llmrun.errors import UnavailableError
from llmrun.formats.layout import published_format
from llmrun.formats.planned import Planned
from llmrun.formats.portable import check, dense_instead, violations

DENSE = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (64, 256),
    "self_attn.v_proj": (64, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (512, 256),
    "mlp.up_proj": (512, 256),
    "mlp.down_proj": (256, 512),
}
EXPERTS = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}


def _dense(
    kind: str = "int4 g32", changed: dict[str, str] | None = None, layers: int = 2
) -> list[Planned]:
    """A dense model; ``changed``: other kinds of some modules of layer 1."""
    planned = [Planned("model.embed_tokens.weight", "bf16", (131, 256))]
    for layer in range(layers):
        for name, shape in DENSE.items():
            own = (changed or {}).get(name, kind) if layer == 1 else kind
            planned.append(Planned(f"model.layers.{layer}.{name}.weight", own, shape))
        planned.append(Planned(f"model.layers.{layer}.input_layernorm.weight", "bf16", (256,)))
    return [*planned, Planned("lm_head.weight", "bf16", (131, 256))]


def _experts(
    kind: str = "int4 g32",
    changed: dict[str, str] | None = None,
    shapes: dict[str, tuple[int, int]] | None = None,
) -> list[Planned]:
    """A layer of experts; ``changed``: other kinds of some modules of expert 1."""
    base = "model.layers.0.mlp"
    planned = [Planned(f"{base}.gate.weight", "bf16", (4, 256))]
    for expert in range(4):
        for name, shape in EXPERTS.items():
            own = (changed or {}).get(name, kind) if expert == 1 else kind
            full = f"{base}.experts.{expert}.{name}.weight"
            planned.append(Planned(full, own, (shapes or {}).get(name, shape)))
    return planned


def _broken(planned: list[Planned]) -> set[tuple[str, str]]:
    return {(v.tensor.removeprefix("model.layers."), v.rule) for v in violations(planned)}


@pytest.mark.parametrize(
    "planned",
    [
        _dense("bf16"),
        _dense("int4 g32"),
        _dense("int4 row"),
        _dense("int4 g128 +zero"),
        _dense("int8 g64"),
        _dense(changed={"mlp.down_proj": "int8 g128", "self_attn.o_proj": "bf16"}),
        _dense(changed=dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "int8 g128")),
        _experts("int4 g64"),
        _experts("int8 row"),
    ],
)
def test_what_keeps_every_rule_is_let_through(planned: list[Planned]) -> None:
    assert violations(planned) == ()
    assert dense_instead(planned) == frozenset()
    assert check(planned, "on") == check(planned, "auto") == check(planned, "off") == ()


@pytest.mark.parametrize(("shape", "rule"), [((256, 576 + 64 - 32), "K"), ((96, 512), "N")])
def test_q002_widths_that_marlin_does_not_divide_are_refused_or_kept_at_16_bit(
    shape: tuple[int, int], rule: str
) -> None:
    down = "model.layers.1.mlp.down_proj.weight"
    planned = [t if t.name != down else Planned(down, t.kind, shape) for t in _dense()]
    assert _broken(planned) == {("1.mlp.down_proj.weight", rule)}
    assert dense_instead(planned) == {down}
    assert (
        violations([t if t.name != down else Planned(down, "bf16", shape) for t in planned]) == ()
    )
    with pytest.raises(UnavailableError, match=f"divides .* not so .*{down}") as caught:
        check(planned, "on")
    assert caught.value.exit_code == 9
    assert "keep 1 tensors at 16 bit" in caught.value.next_step
    (said,) = check(planned, "auto")
    assert down in said
    assert check(planned, "off") == ()


def test_q002_what_is_fused_counts_together() -> None:
    """k and v of 32 rows stand beside 256 of q in one weight: 320, which 64 divides."""
    planned = [
        Planned(t.name, t.kind, (32, 256))
        if t.name.endswith(("k_proj.weight", "v_proj.weight"))
        else t
        for t in _dense()
    ]
    assert violations(planned) == ()
    q = "model.layers.0.self_attn.q_proj.weight"
    planned = [Planned(q, t.kind, (288, 256)) if t.name == q else t for t in planned]
    names = {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"}
    assert {v.tensor for v in violations(planned)} == names
    assert dense_instead(planned) == names


def test_many_tensors_are_one_sentence() -> None:
    planned = [
        Planned(t.name, t.kind, (t.shape[0], 288)) if t.name.endswith("up_proj.weight") else t
        for t in _dense(layers=3)
    ]
    (said,) = check(planned, "auto")
    assert "model.layers.0.mlp.up_proj.weight and 2 more" in said


@pytest.mark.parametrize("kind", ["int4 g32 +zero", "int8 g128 +zero"])
def test_q007_experts_are_never_asymmetric(kind: str) -> None:
    rules = {rule for _, rule in _broken(_experts(kind))}
    assert rules == {"symmetric", "format"}
    writing = published_format(_experts(kind))
    assert writing is not None
    assert writing.readers == ("llmrun",)
    with pytest.raises(UnavailableError, match="experts are symmetric"):
        check(_experts(kind), "on")


def test_eight_bits_are_symmetric() -> None:
    assert {rule for _, rule in _broken(_dense("int8 g128 +zero"))} == {"symmetric"}


@pytest.mark.parametrize(
    ("changed", "tensor"),
    [
        ({"self_attn.k_proj": "int8 g128"}, "1.self_attn.k_proj.weight"),
        ({"self_attn.v_proj": "bf16"}, "1.self_attn.v_proj.weight"),
        ({"mlp.up_proj": "int4 g64"}, "1.mlp.up_proj.weight"),
        ({"mlp.up_proj": "int4 g32 +zero"}, "1.mlp.up_proj.weight"),
    ],
)
def test_what_is_fused_has_one_scheme(changed: dict[str, str], tensor: str) -> None:
    planned = _dense(changed=changed)
    assert _broken(planned) == {(tensor, "one scheme")}
    unit = "qkv" if "self_attn" in tensor else ("gate", "up")
    assert {name.split(".")[-2][:-5] for name in dense_instead(planned)} <= set(unit)


def test_all_experts_of_a_layer_have_one_scheme() -> None:
    planned = _experts(changed={"down_proj": "int8 g32"})
    name = "0.mlp.experts.1.down_proj.weight"
    assert _broken(planned) == {(name, "one scheme"), (name, "experts")}
    assert len(dense_instead(planned)) == 12


def test_experts_of_all_layers_have_one_scheme_for_transformers() -> None:
    second = [
        Planned(t.name.replace("layers.0", "layers.1"), t.kind, t.shape)
        for t in _experts("int8 g32")
    ]
    planned = _experts() + second
    assert {rule for _, rule in _broken(planned)} == {"experts"}
    assert dense_instead(planned) == frozenset()  # vLLM loads it
    (said,) = check(planned, "auto")
    assert "transformers: it reads the experts of all layers by one scheme" in said
    assert "and 11 more" in said


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [
        ({"gate_proj": (128, 192), "up_proj": (128, 192), "down_proj": (192, 128)}, "hidden"),
        ({"gate_proj": (96, 256), "up_proj": (96, 256), "down_proj": (256, 96)}, "intermediate"),
    ],
)
def test_experts_have_widths_of_their_own(shapes: dict[str, tuple[int, int]], rule: str) -> None:
    assert {found for _, found in _broken(_experts(shapes=shapes))} == {rule}


def test_embedding_and_head_stay_at_16_bit() -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        planned = [
            t if t.name != name else Planned(name, "int8 g128", (128, 256)) for t in _dense()
        ]
        assert _broken(planned) == {(name, "outer")}
        assert dense_instead(planned) == {name}


def test_q028_what_no_other_engine_loads_is_never_called_portable() -> None:
    for planned in (_dense("lut4 g32"), _dense("int4 g16"), _dense("int4 g32 +min")):
        assert "format" in {rule for _, rule in _broken(planned)}
        with pytest.raises(UnavailableError, match="other engines would not load"):
            check(planned, "on")
        assert check(planned, "off") == ("only llmrun loads the result",)
    tables = [
        Planned(t.name, t.kind, t.shape, table="nf4") if "lut4" in t.kind else t
        for t in _dense("lut4 g64")
    ]
    assert check(tables, "off") == ()  # transformers loads it
    with pytest.raises(UnavailableError, match="other engines would not load"):
        check(tables, "on")
