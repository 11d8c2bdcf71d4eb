"""``llmrun chat``: talk to a model."""

import sys

import typer

from llmrun.cli.options import (
    GeneralOptions,
    ModelArgument,
    ModelOptions,
    OutputFlags,
    PromptFlags,
    SamplingFlags,
    one_model,
    spread,
)
from llmrun.cli.session import Session


@spread
def command(
    context: typer.Context,
    named: ModelArgument = None,
    *,
    model: ModelOptions,
    sampling: SamplingFlags,
    prompting: PromptFlags,
    output: OutputFlags,
    general: GeneralOptions,
) -> None:
    """Talk to a model.

    If standard input is not a terminal, all of it is one prompt: it is answered, and that is all.
    """
    from llmrun.cli.loading import check_scheme, known, load
    from llmrun.cli.one_shot import Answering, one_shot
    from llmrun.cli.prompting import check_raw, damage_note, gather

    session: Session = context.obj.with_options(general)
    check_raw(prompting)
    name = session.model(one_model(named, model.model))
    how = Answering(sampling, prompting, output)
    if session.terminal.stdin_is_terminal:
        from llmrun.cli.chat_loop import converse

        converse(session, load(session, name, model, prompting), how)
        return
    text = gather(None, (), sys.stdin.buffer if sys.stdin else None)
    if note := damage_note(text):
        session.say(note)
    if not text.text.strip():
        check_scheme(model.quant)
        known(name, model.revision)
        return
    one_shot(session, load(session, name, model, prompting), text.text, how)
