"""Chat templates: found in the model's files, rendered in a sandbox in a bounded child process.

A template is a program by a stranger. It runs in a process of its own (render_child.py, run with
``python -I``) with limits on time, memory and output.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llmrun.errors import LlmrunError, ModelFileError, UsageError
from llmrun.text.folder_tokenizer import read_json_object, read_limited
from llmrun.text.limits import TEMPLATE_FILE_BYTES, RenderLimits
from llmrun.text.message import Message
from llmrun.text.render_process import OutOfBoundsError, RenderProcess
from llmrun.text.terminal import clean

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


def renderer(limits: RenderLimits) -> RenderProcess:
    """A child process that renders any template; not started yet."""
    script = Path(__file__).with_name("render_child.py")
    arguments = [str(script), str(limits.memory_bytes), str(limits.seconds)]
    return RenderProcess(arguments, limits)


class ChatTemplate:
    """Renders conversations. ``given_by_user``: a broken template is their mistake (exit 2).

    ``process``: from ``renderer`` with the same limits, perhaps started before the template was
    known. It, or a new one, starts with the first ``render``, or ahead of it by ``start``.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        limits: RenderLimits | None = None,
        given_by_user: bool = False,
        process: RenderProcess | None = None,
    ) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._limits = limits or RenderLimits()
        self._given_by_user = given_by_user
        self._process = process or renderer(self._limits)

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
        now: datetime.datetime | None = None,
    ) -> str:
        """The conversation as the model was trained to read it.

        ``extra``: further variables of the template (plain data). ``now``: what it is told if it
        asks for the time. UsageError with the template's
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
            "now": (now or datetime.datetime.now()).isoformat(),
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
    """The template of a model folder: ``chat_template.jinja``, else ``chat_template`` in
    chat_template.json (older repositories), else the same key in tokenizer_config.json, else the
    fallback. The key holds a string, or a list of named ones: ``default``, else the only one.

    ModelFileError if a file is too large or damaged, or no one of several is the default.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            source = read_limited(path, TEMPLATE_FILE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ModelFileError("The model's chat_template.jinja is not UTF-8.") from error
        return FoundTemplate(source, path.name)
    older = read_json_object(folder / "chat_template.json").get("chat_template")
    if older:
        return _found(_chosen(older), "chat_template.json")
    return _found(_chosen(tokenizer_config.get("chat_template")), "tokenizer_config.json")


def gguf_template(metadata: Mapping[str, object]) -> FoundTemplate:
    """The template in a GGUF's metadata, else the fallback."""
    return _found(metadata.get("tokenizer.chat_template"), "the GGUF file")


def _chosen(listed: object) -> object:
    """The one template to use of what ``chat_template`` holds."""
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
    return listed


def _found(source: object, origin: str) -> FoundTemplate:
    if not isinstance(source, str) or not source:
        return FoundTemplate(FALLBACK_TEMPLATE, "llmrun (the model has none)", is_fallback=True)
    if len(source) > TEMPLATE_FILE_BYTES:
        raise ModelFileError(f"The chat template in {origin} is over {TEMPLATE_FILE_BYTES} bytes.")
    return FoundTemplate(source, origin)
