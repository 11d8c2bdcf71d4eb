"""``llmrun run``: one answer for a shell pipeline."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

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

if TYPE_CHECKING:
    from llmrun.text.render_process import RenderProcess


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
        bool,
        typer.Option("--json-stream", help="One JSON line per token; the last one has the usage."),
    ] = False,
    receipt: Annotated[
        Path | None,
        typer.Option("--receipt", metavar="FILE", help="Write what made the answer, as JSON."),
    ] = None,
    general: GeneralOptions,
) -> None:
    """Answer one prompt; only the answer goes to stdout.

    The prompt is the argument, then the files of -f, then standard input, joined by blank lines.

    Lines of --json-stream: token_id, text, time_ms, step_ms, phase, logprob, position for a token;
    token_id null for text held back until the end; last: finish_reason, usage, timings.
    """
    process = _template_process(prompting)
    from llmrun.cli.loading import is_alias, is_model_path, load
    from llmrun.cli.one_shot import Answering, Shape, check_receipt, one_shot
    from llmrun.cli.prompting import check_raw, damage_note, gather

    imported_ns = time.monotonic_ns()
    session: Session = context.obj.with_options(general)
    if as_json and json_stream:
        raise UsageError("--json and --json-stream exclude each other.", "Give one of them.")
    check_raw(prompting)
    check_receipt(receipt)
    stdin = _standard_input(session, bool(prompt or files))
    text = gather(prompt, files or (), stdin)
    if prompt is not None and (is_alias(prompt) or is_model_path(prompt)):
        session.say(f"note: {prompt!r} is taken as the prompt; -m {prompt} chooses that model")
    if note := damage_note(text):
        session.say(note)
    if not text.text.strip():
        raise UsageError(
            "The prompt is empty.",
            'Give a prompt: llmrun run "..." or something on standard input.',
        )
    shape = Shape.JSON if as_json else Shape.JSON_LINES if json_stream else Shape.TEXT
    stages = (("import", imported_ns), ("input", time.monotonic_ns()))
    loaded = load(session, session.model(model.model), model, prompting, process)
    how = Answering(sampling, prompting, output, shape, receipt, stages)
    one_shot(session, loaded, text.text, how)


def _template_process(prompting: PromptFlags) -> "RenderProcess":
    """What renders the template; it starts as soon as possible, beside our own imports.

    It ends by itself if this process does.
    """
    from llmrun.text.limits import RenderLimits
    from llmrun.text.template import renderer

    process = renderer(RenderLimits())
    if not prompting.raw:
        process.start()
    return process


def _standard_input(session: Session, has_prompt: bool) -> BinaryIO | None:
    """What to read: a pipe always, the terminal only if there is no other prompt."""
    if sys.stdin is None or (session.terminal.stdin_is_terminal and has_prompt):
        return None
    if session.terminal.stdin_is_terminal:
        session.say("Type the prompt; Ctrl-D ends it.")
    return sys.stdin.buffer
