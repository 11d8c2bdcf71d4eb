"""The ``llmrun`` command: settings, options, commands, exit code.

Commands are found in ``llmrun/cli/commands``: a module that exports ``command`` is a command of
the module's name. Nothing heavy is imported here; a command imports what it needs when it runs.
"""

import difflib
import gc
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import llmrun
from llmrun.cli import commands, exits
from llmrun.cli.plain_values import convert_plainly
from llmrun.cli.session import Session
from llmrun.cli.settings import Settings, read_settings
from llmrun.cli.terminal import Terminal, use_utf8
from llmrun.errors import ClosedPipeError, InternalError, UsageError

NOT_IN_CONFIG = frozenset({"model", "help"})
"""Options the config file does not set: the model there is called ``default``."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and leave with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # closed by whoever started us: nobody can read an answer
        sys.exit(ClosedPipeError.exit_code)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    use_utf8(sys.stdout, sys.stderr)
    code = exits.guard(lambda: run(given), wants_traceback=lambda: _wants_traceback(given))
    gc.freeze()  # or Python looks through a whole vocabulary for garbage as it ends, for 25 ms
    sys.exit(code)


def run(arguments: list[str]) -> None:
    """Run one command; every problem is an exception."""
    settings = read_settings(os.environ)
    terminal = Terminal(settings, sys.stdout, sys.stderr)
    exits.die_cleanly_on_signals(terminal)
    program = build(_only_command(arguments, settings))
    try:
        with program.make_context(
            "llmrun",
            arguments,
            obj=Session(settings, terminal),
            default_map=defaults(program, settings),
        ) as context:
            program.invoke(context)
    finally:
        terminal.restore()


def build(only: str | None = None) -> TyperGroup:
    """The whole program as one click command group, or as much of it as one command needs."""
    app = typer.Typer(
        name="llmrun",
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback(invoke_without_command=True)(_start)
    commands_found = found(only)
    for name, command in commands_found.items():
        app.command(name)(command)
    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)  # an app with a callback is one
    convert_plainly(program, commands_found)
    return program


def found(only: str | None = None) -> dict[str, Callable[..., None]]:
    """Every command by name, or the one called ``only`` if there is one of that name.

    InternalError for a module there that is none.
    """
    modules = [*pkgutil.iter_modules(commands.__path__)]
    result = {}
    for module in [module for module in modules if module.name == only] or modules:
        command = getattr(
            importlib.import_module(f"{commands.__name__}.{module.name}"), "command", None
        )
        if command is None:
            raise InternalError(f"{module.name} in the folder of commands has no command.")
        result[module.name] = command
    return result


def defaults(program: TyperGroup, settings: Settings) -> dict[str, dict[str, object]]:
    """The config file as defaults per command. UsageError for a key that is no option."""
    options = {name: _options(command.params) for name, command in program.commands.items()}
    known = {key for keys in options.values() for key in keys} - NOT_IN_CONFIG
    wanted = {key: value for key, value in settings.config.items() if key != "default"}
    for key in wanted:
        if key not in known:
            near = difflib.get_close_matches(key.replace("_", "-"), [*known, "default"], n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"The config file {settings.config_file} has the key {key!r}, which is no option.",
                f"{hint}Keys are long option names without the dashes in front.",
            )
    return {
        name: {keys[key]: value for key, value in wanted.items() if key in keys}
        for name, keys in options.items()
    }


def _only_command(arguments: Sequence[str], settings: Settings) -> str | None:
    """The command that is typed first; None if the config file must be held against all options."""
    return arguments[0] if arguments and not settings.config.keys() - {"default"} else None


def _options(parameters: Sequence[Any]) -> dict[str, str]:
    """The long options among click's parameters, without dashes, and the name each one sets."""
    return {
        spelling.removeprefix("--"): parameter.name
        for parameter in parameters
        for spelling in parameter.opts
        if spelling.startswith("--") and parameter.name
    }


def _wants_traceback(arguments: Sequence[str]) -> bool:
    """Asked after an error, which may be that of reading the very settings."""
    if "--debug" in arguments:
        return True
    try:
        return read_settings(os.environ).debug
    except UsageError:
        return False


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmrun {llmrun.__version__}")
        raise typer.Exit()


def _start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = False,
) -> None:
    """Download, quantize and run a language model, and see what it costs.

    Start with: llmrun chat
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
