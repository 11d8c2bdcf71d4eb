"""Mixed recipes from ``--target-bpw`` to files that other programs load; copies in the store."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from llmrun.cli.assemble import LoadOptions, load
from llmrun.cli.choice import Choice, CopyOptions
from llmrun.cli.quantizing import convert, order, plan, quantize, recipe
from llmrun.cli.settings import Settings
from llmrun.cli.source import open_source
from llmrun.errors import UnavailableError, UsageError
from llmrun.kernels.forms import GroupInt, Lut16
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.quant.dequantize import dequantize
from llmrun.quant.scheme import find
from llmrun.store.progress import SilentProgress
from llmrun.store.store import Store

QUIET = SilentProgress()
LAYERS = 8
"""32 units of which the smallest changes the whole by 0.05 bits: a target can be met within 1 %."""


def chat(command: Any, *arguments: str) -> Any:
    """Ask one question by ``llmrun chat``."""
    return command("chat", *arguments, "-n", "3", "--threads", "1", asked=b"Hello")


def mixed(path: Path, scheme: str, target: float, out: Path, settings: Settings) -> Any:
    return convert(str(path), scheme, out, settings, QUIET, CopyOptions("none", target))


@pytest.mark.parametrize("target", [5.0, 6.0])
def test_a_target_is_reached_within_a_hundredth_and_never_exceeded(
    folder: Any, settings: Settings, tmp_path: Path, target: float
) -> None:
    out = tmp_path / "out"
    result = mixed(folder(num_hidden_layers=LAYERS), "int4", target, out, settings)
    assert 0.99 * target <= result.coverage.actual_bits <= target
    assert result.coverage.requested_bits == pytest.approx(result.coverage.actual_bits)
    manifest = json.loads((out / "llmrun.json").read_text())
    tensors = manifest["tensors"]
    linear = {name: facts for name, facts in tensors.items() if facts["form"].startswith("int")}
    shapes = open_source(out).checkpoint.tensors
    count = sum(torch.Size(shapes[name].shape).numel() for name in linear)
    bits = sum(
        torch.Size(shapes[name].shape).numel() * facts["bits_per_weight"]
        for name, facts in linear.items()
    )
    # Of pack-quantized files each weight also keeps its shape: 16 bytes.
    assert 0.99 * target <= bits / count - 128 * len(linear) / count <= target + 0.001
    wide = {name for name, facts in linear.items() if facts["form"].startswith("int8")}
    said = {
        "attn_qkv": ("q_proj", "k_proj", "v_proj"), "attn_out": ("o_proj",),
        "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",),
    }  # fmt: skip
    expected = set()
    for unit in manifest["widened"]:
        _, layer, role = unit.split()
        expected |= {
            name for name in linear if f".{layer}." in name and name.split(".")[-2] in said[role]
        }
    assert wide == expected
    assert 0 < len(wide) < len(linear)


@pytest.mark.parametrize(("target", "limits"), [(4.2, "4.500"), (9.0, "8.222")])
def test_a_target_out_of_reach_names_the_limits(
    folder: Any, settings: Settings, tmp_path: Path, target: float, limits: str
) -> None:
    with pytest.raises(UsageError, match="cannot be reached") as refusal:
        mixed(folder(), "int4", target, tmp_path / "out", settings)
    assert limits in refusal.value.what
    assert refusal.value.next_step == "give --target-bpw a number from 4.500 to 8.222"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", [None, 6.0])
def test_q001_a_plan_that_cannot_pass_the_audit_is_refused_before_any_work(
    folder: Any, settings: Settings, tmp_path: Path, target: float | None
) -> None:
    path, done = folder(intermediate_size=120), []
    asked = order(str(path), "int4", settings, QUIET, CopyOptions("none", target))
    with pytest.raises(UnavailableError, match=r"down_proj.*no group of 128, 64 or 32 divides"):
        plan(asked, lambda name, so_far, total: done.append(name))
    assert target is not None or done == []
    allowed = order(str(path), "int4", settings, QUIET, CopyOptions("none", target, True))
    conversion, _ = plan(allowed, lambda name, so_far, total: None)
    result = quantize(allowed, conversion, tmp_path / "out", settings)
    assert result.coverage.partial


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_transformers_computes_with_the_weights_of_a_mix(
    tiny_model: Any, settings: Settings, tmp_path: Path, model_type: str
) -> None:
    path = tiny_model(model_type)
    out = tmp_path / "out"
    result = mixed(path, "int4", 6.0, out, settings)
    kinds = set(result.coverage.kinds)
    assert {kind.split()[0] for kind in kinds} == {"bf16", "int4", "int8"}
    config = json.loads((out / "config.json").read_text())
    assert len(config["quantization_config"]["config_groups"]) >= 2
    copy = open_source(out)
    dense = tmp_path / "dense"
    dense.mkdir()
    weights = {}
    for name in copy.binding.held:
        form = copy.checkpoint.read(name)
        weight = as_tensor(dequantize(form) if isinstance(form, GroupInt) else form.w)  # type: ignore[attr-defined]
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})
    del config["quantization_config"]
    (dense / "config.json").write_text(json.dumps(config))
    ids = torch.arange(1, 33).view(1, -1)
    logits = []
    for made in (out, dense):
        model = AutoModelForCausalLM.from_pretrained(made, dtype="auto").eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_q028_a_mix_of_levels_is_llmruns_own_and_loads_in_chat(
    folder: Any, settings: Settings, tmp_path: Path, command: Any
) -> None:
    out = tmp_path / "out"
    mixed(folder(), "nl4", 6.0, out, settings)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == (
        "llmrun"
    )
    copy = open_source(out)
    kinds = {type(copy.checkpoint.read(name)) for name in copy.binding.held if "_proj" in name}
    assert kinds == {GroupInt, Lut16}
    card = (out / "README.md").read_text()
    assert "nothing else: no other program knows this format" in card
    answer = chat(command, str(out), "-v")
    assert answer.code == 0, answer.err
    assert "llmrun" in answer.err


@pytest.mark.parametrize("scheme", ["nf4", "fp4-dq"])
def test_what_is_written_for_bitsandbytes_loads_in_chat(
    folder: Any, settings: Settings, tmp_path: Path, command: Any, scheme: str
) -> None:
    out = tmp_path / "out"
    convert(str(folder()), scheme, out, settings, QUIET)
    answer = chat(command, str(out))
    assert answer.code == 0, answer.err


def test_the_name_of_a_copy_tells_schemes_texts_and_targets_apart(tmp_path: Path) -> None:
    text = tmp_path / "text"
    names = []
    for content in ("one", "two"):
        text.write_text(content)
        names.append(recipe(choice("int4"), CopyOptions(str(text))))
    names += [recipe(choice(scheme), CopyOptions()) for scheme in ("int4", "int4-g64", "int8")]
    names += [recipe(choice("int4"), CopyOptions(word)) for word in ("none", "random", "bundled")]
    names += [recipe(choice("int4"), CopyOptions(target_bpw=bits)) for bits in (5.0, 5.25)]
    names.append(recipe(choice("int4", requantized=True), CopyOptions()))
    assert len(set(names)) == len(names)
    moved = tmp_path / "moved"
    moved.write_text("two")
    assert recipe(choice("int4"), CopyOptions(str(moved))) == names[1]  # its content counts
    assert recipe(choice("int4"), CopyOptions(allow_partial=True)) == names[2]


def choice(scheme: str, *, requantized: bool = False) -> Choice:
    return Choice(find(scheme), scheme, "", requantized=requantized)


def test_loading_makes_each_copy_once(folder: Any, settings: Settings, tmp_path: Path) -> None:
    path, text = folder(), tmp_path / "text"
    text.write_text("".join(f"{n} bottles; " for n in range(300)))
    asked: list[dict[str, Any]] = [
        {"calibrate": "none"},
        {"calibrate": str(text)},
        {"calibrate": "none", "target_bpw": 6.0},
    ]
    bits = []
    for options in asked:
        wanted = LoadOptions(str(path), quant="int4", device="cpu", threads=1, **options)
        first, second = (load(wanted, settings, QUIET) for _ in "12")
        assert any("made a copy in int4" in note for note in first.notes)
        assert not any("made a copy" in note for note in second.notes)
        assert first.coverage == second.coverage
        bits.append(first.coverage.actual_bits)
    copies = Store(settings.store_root).derived()
    assert len({copy.recipe for copy in copies}) == 3
    assert all(copy.problem is None for copy in copies)
    assert bits[0] == bits[1] == 4.5
    assert 5.5 < bits[2] <= 6
