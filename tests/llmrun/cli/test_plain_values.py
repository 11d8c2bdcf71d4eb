"""Plain words become what typer makes of them; all else is left to typer."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from llmrun.cli import app

WORDS = (
    *("", "x", "auto", "a b", "ä\ud800", "0", "1", "7", "-3", "+5", "007", "1_000", " 4", "9" * 30),
    *(
        "0.5",
        "-1.25",
        "1e3",
        ".5",
        "5.",
        "inf",
        "nan",
        "0x10",
        "true",
        "off",
        "line",
        "full",
        "OFF",
    ),
    *("cpu", "cuda:1", "f16", "f32", "/nowhere/at/all", ".", "a\0b", "none", "int4"),
)
VALUES = (None, True, 3, 0, -1, 2.5, 10**20, ["x"], ["1", "2"], [], (), {"a": 1})


def parameters() -> Iterator[Any]:
    """Every parameter whose conversion is replaced, with both ways."""
    replaced, typers = app.build(), typer_only()
    for name, command in replaced.commands.items():
        for ours, theirs in zip(command.params, typers.commands[name].params, strict=True):
            assert ours.name == theirs.name
            yield pytest.param(ours, theirs, id=f"{name} {ours.name}")


def typer_only() -> Any:
    """The program as typer builds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "convert_plainly", lambda program, commands: None)
        return app.build()


CONTEXT = typer.Context(typer_only().commands["run"])


def outcome(parameter: Any, value: object) -> object:
    try:
        made = parameter.process_value(CONTEXT, value)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "message", None)
    return type(made), repr(made)


@pytest.mark.parametrize(("ours", "theirs"), [*parameters()])
def test_every_value_comes_out_as_typer_makes_it(ours: Any, theirs: Any) -> None:
    is_list = ours.multiple or ours.nargs == -1
    for value in (*WORDS, *VALUES, *([word] for word in WORDS if is_list)):
        assert outcome(ours, value) == outcome(theirs, value), value


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="this user reads everything")
def test_a_file_nobody_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0)
    parameter = next(p for p in app.build().commands["run"].params if p.name == "files")
    with pytest.raises(typer.BadParameter, match="not readable"):
        parameter.process_value(CONTEXT, [str(secret)])


def test_the_options_of_run_are_all_converted_plainly() -> None:
    ours, theirs = app.build().commands["run"], typer_only().commands["run"]
    kept = [
        ours_one.name
        for ours_one, theirs_one in zip(ours.params, theirs.params, strict=True)
        if type(ours_one.process_value) is type(theirs_one.process_value)
    ]
    # typer itself lets a switch through as it is.
    assert all(parameter.is_flag for parameter in ours.params if parameter.name in kept)
