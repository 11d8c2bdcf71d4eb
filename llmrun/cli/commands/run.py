"""``llmrun run``: one answer for a shell pipeline."""

import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from llmrun.cli.options import (
    GeneralOptions,
    Json,
    ModelOptions,
    OutputFlags,
    PromptFlags,
    SamplingFlags,
    spread,
)
from llmrun.cli.session import Session
from llmrun.errors import UsageError


@spread
def command(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The question.")] = None,
    *,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", metavar="FILE", help="Add a file to the prompt; repeatable."),
    ] = None,
    model: ModelOptions,
    sampling: SamplingFlags,
    prompting: PromptFlags,
    output: OutputFlags,
    as_json: Json = False,
    json_stream: Annotated[
        bool, typer.Option("--json-stream", help="One JSON line per token on stdout.")
    ] = False,
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="FILE", help="Write what made the answer, as JSON."),
    ] = None,
    general: GeneralOptions,
) -> None:
    """Answer one prompt; only the answer goes to stdout.

    The prompt is the argument, then the files of -f, then standard input, joined by blank lines.
    """
    from llmrun.cli.loading import load
    from llmrun.cli.one_shot import Answering, Shape, one_shot
    from llmrun.cli.prompting import check_raw, damage_note, gather

    session: Session = context.obj.with_options(general)
    if as_json and json_stream:
        raise UsageError("--json and --json-stream exclude each other.", "Give one of them.")
    check_raw(prompting)
    stdin = _standard_input(session, bool(prompt or files))
    text = gather(prompt, files or (), stdin)
    if note := damage_note(text):
        session.say(note)
    if not text.text.strip():
        raise UsageError(
            "The prompt is empty.",
            'Give a prompt: llmrun run "..." or something on standard input.',
        )
    shape = Shape.JSON if as_json else Shape.JSON_LINES if json_stream else Shape.TEXT
    loaded = load(session, session.model(model.model), model, prompting)
    one_shot(session, loaded, text.text, Answering(sampling, prompting, output, shape, receipt))


def _standard_input(session: Session, has_prompt: bool) -> BinaryIO | None:
    """What to read: a pipe always, the terminal only if there is no other prompt."""
    if sys.stdin is None or (session.terminal.stdin_is_terminal and has_prompt):
        return None
    if session.terminal.stdin_is_terminal:
        session.say("Type the prompt; Ctrl-D ends it.")
    return sys.stdin.buffer
