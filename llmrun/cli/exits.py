"""Every way out of the program: one exit code and at most one message per cause.

0 ok, 1 internal, 2 usage, 3 not found, 4 download, 5 bad model file, 6 memory, 7 context,
8 structured output, 9 unavailable, 130 interrupted, 141 broken pipe. A traceback is shown with
``--debug`` only. SIGTERM and SIGHUP restore the terminal, then end the process by that signal.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

import typer

from llmrun.cli.terminal import Terminal
from llmrun.errors import (
    ClosedPipeError,
    DoesNotFitError,
    InternalError,
    InterruptError,
    LlmrunError,
    UsageError,
)

DEBUG_HINT = "Run again with --debug for the traceback."


def guard(run: Callable[[], None], *, wants_traceback: Callable[[], bool]) -> int:
    """Run a command; return its exit code. Whatever went wrong has been said on stderr.

    ``wants_traceback`` is asked after an error only.
    """
    try:
        run()
        sys.stdout.flush()
        return 0
    except typer.Exit as err:
        return err.exit_code
    except (KeyboardInterrupt, typer.Abort, InterruptError):
        return InterruptError.exit_code
    except (BrokenPipeError, ClosedPipeError):
        _abandon_streams()
        return ClosedPipeError.exit_code
    except Exception as err:
        error = named(err)
        if wants_traceback():
            traceback.print_exc()
            error.next_step = error.next_step.removeprefix(DEBUG_HINT)
        complain(error)
        return error.exit_code


def named(err: Exception) -> LlmrunError:
    """The error of our tree that says what ``err`` means to the user."""
    if isinstance(err, LlmrunError):
        return err
    if isinstance(err, typer.TyperException):
        return UsageError(err.format_message(), _usage_hint(err))
    if isinstance(err, out_of_memory()):
        return DoesNotFitError(
            f"Memory ran out: {_first_line(err) or 'an allocation failed'}.",
            "Try a smaller --ctx, a smaller scheme (-q int4) or a smaller model.",
        )
    if isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return InternalError(
            f"Writing failed: {err.strerror}{f' ({err.filename})' if err.filename else ''}.",
            "Free some space or write elsewhere, then run the command again.",
        )
    said = _first_line(err)
    what = f"Internal error: {type(err).__name__}{f': {said}' if said else ''}."
    return InternalError(what, DEBUG_HINT)


def out_of_memory() -> tuple[type[Exception], ...]:
    """The exceptions that mean memory ran out; torch's only if it is loaded, never imported."""
    of_torch = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return (MemoryError,) if of_torch is None else (MemoryError, of_torch)


def survivable() -> tuple[type[Exception], ...]:
    """What a chat goes on after: refusals, and memory that ran out for one answer."""
    return (LlmrunError, *out_of_memory())


def complain(error: LlmrunError) -> None:
    """Say what happened and what to type next, on stderr; names in it cannot drive a terminal."""
    text = f"error: {error}\n"
    if sys.stderr.isatty():
        from llmrun.text.terminal import clean

        text = clean(text)
    sys.stderr.write(text)
    sys.stderr.flush()


def die_cleanly_on_signals(terminal: Terminal) -> None:
    """From now on SIGTERM and SIGHUP give the terminal back before they end the process."""

    def die(number: int, frame: FrameType | None) -> None:
        terminal.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # nohup ignores SIGHUP on purpose; leave it so.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, die)


def _usage_hint(err: typer.TyperException) -> str:
    context = getattr(err, "ctx", None)
    path = context.command_path if context else "llmrun"
    return f"See `{path} --help`."


def _first_line(err: Exception) -> str:
    return str(err).partition("\n")[0].strip().rstrip(".")


def _abandon_streams() -> None:
    """Point a closed stdout (or stderr) at the null device: the interpreter flushes at its end
    and would print a note about the pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
    os.close(null)
