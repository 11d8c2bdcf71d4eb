"""SEC-07: every rule of the header has files that break it, each refused by field and offset."""

import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmrun.errors import ModelFileError
from llmrun.formats import limits
from llmrun.formats.gguf import FORMAT
from llmrun.formats.gguf_header import read_header
from llmrun.formats.mapping import map_file

Refused = Callable[..., str]
U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)


def _open(path: Path) -> object:
    return read_header(map_file(path), path)


def _cases(gg: SimpleNamespace) -> dict[str, tuple[bytes, str]]:
    """Return for each fault a file and words its message must have."""
    one, data = gg.tensor("t", [4], 0, 0), bytes(16)
    arch = gg.key("general.architecture", STR, "llama")
    tokens = gg.array("tokenizer.ggml.tokens", STR, ["a", "b"])

    def file(*keys: bytes, tensors: list[bytes] | None = None, data: bytes = data, **more: object):  # noqa: ANN202
        return gg.file(keys, [one] if tensors is None else tensors, data, **more)

    def tensor(*args: object, data: bytes = data, **more: object) -> bytes:
        return file(tensors=[gg.tensor(*args, **more)], data=data)

    big = limits.GGUF_STRING_BYTES
    align = "general.alignment"
    pair = [gg.tensor("a", [4], 0, 0), gg.tensor("b", [4], 0, 32)]
    return {
        "empty": (b"", "magic at byte 0"),
        "magic": (file(magic=b"GGML"), "magic at byte 0"),
        "version 0": (file(version=0), "version at byte 4: version 0"),
        "version 1": (file(version=1), "version at byte 4: version 1"),
        "version 4": (file(version=4), "version at byte 4: version 4"),
        "big-endian": (file(version=3 << 24), "big-endian"),
        "49 bytes, array of 2**60": (
            gg.file([gg.array("a", U8, [], 2**60)], [], b"", tensor_count=1)[:49],
            "",
        ),
        "keys over the limit": (file(key_count=limits.GGUF_KEYS + 1), "key count at byte 16"),
        "keys do not fit": (file(key_count=50), "key count at byte 16"),
        "2**64 - 1 keys": (file(key_count=2**64 - 1), "key count at byte 16"),
        "no tensors": (file(tensors=[], data=b""), "vocabulary-only"),
        "tensors over the limit": (file(tensor_count=16_385), "tensor count at byte 8"),
        "tensors do not fit": (file(tensor_count=9), "tensor count at byte 8"),
        "2**63 tensors": (file(tensor_count=2**63), "tensor count at byte 8"),
        "empty key": (file(gg.key("", U8, 1)), "key at byte 32"),
        "key too long": (file(gg.key("k" * 257, U8, 1)), "key at byte 24: 257 bytes"),
        "key not ASCII": (file(gg.key("k\u00e9", U8, 1)), "printable ASCII"),
        "key with a control": (file(gg.key("k\x1b[2J", U8, 1)), r"'k\x1b[2J' is not printable"),
        "key twice": (file(arch, arch), "occurs twice"),
        "key past the file": (file(gg.string(b"k")[:8] + b"")[:30], ""),
        "string past the file": (
            file(gg.string("k") + struct.pack("<IQ", STR, 5000)),
            "value of 'k' at byte 45: needs 5,000 bytes",
        ),
        "string of 2**64 - 1": (
            file(gg.string("k") + struct.pack("<IQ", STR, 2**64 - 1)),
            "over 1,048,576",
        ),
        "string over the limit": (file(gg.key("k", STR, b"x" * (big + 1))), "over 1,048,576"),
        "tokenizer over its limit": (
            file(
                gg.string("tokenizer.huggingface.json")
                + struct.pack("<IQ", STR, limits.GGUF_TOKENIZER_JSON_BYTES + 1)
            ),
            "over 41,943,040",
        ),
        "element over the limit": (
            file(gg.array("k", STR, [b"x" * (limits.GGUF_ELEMENT_BYTES + 1)])),
            "element 0 of value of 'k'",
        ),
        "element past the file": (
            file(gg.array("k", STR, [])[:-8] + struct.pack("<QQ", 1, 60_000)),
            "needs",
        ),
        "element of 2**64 - 1": (
            file(gg.array("k", STR, [])[:-8] + struct.pack("<QQ", 1, 2**64 - 1)),
            "element 0",
        ),
        "nested array": (file(gg.array("k", ARR, [], 1)), "nested arrays"),
        "array of an unknown type": (file(gg.array("k", 13, [], 1)), "unknown type 13"),
        "too many elements": (file(gg.array("k", U8, [], 2_097_153)), "over 2,097,152"),
        "elements past the file": (file(gg.array("k", F64, [], 1000)), "needs 8,000 bytes"),
        "strings past the file": (file(gg.array("k", STR, [], 1000)), "needs 8,000 bytes"),
        "array of 2**64 - 1": (file(gg.array("k", U8, [], 2**64 - 1)), "over 2,097,152"),
        "bool of 2": (file(gg.key("k", BOOL, 2)), "2 is neither"),
        "bool of 2 in an array": (file(gg.array("k", BOOL, [1, 2, 0])), "an element is neither"),
        "unknown type": (file(gg.string("k") + struct.pack("<IQ", 13, 0)), "unknown type 13"),
        "alignment 0": (file(gg.key(align, U32, 0)), "0 is no power of two"),
        "alignment 4": (file(gg.key(align, U32, 4)), "4 is no power of two"),
        "alignment 48": (file(gg.key(align, U32, 48)), "48 is no power of two"),
        "alignment 131072": (file(gg.key(align, U32, 131_072)), "is no power of two"),
        "alignment as u64": (file(gg.key(align, U64, 32)), "unsigned 32-bit"),
        "empty tensor name": (tensor("", [4], 0, 0), "tensor name"),
        "tensor name too long": (tensor("t" * 65, [4], 0, 0), "65 bytes, over 64"),
        "tensor name not ASCII": (tensor("t\u00e9", [4], 0, 0), "printable ASCII"),
        "tensor twice": (file(tensors=[pair[0], pair[0]], data=bytes(48)), "occurs twice"),
        "no dimensions": (tensor("t", [], 0, 0), "0, not 1 to 4"),
        "five dimensions": (tensor("t", [1] * 5, 0, 0), "5, not 1 to 4"),
        "2**32 - 1 dimensions": (tensor("t", [1], 0, 0, rank=2**32 - 1), "not 1 to 4"),
        "dimension 0": (tensor("t", [0], 0, 0), "dimension of tensor 't' at byte 37: 0"),
        "dimension 2**31": (tensor("t", [2**31], 0, 0), "2,147,483,648"),
        "product over 64 bits": (tensor("t", [2**31 - 1] * 4, 0, 0), "its data ends at"),
        "ragged block": (tensor("t", [48, 2], 2, 0, data=bytes(54)), "Q4_0's block of 32"),
        "ragged K block": (
            tensor("t", [384, 2], 12, 0, data=bytes(432)),
            "dimension of tensor 't' at byte 57: 384 is no multiple of Q4_K's block of 256",
        ),
        "Q8_K": (tensor("t", [256], 15, 0, data=bytes(292)), "type of tensor 't' at byte 45: Q8_K"),
        "IQ1_S": (tensor("t", [256], 19, 0, data=bytes(50)), "IQ1_S, which llmrun does not"),
        "integers": (tensor("t", [4], 26, 0), "I32, which llmrun does not"),
        "TQ1_0": (tensor("t", [256], 34, 0, data=bytes(54)), "TQ1_0, which llmrun does not"),
        "NVFP4": (tensor("t", [64], 40, 0, data=bytes(36)), "NVFP4, which llmrun does not"),
        "type 99": (tensor("t", [4], 99, 0), "unknown type 99"),
        "first offset": (tensor("t", [4], 0, 32, data=bytes(48)), "offset of tensor 't'"),
        "odd offset": (
            file(tensors=[pair[0], gg.tensor("b", [4], 0, 33)], data=bytes(49)),
            "offset of tensor 'b'",
        ),
        "overlap": (
            file(tensors=[pair[0], gg.tensor("b", [4], 0, 0)], data=bytes(16)),
            "offset of tensor 'b'",
        ),
        "gap": (
            file(tensors=[pair[0], gg.tensor("b", [4], 0, 64)], data=bytes(80)),
            "ends at 32",
        ),
        "offsets out of order": (file(tensors=pair[::-1], data=bytes(48)), "offset of tensor 'b'"),
        "offset of 2**64 - 1": (tensor("t", [4], 0, 2**64 - 1), "offset of tensor 't'"),
        "data cut": (file(data=bytes(15)), "its data ends at"),
        "trailing bytes": (file(data=bytes(48)), "32 bytes follow"),
        "scores of another length": (
            file(tokens, gg.array("tokenizer.ggml.scores", F32, [0.0])),
            "1 values for 2 tokens",
        ),
        "types of another length": (
            file(tokens, gg.array("tokenizer.ggml.token_type", I32, [1, 1, 1])),
            "3 values for 2 tokens",
        ),
        "tokens are numbers": (
            file(gg.array("tokenizer.ggml.tokens", I32, [1])),
            "list of strings",
        ),
        "special id": (file(tokens, gg.key("tokenizer.ggml.eos_token_id", U32, 2)), "id below 2"),
        "negative id": (file(tokens, gg.key("tokenizer.ggml.bos_token_id", I32, -1)), "id below 2"),
        "id as text": (file(tokens, gg.key("tokenizer.ggml.bos_token_id", STR, "1")), "id below 2"),
        "no tensors, one part": (
            file(gg.key("split.count", U16, 1), tensors=[], data=b""),
            "vocabulary-only",
        ),
    }


@pytest.fixture(scope="module")
def cases(gg: SimpleNamespace) -> dict[str, tuple[bytes, str]]:
    return _cases(gg)


def test_sec07_every_fault_is_named(
    cases: dict[str, tuple[bytes, str]], refused: Refused, subtests: pytest.Subtests
) -> None:
    assert len(cases) >= 60
    for name, (content, words) in cases.items():
        with subtests.test(name):
            message = refused(_open, content)
            assert words in message
            assert "at byte" in message


@pytest.mark.slow
def test_sec07_worst_legal_header_stays_in_budget(gg: SimpleNamespace, refused: Refused) -> None:
    def arrays(count: int) -> list[bytes]:
        head = struct.pack("<Q", count)
        return [gg.array(name, 8, [])[:-8] + head + gg.string("") * count for name in "ab"]

    names = [gg.tensor(f"{index}", [8], 0, 32 * index) for index in range(limits.GGUF_TENSORS)]
    data = bytes(32 * limits.GGUF_TENSORS - 1)
    # Strings cost time but no memory, so tracing (which is slow) is done with few of them.
    few, many = (gg.file(arrays(n), names, data) for n in (1000, limits.GGUF_STRINGS // 2))
    assert "its data ends at" in refused(_open, few)
    assert "its data ends at" in refused(_open, many, memory=False)


def test_sec07_strings_are_counted_over_the_whole_file(
    gg: SimpleNamespace, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GGUF_STRINGS", 4)
    arrays = [gg.array(name, STR, ["x", "y"]) for name in "abc"]
    content = gg.file(arrays, [gg.tensor("t", [4], 0, 0)], bytes(16))
    assert "value of 'c' at byte" in refused(_open, content)
    assert "over 4 strings in all" in refused(_open, content)


def test_sec07_header_size_is_bounded(gg: SimpleNamespace, refused: Refused) -> None:
    text = gg.key("tokenizer.huggingface.json", 8, b"x" * limits.GGUF_TOKENIZER_JSON_BYTES)
    more = [
        gg.array(f"k{n}", 0, [])[:-8] + struct.pack("<Q", 2 << 20) + bytes(2 << 20)
        for n in range(5)
    ]
    content = gg.file([text, *more], [gg.tensor("t", [4], 0, 0)], bytes(16))
    assert "the header is over 50,331,648 bytes" in refused(_open, content, memory=False)


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value(version: int, gg: SimpleNamespace, tmp_path: Path) -> None:
    numbers = {U8: 200, I8: -3, U16: 60_000, I16: -300, U32: 2**32 - 1, I32: -9}
    numbers |= {F32: 0.5, U64: 2**64 - 1, I64: -(2**63), F64: 1e300}
    keys = [gg.key(f"k{kind}", kind, value) for kind, value in numbers.items()]
    keys += [gg.array(f"a{kind}", kind, [value, value]) for kind, value in numbers.items()]
    keys += [
        gg.key("yes", BOOL, 1),
        gg.array("flags", BOOL, [0, 1]),
        gg.key("text", STR, "h\u00e9"),
    ]
    keys += [gg.array("texts", STR, ["", "\u00fc", "x" * 300]), gg.array("none", STR, [])]
    path = tmp_path / "values"
    path.write_bytes(gg.file(keys, [gg.tensor("t", [4], 0, 0)], bytes(16), version=version))
    metadata, (tensor,) = read_header(map_file(path), path)
    expected: dict[str, object] = {f"k{kind}": value for kind, value in numbers.items()}
    expected |= {f"a{kind}": [value, value] for kind, value in numbers.items()}
    expected |= {"yes": True, "flags": [False, True], "text": "h\u00e9", "none": []}
    expected["texts"] = ["", "\u00fc", "x" * 300]
    assert dict(metadata) == expected
    assert metadata["yes"] is True
    assert metadata["texts"] is metadata["texts"]
    assert (tensor.name, tensor.kind, tensor.shape) == ("t", "F32", (4,))


def test_text_that_is_not_utf8_is_damage_when_it_is_used(
    gg: SimpleNamespace, tmp_path: Path
) -> None:
    path = tmp_path / "text"
    keys = [gg.array("k", STR, ["ok", b"\xff"])]
    path.write_bytes(gg.file(keys, [gg.tensor("t", [4], 0, 0)], bytes(16)))
    metadata, _ = read_header(map_file(path), path)
    with pytest.raises(ModelFileError, match=r"'k' at byte .* not valid UTF-8"):
        metadata["k"]


def test_alignment_of_the_file_is_used(gg: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    tensors = [gg.tensor("a", [1], 0, 0), gg.tensor("b", [1], 0, 4096)]
    key = gg.key("general.alignment", U32, 4096)
    data = struct.pack("<f", 1) + bytes(4092) + struct.pack("<f", 2)
    path.write_bytes(gg.file([key], tensors, data, alignment=4096))
    opened = FORMAT.open(path)
    assert [bytes(opened.read(n).arrays["w"].data) for n in "ab"] == [data[:4], data[-4:]]
