"""The commands about models: pull, list, show, rm, quantize, doctor; and bench."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.cli import fetching
from llmrun.cli import quantizing as making
from llmrun.errors import DownloadError
from llmrun.store.derived import key_for
from llmrun.store.manifest import Manifest
from llmrun.store.model import FileRecord, LocalModel
from llmrun.store.progress import Progress
from llmrun.store.store import Store

REVISION = "ab" * 20


@pytest.fixture
def store(environment: dict[str, str]) -> Store:
    """The store of the fake user, empty."""
    return Store(Path(environment["HOME"]) / ".cache" / "llmrun")


@pytest.fixture
def held(store: Store) -> LocalModel:
    """A model of 1,000 bytes in it, and a quantized copy of 400."""
    target = store.root / "models" / "org-name-0123456789ab" / REVISION
    made = store.root / "staging" / "by-hand"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_bytes(b"x" * 1000)
    files = (FileRecord("model.safetensors", 1000, "cd" * 32),)
    manifest = Manifest(
        kind="model",
        source="hub",
        origin="org/name",
        revision=REVISION,
        opens="",
        files=files,
        alias="short",
    )
    target.parent.mkdir(parents=True)
    store.publish(made, target, manifest)
    (model,) = store.models()

    def write(folder: Path) -> None:
        (folder / "w.safetensors").write_bytes(b"y" * 400)

    store.ensure(key_for(model, "int4 v1"), write)
    return model


def test_an_empty_store_says_how_to_go_on(llmrun: Any) -> None:
    result = llmrun("list")
    assert (result.code, result.out) == (0, "")
    assert "llmrun pull" in result.err
    assert json.loads(llmrun("list", "--json").out) == {"models": [], "quantized": []}


def test_list_shows_models_and_their_copies(llmrun: Any, held: LocalModel) -> None:
    lines = llmrun("list").out.splitlines()
    assert lines[1].split() == ["short", *lines[1].split()[1:3], "hub", "org/name", "ab" * 6, "ok"]
    assert lines[2].startswith("  int4 v1 ")
    assert lines[2].split()[-4:] == ["made", "from", "org/name", "ok"]
    document = json.loads(llmrun("list", "--json").out)
    assert document["models"][0]["revision"] == REVISION
    assert document["quantized"][0]["recipe"] == "int4 v1"


def test_list_puts_a_copy_below_its_model_or_apart(
    llmrun: Any, held: LocalModel, store: Store
) -> None:
    shutil.rmtree(held.path)
    (copy,) = [line for line in llmrun("list").out.splitlines() if "int4 v1" in line]
    assert copy.startswith("int4 v1 ")


def test_list_names_damage(llmrun: Any, held: LocalModel) -> None:
    (held.path / "model.safetensors").write_bytes(b"short")
    assert "damaged: " in llmrun("list").out


def test_the_catalog_is_listed_with_its_default(llmrun: Any) -> None:
    document = json.loads(llmrun("list", "--catalog", "--json").out)
    names = [entry["alias"] for entry in document["models"]]
    assert document["default"] in names
    shown = llmrun("list", "--catalog")
    assert f"{document['default']} *" in shown.out
    assert "* is used when" in shown.err


def test_rm_says_what_went(llmrun: Any, held: LocalModel, store: Store) -> None:
    result = llmrun("rm", "short")
    assert result.code == 0
    assert "removed short" in result.err
    assert "int4 v1" in result.err
    assert store.models() == []
    assert store.derived() == []


def test_rm_as_json(llmrun: Any, held: LocalModel) -> None:
    document = json.loads(llmrun("rm", "org/name", "--json").out)
    assert len(document["removed"]) == 2
    assert document["bytes"] >= 1400


def test_rm_of_something_unknown_is_3(llmrun: Any, store: Store) -> None:
    result = llmrun("rm", "nothing")
    assert result.code == 3
    assert "llmrun list" in result.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with two tensors."""
    import numpy
    from safetensors.numpy import save_file

    folder = tmp_path / "tiny"
    folder.mkdir()
    tensors = {
        "model.norm.weight": numpy.ones(8, numpy.float32),
        "model.embed_tokens.weight": numpy.ones((4, 8), numpy.float16),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_show_counts_bits_from_the_headers(llmrun: Any, folder: Path) -> None:
    document = json.loads(llmrun("show", str(folder), "--json").out)
    assert document["weights"]["parameters"] == 40
    assert document["weights"]["bytes"] == 8 * 4 + 32 * 2
    assert document["weights"]["bits_per_weight"] == pytest.approx(8 * 96 / 40)
    assert document["config"]["layers"] == 2
    text = llmrun("show", str(folder)).out
    assert "19.20" in text
    assert "hidden size" in text
    # Its files are readable, but nothing would load it.
    assert "num_attention_heads" in document["refused"]
    assert "cannot be loaded" in text


def test_show_of_a_model_that_is_not_here(llmrun: Any) -> None:
    text = llmrun("show", "smollm2-135m").out
    assert "Apache-2.0" in text
    assert "llmrun pull smollm2-135m" in text
    assert llmrun("show", "no such model").code == 3


def test_pull_shows_where_the_model_is(
    llmrun: Any, held: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def fetch(
        name: str, settings: object, progress: Progress, revision: object, *, update: bool
    ) -> LocalModel:
        asked.append((name, revision, update))
        progress.start("model.safetensors", 1000)
        progress.advance(1000)
        progress.finish()
        return held

    monkeypatch.setattr(fetching, "fetch_model", fetch)
    result = llmrun("pull", "org/name", "--revision", "main", "--update")
    assert asked == [("org/name", "main", True)]
    assert result.out == ""
    assert "model.safetensors (1.00 kB) ..." in result.err
    assert str(held.path) in result.err
    quiet = llmrun("pull", "org/name", "--json", "--quiet")
    assert quiet.err == ""
    assert json.loads(quiet.out)["origin"] == "org/name"


def test_a_failed_pull_is_4(llmrun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise DownloadError("The network is gone.", "Try again.")

    monkeypatch.setattr(fetching, "fetch_model", fail)
    assert llmrun("pull", "org/name").code == 4


@pytest.fixture
def quantizing(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """Quantizing without any work; holds the folders that were asked for."""
    asked: list[Path | None] = []

    def order(name: str, *arguments: object, **options: object) -> object:
        return SimpleNamespace(name=name)

    def plan(asked_for: object, on_work: object) -> object:
        content = SimpleNamespace(layout=SimpleNamespace(planned=()))
        made = SimpleNamespace(quantized=3, predicted_bytes=5000, content=content)
        return made, ("a text was read",)

    def quantize(
        asked_for: object,
        conversion: object,
        out: Path | None,
        settings: object,
        on_tensor: Callable[[str, int, int], None],
        stopped: object,
    ) -> object:
        asked.append(out)
        on_tensor("a", 40, 100)
        on_tensor("b", 100, 100)
        return making.QuantizeResult(out or Path("store"), fakes.loaded().coverage, 4321)

    monkeypatch.setattr(making, "order", order)
    monkeypatch.setattr(making, "kept", lambda asked_for, settings: None)
    monkeypatch.setattr(making, "plan", plan)
    monkeypatch.setattr(making, "quantize", quantize)
    return asked


def test_quantize_shows_plan_and_coverage(llmrun: Any, quantizing: list[Path | None]) -> None:
    result = llmrun("quantize", "fake", "-q", "int4", "-o", "out")
    assert result.code == 0
    assert quantizing == [Path("out")]
    assert "3 weights to int4" in result.err
    assert "note: a text was read" in result.err
    assert "4.32 kB in out" in result.err
    role, *_, bits = result.out.splitlines()[1].split()
    assert (role, bits) == ("down", "4.000")


def test_a_dry_run_makes_nothing(llmrun: Any, quantizing: list[Path | None]) -> None:
    result = llmrun("quantize", "fake", "-q", "int4", "--dry-run")
    assert quantizing == []
    assert "5.00 kB" in result.err


def test_ctrl_c_says_that_the_work_goes_on(
    llmrun: Any, quantizing: list[Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not arguments[-1]():  # type: ignore[operator]
            pass
        raise InterruptedError

    monkeypatch.setattr(making, "quantize", pressed)
    result = llmrun("quantize", "fake", "-q", "int4", "-o", "out")
    assert (result.code, result.out) == (130, "")
    assert result.err.rstrip().endswith("run the same command again to go on behind them.")


def test_a_copy_that_is_there_is_not_made_again(
    llmrun: Any, quantizing: list[Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "kept", lambda asked_for, settings: Path("derived/copy"))
    result = llmrun("quantize", "fake", "-q", "int4")
    assert (result.code, quantizing) == (0, [])
    assert "fake is in the store in int4 already: derived/copy" in result.err
    assert "llmrun chat fake -q int4" in result.err


def test_quantize_refuses_an_unknown_scheme(llmrun: Any, quantizing: list[Path | None]) -> None:
    assert llmrun("quantize", "fake", "-q", "int3").code == 9


@pytest.mark.slow
def test_doctor_names_what_is_used_and_shows_no_token(llmrun: Any, held: LocalModel) -> None:
    env = {"HF_TOKEN": "hf_canary_1234"}
    document = json.loads(llmrun("doctor", "--json", env=env).out)
    assert document["token"] == {"source": "HF_TOKEN", "ends_with": "1234"}
    assert document["usable_processors"] >= 1
    assert document["store_free_bytes"] > 0
    assert document["models"][0]["name"] == "short"
    assert {row["op"] for row in document["kernels"]} >= {"attend", "pick"}
    text = llmrun("doctor", env=env)
    assert "hf_canary" not in text.out + text.err
    assert "...1234 from HF_TOKEN" in text.out


def test_bench_table_has_every_measure(llmrun: Any) -> None:
    result = llmrun("bench", "-p", "32", "-n", "30", "-r", "2")
    assert result.code == 0
    for word in ("TTFT", "ITL", "prefill", "decode", "MFU", "MBU", "p95", "peak memory", "-bound"):
        assert word in result.out
    assert "prompt 32 + 30 generated, 2 repeats" in result.out
    assert "n too small" in result.out, "two values of TTFT have no p95"


BENCH_KEYS = {
    "model", "revision", "scheme", "bits_per_weight",
    "device", "backend", "threads", "env",
    "prompt_tokens", "generated_tokens", "depth_tokens", "batch", "repeats",
    "ttft_ms", "itl_ms", "prefill_tokens_per_s", "decode_tokens_per_s",
    "load_ms", "peak_host_bytes", "peak_device_bytes",
    "weight_bytes_per_token", "kv_bytes_per_token",
    "measured_bandwidth_bytes_per_s", "measured_flops_per_s",
    "mbu", "mfu", "verdict", "ttft_from", "wait_share", "warnings",
}  # fmt: skip


def test_bench_makes_a_cache_of_the_wanted_size(
    llmrun: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacities: list[int] = []
    kv_layer = fakes.Backend.kv_layer

    def noted(self: Any, n_slots: int, capacity: int, *shape: object) -> object:
        capacities.append(capacity)
        return kv_layer(self, n_slots, capacity, *shape)

    monkeypatch.setattr(fakes.Backend, "kv_layer", noted)
    assert llmrun("bench", "-p", "8", "-n", "4", "-r", "1", "--ctx", "64").code == 0
    assert llmrun("bench", "-p", "8", "-n", "4", "-r", "1").code == 0
    assert capacities == [64, 12]


@pytest.mark.parametrize(
    ("arguments", "room"), [(["--ctx", "11"], "--ctx 11"), ([], "a context of 4,096")]
)
def test_bench_refuses_what_does_not_fit_by_the_names_of_its_options(
    llmrun: Any, arguments: list[str], room: str
) -> None:
    n_prompt = "8" if arguments else "4093"
    result = llmrun("bench", "-p", n_prompt, "-n", "4", *arguments)
    assert (result.code, result.out) == (7, "")
    assert f"-p {n_prompt} and -n 4" in result.err
    assert room in result.err


def test_bench_json_has_the_documented_keys(llmrun: Any) -> None:
    result = llmrun("bench", "-p", "8", "-n", "4", "-r", "1", "-o", "json", env={"COLUMNS": "20"})
    document = json.loads(result.out)
    assert document["schema"] == "llmrun.bench/1"
    (record,) = document["results"]
    assert set(record) == BENCH_KEYS
    assert record["generated_tokens"] == 4


def test_bench_markdown_is_a_table(llmrun: Any) -> None:
    result = llmrun("bench", "-p", "8", "-n", "4", "-r", "1", "-o", "md")
    rows = [line for line in result.out.splitlines() if line.startswith("|")]
    assert len(rows) > 8
    assert {row.count("|") for row in rows} == {4}
