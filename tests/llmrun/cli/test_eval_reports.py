"""Evaluations as tables, charts, HTML and JSON, from records made of known numbers."""

import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest

from llmrun.cli import eval_plot
from llmrun.cli.eval_html import page
from llmrun.cli.eval_lockstep import Measured, TensorError
from llmrun.cli.eval_record import EvalRecord, Scored, Setup, Subject, Weighed, document
from llmrun.cli.eval_table import eval_text, number, plus_minus, verdict_text
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.fidelity import Comparison, Fidelity, Verdict, predictions, verdict

VOCAB = 60


def host(array: np.ndarray) -> HostArray:
    array = np.ascontiguousarray(array, dtype="<f4")
    return HostArray(DType.F32, array.shape, memoryview(array).cast("B"))


def fidelity(noise: float, n: int = 1200) -> Fidelity:
    rng = np.random.default_rng(0)
    ref = rng.normal(0, 1, (n, VOCAB)) * rng.uniform(0.5, 5, (n, 1))
    own = ref + rng.normal(0, noise, (n, VOCAB))
    comparison = Comparison()
    targets = ref.argmax(axis=1).tolist()
    comparison.add(predictions(host(ref), VOCAB), predictions(host(own), VOCAB), targets)
    return comparison.finish()


def record(
    scheme: str = "int4",
    bits: float = 4.5,
    noise: float = 0.5,
    sqnr: tuple[float, ...] = (),
    kl: tuple[float, ...] | None = None,
) -> EvalRecord:
    name = "a-publisher-with-a-long-name/a-model-with-a-long-name-3b-instruct"
    tensors = [
        TensorError(f"model.layers.{i}.mlp.down_proj.weight", scheme, 0.01) for i in range(9)
    ]
    return EvalRecord(
        Subject(name, "main", scheme, name, "main", "not quantized", (), ()),
        Weighed(bits, bits - 0.2, 80_700_000, 81_000_000),
        Measured(
            fidelity(noise) if noise else fidelity(0.0),
            sqnr or tuple(40 - noise * 30 - 0.3 * i for i in range(30)),
            tuple(tensors),
            tuple(noise * 0.01 * (i + 1) for i in range(30)) if kl is None else kl,
        ),
        fidelity(0.004),
        Scored("bundled", "ab" * 32, "cd" * 32, 512, 16, 8192, False),
        Setup("cpu", "cpu", "amx", 2, "f16", 41.2, 1_240_000_000, None, {"cpu": "some"}),
    )


@pytest.fixture(scope="module")
def several() -> list[EvalRecord]:
    return [record("int8", 8.25, 0.06), record("int4", 4.5, 0.5), record("int4-g128", 4.13, 0.6)]


def test_tables_and_charts_fit_80_columns(several: list[EvalRecord]) -> None:
    for records in (several, several[1:2]):
        lines = [
            *eval_text(records).splitlines(),
            *eval_plot.charts(records, 80).splitlines(),
            *verdict_text(records).splitlines(),
        ]
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        assert not any(line != line.rstrip() for line in eval_text(records).splitlines())


def test_a_table_says_what_was_found(several: list[EvalRecord]) -> None:
    text = eval_text(several[1:2])
    found = several[1].fidelity
    assert plus_minus(found.kl.mean, found.kl.se) in text
    assert "1,200 scored" in text
    assert "layers.0.mlp.down_proj" in text
    ladder = eval_text(several)
    rungs = [line.split() for line in ladder.splitlines()[-3:]]
    assert [(rung[0], rung[-1]) for rung in rungs] == [
        (one.subject.scheme, one.verdict) for one in several
    ]


def test_a_child_beyond_all_comparison_fits_the_table() -> None:
    lost = record(noise=300.0)
    assert "over 1,000" in eval_text([lost])
    assert max(map(len, eval_text([lost, lost]).splitlines())) <= 80
    assert page([lost])


def test_numbers_keep_three_digits_and_no_exponent() -> None:
    given = (0.0712345, 1.5, 123.4, 1.23e-5, 0.0, None, math.nan, -0.00123)
    assert [number(value) for value in given] == [
        "0.0712", "1.50", "123", "0.0000123", "0", "-", "-", "-0.00123",
    ]  # fmt: skip
    assert plus_minus(0.0712, 0.00131) == "0.0712 ± 0.0013"


@pytest.mark.parametrize(
    ("kl", "floor", "word"),
    [
        (0.002, 0.0, Verdict.LOSSLESS),
        (0.0021, 0.0001, Verdict.GOOD),
        (0.028, 0.01, Verdict.LOSSLESS),  # a mixture of experts: its floor is high
        (0.03, None, Verdict.GOOD),
        (0.031, 0.0, Verdict.VISIBLE),
        (0.1, 0.0, Verdict.VISIBLE),
        (0.11, 0.0, Verdict.BAD),
    ],
)
def test_verdicts(kl: float, floor: float | None, word: Verdict) -> None:
    assert verdict(kl, floor) is word


def test_nothing_compared_has_no_verdict() -> None:
    assert verdict(None, 0.1) is None


def test_states_that_are_the_same_or_not_finite_are_drawn() -> None:
    odd = record(sqnr=(math.inf, 30.0, math.nan, 20.0), kl=(0.0, 0.01, math.nan, 0.2))
    chart = eval_plot.kl_by_layer(odd, 80)
    assert "xxx" in chart
    assert eval_plot.charts([odd, record("int8", 8.2, 0.1, (40.0,) * 4, (0.001,) * 4)], 80)
    assert page([odd])
    assert "exact" in eval_text([record(noise=0.0, sqnr=(math.inf,) * 3)])


@pytest.mark.parametrize("values", [(), (0.0,) * 4, (math.nan,) * 4])
def test_nothing_to_draw_is_said(values: tuple[float, ...]) -> None:
    assert "nothing to draw" in eval_plot.kl_by_layer(record(kl=values), 80)


def test_more_layers_than_columns_are_drawn() -> None:
    values = tuple(0.2 if i == 77 else 0.01 for i in range(120))
    chart = eval_plot.kl_by_layer(record(kl=values), 80)
    assert max(map(len, chart.splitlines())) <= 80
    assert "█" in chart.splitlines()[1]  # the worst of the layers that share a column
    assert "119" in chart


def test_every_scheme_is_named_in_the_scatter(several: list[EvalRecord]) -> None:
    chart = eval_plot.kl_by_bits(several, 80)
    assert chart.count("●") == 3
    for one in several:
        assert one.subject.scheme in chart
    assert "nothing to draw" in eval_plot.kl_by_bits([record(noise=0.0)] * 2, 80)


class Page(HTMLParser):
    """Collects the elements and checks that they close."""

    VOID = ("meta", "line", "circle", "rect", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("href", "src")]
        if tag not in self.VOID or tag in ("circle", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(several: list[EvalRecord]) -> None:
    text = page(several)
    found = Page(text)
    assert found.open == []
    assert found.links == []
    assert "script" not in found.tags
    assert "http" not in text
    assert found.tags.count("svg") == 5
    assert Page(page(several[:1])).tags.count("svg") == 4


def test_names_in_the_page_are_text() -> None:
    text = page([record("<script>alert(1)</script>")])
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_json_has_null_where_there_is_no_number(several: list[EvalRecord]) -> None:
    odd = record(noise=0.0, sqnr=(math.inf, math.nan, 3.0), kl=(0.0, math.nan, 0.1))
    found = json.loads(json.dumps(document([odd]), allow_nan=False))
    assert found["sqnr_db"] == [None, None, 3.0]
    assert found["kl_by_layer"] == [0.0, None, 0.1]
    assert found["schema"] == "llmrun.eval/1"
    assert [one["verdict"] for one in document(several)["results"]] == [  # type: ignore[attr-defined]
        one.verdict for one in several
    ]
