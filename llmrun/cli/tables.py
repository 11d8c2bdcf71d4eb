"""Tables on stdout: aligned text that pipes well, or JSON. No library: names are foreign text."""

from collections.abc import Sequence

from llmrun.cli.session import Session


def show_json(session: Session, document: object) -> None:
    """One JSON document on stdout; on a terminal nothing in it can drive the terminal."""
    from llmrun.cli.json_text import json_text

    terminal = session.terminal
    terminal.write(json_text(document, for_terminal=terminal.stdout_is_terminal, indent=2))


def show_table(session: Session, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns side by side; the last one is not padded."""
    show_text(session, "\n".join(_lines([head, *rows])))


def show_pairs(session: Session, pairs: Sequence[tuple[str, str]]) -> None:
    """A name and a value on each line."""
    show_text(session, "\n".join(_lines(pairs)))


def show_text(session: Session, text: str) -> None:
    """Text on stdout; on a terminal nothing in it can drive the terminal."""
    if session.terminal.stdout_is_terminal:
        from llmrun.text.terminal import clean

        text = clean(text)
    session.terminal.write(text + "\n")


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
