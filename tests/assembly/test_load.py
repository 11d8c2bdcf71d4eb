"""Loading: schemes, copies in the store, the audit, and what is said about it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmrun.cli.assemble import LoadedModel, LoadOptions, load
from llmrun.cli.choice import CopyOptions
from llmrun.cli.quantizing import convert, kept, order, plan, quantize
from llmrun.cli.settings import Settings
from llmrun.cli.source import open_source
from llmrun.errors import DoesNotFitError, UnavailableError, UsageError
from llmrun.kernels.forms import GroupInt
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.quant.dequantize import dequantize
from llmrun.store.progress import SilentProgress
from llmrun.store.store import Store

QUIET = SilentProgress()


def opened(model: Path, settings: Settings, **options: Any) -> LoadedModel:
    return load(LoadOptions(str(model), device="cpu", threads=1, **options), settings, QUIET)


def logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    cache = loaded.new_cache()
    made = loaded.decoder.forward(ids, [Span(0, 0, len(ids), 0)], cache.layers, [len(ids) - 1])
    return as_tensor(loaded.backend.to_host(made, 1)).clone()


def test_a_copy_is_made_once_and_used_from_then_on(folder: Any, settings: Settings) -> None:
    model = folder()
    first = opened(model, settings, quant="int4")
    assert any("made a copy in int4" in note for note in first.notes)
    assert "quantize" in first.times.parts_ms
    assert first.times.total_ms < sum(first.times.parts_ms.values())
    second = opened(model, settings, quant="int4")
    assert second.notes == ()
    assert (second.scheme, second.coverage.kinds) == (first.scheme, first.coverage.kinds)
    assert torch.equal(logits(first, [1, 2, 3]), logits(second, [1, 2, 3]))
    (copy,) = Store(settings.store_root).derived()
    assert copy.problem is None
    assert copy.recipe.startswith("int4")


def test_none_changes_nothing_and_auto_says_what_it_changes(
    folder: Any, settings: Settings, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert(str(folder()), "int4", out, settings, QUIET)
    untouched = opened(out, settings, quant="none")
    assert "bf16" in untouched.coverage.kinds
    assert "int8 g64" not in untouched.coverage.kinds
    auto = opened(out, settings)
    assert "int8 g64" in auto.coverage.kinds
    assert "int8" in auto.decisions[0]
    assert untouched.scheme == auto.scheme == "compressed-tensors int4 g32"
    assert opened(out, settings, quant="int4").scheme == "int4"
    with pytest.raises(UnavailableError, match="quantized already"):
        opened(out, settings, quant="int8")


@pytest.mark.parametrize(
    ("dtypes", "scales"),
    [
        ({"embed": torch.bfloat16, "proj": torch.float16}, "F16"),
        ({"proj": torch.float32}, "F32"),
        ({"q_proj": torch.float16}, "BF16"),
    ],
)
def test_scales_have_the_dtype_the_file_says(
    folder: Any, settings: Settings, tmp_path: Path, dtypes: Any, scales: str
) -> None:
    model = folder(dtypes)
    out = tmp_path / "out"
    convert(str(model), "int8", out, settings, QUIET)
    source, written = open_source(model), open_source(out)
    for name in source.binding.held:
        form = written.checkpoint.read(name)
        if not name.endswith("proj.weight"):
            continue
        assert isinstance(form, GroupInt)
        assert form.scales.dtype.name == scales
        want = as_tensor(dequantize(source.checkpoint.read(name)))
        got = as_tensor(dequantize(form))
        assert float((got - want).norm() / want.norm()) < 0.02


def test_a_width_no_group_divides_is_refused_until_it_is_wanted(
    folder: Any, settings: Settings
) -> None:
    model = folder(intermediate_size=120)
    with pytest.raises(UnavailableError, match="down_proj"):
        opened(model, settings, quant="int4")
    assert Store(settings.store_root).derived() == []
    partial = opened(model, settings, quant="int4", allow_partial=True)
    assert partial.coverage.partial
    assert any("stay dense" in note for note in partial.notes)
    # The copy is there now; it is no more acceptable than before.
    with pytest.raises(UnavailableError, match="down_proj"):
        opened(model, settings, quant="int4")


def test_quantize_refuses_what_makes_no_sense(
    folder: Any, settings: Settings, tmp_path: Path
) -> None:
    model = str(folder())
    for scheme in ("auto", "none"):
        with pytest.raises(UsageError, match="names no scheme"):
            convert(model, scheme, tmp_path / "no", settings, QUIET)
    convert(model, "int4", tmp_path / "out", settings, QUIET)
    with pytest.raises(UsageError, match="already"):
        convert(str(tmp_path / "out"), "int4", tmp_path / "no", settings, QUIET)


def test_what_cannot_fit_is_refused_before_it_is_quantized(
    folder: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrun.cli.memory.free_bytes", lambda: 1000)
    with pytest.raises(DoesNotFitError, match="memory are free"):
        opened(folder(), settings, quant="int4")
    assert Store(settings.store_root).derived() == []


def test_a_tied_head_in_the_file_is_mentioned(folder: Any, settings: Settings) -> None:
    from safetensors.torch import load_file, save_file

    model = folder(tie_word_embeddings=True)
    state = load_file(model / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    loaded = opened(model, settings, quant="none")
    assert any("lm_head.weight left out" in decision for decision in loaded.decisions)


def test_many_tensors_left_out_for_one_reason_are_one_line(folder: Any, settings: Settings) -> None:
    model = folder()
    state = load_file(model / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        state[name] = torch.ones(8)
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    for quant in ("none", "int8"):  # of the copy in the store, too, it says what the file had
        decisions = opened(model, settings, quant=quant).decisions
        (line,) = [decision for decision in decisions if "left out" in decision]
        assert line.endswith("rotary_emb.inv_freq and 1 more left out: recomputed from the config")


def as_fp8(model: Path) -> Path:
    """The checkpoint with its projections as 8-bit floats in blocks of 128 x 128."""
    weights = load_file(str(model / "model.safetensors"))
    config = json.loads((model / "config.json").read_text())
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weight = weights[name].float()  # no larger than a block
        scale = weight.abs().max() / 448
        weights[name] = (weight / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.view(1, 1)
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    save_file(weights, str(model / "model.safetensors"), metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_weights_no_kernel_computes_with_become_int8_and_that_is_said(
    folder: Any, settings: Settings
) -> None:
    model = as_fp8(folder())
    auto = opened(model, settings)
    assert auto.scheme == "int8"
    assert any("as stored (fp8 F8_E4M3" in decision for decision in auto.decisions)
    assert not [kind for kind in auto.coverage.kinds if kind.startswith(("f8", "f32"))]
    untouched = opened(model, settings, quant="none")
    assert "f32" in untouched.coverage.kinds
    ids = [1, 2, 3]
    error = (logits(auto, ids) - logits(untouched, ids)).norm() / logits(untouched, ids).norm()
    assert 0 < float(error) < 0.03
    assert opened(model, settings, quant="int8").scheme == "int8"
    with pytest.raises(UnavailableError, match="quantized already"):
        opened(model, settings, quant="int4")


def as_gptq(model: Path) -> tuple[Path, Path]:
    """The checkpoint with its projections in GPTQ's act-order, and the same weights as numbers."""
    weights = load_file(str(model / "model.safetensors"))
    config = json.loads((model / "config.json").read_text())
    packed, plain = {}, dict(weights)
    for name, weight in weights.items():
        if not name.endswith("proj.weight"):
            packed[name] = weight
            continue
        n, k = weight.shape
        seed = k if "down" in name else len(name.split("proj")[0].split(".")[3])
        groups = torch.randperm(k, generator=torch.Generator().manual_seed(seed)) // 32
        scales = (weight.float().abs().max() / 8).half().repeat(k // 32, n)
        codes = (weight.float().T / scales[groups]).round().clamp(-8, 7) + 8  # [K, N]
        plain[name] = ((codes - 8) * scales[groups]).T.contiguous()
        words = (codes.view(-1, 8, n).long() << (4 * torch.arange(8)).view(1, 8, 1)).sum(1)
        module = name.removesuffix(".weight")
        packed |= {
            f"{module}.qweight": words.to(torch.uint32).view(torch.int32),
            f"{module}.qzeros": torch.full((k // 32, n // 8), 0x77777777, dtype=torch.int32),
            f"{module}.scales": scales,
            f"{module}.g_idx": groups.int(),
        }
    other = model.parent / "plain"
    shutil.copytree(model, other)
    save_file(plain, str(other / "model.safetensors"), metadata={"format": "pt"})
    save_file(packed, str(model / "model.safetensors"), metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    return model, other


def test_gptq_with_act_order_computes_what_it_holds(folder: Any, settings: Settings) -> None:
    packed, plain = as_gptq(folder())
    auto, exact, numbers = (
        opened(packed, settings),
        opened(packed, settings, quant="none"),
        opened(plain, settings, quant="none"),
    )
    assert "int4 g32" in auto.coverage.kinds
    ids = list(range(40))
    want = logits(numbers, ids)
    for loaded, tolerance in ((exact, 1e-3), (auto, 0.05)):
        assert float((logits(loaded, ids) - want).norm() / want.norm()) < tolerance


@pytest.mark.parametrize("options", [{"calibrate": "random"}, {"target_bpw": 5.0}])
def test_what_would_change_nothing_is_refused(
    folder: Any, settings: Settings, options: dict[str, Any]
) -> None:
    with pytest.raises(UnavailableError, match="would change nothing of this model"):
        opened(folder(), settings, quant="none", **options)


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_loading_finds_the_copy_that_quantize_made(
    folder: Any, settings: Settings, scheme: str
) -> None:
    model = folder()
    asked = order(str(model), scheme, settings, QUIET, CopyOptions())
    assert kept(asked, settings) is None
    conversion, _ = plan(asked, lambda name, done, total: None)
    made = quantize(asked, conversion, None, settings)
    assert kept(asked, settings) == made.path
    loaded = opened(model, settings, quant=scheme)
    assert not any("made a copy" in note for note in loaded.notes)
    assert len(Store(settings.store_root).derived()) == 1
