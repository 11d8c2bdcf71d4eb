"""Bytes and arguments become text that can be encoded again, with replacements counted."""

from hypothesis import given
from hypothesis import strategies as st

from llmrun.text.decode_input import DecodedText, clean_text, decode_bytes


def test_r020_bad_bytes_are_replaced_once_and_counted() -> None:
    assert decode_bytes(b"\xff\xfeA") == DecodedText("\ufffd\ufffdA", 2)
    assert decode_bytes(b"ok \xe2\x82 cut \xc3") == DecodedText("ok \ufffd cut \ufffd", 2)


def test_replacement_marks_of_the_input_are_not_counted() -> None:
    assert decode_bytes("a\ufffdb".encode()) == DecodedText("a\ufffdb", 0)
    assert decode_bytes(b"\xe2\xef\xbf\xbd") == DecodedText("\ufffd\ufffd", 1)


def test_byte_order_marks_are_honoured_and_dropped() -> None:
    assert decode_bytes("\ufeffhé".encode()) == DecodedText("hé", 0)
    assert decode_bytes("hé🦀".encode("utf-16")) == DecodedText("hé🦀", 0)
    assert decode_bytes(b"\xfe\xff" + "hé".encode("utf-16-be")) == DecodedText("hé", 0)
    assert decode_bytes("a\ufeffb".encode()) == DecodedText("a\ufeffb", 0)


def test_r023_pairs_are_joined_and_lone_halves_replaced() -> None:
    assert clean_text("\ud83e\udd80 ok") == DecodedText("🦀 ok", 0)
    assert clean_text("\ud83c\udcb0") == DecodedText("\U0001f0b0", 0)
    assert clean_text("a\ud83e b \udd80") == DecodedText("a\ufffd b \ufffd", 2)


def test_r021_an_argument_reads_as_the_same_bytes_from_a_file() -> None:
    for data in (b"h\xc3\xa9", b"\xff\xfeA", b"\xf0\x9f\xa6\x80\x80"):
        argument = data.decode("ascii", "surrogateescape")
        assert clean_text(argument) == decode_bytes(data)


@given(st.binary(max_size=40))
def test_any_bytes_become_encodable_text(data: bytes) -> None:
    decoded = decode_bytes(data)
    decoded.text.encode()
    assert decoded.replaced >= 0


@given(st.text(st.characters(categories=["Cs", "Lu", "So"]), max_size=20))
def test_any_string_becomes_encodable(text: str) -> None:
    clean_text(text).text.encode()
