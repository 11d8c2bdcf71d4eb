"""Conversions that read a text: what they write, how much closer it is, and that they go on."""

import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from llmrun.cli import conversion as converting
from llmrun.cli import quantizing
from llmrun.cli.choice import CopyOptions
from llmrun.cli.quantizing import convert
from llmrun.cli.settings import Settings
from llmrun.cli.source import Source, open_source
from llmrun.formats.layout import plan_layout
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.quant.dequantize import dequantize
from llmrun.quant.scheme import find
from llmrun.store.progress import SilentProgress

QUIET = SilentProgress()
TEXT = "".join(f"{n} bottles of beer on the wall, take {n * n} down; " for n in range(150))[:6200]
"""Bytes are tokens here: 4 sequences of 512 from all over it."""

SHARD_BYTES = 16_000


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text to calibrate on."""
    file = tmp_path / "beer.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A text that is read quickly: 512 tokens."""
    file = tmp_path / "short.txt"
    file.write_text(TEXT[:600])
    return file


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards even of a tiny model."""
    monkeypatch.setattr(converting, "plan_layout", partial(plan_layout, shard_bytes=SHARD_BYTES))


def quantized(source: Source, name: str) -> bool:
    return bool(source.checkpoint.tensors[name].kind.startswith(("int", "lut")))


def numbers(source: Source, name: str) -> torch.Tensor:
    form = source.binding.published_tensor(name, source.checkpoint.read)[1]
    return as_tensor(dequantize(form)).float().clone()


def ids_of_text(folder: Path) -> torch.Tensor:
    """The text as it is read: in 4 even parts, of each the first 512 tokens with a BOS."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = [TEXT[i * len(TEXT) // 4 : (i + 1) * len(TEXT) // 4][:511] for i in range(4)]
    encoded = [tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
    return torch.tensor([[256, *ids] for ids in encoded])


def inputs_of_linears(folder: Path) -> dict[str, torch.Tensor]:
    """What each weight is multiplied with [T, K] by transformers in fp32, by module name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen[name] = args[0].reshape(-1, args[0].shape[-1]).clone()

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or name.endswith(".mlp"):
            module.register_forward_pre_hook(partial(hook, name))
    with torch.no_grad():
        model(ids_of_text(folder))
    return seen


def errors(source: Source, copy: Source, seen: dict[str, torch.Tensor]) -> dict[str, float]:
    """Squared error of the outputs of each linear on its real inputs, relative to the outputs."""
    found = {}
    for name in source.binding.held:
        published = source.binding.published[name]
        if not quantized(copy, published):
            continue
        expert = re.sub(
            r"block_sparse_moe\.experts\.\d+\.w[13]$", "mlp", name.removesuffix(".weight")
        )
        if expert not in seen:
            assert name.endswith(".w2.weight")  # of experts: only what goes in is seen
            continue
        x, weight = seen[expert], numbers(source, name)
        right, wrong = x @ weight.T, x @ (numbers(copy, published) - weight).T
        found[name] = float(wrong.square().sum() / right.square().sum())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [("llama", "int4"), ("llama", "nl4"), ("gemma3_text", "int4"), ("mixtral", "int4")],
)
def test_a_text_brings_the_outputs_closer_and_is_recorded(
    tiny_model: Any, settings: Settings, text: Path, tmp_path: Path, model_type: str, scheme: str
) -> None:
    path = tiny_model(model_type)
    made = {}
    for calibrate in ("none", str(text)):
        out = tmp_path / f"out{len(made)}"
        result = convert(str(path), scheme, out, settings, QUIET, CopyOptions(calibrate))
        assert result.coverage.actual_bits == pytest.approx(result.coverage.requested_bits)
        made[calibrate] = open_source(out)
    source, (plain, read) = open_source(path), made.values()
    assert read.binding.unused == plain.binding.unused == {}
    kinds = {name: info.kind for name, info in read.checkpoint.tensors.items()}
    assert kinds == {name: info.kind for name, info in plain.checkpoint.tensors.items()}
    for name in kinds:
        same = bytes(read.checkpoint.read(name).arrays[_codes(read, name)].data) == bytes(
            plain.checkpoint.read(name).arrays[_codes(plain, name)].data
        )
        assert same is not quantized(read, name), name
    seen = inputs_of_linears(path)
    without, weighed = errors(source, plain, seen), errors(source, read, seen)
    assert len(without) > 6
    assert [name for name in without if weighed[name] > without[name]] == []
    assert sum(weighed.values()) < 0.5 * sum(without.values())
    manifest = json.loads((tmp_path / "out1" / "llmrun.json").read_text())
    digest = hashlib.sha256()
    for sequence in ids_of_text(path).tolist():
        digest.update(struct.pack(f"<{len(sequence) + 1}I", len(sequence), *sequence))
    assert manifest["calibration"] == {
        "text": "text of beer.txt, 2,048 tokens",
        "tokens": 2048,
        "sha256": digest.hexdigest(),
    }
    assert json.loads((tmp_path / "out0" / "llmrun.json").read_text())["calibration"] is None
    assert f"`{digest.hexdigest()}`" in (tmp_path / "out1" / "README.md").read_text()


def _codes(source: Source, name: str) -> str:
    return "codes" if quantized(source, name) else "w"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("calibrate", ["none", "random", "bundled", "beer.txt"])
def test_q020_the_same_bytes_twice(
    folder: Any, settings: Settings, text: Path, tmp_path: Path, calibrate: str
) -> None:
    path = folder()
    options = CopyOptions(str(text) if calibrate == "beer.txt" else calibrate)
    for number in (1, 2):
        convert(str(path), "int4", tmp_path / str(number), settings, QUIET, options)
    once, again = files(tmp_path / "1"), files(tmp_path / "2")
    assert once == again
    facts = json.loads(once["llmrun.json"])["calibration"]
    assert (facts is None) is (calibrate == "none")
    if facts is not None:
        named = {"random": "at random", "bundled": "bundled text", "beer.txt": "beer.txt"}
        assert named[calibrate] in facts["text"]
        assert facts["tokens"] == (2048 if calibrate == "beer.txt" else 4096)


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-asym", "nl4", "nf4"])
def test_q020_the_same_bytes_with_any_number_of_threads(
    folder: Any, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    from llmrun.kernels.cpu import quantize as native

    path = folder()
    monkeypatch.setattr(native, "SHARED_FROM", 0)  # else small weights are never shared
    count = native.recommended_threads()
    for threads in (1, 2, 3):
        monkeypatch.setattr(
            native, "recommended_threads", lambda n=threads: replace(count, count=n)
        )
        out = tmp_path / str(threads)
        convert(str(path), scheme, out, settings, QUIET, CopyOptions("none"))
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "3")


def order(path: Path, settings: Settings, calibrate: str) -> quantizing.Order:
    return quantizing.order(str(path), "int4", settings, QUIET, CopyOptions(calibrate))


def planned(asked: quantizing.Order) -> converting.Conversion:
    return quantizing.plan(asked, lambda name, done, total: None)[0]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("calibrate", ["none", "short.txt"])
def test_ctrl_c_leaves_no_folder_and_the_next_run_goes_on(
    folder: Any, settings: Settings, short: Path, tmp_path: Path, calibrate: str
) -> None:
    calibrate = str(short) if calibrate == short.name else calibrate
    path = folder(num_hidden_layers=4)
    whole = tmp_path / "whole"
    convert(str(path), "int4", whole, settings, QUIET, CopyOptions(calibrate))
    assert len(list(whole.glob("*.safetensors"))) > 4
    out, asked = tmp_path / "out", order(path, settings, calibrate)
    n_tensors = len(asked.source.binding.held)
    written: list[str] = []

    def on_tensor(name: str, done: int, total: int) -> None:
        written.append(name)

    for enough in (n_tensors // 2, 3 * n_tensors // 4):
        with pytest.raises(InterruptedError):
            quantizing.quantize(
                asked, planned(asked), out, settings, on_tensor,
                lambda enough=enough: len(written) >= enough,
            )  # fmt: skip
        assert not out.exists()
    assert len(written) < n_tensors  # shards of the first run are not made again
    written.clear()
    quantizing.quantize(asked, planned(asked), out, settings, on_tensor)
    assert 0 < len(written) < 2 * n_tensors // 3
    assert files(out) == files(whole)
    assert not (tmp_path / ".llmrun-unfinished").exists()


KILLED = """
import os, signal, sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from llmrun.cli import conversion, quantizing
from llmrun.cli.choice import CopyOptions
from llmrun.cli.settings import read_settings
from llmrun.formats.layout import plan_layout
from llmrun.store.progress import SilentProgress

path, home, out, text, shard_bytes, kill_at = sys.argv[1:]
conversion.plan_layout = partial(plan_layout, shard_bytes=int(shard_bytes))
settings = read_settings({"LLMRUN_HOME": home}, home=Path(home))
asked = quantizing.order(path, "int4", settings, SilentProgress(), CopyOptions(text))
made, _ = quantizing.plan(asked, lambda *work: None)
left = int(kill_at)

def on_tensor(name, done, total):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

quantizing.quantize(asked, made, Path(out), settings, on_tensor)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
@pytest.mark.usefixtures("small_shards")
def test_q031_a_calibrated_conversion_goes_on_after_a_kill(
    folder: Any, settings: Settings, short: Path, tmp_path: Path
) -> None:
    path, out = folder(num_hidden_layers=4), tmp_path / "out"
    whole = tmp_path / "whole"
    convert(str(path), "int4", whole, settings, QUIET, CopyOptions(str(short)))
    command = [sys.executable, "-c", KILLED, str(path), str(settings.store_root), str(out)]
    done = subprocess.run([*command, str(short), str(SHARD_BYTES), "25"], check=False, timeout=200)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    written: list[str] = []
    asked = order(path, settings, str(short))
    quantizing.quantize(
        asked, planned(asked), out, settings, lambda name, done, total: written.append(name)
    )
    assert 0 < len(written) < len(asked.source.binding.held) - 9
    assert files(out) == files(whole)


def test_another_text_begins_anew(
    folder: Any, settings: Settings, text: Path, tmp_path: Path
) -> None:
    path, out = folder(), tmp_path / "out"
    asked = order(path, settings, str(text))
    with pytest.raises(InterruptedError):
        quantizing.quantize(asked, planned(asked), out, settings, stopped=lambda: True)
    text.write_text(TEXT[::-1])
    convert(str(path), "int4", out, settings, QUIET, CopyOptions(str(text)))
    assert not (tmp_path / ".llmrun-unfinished").exists()
    other = tmp_path / "other"
    convert(str(path), "int4", other, settings, QUIET, CopyOptions(str(text)))
    assert files(out) == files(other)


@pytest.mark.parametrize("scheme", ["nf4", "nf4-dq", "fp4", "fp4-dq"])
def test_tables_of_bitsandbytes_are_written_in_its_layout(
    folder: Any, settings: Settings, tmp_path: Path, scheme: str
) -> None:
    path, out = folder(), tmp_path / "out"
    result = convert(str(path), scheme, out, settings, QUIET)
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "bitsandbytes"
    assert described["bnb_4bit_quant_type"] == scheme[:3]
    assert described["bnb_4bit_use_double_quant"] is scheme.endswith("-dq")
    assert result.coverage.actual_bits == pytest.approx(result.coverage.requested_bits, rel=0.01)
    source, copy = open_source(path), open_source(out)
    for name in source.binding.held:
        if name.endswith("_proj.weight"):
            want = as_tensor(dequantize(find(scheme).quantize(source.checkpoint.read(name).w)))  # type: ignore[attr-defined]
            assert torch.equal(numbers(copy, name), want.float()), name
