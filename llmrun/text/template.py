"""Chat templates: found in the model's files, rendered in a sandbox in a bounded child process.

A template is a program by a stranger. It runs in Jinja's immutable sandbox, without a loader, in a
process of its own (this file, run with ``python -I``) with limits on time, memory and output. The
only file that imports jinja2, and only in the child.
"""

import datetime
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from llmrun.errors import LlmrunError, ModelFileError, UsageError
from llmrun.text.folder_tokenizer import read_limited
from llmrun.text.limits import MIB, TEMPLATE_FILE_BYTES, RenderLimits
from llmrun.text.message import Message
from llmrun.text.render_process import (
    OutOfBoundsError,
    RenderProcess,
    memory_reason,
    read_frame,
    write_frame,
)
from llmrun.text.terminal import clean

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Pairs = Mapping[str, object] | Iterable[tuple[str, object]]

# For base models, which have no template. Its use must be told to the user.
FALLBACK_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'assistant' %}Assistant: {{ message.content }}\n"
    "{% else %}User: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
FALLBACK_STOPS = ("\nUser:",)


@dataclass(frozen=True)
class FoundTemplate:
    """A template's source and where it comes from, in words for the user.

    ``is_fallback``: the model has none; say so on stderr, and stop answers at ``FALLBACK_STOPS``.
    """

    source: str
    origin: str
    is_fallback: bool = False


class ChatTemplate:
    """Renders conversations. ``given_by_user``: a broken template is their mistake (exit 2).

    The child process starts with the first ``render``, or ahead of it by ``start``.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        limits: RenderLimits | None = None,
        given_by_user: bool = False,
    ) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._limits = limits or RenderLimits()
        self._given_by_user = given_by_user
        script = resources.files("llmrun.text").joinpath("template.py")
        arguments = [str(script), str(self._limits.memory_bytes), str(self._limits.seconds)]
        self._process = RenderProcess(arguments, self._limits)

    def start(self) -> None:
        """Starts the child process now, for instance while weights load; returns at once."""
        self._process.start()

    def close(self) -> None:
        """Ends the child process; a later ``render`` starts another."""
        self._process.close()

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as the model was trained to read it.

        ``extra``: further variables of the template (plain data). UsageError with the template's
        words if it refuses the messages; ModelFileError (UsageError for a template of the user's)
        if it is broken or over the limits.
        """
        turns = [asdict(message) for message in messages]
        input_bytes = sum(len(t["content"].encode("utf-8", "replace")) for t in turns)
        output_bytes = max(self._limits.output_bytes, self._limits.output_factor * input_bytes)
        variables = {
            "messages": turns,
            "tools": None,
            "documents": None,
            **{name: token for name, token in self._tokens.items() if token is not None},
            **(extra or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        request = {
            "source": self._source,
            "variables": variables,
            "now": datetime.datetime.now().isoformat(),
            "output_bytes": output_bytes,
        }
        try:
            answer = self._process.ask(request, output_bytes)
        except OutOfBoundsError as error:
            raise self._failure(f"was stopped: {error}") from error
        return self._text(answer)

    def _text(self, answer: Mapping[str, object]) -> str:
        if "text" in answer:
            return str(answer["text"])
        words = clean(str(next(iter(answer.values()), "")))[:500]
        if "refused" in answer:
            raise UsageError(
                f"The model's chat template refuses these messages: {words}",
                "Change the messages (many models take no system message, or only user and "
                "assistant in turn), or give another template with --template FILE.",
            )
        if "stopped" in answer:
            self._process.close()  # a process that ran out of memory is not used again
            raise self._failure(f"was stopped: {words}")
        raise self._failure(f"does not work: {words}")

    def _failure(self, what: str) -> LlmrunError:
        if self._given_by_user:
            return UsageError(f"The chat template {what}.", "Correct the file given to --template.")
        return ModelFileError(
            f"The model's chat template {what}.",
            "Give another template with --template FILE, or use --raw without a template.",
        )


def find_template(folder: Path, tokenizer_config: Mapping[str, object]) -> FoundTemplate:
    """The template of a model folder: ``chat_template.jinja`` first, then ``chat_template`` in
    tokenizer_config.json (a string, or a list of named ones: ``default``, else the only one), then
    the fallback.

    ModelFileError if the file is too large or not UTF-8, or no one of several is the default.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            source = read_limited(path, TEMPLATE_FILE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ModelFileError("The model's chat_template.jinja is not UTF-8.") from error
        return FoundTemplate(source, path.name)
    listed = tokenizer_config.get("chat_template")
    if isinstance(listed, list):
        named = {
            str(entry.get("name")): entry.get("template")
            for entry in listed
            if isinstance(entry, dict)
        }
        listed = named["default"] if "default" in named else next(iter(named.values()), None)
        if len(named) > 1 and "default" not in named:
            raise ModelFileError(
                f"The model has the chat templates {', '.join(sorted(named))}, and no default.",
                "Save the one you want to a file and give it with --template FILE.",
            )
    return _found(listed, "tokenizer_config.json")


def gguf_template(metadata: Mapping[str, object]) -> FoundTemplate:
    """The template in a GGUF's metadata, else the fallback."""
    return _found(metadata.get("tokenizer.chat_template"), "the GGUF file")


def _found(source: object, origin: str) -> FoundTemplate:
    if not isinstance(source, str) or not source:
        return FoundTemplate(FALLBACK_TEMPLATE, "llmrun (the model has none)", is_fallback=True)
    if len(source) > TEMPLATE_FILE_BYTES:
        raise ModelFileError(f"The chat template in {origin} is over {TEMPLATE_FILE_BYTES} bytes.")
    return FoundTemplate(source, origin)


# What follows runs in the child process.


def serve(stdin: BinaryIO, stdout: BinaryIO, memory_bytes: int, seconds: float) -> None:
    """Answers requests until the parent goes away."""
    environment = sandbox()
    _limit_memory(memory_bytes)
    write_frame(stdout, {"ready": True})
    limits = RenderLimits(seconds=seconds, memory_bytes=memory_bytes)
    while (request := read_frame(stdin)) is not None:
        _limit_cpu(seconds)
        write_frame(stdout, _answer(environment, request, limits))


def sandbox() -> "ImmutableSandboxedEnvironment":
    """Jinja's immutable sandbox with what chat templates expect, and nothing else."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for training; here it only scopes."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    # Jinja assigns `{% set ns.x = 1 %}` only to objects of its own class, hence a subclass.
    class SafeNamespace(Namespace):
        def __init__(self, values: Mapping[str, object]) -> None:
            super().__init__()
            for name, value in values.items():
                self[name] = value

        def __setitem__(self, name: str, value: object) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"the name {name!r} is not allowed in a namespace")
            super().__setitem__(name, value)

    def namespace(pairs: Pairs = (), /, **named: object) -> SafeNamespace:
        return SafeNamespace(_dict(pairs, **named))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    for name in ("cycler", "joiner", "lipsum"):
        del environment.globals[name]
    environment.globals.update(namespace=namespace, dict=_dict, raise_exception=_refuse)
    environment.filters["tojson"] = _tojson
    return environment


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
    environment: "ImmutableSandboxedEnvironment", request: Mapping[str, Any], limits: RenderLimits
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
