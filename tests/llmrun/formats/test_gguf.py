"""GGUF files against the format's own reader and dequantization."""

import struct
import time
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from llmrun.errors import ModelFileError
from llmrun.formats.gguf import FORMAT, open_gguf
from llmrun.kernels.forms import Dense, Form, GroupInt, Lut16, rows
from llmrun.kernels.host import DType


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file made by the format's own writer."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list(["a", "\u00fc", "<s>"])
    writer.add_token_scores([0.0, -1.5, 1.0])
    writer.add_bos_token_id(2)
    writer.add_bool("flag", True)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3, 64), np.float32)
    writer.add_tensor("norm.weight", weight[0])
    writer.add_tensor("half.weight", weight.astype(np.float16))
    for kind in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"):
        type_ = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{kind}.weight", gguf.quants.quantize(weight, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_as_the_reader_gives_them(written: Path) -> None:
    opened = FORMAT.open(written)
    assert opened.layout == "gguf"
    assert opened.quantization == "GGUF MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"
    assert opened.config["llama.context_length"] == 128
    assert opened.config["tokenizer.ggml.tokens"] == ["a", "\u00fc", "<s>"]
    assert opened.config["flag"] is True
    reader = gguf.GGUFReader(written)
    assert [(t.name, t.kind, t.shape, t.nbytes) for t in opened.tensors.values()] == [
        (t.name, t.tensor_type.name, tuple(reversed(t.shape.tolist())), t.n_bytes)
        for t in reader.tensors
    ]


def test_weights_equal_the_reference_bit_for_bit(written: Path) -> None:
    opened = FORMAT.open(written)
    for tensor in gguf.GGUFReader(written).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        form = opened.read(tensor.name)
        assert form.shape == expected.shape
        if isinstance(form, Dense):
            assert bytes(form.w.data) == tensor.data.tobytes()
            continue
        assert np.array_equal(_weights(form), expected)


def _weights(form: Form) -> np.ndarray:
    assert isinstance(form, GroupInt | Lut16)
    codes = np.frombuffer(form.codes.data, np.uint8).reshape(form.codes.shape)
    if isinstance(form, Lut16) or form.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(form.shape)
    stored = np.float32 if form.scales.dtype is DType.F32 else np.float16
    scales = np.frombuffer(form.scales.data, stored).astype(np.float32)
    if form.scales.dtype is DType.BF16:
        bits = np.frombuffer(form.scales.data, np.uint16).astype(np.uint32) << 16
        scales = bits.view(np.float32)
    u = codes.reshape(scales.size, -1).astype(np.float32)
    if isinstance(form, Lut16):
        table = np.frombuffer(form.table.data, np.float32)
        return (scales[:, None] * table[codes.reshape(scales.size, -1)]).reshape(form.shape)
    if form.mins is None:
        return (scales[:, None] * (u - 2 ** (form.bits - 1))).reshape(form.shape)
    mins = np.frombuffer(form.mins.data, stored).astype(np.float32)
    return (scales[:, None] * u + mins[:, None]).reshape(form.shape)


PRODUCTS: dict[str, tuple[int, ...]] = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}
"""Types with scales that are products, and where the f16 numbers of their blocks are."""


@pytest.fixture(scope="module")
def k_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random blocks of types the package does not write, three rows of two blocks each; and a
    stack of three experts, with rows of one block."""
    path = tmp_path_factory.mktemp("gguf") / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    rng = np.random.default_rng(0)
    for kind, numbers in PRODUCTS.items():
        type_ = gguf.GGMLQuantizationType[kind]
        blocks = rng.integers(0, 256, (3, 2, gguf.GGML_QUANT_SIZES[type_][1]), np.uint8)
        for at in numbers:
            scales = rng.standard_normal((3, 2, 1)).astype(np.float16)
            blocks[:, :, at : at + 2] = scales.view(np.uint8)
        writer.add_tensor(f"{kind}.weight", blocks.reshape(3, -1), raw_dtype=type_)
        stack = blocks.reshape(3, 2, -1)
        writer.add_tensor(f"blk.0.{kind}_exps.weight", stack, raw_dtype=type_)
    writer.add_tensor("dense_exps.weight", rng.standard_normal((3, 2, 5), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_k_types_are_exact_on_request_and_close_by_default(k_types: Path) -> None:
    exact, opened = open_gguf(k_types, exact=True), FORMAT.open(k_types)
    assert opened.quantization == "GGUF IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K"
    for tensor in gguf.GGUFReader(k_types).tensors:
        if "exps" in tensor.name:
            continue
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        form, rounded = exact.read(tensor.name), opened.read(tensor.name)
        assert opened.tensors[tensor.name].shape == form.shape == rounded.shape == (3, 512)
        assert np.array_equal(_weights(form), expected)
        assert 0 < np.square(_weights(rounded) - expected).mean() < 1e-6 * expected.var()


def test_stacks_of_experts_are_one_form(k_types: Path) -> None:
    opened, stacks = open_gguf(k_types, exact=True), 0
    for tensor in gguf.GGUFReader(k_types).tensors:
        if "exps" not in tensor.name:
            continue
        stacks += 1
        info, form = opened.tensors[tensor.name], opened.read(tensor.name)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert info.shape == expected.shape
        if isinstance(form, Dense):
            assert form.shape == (3, 2, 5)
            assert bytes(form.w.data) == expected.tobytes()
            continue
        assert form.shape == (6, 256)
        assert np.array_equal(_weights(form), expected.reshape(6, 256))
        second = rows(form, range(2, 4))  # the second expert's
        assert np.array_equal(_weights(second), expected[1])
    assert stacks == len(PRODUCTS) + 1


def test_views_do_not_write_into_the_file(written: Path) -> None:
    before = written.read_bytes()
    form = FORMAT.open(written).read("norm.weight")
    form.arrays["w"].data[:4] = b"\0\0\0\0"
    assert written.read_bytes() == before


@pytest.fixture
def tiny(gg: SimpleNamespace) -> bytes:
    """A file small enough for every byte and bit, with two tensors and most kinds of value."""
    keys = [
        gg.key("s", 8, "x"),
        gg.key("general.alignment", 4, 32),
        gg.array("tokenizer.ggml.tokens", 8, ["a", "b"]),
        gg.key("tokenizer.ggml.bos_token_id", 4, 1),
        gg.key("ok", 7, 1),
    ]
    tensors = [gg.tensor("n", [3], 0, 0), gg.tensor("w", [32, 2], 3, 32)]
    data = struct.pack("<3f", 1, 2, 3).ljust(32, b"\0") + struct.pack("<ee", 1, 2) * 10
    return gg.file(keys, tensors, data)


def test_cut_at_every_byte(tiny: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in range(len(tiny)):
        path.write_bytes(tiny[:length])
        with pytest.raises(ModelFileError):
            FORMAT.open(path)
    path.write_bytes(tiny)
    assert list(FORMAT.open(path).tensors) == ["n", "w"]


@pytest.mark.slow
def test_every_header_bit_flipped(tiny: bytes, tmp_path: Path) -> None:
    path = tmp_path / "flipped.gguf"
    readable = 0
    for bit in range(8 * (len(tiny) - 72)):
        flipped = bytearray(tiny)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            opened = FORMAT.open(path)
            metadata = dict(opened.config)
            forms = {name: opened.read(name) for name in opened.tensors}
        except ModelFileError:
            continue
        readable += 1
        reader = gguf.GGUFReader(path)
        fields = {key: value for key, value in reader.fields.items() if key[:5] != "GGUF."}
        assert {key: repr(value.contents()) for key, value in fields.items()} == {
            key: repr(value) for key, value in metadata.items()
        }
        assert [t.name for t in reader.tensors] == list(forms)
        for tensor in reader.tensors:
            info, form = opened.tensors[tensor.name], forms[tensor.name]
            assert (info.kind, info.shape) == (
                tensor.tensor_type.name,
                tuple(reversed(tensor.shape.tolist())),
            )
            if isinstance(form, Dense):
                assert bytes(form.w.data) == tensor.data.tobytes()
    assert readable > 100


def test_a_scale_that_is_not_finite_is_named(gg: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "inf.gguf"
    data = struct.pack("<e", float("inf")) + bytes(16)
    path.write_bytes(gg.file([], [gg.tensor("w", [32, 1], 2, 0)], data))
    opened = FORMAT.open(path)
    with pytest.raises(ModelFileError, match="'w': scales 0 is not finite"):
        assert opened.read("w").arrays["codes"].data


@pytest.mark.parametrize("dims", [[32], [32, 1, 1, 1]])
def test_quantized_vectors_are_named(dims: list[int], gg: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "vector.gguf"
    path.write_bytes(gg.file([], [gg.tensor("v", dims, 2, 0)], bytes(18)))
    with pytest.raises(ModelFileError, match=f"'v' is Q4_0 with {len(dims)} dimensions"):
        FORMAT.open(path).read("v")


@pytest.mark.parametrize(("kind", "block"), [(11, 110), (20, 18), (39, 17)])
def test_scales_of_new_types_that_are_not_finite_are_named(
    kind: int, block: int, gg: SimpleNamespace, tmp_path: Path
) -> None:
    path = tmp_path / "inf.gguf"
    weights = 256 if kind == 11 else 32
    path.write_bytes(gg.file([], [gg.tensor("w", [weights, 2], kind, 0)], b"\xff" * 2 * block))
    with pytest.raises(ModelFileError, match="'w': scales 0 is not finite"):
        assert FORMAT.open(path).read("w").arrays["scales"].data


def test_many_tokens_open_quickly(gg: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    tokens = gg.array("tokenizer.ggml.tokens", 8, [f"token {n}" for n in range(49_152)])
    merges = gg.array("tokenizer.ggml.merges", 8, [f"{n} {n}" for n in range(48_900)])
    path.write_bytes(gg.file([tokens, merges], [gg.tensor("t", [4], 0, 0)], bytes(16)))
    start = time.process_time()
    config = FORMAT.open(path).config
    assert len(config["tokenizer.ggml.tokens"]) == 49_152  # type: ignore[arg-type]
    assert len(config["tokenizer.ggml.merges"]) == 48_900  # type: ignore[arg-type]
    assert time.process_time() - start < 0.3
