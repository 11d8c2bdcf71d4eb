"""Makers of tiny model files, byte by byte, and the budget every refusal must keep."""

import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.errors import ModelFileError


def _safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture(scope="session")
def st() -> SimpleNamespace:
    """``st.file(header, data, length)``: a safetensors file."""
    return SimpleNamespace(file=_safetensors)


_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str | bytes, kind: int, value: object) -> bytes:
    head = _string(name) + struct.pack("<I", kind)
    if kind == 8:
        return head + _string(value)  # type: ignore[arg-type]
    return head + struct.pack(f"<{_CODES[kind]}", value)


def _array(name: str, kind: int, values: Sequence[object], count: int | None = None) -> bytes:
    number = len(values) if count is None else count
    head = _string(name) + struct.pack("<IIQ", 9, kind, number)
    if kind == 8:
        return head + b"".join(_string(value) for value in values)  # type: ignore[arg-type]
    return head + struct.pack(f"<{len(values)}{_CODES.get(kind, 'B')}", *values)


def _tensor(
    name: str | bytes, dims: Sequence[int], kind: int, offset: int, rank: int = -1
) -> bytes:
    number = len(dims) if rank < 0 else rank
    return (
        _string(name)
        + struct.pack("<I", number)
        + b"".join(struct.pack("<Q", extent) for extent in dims)
        + struct.pack("<IQ", kind, offset)
    )


def _gguf(
    keys: Sequence[bytes],
    tensors: Sequence[bytes],
    data: bytes,
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


@pytest.fixture(scope="session")
def gg() -> SimpleNamespace:
    """``gg.file, gg.key, gg.array, gg.tensor, gg.string``: the pieces of a GGUF file."""
    return SimpleNamespace(file=_gguf, key=_key, array=_array, tensor=_tensor, string=_string)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """``refused(opener, content, name)``: the message; exit 5 within a second and 64 MiB."""

    def check(
        opener: Callable[[Path], object], content: bytes, name: str = "file", memory: bool = True
    ) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        start = time.process_time()
        with pytest.raises(ModelFileError) as caught:
            opener(path)
        assert time.process_time() - start < 1
        assert caught.value.exit_code == 5
        if memory and len(content) > 100_000:
            tracemalloc.start()
            with pytest.raises(ModelFileError):
                opener(path)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 64 << 20
        assert name in str(caught.value)
        return caught.value.what

    return check


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(config, **files)``: a model folder with config.json and other files."""

    def make(config: Mapping[str, object], files: Mapping[str, bytes] | None = None) -> Path:
        made = tmp_path / "model"
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config))
        for name, content in (files or {}).items():
            (made / name).write_bytes(content)
        return made

    return make


MODULE = "model.layers.0.mlp.up_proj"


def _compressed(scheme: Any, n: int, k: int, dtype: Any, global_scale: bool = False) -> Any:
    """Return the stored parts of a random weight and the library's decompression of them.

    Scales are random and of both signs where the format has signs; the first group is all zero,
    the last holds weights far over the range.
    """
    import torch
    from compressed_tensors.compressors import BaseCompressor

    args = scheme.weights
    generator = torch.Generator().manual_seed(n + k)
    rows, columns = args.block_structure or (1, args.group_size or k)
    grid = (-(-n // rows), -(-k // columns)) if args.strategy != "tensor" else (1,)
    largest = 448.0 if args.num_bits == 8 and args.type == "float" else 2.0**args.num_bits / 2
    scale = (torch.rand(grid, generator=generator) + 0.5) * 4 / largest
    scale *= torch.where(torch.rand(grid, generator=generator) < 0.3, -1.0, 1.0)
    weight = torch.randn((n, k), generator=generator)
    weight[0, : k // 2] = 0
    weight[-1, -columns:] *= 1_000
    state = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype)}
    if not args.symmetric:
        half = 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, grid, generator=generator).to(
            torch.int8
        )
    if global_scale:
        state["weight_global_scale"] = torch.tensor([37.0])
        state["weight_scale"] = (scale.abs() * 37).to(torch.float8_e4m3fn).to(dtype)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    parts = compressor.compress(state, scheme)
    return parts, _decompressed(parts, scheme)


def _decompressed(parts: Mapping[str, Any], scheme: Any) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(scheme.format).decompress(parts, scheme)["weight"]


def _ct_scheme(format: str, bits: int = 8, type: str = "int", **weights: object) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, type=type, **weights)
    return QuantizationScheme(targets=["Linear"], weights=args, format=format)


def _ct_folder(path: Path, parts: Mapping[str, Any], scheme: Any, **config: object) -> Path:
    import torch
    from safetensors.torch import save_file

    quantization = {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
        **config,
    }
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    stored = {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    stored["lm_head.weight"] = torch.ones(2, 3)
    save_file(stored, path / "model.safetensors")
    return path


def _weights(form: Any) -> Any:
    """Return the weights by the storage form's formula, in float64."""
    import torch

    types = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}

    def tensor(name: str) -> Any:
        array = form.arrays[name]
        return torch.frombuffer(array.data, dtype=types[array.dtype.name]).double()

    if "w" in form.arrays:
        return tensor("w").view(form.shape)
    codes = torch.frombuffer(form.codes.data, dtype=torch.uint8)
    if form.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1)
    u = codes.reshape(-1, form.group or form.shape[1]).double()
    scales = tensor("scales").view(-1, 1)
    if form.mins is None:
        return (scales * (u - 2 ** (form.bits - 1))).view(form.shape)
    if form.mins.dtype.name == "U8":
        zeros = torch.frombuffer(form.mins.data, dtype=torch.uint8).double().view(-1, 1)
        return (scales * (u - zeros)).view(form.shape)
    return (scales * u + tensor("mins").view(-1, 1)).view(form.shape)


@pytest.fixture(scope="session")
def ct() -> SimpleNamespace:
    """Checkpoints as the compressed-tensors library makes them, for one module ``ct.MODULE``.

    ``ct.scheme(format, bits, type, **weights)``; ``ct.compressed(scheme, n, k, dtype)``: the parts
    and the library's own reading of them, also ``ct.decompressed(parts, scheme)``;
    ``ct.folder(path, parts, scheme, **config)``; ``ct.weights(form)``: what a storage form stands
    for, float64.
    """
    return SimpleNamespace(
        MODULE=MODULE,
        scheme=_ct_scheme,
        compressed=_compressed,
        decompressed=_decompressed,
        folder=_ct_folder,
        weights=_weights,
    )


@pytest.fixture(scope="session")
def llama() -> Callable[[bool], SimpleNamespace]:
    """Make a tiny random Llama in bf16: ``config`` and ``weights`` (names as in files)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(tied: bool) -> SimpleNamespace:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )
        weights = LlamaForCausalLM(config).bfloat16().state_dict()
        if tied:
            del weights["lm_head.weight"]
        return SimpleNamespace(config=json.loads(config.to_json_string()), weights=weights)

    return make
