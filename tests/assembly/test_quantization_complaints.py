"""Complaints about quantizing that no other file holds: see docs/quantization-complaints.md."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmrun.cli.assemble import LoadOptions, load
from llmrun.cli.choice import CopyOptions
from llmrun.cli.eval_text import Extent, read_text
from llmrun.cli.evaluation import EvalOptions, evaluate, prepare
from llmrun.cli.quantizing import convert
from llmrun.cli.settings import Settings
from llmrun.cli.source import open_source
from llmrun.formats import own_format, portable
from llmrun.kernels.cpu import library as native
from llmrun.kernels.forms import ROW, nbytes
from llmrun.quant import scheme as schemes
from llmrun.quant.roles import Role
from llmrun.store.progress import SilentProgress

QUIET = SilentProgress()


@pytest.mark.parametrize("model_type", ["mixtral", "granitemoe", "gpt_oss"])
def test_q006_experts_shrink_by_60_percent(
    tiny_model: Any, settings: Settings, tmp_path: Path, model_type: str
) -> None:
    path = tiny_model(model_type)
    options = {"allow_partial": True, "calibrate": "none"}
    loaded = load(LoadOptions(str(path), quant="int4", device="cpu", **options), settings, QUIET)  # type: ignore[arg-type]
    experts = loaded.coverage.roles[Role.EXPERTS]
    assert experts.nbytes <= 0.4 * 2 * experts.parameters
    assert loaded.decoder.weight_bytes < 0.6 * 2 * loaded.coverage.total.parameters
    if model_type == "mixtral":  # which files can hold, expert by expert
        convert(str(path), "int4", tmp_path / "out", settings, QUIET, CopyOptions("none"))
        sizes = [
            {name: info.nbytes for name, info in open_source(folder).checkpoint.tensors.items()}
            for folder in (path, tmp_path / "out")
        ]
        dense, packed = (
            sum(size for name, size in own.items() if ".experts." in name) for own in sizes
        )
        assert 0 < packed <= 0.4 * dense


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "int4-asym", "nl4", "nf4", "fp4-dq"])
def test_q022_no_dense_copy_hides_in_memory(folder: Any, settings: Settings, quant: str) -> None:
    path = folder(tie_word_embeddings=True)
    options = LoadOptions(str(path), quant=quant, device="cpu", threads=1, calibrate="none")
    loaded = load(options, settings, QUIET)
    (copy,) = (item.path for item in _store(settings)) if quant != "none" else (path,)
    source, stored = open_source(copy), 0
    for name, form in source.tensors(lambda _, form: form):
        if len(form.shape) == 2 and source.binding.parameters[name].role is not Role.EMBEDDING:
            stored += nbytes(form)
    n, k = source.binding.parameters["model.embed_tokens.weight"].shape
    outer = 2 * n * k if quant == "none" else n * k + 2 * n * k // 64  # int8 in groups of 64
    padding = 16 * outer // n  # rows lie in panels of 16: the vocabulary's last one is filled up
    assert loaded.decoder.weight_bytes < loaded.coverage.total.nbytes + padding
    if quant in ("none", "int8", "int4"):  # stored as kernels hold them
        assert 0 <= loaded.decoder.weight_bytes - stored - outer < padding


def _store(settings: Settings) -> list[Any]:
    from llmrun.store.store import Store

    return Store(settings.store_root).derived()


def test_q024_kernels_are_named_for_every_op_and_form(command: Any) -> None:
    shown = command("doctor", "--json")
    assert shown.code == 0, shown.err
    rows = {(row["op"], row["form"]): row["backend"] for row in json.loads(shown.out)["kernels"]}
    for op in ("embed", "norm_linear", "linear_add", "norm_gate_up", "norm_head", "moe_add"):
        for form in ("bf16", "int4", "int8", "lut4"):
            assert rows[op, form], (op, form)


def test_q024_a_load_says_what_computes(folder: Any, command: Any) -> None:
    answer = command(
        "chat", str(folder()), "-q", "int4", "--calibrate", "none", "-v", "-n", "2", asked=b"Hello"
    )
    assert answer.code == 0, answer.err
    assert re.search(r"int4 \(\d\.\d\d bits per weight\) · cpu \(\w+\)", answer.err)
    if native.problem() is None:
        assert re.search(r"chosen: device cpu \(\w+ kernels for \w+\)", answer.err)


def test_q026_documented_groups_are_accepted_groups() -> None:
    for name, scheme in schemes.schemes().items():
        if scheme.group == ROW:
            assert "a scale per row" in scheme.summary
            continue
        assert scheme.group in schemes.GROUPS
        assert f" {scheme.group} weights" in scheme.summary or name.endswith("-dq"), name
        said = re.search(r"-g(\d+)$", name)
        assert said is None or int(said[1]) == scheme.group
        for group in schemes.GROUPS:
            assert schemes.fitting_group(scheme.group, group) == min(group, scheme.group)
    assert set(schemes.GROUPS) <= set(portable.GROUPS)
    assert set(schemes.GROUPS) <= set(own_format._GROUPS)


def shortened(starter: Path, out: Path, n_layers: int) -> Path:
    """The first layers of the starter: real weights, and an answer of sorts."""
    out.mkdir()
    state = load_file(starter / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in state.items()
        if "layers." not in name or int(name.split(".")[2]) < n_layers
    }
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((starter / "config.json").read_text())
    config["num_hidden_layers"] = n_layers
    config.pop("layer_types", None)
    (out / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((starter / name).read_bytes())
    return out


@pytest.mark.slow
@pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))
def test_q029_a_text_of_one_kind_does_not_harm_another(
    starter_folder: Path, settings: Settings, tmp_path: Path
) -> None:
    path = shortened(starter_folder, tmp_path / "short", 4)
    code = tmp_path / "code.py"
    code.write_text(Path(argparse.__file__).read_text()[:6200])
    paragraphs = read_text(None).text.split("\n\n")
    prose = tmp_path / "prose.txt"
    prose.write_text(
        "\n\n".join(p for p in paragraphs if len(p) > 200 and not set("{}<>;=_#|") & set(p))
    )
    divergences = {}
    for calibrate in ("none", str(code)):
        options = EvalOptions(
            str(path), ("int4",), text=prose, extent=Extent(256, None, 1024), device="cpu",
            copying=CopyOptions(calibrate),
        )  # fmt: skip
        prepared = prepare(options, settings, QUIET)
        (record,) = evaluate(options, prepared, lambda done, total: None).records
        assert record.fidelity.kl.mean is not None
        divergences[calibrate] = record.fidelity.kl.mean
    assert divergences[str(code)] < 0.8 * divergences["none"]
