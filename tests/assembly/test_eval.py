"""``llmrun eval`` from names to records: the protocol against transformers, and what it refuses."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from llmrun.cli import app, eval_models
from llmrun.cli.choice import CopyOptions
from llmrun.cli.eval_blocks import Block, aligned
from llmrun.cli.eval_text import Extent
from llmrun.cli.evaluation import EvalOptions, Evaluation, evaluate, prepare
from llmrun.cli.settings import Settings
from llmrun.errors import UsageError
from llmrun.model.streaming import LayerStream
from llmrun.quant.fidelity import Predictions
from llmrun.store.progress import SilentProgress
from llmrun.store.store import Store

CONTEXT, WINDOWS = 64, 3
TEXT = "".join(f"{n} bottles of beer on the wall, take {n * n} down; " for n in range(60))
PRODUCT_KEYS = {
    "schema",
    "model",
    "reference",
    "scheme",
    "bits_per_weight",
    "tokens_scored",
    "kl",
    "top1_agreement",
    "rms_delta_p",
    "ppl",
    "ppl_reference",
    "ppl_ratio",
    "noise_floor",
    "nonfinite",
    "worst_tensors",
    "seconds",
    "peak_host_bytes",
    "text_sha256",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of a few thousand bytes, which are tokens here."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


Compare = Callable[..., Evaluation]


@pytest.fixture
def compare(settings: Settings, text: Path) -> Compare:
    """Evaluate, with quantizers that read no text."""

    def run(model: Path, *schemes: str, on_work: Any = None, **options: Any) -> Evaluation:
        wanted = {
            "text": text,
            "extent": Extent(CONTEXT, None, CONTEXT * WINDOWS),
            "copying": CopyOptions("none"),
            "device": "cpu",
            "threads": 1,
            **options,
        }
        asked = EvalOptions(str(model), schemes, **wanted)
        prepared = prepare(asked, settings, SilentProgress())
        return evaluate(asked, prepared, on_work or (lambda done, total: None))

    return run


def test_a_child_that_is_its_reference(folder: Any, compare: Compare) -> None:
    (record,) = compare(folder(), "none").records
    found = record.fidelity
    assert found.tokens == WINDOWS * (CONTEXT - 1 - CONTEXT // 2)
    assert (found.kl.mean, found.kl.max, found.top1.value, found.rms_delta_p) == (
        0.0,
        0.0,
        1.0,
        0.0,
    )
    assert set(record.measured.sqnr_db) == {float("inf")}
    assert {error.relative_mse for error in record.measured.tensors} == {0.0}
    assert record.measured.kl_by_layer == ()
    assert record.floor.kl.mean is not None
    assert 0 < record.floor.kl.mean < 0.01
    assert (record.verdict, record.weighed.bits_per_weight) == ("lossless-ish", 16.0)


def test_a_child_that_is_its_reference_has_no_kl_behind_any_layer(
    folder: Any, compare: Compare
) -> None:
    (record,) = compare(folder(), "none", by_layer=True).records
    assert record.measured.kl_by_layer == (0.0, 0.0)


def test_kl_behind_the_last_layer_is_that_at_the_end(
    folder: Any, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows short enough that all scored positions are read."""
    monkeypatch.setattr(LayerStream, "rows_at_once", 7)
    extent = Extent(24, None, 24 * WINDOWS)
    records = compare(folder(), "int8", "int4", extent=extent, by_layer=True).records
    for record in records:
        assert record.fidelity.tokens == WINDOWS * 11
        assert record.measured.kl_by_layer[-1] == pytest.approx(record.fidelity.kl.mean, rel=1e-3)
        assert record.measured.kl_by_layer[0] > 0


def test_kl_begins_behind_the_layer_that_is_noisy(
    folder: Any, compare: Compare, tmp_path: Path
) -> None:
    path, noisy = folder(num_hidden_layers=4), tmp_path / "noisy"
    shutil.copytree(path, noisy)
    state = load_file(noisy / "model.safetensors")
    weight = state["model.layers.2.mlp.down_proj.weight"]
    torch.manual_seed(0)
    weight += weight.std() * torch.randn(weight.shape).to(weight.dtype)
    save_file(state, noisy / "model.safetensors", metadata={"format": "pt"})
    (record,) = compare(noisy, against=str(path), by_layer=True).records
    kls = record.measured.kl_by_layer
    assert kls[:2] == (0.0, 0.0)
    assert min(kls[2:]) > 1e-6


def test_positions_targets_and_bos_are_those_of_transformers(folder: Any, compare: Compare) -> None:
    """The mean log-probability over the second half of each window, computed independently."""
    path = folder()
    (record,) = compare(path, "none").records
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    alphabet = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    from transformers import PreTrainedTokenizerFast

    ids = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json")).encode(
        TEXT, add_special_tokens=False
    )
    bos = len(alphabet)  # the first special token
    total = 0.0
    for window in range(WINDOWS):
        part = ids[window * CONTEXT : (window + 1) * CONTEXT]
        part[0] = bos
        with torch.no_grad():
            logp = model(torch.tensor([part])).logits[0, :, : bos + 3].log_softmax(-1)
        total += sum(
            float(logp[position, part[position + 1]])
            for position in range(CONTEXT // 2, CONTEXT - 1)
        )
    expected = np.exp(-total / (WINDOWS * (CONTEXT - 1 - CONTEXT // 2)))
    assert record.fidelity.ppl_reference == pytest.approx(expected, rel=2e-4)  # K and V are f16
    assert record.scored.bos


def test_fewer_bits_are_further_away(folder: Any, compare: Compare) -> None:
    records = compare(folder(), "int8", "int4", "int4-g64").records
    kls = [record.fidelity.kl.mean for record in records]
    assert [record.subject.scheme for record in records] == ["int8", "int4", "int4-g64"]
    assert 0 < kls[0] < min(kls[1:])  # type: ignore[type-var]
    # Behind one layer: how errors of two add up in so small a model is chance.
    noise = [record.measured.sqnr_db[0] for record in records]
    assert noise[0] > noise[1] > noise[2]
    linear = [record.weighed.bits_per_linear_weight for record in records]
    assert linear == [pytest.approx(8.22, abs=0.01), 4.5, 4.25]
    worst = records[1].measured.tensors[0]
    assert 0.003 < worst.relative_mse < 0.02
    assert worst.kind == "int4 g32"


def test_what_is_made_while_loading_is_what_the_store_has(
    folder: Any, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder()
    (kept,) = compare(path, "int4").records
    monkeypatch.setattr(eval_models, "is_kept_in_store", lambda choice, source: False)
    (made,) = compare(path, "int4").records
    assert made.fidelity == kept.fidelity
    assert made.measured == kept.measured
    assert made.weighed.bits_per_weight == kept.weighed.bits_per_weight
    assert made.weighed.file_bytes is None
    assert kept.weighed.file_bytes


def test_two_runs_and_any_number_of_threads_agree(folder: Any, compare: Compare) -> None:
    path = folder()
    once, again = (compare(path, "int4", threads=n).records[0] for n in (1, 2))
    assert once.fidelity == again.fidelity
    assert once.floor == again.floor


def test_a_written_checkpoint_against_its_source(
    folder: Any, compare: Compare, settings: Settings, tmp_path: Path
) -> None:
    path, out = folder(), tmp_path / "int8"
    code, _, _ = command(settings, "quantize", str(path), "-q", "int8", "--calibrate", "none",
                         "-o", str(out))  # fmt: skip
    assert code == 0
    judged = compare(out, against=str(path))
    (apart,) = judged.records
    assert not any("two different models" in note for note in judged.notes)
    (on_the_way,) = compare(path, "int8").records
    assert apart.fidelity == on_the_way.fidelity
    with pytest.raises(UsageError, match="quantized already") as refusal:
        compare(out)
    assert f"made from ({path.name})" in refusal.value.next_step
    record = json.loads((out / "llmrun.json").read_text())
    record["source"]["files"]["model.safetensors"]["bytes"] += 1
    (out / "llmrun.json").write_text(json.dumps(record))
    (said,) = [n for n in compare(out, against=str(path)).notes if "two different models" in n]
    assert path.name in said
    record["source"]["model"] = "org/parent"
    (out / "llmrun.json").write_text(json.dumps(record))
    with pytest.raises(UsageError) as refusal:
        compare(out)
    assert "--against org/parent" in refusal.value.next_step


def test_positions_that_are_not_finite_fail_the_run(
    folder: Any, settings: Settings, text: Path, tmp_path: Path
) -> None:
    path = folder()
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    code, out, err = command(
        settings, "eval", str(broken), "--against", str(path), "--text", str(text), "--json",
        "--context", "64", "--tokens", "62", "--threads", "1",
    )  # fmt: skip
    assert code == 1
    found = json.loads(out)
    assert (found["nonfinite"], found["tokens_scored"], found["kl"]["mean"]) == (62, 0, None)
    assert "62 of 62 positions have logits that are not finite" in err


def test_ctrl_c_ends_the_work(folder: Any, compare: Compare) -> None:
    done = []

    def press(so_far: int, total: int) -> None:
        done.append(so_far / total)
        if len(done) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        compare(folder(), "none", on_work=press, extent=Extent(CONTEXT, None, CONTEXT * 30))
    assert done == sorted(done)
    assert done[-1] < 1


def test_progress_comes_to_its_end(folder: Any, compare: Compare) -> None:
    told: list[tuple[int, int]] = []
    compare(
        folder(), "none", "int8", by_layer=True,
        on_work=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == sorted(told)
    assert told[-1][0] == pytest.approx(told[-1][1], rel=0.01)


def command(settings: Settings, *arguments: str) -> tuple[int, str, str]:
    """Run a command in a process of its own streams: exit code, stdout, stderr."""
    import io

    class Stream(io.TextIOWrapper):
        def __init__(self) -> None:
            super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

        def text(self) -> str:
            self.flush()
            return self.buffer.getvalue().decode()  # type: ignore[attr-defined]

    out, err = Stream(), Stream()
    before = sys.stdout, sys.stderr, os.environ.get("LLMRUN_HOME")
    os.environ["LLMRUN_HOME"] = str(settings.store_root)
    sys.stdout, sys.stderr = out, err
    try:
        app.main([*arguments])
    except SystemExit as left:
        return int(left.code or 0), out.text(), err.text()
    finally:
        sys.stdout, sys.stderr = before[:2]
        os.environ.pop("LLMRUN_HOME")
        if before[2] is not None:
            os.environ["LLMRUN_HOME"] = before[2]
    raise AssertionError


SMALL = ("--context", "64", "--tokens", "62", "--calibrate", "none", "--threads", "1")


def test_json_table_charts_and_report(
    folder: Any, settings: Settings, text: Path, tmp_path: Path
) -> None:
    path = str(folder())
    given = (path, "--text", str(text), *SMALL)
    code, out, _ = command(settings, "eval", *given, "-q", "int8", "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) >= PRODUCT_KEYS
    assert (found["schema"], found["tokens_scored"], found["nonfinite"]) == (
        "llmrun.eval/1", 62, 0,
    )  # fmt: skip
    assert len(found["kl_by_layer"]) == len(found["sqnr_db"]) == 2
    assert {"mean", "se", "median", "p90", "p99", "p99_9", "max"} <= set(found["kl"])
    page = tmp_path / "report.html"
    code, out, err = command(
        settings, "eval", *given, "-q", "int8,int4", "--plot", "--html", str(page)
    )
    assert code == 0
    assert "mean KL against bits per weight" in out
    assert "KL by layer" in out
    assert "verdict by KL" in out
    assert "int4" in page.read_text()
    assert f"report in {page}" in err
    code, out, _ = command(settings, "eval", *given, "-q", "int8,int4", "--json")
    assert [one["scheme"] for one in json.loads(out)["results"]] == ["int8", "int4"]


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ((), 2, "no scheme is named"),
        (("-q", "int3"), 9, "no quantization scheme named 'int3'"),
        (("-q", "int4,int4"), 2, "names int4 twice"),
        (("-q", "int4", "--full"), 2, "--full and --tokens"),
        (("-q", "int4", "--context", "512"), 2, "longer than the 128 tokens"),
        (("-q", "int4", "--html", "/nowhere/at/all.html"), 2, "no place for a file"),
        (("-q", "int4", "--text", "/nowhere.txt"), 2, "cannot be read"),
    ],
)
def test_refusals_say_what_to_do(
    more: tuple[str, ...], code: int, said: str, folder: Any, settings: Settings, text: Path
) -> None:
    path = str(folder())
    found, out, err = command(settings, "eval", path, "--text", str(text), *SMALL, *more)
    assert (found, out) == (code, "")
    assert said in err
    assert len(err.strip().splitlines()) >= 2  # the fault and the next step


def test_a_device_that_cannot_be_used_is_refused_before_anything_is_quantized(
    folder: Any, settings: Settings, text: Path
) -> None:
    more = ("-q", "int8", "--device", "cuda:99")
    found, out, err = command(settings, "eval", str(folder()), "--text", str(text), *SMALL, *more)
    assert (found, out) == (9, "")
    assert "cuda:99 cannot be used" in err
    assert Store(settings.store_root).derived() == []


def test_a_text_too_short_for_one_window(folder: Any, compare: Compare, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UsageError, match="9 tokens; one window takes 64") as refusal:
        compare(folder(), "int8", text=short)
    assert "--context 4" in refusal.value.next_step


def test_a_text_too_short_for_all_windows_is_said(folder: Any, compare: Compare) -> None:
    found = compare(folder(), "none", extent=Extent(CONTEXT, None, 1 << 20))
    assert any("windows of 64 instead of 16384" in note for note in found.notes)


def test_models_that_do_not_belong_together(folder: Any, compare: Compare, tmp_path: Path) -> None:
    path = folder()
    other = tmp_path / "other"
    shutil.copytree(path, other)
    data = json.loads((other / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match="different vocabularies"):
        compare(other, against=str(path))
    shutil.rmtree(other)
    path.rename(other)
    with pytest.raises(UsageError, match=r"3 layers of 64 .* against 2 layers of 64"):
        compare(folder(num_hidden_layers=3), against=str(other))


def test_blocks_of_different_lengths_are_compared_position_by_position() -> None:
    logp = np.arange(20, dtype=np.float32).reshape(10, 2)

    def stream(*lengths: int) -> Any:
        start = 0
        for length in lengths:
            stop = start + length
            made = Predictions(logp[start:stop], np.ones(length, bool))
            yield Block(0, range(start, stop), made)
            start = stop

    found = list(aligned([stream(4, 4, 2), stream(3, 7), stream(10)]))
    assert [list(positions) for _, positions, _ in found] == [
        [0, 1, 2], [3], [4, 5, 6, 7], [8, 9],
    ]  # fmt: skip
    for _, positions, blocks in found:
        for block in blocks:
            assert (block.logp == logp[positions.start : positions.stop]).all()


@pytest.mark.slow
@pytest.mark.network
def test_the_starter_quantized_again(starter_gguf: Path, settings: Settings) -> None:
    code, printed, err = command(
        settings, "eval", str(starter_gguf), "-q", "int8", "--requantize", "--calibrate", "none",
        "--context", "128", "--tokens", "60", "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(printed)
    assert found["scheme"] == "int8"
    assert 0 < found["kl"]["mean"] < 0.01
    assert found["top1_agreement"] > 0.9
    assert 5 < found["ppl_reference"] < 60  # English prose, and not noise
    assert found["text"] == "bundled"
    assert len(found["sqnr_db"]) == 30
