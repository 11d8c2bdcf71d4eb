"""Windows of a text, and the text that comes with llmrun."""

import hashlib
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.cli.eval_text import BUNDLED, EvalText, Extent, cut, read_text
from llmrun.errors import UsageError


def tokenizer(add_bos: bool = False, per_character: int = 1) -> Any:
    """Each character is a token, or several."""

    def encode(text: str) -> list[int]:
        return [ord(c) % 250 for c in text for _ in range(per_character)]

    return SimpleNamespace(encode_plain=encode, add_bos=add_bos, bos_id=255, n_ids=256)


TEXT = EvalText("t", "abcdefghij" * 100, "")


@pytest.mark.parametrize(("context", "scored"), [(512, 255), (16, 7), (5, 2), (4, 1)])
def test_the_second_half_of_each_window_is_scored(context: int, scored: int) -> None:
    made = cut(TEXT, Extent(context, None, context), tokenizer(), 256)
    assert made.windows.scored == scored
    assert made.windows.first == context // 2


def test_windows_follow_each_other() -> None:
    made = cut(TEXT, Extent(10, None, 30), tokenizer(), 300)
    assert [len(window) for window in made.windows.sequences] == [10, 10, 10]
    assert made.windows.sequences[2] == tuple(map(ord, "abcdefghij"))
    assert (made.windows.vocab, made.bos) == (256, None)


def test_a_bos_takes_the_place_of_the_first_token() -> None:
    made = cut(TEXT, Extent(10, None, 20), tokenizer(add_bos=True), 256)
    assert made.bos == 255
    assert made.windows.sequences[1] == (255, *map(ord, "bcdefghij"))
    assert made.ids_sha256 != cut(TEXT, Extent(10, None, 20), tokenizer(), 256).ids_sha256


def test_as_many_windows_as_make_the_scored_positions() -> None:
    assert Extent(512, 4080).windows == 16
    assert Extent(512, 4081).windows == 17
    assert Extent(512).windows == 16
    assert Extent(4096, None, 1024).windows == 1


def test_the_hash_is_that_of_the_ids() -> None:
    made = cut(TEXT, Extent(10, None, 10), tokenizer(), 256)
    data = b"".join(bytes([ord(c), 0, 0, 0]) for c in "abcdefghij")
    assert made.ids_sha256 == hashlib.sha256(data).hexdigest()


def test_of_a_long_text_only_the_beginning_is_looked_at() -> None:
    long = EvalText("t", "x" * 100_000, "")
    assert cut(long, Extent(10, None, 20), tokenizer(), 256).text_tokens == 12 * 21


def test_tokens_of_many_characters_do_not_end_a_text_early() -> None:
    class Rare:
        add_bos, bos_id, n_ids = False, None, 256

        def encode_plain(self, text: str) -> list[int]:
            return [1] * (len(text) // 50)

    made = cut(EvalText("t", "x" * 5000, ""), Extent(10, None, 100), Rare(), 256)  # type: ignore[arg-type]
    assert len(made.windows.sequences) == 10


def test_a_file_is_hashed_and_must_be_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("Grüße\n".encode())
    assert read_text(file) == EvalText(
        "text.txt", "Grüße\n", hashlib.sha256("Grüße\n".encode()).hexdigest()
    )
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        read_text(file)


def test_the_bundled_text_is_long_and_of_many_kinds() -> None:
    text = read_text(None)
    assert text.name == BUNDLED
    assert len(text.text.encode()) > 250_000
    start = text.text[:30_000]  # what is read by default holds some of each kind
    for sign in ("def ", "User: ", "SELECT", "ü", "é", "的", "struct "):
        assert sign in start, sign
    assert not any(ord(c) < 32 and c not in "\n\t" for c in text.text)


def test_nothing_is_both_calibrated_and_evaluated_on() -> None:
    calibration = (files("llmrun") / "text" / "data" / "calibration.txt").read_text("utf-8")
    lines = {line.strip() for line in calibration.splitlines() if len(line.strip()) >= 30}
    evaluated = read_text(None).text
    assert [line for line in lines if line in evaluated] == []
