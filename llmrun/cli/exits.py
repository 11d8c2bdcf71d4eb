"""Every way out of the program: one exit code and at most one message per cause.

0 ok, 1 internal, 2 usage, 3 not found, 4 download, 5 bad model file, 6 memory, 7 context,
8 structured output, 9 unavailable, 130 interrupted, 141 broken pipe. A traceback is shown with
``--debug`` only. SIGTERM and SIGHUP restore the terminal, then end the process by that signal.
"""

import errno
import os
import re
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

_NO_MEMORY = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|can't allocate memory"
)
"""How RuntimeErrors of torch, its libraries and Triton say that memory ran out."""

_WANTED = re.compile(r"Tried to allocate ([\d.]+ \wi?B)")
_OF_WHICH = re.compile(r"total capacity of ([\d.]+ \wi?B) of which ([\d.]+ \wi?B) is free")

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
    if is_out_of_memory(err):
        return _memory_ran_out(err)
    if isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return InternalError(
            f"Writing failed: {err.strerror}{f' ({err.filename})' if err.filename else ''}.",
            "Free some space or write elsewhere, then run the command again.",
        )
    said = _first_line(err)
    what = f"Internal error: {type(err).__name__}{f': {said}' if said else ''}."
    return InternalError(what, DEBUG_HINT)


def is_out_of_memory(err: Exception) -> bool:
    """Whether an error means that memory ran out, of the host or of a device; torch, whose class
    this may be, is not imported for it."""
    of_torch = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    if isinstance(err, MemoryError | of_torch):
        return True
    return isinstance(err, RuntimeError) and _NO_MEMORY.search(str(err)) is not None


def is_survivable(err: Exception) -> bool:
    """Whether a chat goes on after it: a refusal, or memory that ran out for one answer."""
    return isinstance(err, LlmrunError) or is_out_of_memory(err)


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


def _memory_ran_out(err: Exception) -> DoesNotFitError:
    said = str(err)
    wanted, of_which = _WANTED.search(said), _OF_WHICH.search(said)
    if wanted is None or of_which is None:
        what = f"Memory ran out: {_first_line(err) or 'an allocation failed'}."
        return DoesNotFitError(
            what, "Try a smaller --ctx, a smaller scheme (-q int4) or a smaller model."
        )
    return DoesNotFitError(
        f"The memory of the GPU ran out: {wanted[1]} more were needed, {of_which[2]} of "
        f"{of_which[1]} are free.",
        "Try a smaller --ctx, --kv int8, fewer bits (-q int4) or --offload, or end other programs "
        "there.",
    )


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
