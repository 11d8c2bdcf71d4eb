"""The status line below streaming text, as a terminal shows it (pyte is the terminal)."""

import random

import pyte
import pytest
from wcwidth import wcwidth

from llmrun.cli.screen import Screen, cells, fit


class Wrapping(pyte.HistoryScreen):
    """A wide character that does not fit in its row goes to the next, as on real terminals."""

    def draw(self, data: str) -> None:
        for character in data:
            if wcwidth(character) == 2 and self.cursor.x == self.columns - 1:
                self.carriage_return()
                self.linefeed()
            super().draw(character)


class Shown:
    """A terminal in cooked mode: a newline also returns to the first column."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns = columns
        self.screen = Wrapping(columns, lines, history=10_000, ratio=0.5)
        self.stream = pyte.Stream(self.screen)

    def write(self, text: str) -> None:
        self.stream.feed(text.replace("\n", "\r\n"))

    def lines(self) -> list[str]:
        """Scrolled away and visible."""
        top = [
            "".join(line[x].data for x in range(self.columns)).rstrip()
            for line in self.screen.history.top
        ]
        return [*top, *(line.rstrip() for line in self.screen.display)]


def test_the_status_stands_below_the_text_and_goes_at_the_end() -> None:
    shown = Shown(20, 5)
    screen = Screen(shown.write, lambda: 20)
    screen.text("Hello")
    screen.status("status 1")
    assert shown.lines()[:3] == ["Hello", "status 1", ""]
    screen.text(" you")
    screen.status("status 2")
    assert shown.lines()[:3] == ["Hello you", "status 2", ""]
    screen.end()
    shown.write("next")
    assert shown.lines()[:3] == ["Hello you", "next", ""]


@pytest.mark.parametrize("columns", [7, 20, 33])
@pytest.mark.parametrize("seed", range(12))
def test_text_with_a_status_line_is_the_text_alone(columns: int, seed: int) -> None:
    """Wide, combining and control characters, right edges, the bottom row, scrolling."""
    choose = random.Random(seed)
    pieces = [
        "".join(choose.choices("ab 世界e\u0301\n", k=choose.randint(0, 9))) for _ in range(120)
    ]
    alone, beside = Shown(columns, 6), Shown(columns, 6)
    screen = Screen(beside.write, lambda: columns)
    for piece in pieces:
        alone.write(piece)
        screen.text(piece)
        if choose.random() < 0.6:
            screen.status("status"[: columns - 1])
    screen.end()
    if not "".join(pieces).endswith("\n"):
        alone.write("\n")

    def text(lines: list[str]) -> list[str]:
        return "\n".join(lines).rstrip().split("\n")

    assert text(beside.lines()) == text(alone.lines())


def test_a_status_line_never_costs_the_character_at_the_right_edge() -> None:
    shown = Shown(5, 4)
    screen = Screen(shown.write, lambda: 5)
    screen.text("abcd")
    screen.status("st")
    screen.text("e")  # the row is full, the cursor still stands on it
    screen.status("st")
    screen.text("f")
    screen.end()
    assert shown.lines()[:3] == ["abcde", "f", ""]


def test_a_narrower_window_does_no_lasting_harm() -> None:
    shown = Shown(40, 8)
    width = 40
    screen = Screen(shown.write, lambda: width)
    screen.text("before ")
    screen.status("a status line that is rather long")
    width = 20
    shown.screen.resize(columns=20)
    shown.columns = 20
    screen.text("after\nend")
    screen.status("short")
    screen.end()
    assert [line for line in shown.lines() if line] == ["before after", "end"]


def test_tabs_become_spaces_up_to_the_next_stop() -> None:
    shown = Shown(20, 4)
    screen = Screen(shown.write, lambda: 20)
    screen.text("a\tb\n\tc")
    assert shown.lines()[:2] == ["a       b", "        c"]


def test_widths() -> None:
    assert [cells(c) for c in ("a", "世", "\u0301", "🙂")] == [1, 2, 0, 2]
    assert fit("a世b", 2) == "a"
    assert fit("a世b", 4) == "a世b"
