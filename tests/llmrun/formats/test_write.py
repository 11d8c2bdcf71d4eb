"""Written folders load in stock transformers with the logits of their dequantized weights."""

import json
import shutil
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from llmrun.errors import InternalError, ModelFileError
from llmrun.formats.layout import Layout, plan_layout
from llmrun.formats.open import open_checkpoint
from llmrun.formats.planned import Planned
from llmrun.formats.write import Content, Item, Tensors, write_folder
from llmrun.kernels.forms import ROW, Dense, Form, GroupInt, parameters
from llmrun.kernels.host import DType, HostArray

Forms = dict[str, Form]


def _host(tensor: torch.Tensor, dtype: DType) -> HostArray:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return HostArray(dtype, tuple(tensor.shape), memoryview(bytearray(raw)))


def _quantize(weight: torch.Tensor, bits: int, group: int) -> tuple[GroupInt, torch.Tensor]:
    """Return a plain absmax form with half of the scales negative, and its weights in bf16."""
    n, k = weight.shape
    half = 2 ** (bits - 1)
    grouped = weight.float().view(n, -1, group or k)
    scales = (grouped.abs().amax(-1, keepdim=True) / (half - 1)).bfloat16()
    scales[::2] *= -1
    q = (grouped / scales.float()).round().clamp(-half, half - 1)
    codes = (q + half).to(torch.uint8).view(n, k)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    form = GroupInt(
        bits,
        group,
        _host(codes, DType.U8),
        _host(scales[..., 0], DType.BF16),
        None,
        (n, k),
    )
    return form, (q * scales.float()).bfloat16().view(n, k)


def _shifted(weight: torch.Tensor, bits: int, group: int) -> tuple[GroupInt, torch.Tensor]:
    """Return a form with zero points and its weights in bf16."""
    n, k = weight.shape
    most = 2**bits - 1
    grouped = weight.float().view(n, -1, group or k) + 0.01  # so that the middle is not 0
    low, high = (
        grouped.aminmax(dim=-1, keepdim=True)[end].clamp(*span)
        for end, span in ((0, (None, 0)), (1, (0, None)))
    )
    scales = ((high - low) / most).bfloat16()
    zeros = (-low / scales.float()).round().clamp(0, most)
    u = ((grouped / scales.float()).round() + zeros).clamp(0, most)
    codes = u.to(torch.uint8).view(n, k)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    form = GroupInt(
        bits,
        group,
        _host(codes, DType.U8),
        _host(scales[..., 0], DType.BF16),
        _host(zeros[..., 0].to(torch.uint8), DType.U8),
        (n, k),
    )
    return form, ((u - zeros) * scales.float()).bfloat16().view(n, k)


Chosen = tuple[int, int] | tuple[int, int, str]


def _forms(
    weights: dict[str, torch.Tensor], choose: Callable[[str], Chosen | None]
) -> tuple[Forms, Forms]:
    """Return the forms to write and, beside them, the dense forms of the dequantized weights."""
    quantized: Forms = {}
    dense: Forms = {}
    for name, weight in weights.items():
        chosen = choose(name) if "_proj" in name else None
        if chosen is None:
            quantized[name] = dense[name] = Dense(_host(weight, DType.BF16))
        else:
            make = _shifted if chosen[2:] else _quantize
            quantized[name], exact = make(weight, *chosen[:2])
            dense[name] = Dense(_host(exact, DType.BF16))
    return quantized, dense


def _layout(forms: Forms, shard_bytes: int = 4_000_000) -> Layout:
    planned = [Planned(name, form.kind, form.shape) for name, form in forms.items()]
    return plan_layout(planned, DType.BF16, {}, shard_bytes)


def _stream(forms: Forms) -> Tensors:
    """The stream of all forms, none of which has anything to be said about it."""
    items: list[Item] = [(name, form, {}) for name, form in forms.items()]
    return lambda start: items[start:]


def _content(forms: Forms, config: dict[str, object]) -> Content:
    return Content(_layout(forms), config, {}, {})


def _write(
    out: Path, forms: Forms, config: dict[str, object], shard_bytes: int = 4_000_000
) -> None:
    out.mkdir()
    layout = _layout(forms, shard_bytes)
    content = Content(layout, config, {"a.txt": b"x"}, {"by": "t"})
    report = write_folder(out, _stream(forms), content)
    on_disk = {path.name: path.stat().st_size for path in out.iterdir()}
    assert report.files == on_disk
    assert report.predicted_bytes == report.nbytes == sum(on_disk.values())


def _logits(folder: Path, opening: bool = False) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    # Packed zero points do not fit the modules that transformers 5.24 makes for them; it reads
    # them where it opens the weights while loading.
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if opening else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **how).eval()
    with torch.no_grad():
        return model(torch.arange(1, 33).view(1, -1)).logits


SCHEMES: dict[str, Callable[[str], Chosen | None]] = {
    "int4 g32": lambda name: (4, 32),
    "int8 g64": lambda name: (8, 64),
    "int8 row": lambda name: (8, ROW),
    "two groups, one layer kept": lambda name: (
        None
        if "layers.1.self_attn.k" in name
        else (8, 64)
        if "layers.0.mlp.down" in name
        else (4, 32)
    ),
    "zero points": lambda name: (4, 32, "zero"),
    "units of three kinds": lambda name: (
        (8, 32) if "layers.0.self_attn" in name else (4, 64) if "down" in name else (4, 32)
    ),
    "8 bits but for experts": lambda name: (8, 64) if "self_attn" in name else (4, 32),
    "4 bits but for experts": lambda name: (4, 64) if "self_attn" in name else (8, 32),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "tied"),
    [
        ("int4 g32", True),
        ("int4 g32", False),
        ("int8 g64", False),
        ("int8 row", True),
        ("two groups, one layer kept", False),
        ("zero points", True),
        ("zero points", False),
        ("units of three kinds", True),
    ],
)
def test_stock_transformers_gives_the_logits_of_the_dequantized_weights(
    scheme: str, tied: bool, llama: Callable[[bool], SimpleNamespace], tmp_path: Path
) -> None:
    model = llama(tied)
    quantized, dense = _forms(model.weights, SCHEMES[scheme])
    _write(tmp_path / "quantized", quantized, model.config)
    _write(tmp_path / "dense", dense, model.config)
    opening = "zero points" in scheme
    assert torch.equal(_logits(tmp_path / "quantized", opening), _logits(tmp_path / "dense"))
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    QuantizationConfig.model_validate(config.pop("quantization_config"))
    assert config == model.config


@pytest.fixture(scope="session")
def mixture() -> SimpleNamespace:
    """A tiny random Qwen3-MoE in bf16, its experts by their own names as in published files."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    held = Qwen3MoeForCausalLM(config).bfloat16().state_dict()
    weights = {}
    for name, tensor in held.items():
        base, _, last = name.rpartition(".")
        if not base.endswith("experts"):
            weights[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                weights[f"{base}.{expert}.{part}.weight"] = rows.contiguous()
    return SimpleNamespace(config=json.loads(config.to_json_string()), weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4 g32", "8 bits but for experts", "4 bits but for experts"])
def test_stock_transformers_gives_the_logits_of_dequantized_experts(
    scheme: str, mixture: SimpleNamespace, tmp_path: Path
) -> None:
    quantized, dense = _forms(mixture.weights, SCHEMES[scheme])
    assert (
        sum(".experts." in name and form.kind.startswith("int") for name, form in quantized.items())
        == 24
    )
    _write(tmp_path / "quantized", quantized, mixture.config)
    _write(tmp_path / "dense", dense, mixture.config)
    opening = "zero points" in scheme
    assert torch.equal(_logits(tmp_path / "quantized", opening), _logits(tmp_path / "dense"))
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    QuantizationConfig.model_validate(config["quantization_config"])


@pytest.fixture(scope="session")
def small(llama: Callable[[bool], SimpleNamespace]) -> SimpleNamespace:
    """``config`` and ``forms`` of a small int4 model."""
    model = llama(True)
    return SimpleNamespace(
        config=model.config, forms=_forms(model.weights, lambda name: (4, 32))[0]
    )


def test_what_is_read_back_is_what_was_written(small: SimpleNamespace, tmp_path: Path) -> None:
    _write(tmp_path / "one", small.forms, small.config)
    _write(tmp_path / "many", small.forms, small.config, shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 3
    for folder in ("one", "many"):
        opened = open_checkpoint(tmp_path / folder)
        assert opened.tensors.keys() == small.forms.keys()
        for name, form in small.forms.items():
            read = opened.read(name)
            assert (read.kind, read.shape) == (form.kind, form.shape)
            for part, array in form.arrays.items():
                assert bytes(read.arrays[part].data) == bytes(array.data)


def test_the_library_decompresses_the_same_weights(small: SimpleNamespace, tmp_path: Path) -> None:
    _write(tmp_path / "out", small.forms, small.config)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, form in small.forms.items():
        if not isinstance(form, GroupInt):
            continue
        parts = {key: stored[f"{name[:-6]}{key}"] for key in ("weight_packed", "weight_scale")}
        parts["weight_shape"] = stored[f"{name}_shape"]
        found = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        codes = torch.frombuffer(form.codes.data, dtype=torch.uint8)
        u = torch.stack((codes & 15, codes >> 4), -1).view(-1, 32).double()
        scales = torch.frombuffer(form.scales.data, dtype=torch.bfloat16).double().view(-1, 1)
        assert torch.equal(found, (scales * (u - 8)).view(form.shape).bfloat16())


def test_q020_same_input_same_bytes(small: SimpleNamespace, tmp_path: Path) -> None:
    for name in ("a", "b"):
        _write(tmp_path / name, small.forms, small.config)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    manifest = json.loads((tmp_path / "a" / "llmrun.json").read_text())
    assert manifest["by"] == "t"
    assert set(manifest["files"]) == {p.name for p in (tmp_path / "a").iterdir()} - {"llmrun.json"}
    forms = {name: tensor["form"] for name, tensor in manifest["tensors"].items()}
    assert forms == {name: form.kind for name, form in small.forms.items()}


def test_sidecars_are_copied_and_may_not_replace_our_files(
    small: SimpleNamespace, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    content = Content(_layout(small.forms), small.config, {"tokenizer.json": tokenizer}, {})
    write_folder(out, _stream(small.forms), content)
    assert (out / "tokenizer.json").read_text() == "{}"
    for name in ("config.json", "model.safetensors", "llmrun.json", "job.json", "../x", "a/b"):
        with pytest.raises(InternalError, match="cannot be a file"):
            write_folder(out, _stream({}), replace(content, sidecars={name: b""}))


def test_the_disk_is_checked_before_the_first_byte(
    small: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = _content(small.forms, small.config)
    need = content.predicted_bytes
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, need - 1))
    with pytest.raises(InternalError, match=f"needs {need:,} bytes, but .* {need - 1:,}"):
        write_folder(tmp_path, _stream(small.forms), content)
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_an_exception_in_the_stream_passes_through(small: SimpleNamespace, tmp_path: Path) -> None:
    def stream(start: int) -> Iterator[Item]:
        yield from list(_stream(small.forms)(0))[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path, stream, _content(small.forms, small.config))
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "job.json"}


def test_q027_only_one_tensor_is_held(small: SimpleNamespace, tmp_path: Path) -> None:
    alive: list[weakref.ref[Form]] = []

    def stream(start: int) -> Iterator[Item]:
        for name, form in small.forms.items():
            assert sum(reference() is not None for reference in alive) == 0
            copy = Dense(form.w) if isinstance(form, Dense) else GroupInt(**vars(form))
            alive.append(weakref.ref(copy))
            yield name, copy, {}
            del copy

    write_folder(tmp_path, stream, _content(small.forms, small.config))
    assert len(alive) == len(small.forms)


def test_the_stream_must_be_the_plan(small: SimpleNamespace, tmp_path: Path) -> None:
    items: list[Item] = [(name, form, {}) for name, form in small.forms.items()]
    wrong = {
        "order": [items[1], items[0], *items[2:]],
        "end": items[:-1],
        "extra": [*items, ("extra.weight", items[0][1], {})],
        "form": [(items[0][0], items[1][1], {}), *items[1:]],
    }
    for case, stream in wrong.items():
        out = tmp_path / case
        out.mkdir()
        with pytest.raises(InternalError, match="lanned"):
            write_folder(out, lambda start, own=stream: own, _content(small.forms, small.config))
        assert not (out / "llmrun.json").exists()


def test_q023_scales_have_the_models_dtype(small: SimpleNamespace, tmp_path: Path) -> None:
    config = {**small.config, "dtype": "float16"}
    with pytest.raises(InternalError, match="Scales are BF16, but the model is float16"):
        write_folder(tmp_path, _stream(small.forms), _content(small.forms, config))


def test_q012_nonfinite_values_are_not_published(small: SimpleNamespace, tmp_path: Path) -> None:
    forms = dict(small.forms)
    bad = torch.ones(64, dtype=torch.bfloat16)
    bad[7] = float("nan")
    forms["model.norm.weight"] = Dense(_host(bad, DType.BF16))
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' is not finite at element 7"):
        write_folder(tmp_path, _stream(forms), _content(forms, small.config))
    assert not (tmp_path / "llmrun.json").exists()


def test_a_byte_that_changes_on_disk_is_noticed(small: SimpleNamespace, tmp_path: Path) -> None:
    shard = tmp_path / "model.safetensors"
    content = _content(small.forms, small.config)

    def stream(start: int) -> Iterator[Item]:
        for number, item in enumerate(small.forms.items()):
            if number == len(small.forms) - 1:
                with shard.open("r+b") as file:
                    file.seek(len(content.layout.shards[0].header) + 100)
                    file.write(b"\xaa\xaa\xaa")
            yield (*item, {})

    with pytest.raises(InternalError, match="Read back differently"):
        write_folder(tmp_path, stream, content)


def test_a_quantized_source_loses_its_old_config(small: SimpleNamespace, tmp_path: Path) -> None:
    dense = {name: form for name, form in small.forms.items() if isinstance(form, Dense)}
    config = {**small.config, "quantization_config": {"quant_method": "gptq"}}
    _write(tmp_path / "out", dense, config)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert open_checkpoint(tmp_path / "out").quantization is None


def test_a_failed_write_is_named(small: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(InternalError, match=r"Writing to .* failed"):
        write_folder(tmp_path, _stream(small.forms), _content(small.forms, small.config))


def test_a_folder_with_other_things_is_left_alone(small: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InternalError, match="is not empty"):
        write_folder(tmp_path, _stream(small.forms), _content(small.forms, small.config))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_progress_ends_at_the_whole(small: SimpleNamespace, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def progress(name: str, done: int, total: int) -> None:
        seen.append((name, done, total))

    write_folder(tmp_path, _stream(small.forms), _content(small.forms, small.config), progress)
    assert [name for name, _, _ in seen] == list(small.forms)
    assert seen[-1][1] == seen[-1][2]


def test_what_is_said_of_tensors_and_the_audit_are_kept(
    small: SimpleNamespace, tmp_path: Path
) -> None:
    said = {name: {"relative_mse": number / 7} for number, name in enumerate(small.forms)}

    def audit(pairs: Iterator[tuple[str, Form]]) -> dict[str, object]:
        kinds = {name: form.kind for name, form in pairs}
        return {"coverage": {"tensors": len(kinds)}}

    write_folder(
        tmp_path,
        lambda start: [(name, form, said[name]) for name, form in small.forms.items()],
        _content(small.forms, small.config),
        audit=audit,
    )
    manifest = json.loads((tmp_path / "llmrun.json").read_text())
    assert manifest["coverage"] == {"tensors": len(small.forms)}
    assert manifest["format"] == "compressed-tensors"
    for name, form in small.forms.items():
        tensor = manifest["tensors"][name]
        assert tensor["relative_mse"] == said[name]["relative_mse"]
        expected = 16 if isinstance(form, Dense) else 4.5 + 8 * 16 / parameters(form)
        assert tensor["bits_per_weight"] == pytest.approx(expected, abs=1e-4)
