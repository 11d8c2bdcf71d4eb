"""The child process that renders chat templates; run as a script with ``python -I``.

Templates run in Jinja's immutable sandbox, without a loader, under limits of processor time, memory
and output. Requests come on stdin, answers go to stdout (render_process.py); at the end of stdin,
which also comes when the parent is killed, the process ends. The only file that imports jinja2.
"""

import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from llmrun.text.limits import MIB, RenderLimits
from llmrun.text.render_process import memory_reason, read_frame, write_frame

Pairs = Mapping[str, object] | Iterable[tuple[str, object]]


def serve(stdin: BinaryIO, stdout: BinaryIO, memory_bytes: int, seconds: float) -> None:
    """Answers requests until the parent goes away."""
    environment = sandbox()
    _limit_memory(memory_bytes)
    write_frame(stdout, {"ready": True})
    limits = RenderLimits(seconds=seconds, memory_bytes=memory_bytes)
    while (request := read_frame(stdin)) is not None:
        _limit_cpu(seconds)
        write_frame(stdout, _answer(environment, request, limits))


def sandbox() -> ImmutableSandboxedEnvironment:
    """Jinja's immutable sandbox with what chat templates expect, and nothing else."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    for name in ("cycler", "joiner", "lipsum"):
        del environment.globals[name]
    environment.globals.update(namespace=_namespace, dict=_dict, raise_exception=_refuse)
    environment.filters["tojson"] = _tojson
    return environment


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only scopes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


# Jinja assigns `{% set ns.x = 1 %}` only to objects of its own class, hence a subclass.
class _SafeNamespace(Namespace):
    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"the name {name!r} is not allowed in a namespace")
        super().__setitem__(name, value)


def _namespace(pairs: Pairs = (), /, **named: object) -> _SafeNamespace:
    return _SafeNamespace(_dict(pairs, **named))


class Refusal(Exception):
    """``raise_exception`` in a template: it does not take these messages."""


def _refuse(message: object) -> None:
    raise Refusal(str(message))


def _dict(pairs: Pairs = (), /, **named: object) -> dict[str, object]:
    return {**dict(pairs), **named}


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _answer(
    environment: ImmutableSandboxedEnvironment, request: Mapping[str, Any], limits: RenderLimits
) -> dict[str, object]:
    now = datetime.datetime.fromisoformat(request["now"])
    environment.globals["strftime_now"] = lambda form: now.strftime(form)
    limit = request["output_bytes"]
    try:
        pieces, size = [], 0
        for piece in environment.from_string(request["source"]).generate(request["variables"]):
            size += len(piece)
            if size > limit:
                return {"stopped": f"its output is over {limit / MIB:g} MiB"}
            pieces.append(piece)
        text = "".join(pieces)
        if len(text.encode("utf-8", "surrogatepass")) > limit:
            return {"stopped": f"its output is over {limit / MIB:g} MiB"}
        return {"text": text}
    except Refusal as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"stopped": memory_reason(limits)}
    except Exception as error:
        # A template can raise anything; this process has nobody above it to report to but the pipe.
        return {"broken": f"{type(error).__name__}: {error}"[:2000]}


def _limit_memory(extra_bytes: int) -> None:
    """Caps the address space where the system enforces it; elsewhere the parent watches."""
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    """A child whose parent was killed must not run for ever either."""
    if sys.platform != "win32":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + seconds) + 2
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]), float(sys.argv[2]))
