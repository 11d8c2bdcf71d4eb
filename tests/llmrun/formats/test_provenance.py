"""The facts of a checkpoint: the same in llmrun.json, in the headers and in the card."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.formats.layout import plan_layout
from llmrun.formats.planned import Planned
from llmrun.formats.provenance import Provenance, license_of, model_card
from llmrun.kernels.host import DType

MADE = Provenance(
    tool="0.3.0",
    model="acme/tiny",
    revision="0123abc",
    files={"model.safetensors": {"bytes": 4, "sha256": "f" * 64}, "config.json": {"bytes": 2}},
    scheme="int4",
    recipe={"widened": ["layer 1 down"]},
    calibration={"text": "bundled", "tokens": 2048, "sha256": "c" * 64},
    license={"license": "apache-2.0"},
)
NORM = Planned("norm.weight", "bf16", (64,))


def _card(kind: str, made: Provenance = MADE, **more: str) -> str:
    planned = [Planned("a.weight", kind, (64, 128), **more), NORM]  # type: ignore[arg-type]
    return model_card(made, plan_layout(planned, DType.BF16, {})).decode()


def test_the_document_is_json_and_the_metadata_words() -> None:
    document = json.loads(json.dumps(MADE.document))
    assert document["source"]["files"]["model.safetensors"]["sha256"] == "f" * 64
    assert document["widened"] == ["layer 1 down"]
    assert MADE.metadata == {
        "format": "pt",
        "llmrun": "0.3.0",
        "source": "acme/tiny",
        "revision": "0123abc",
        "scheme": "int4",
        "calibration": "c" * 64,
    }
    bare = replace(MADE, calibration=None, revision=None)
    assert bare.metadata.keys() == {"format", "llmrun", "source", "scheme"}


@pytest.mark.parametrize(
    ("kind", "more", "loads", "does_not"),
    [
        ("int4 g32", {}, ("vLLM", "transformers", "decompresses", "llmrun"), ("bitsandbytes",)),
        ("lut4 g64", {"table": "nf4"}, ("transformers", "bitsandbytes"), ("vLLM", "decompresses")),
        ("lut4 g32", {}, ("llmrun", "nothing else"), ("vLLM", "transformers")),
        ("bf16", {}, ("any program that reads safetensors",), ("vLLM",)),
    ],
)
def test_the_card_says_what_loads_it(
    kind: str, more: dict[str, str], loads: tuple[str, ...], does_not: tuple[str, ...]
) -> None:
    card = _card(kind, **more)
    for name in loads:
        assert name in card
    for name in does_not:
        assert name not in card
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: acme/tiny\n")
    assert "revision `0123abc`" in card
    assert "c" * 64 in card


def test_the_card_says_what_transformers_reads_of_zero_points_and_mixes() -> None:
    assert "dequantize=True" in _card("int4 g32 +zero")
    assert "dequantize=True" not in _card("int4 g32")
    for planned in (
        [
            Planned("a.weight", "int4 g32 +zero", (64, 128)),
            Planned("b.weight", "int8 row", (8, 64)),
        ],
        [
            Planned(f"layers.{n}.mlp.experts.0.up_proj.weight", kind, (64, 128))
            for n, kind in enumerate(("int4 g32", "int8 g32"))
        ],
    ):
        card = model_card(MADE, plan_layout(planned, DType.BF16, {})).decode()
        assert "transformers does not read this mix" in card
        assert "- vLLM" in card


def test_a_folder_of_the_users_is_no_base_model() -> None:
    card = _card("int4 g32", replace(MADE, model="/home/me/model", license=None, calibration=None))
    assert "base_model" not in card
    assert "license" not in card
    assert card.startswith("---\nlibrary_name: transformers\n---\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- x\n---\n# Hi", {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: 'acme'\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_name": "acme", "license_link": "LICENSE"},
        ),
        ("# Hi\nlicense: mit", None),
        ("---\ntags: []\n---\nlicense: mit", None),
        ("---\nlicense: mit", None),
        ("", None),
        ("\ufeff---", None),
    ],
)
def test_the_licence_is_read_from_the_front_matter(
    text: str, found: dict[str, str] | None, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert license_of(tmp_path) == found
    assert license_of(tmp_path / "absent") is None


def test_the_card_does_not_promise_what_vllm_refuses() -> None:
    wide = [Planned("a.weight", "int4 g32", (128, 128))]
    narrow = [Planned("a.weight", "int4 g32", (128, 96))]
    right, wrong = (
        model_card(MADE, plan_layout(planned, DType.BF16, {})).decode()
        for planned in (wide, narrow)
    )
    assert "`vllm serve DIR`" in right
    assert "vLLM may refuse it" in wrong
    assert "128 divides the inputs, not so 96" in wrong
