"""Every option that several commands share, written once.

A command takes whole groups: ``@spread`` turns a parameter annotated with one of these dataclasses
into the options of its fields, and hands the filled dataclass to the command.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from llmrun.errors import UnavailableError, UsageError
from llmrun.kernels.cuda import NOT_YET
from llmrun.kernels.ops import KV_FORMS


class Stats(StrEnum):
    """How much is said about speed."""

    OFF = "off"
    LINE = "line"
    FULL = "full"


class Sanitize(StrEnum):
    """When control sequences are taken out of answers."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


class HugePages(StrEnum):
    """Whether the system is asked for huge pages (it may have none)."""

    ON = "on"
    OFF = "off"


def context_size(value: object) -> int:
    """``--ctx``: tokens; 0 stands for ``auto`` (None would mean that nothing was given)."""
    text = str(value)
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither 'auto' nor a number of tokens.")
    return int(text)


def kv_form(value: str) -> str:
    """``--kv``: a form this version has."""
    if value not in ("auto", *KV_FORMS):
        raise UnavailableError(
            f"There is no KV cache form named {value!r} here.",
            f"Type --kv with one of: auto, {', '.join(KV_FORMS)}.",
        )
    return value


def device_name(value: str) -> str:
    """``--device``: something that can name a device."""
    if (others := NOT_YET.get(value.partition(":")[0].lower())) is not None:
        raise UnavailableError(
            f"--device {value}: {others} are not supported yet.",
            "Type --device cpu, or --device cuda on a machine with an NVIDIA GPU.",
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise UnavailableError(
            f"There is no device named {value!r}.", "Type --device auto, cpu, cuda or cuda:N."
        )
    return value


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="Alias, hub id (org/name, org/name@revision), folder or .gguf file."
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same as the argument.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Revision = Annotated[
    str | None,
    typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a hub model."),
]
Scheme = Annotated[
    str,
    typer.Option(
        "--quant", "-q", metavar="SCHEME", help="auto, none, int8, int4, nl4, nf4 or another."
    ),
]
Requantize = Annotated[
    bool, typer.Option("--requantize", help="Quantize a model again that is quantized already.")
]
Calibrate = Annotated[
    str,
    typer.Option(
        "--calibrate",
        metavar="TEXT",
        help="What quantizing weighs errors by: auto, none, bundled, self, random or a file.",
    ),
]
TargetBpw = Annotated[
    float | None,
    typer.Option(
        "--target-bpw",
        metavar="BITS",
        help="Bits per weight of the linear layers: the most sensitive get 8.",
    ),
]
AllowPartial = Annotated[
    bool,
    typer.Option("--allow-partial", help="Accept weights that take more bits than promised."),
]


@dataclass(frozen=True)
class GeneralOptions:
    """What every command takes."""

    offline: Annotated[bool, typer.Option("--offline", help="Never use the network.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Nothing on stderr except errors.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="The model to use.")
    ] = None
    quant: Scheme = "auto"
    requantize: Requantize = False
    calibrate: Calibrate = "auto"
    target_bpw: TargetBpw = None
    allow_partial: AllowPartial = False
    device: Annotated[
        str,
        typer.Option(
            "--device", parser=device_name, metavar="DEVICE", help="auto, cpu, cuda or cuda:N."
        ),
    ] = "auto"
    ctx: Annotated[
        int | None,
        typer.Option("--ctx", parser=context_size, metavar="N|auto", help="Context in tokens."),
    ] = None
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            parser=kv_form,
            metavar="FORM",
            help=f"Form of the KV cache: auto, {', '.join(KV_FORMS)}.",
        ),
    ] = "auto"
    offload: Annotated[
        bool,
        typer.Option(
            "--offload", help="Layers that do not fit on the GPU stay on the CPU, which is slow."
        ),
    ] = False
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=-1, metavar="N", help="Threads on the CPU; 0 or -1: auto."),
    ] = None
    threads_prefill: Annotated[
        int | None,
        typer.Option("--threads-prefill", min=-1, metavar="N", help="Of them for the prompt."),
    ] = None
    threads_decode: Annotated[
        int | None,
        typer.Option("--threads-decode", min=-1, metavar="N", help="Of them for further tokens."),
    ] = None
    hugepages: Annotated[
        HugePages, typer.Option("--hugepages", help="Weights in huge pages.", hidden=True)
    ] = HugePages.ON
    cpu_isa: Annotated[
        str | None,
        typer.Option("--cpu-isa", metavar="NAME", help="Instruction set.", hidden=True),
    ] = None
    revision: Revision = None


@dataclass(frozen=True)
class SamplingFlags:
    """How ids are chosen and when the answer ends. None: as the model's own config says."""

    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", help="0 is greedy.")
    ] = None
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K", help="0 is off.")] = None
    top_p: Annotated[float | None, typer.Option("--top-p", metavar="P", help="1 is off.")] = None
    min_p: Annotated[float | None, typer.Option("--min-p", metavar="P", help="0 is off.")] = None
    repeat_penalty: Annotated[
        float | None, typer.Option("--repeat-penalty", metavar="X", help="1 is off.")
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Makes the answer repeatable.")
    ] = None
    stop: Annotated[
        list[str], typer.Option("--stop", metavar="TEXT", help="End before this text; repeatable.")
    ] = field(default_factory=list)
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Longest answer in tokens."),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")
    ] = False


@dataclass(frozen=True)
class PromptFlags:
    """What the prompt is made of."""

    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message.")
    ] = None
    template: Annotated[
        Path | None,
        typer.Option("--template", metavar="FILE", help="Chat template (Jinja) to use instead."),
    ] = None
    raw: Annotated[
        bool,
        typer.Option("--raw", help="No chat template; control tokens in the prompt are parsed."),
    ] = False
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="TEXT", help="Start of the answer.")
    ] = ""


@dataclass(frozen=True)
class OutputFlags:
    """What is shown."""

    stats: Annotated[Stats, typer.Option("--stats", help="Statistics on stderr.")] = Stats.LINE
    sanitize: Annotated[
        Sanitize,
        typer.Option(
            "--sanitize", help="Take control sequences out of answers (auto: on a terminal)."
        ),
    ] = Sanitize.AUTO


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of each option group as options of the command itself."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        if dataclasses.is_dataclass(annotation):
            groups[parameter.name] = annotation
            parameters += _as_parameters(annotation)
        else:
            parameters.append(
                parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @functools.wraps(command)
    def gathered(**values: Any) -> None:  # noqa: ANN401 - whatever the options hold
        for name, group in groups.items():
            fields = dataclasses.fields(group)
            values[name] = group(**{f.name: values.pop(f.name) for f in fields})
        command(**values)

    gathered.__annotations__ = {p.name: p.annotation for p in parameters}
    gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return gathered


def _as_parameters(group: Any) -> list[inspect.Parameter]:  # noqa: ANN401 - any dataclass
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=f.default if f.default is not dataclasses.MISSING else [],
            annotation=hints[f.name],
        )
        for f in dataclasses.fields(group)
    ]


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model named by argument or ``--model``. UsageError if both name different ones."""
    if argument and option and argument != option:
        raise UsageError(
            f"Two models are named: {argument!r} and --model {option!r}.", "Name one of them."
        )
    return argument or option


def the_model(argument: str | None, option: str | None) -> str:
    """The model a command is about, which must be named."""
    name = one_model(argument, option)
    if name is None:
        raise UsageError("No model is named.", "Give its name; `llmrun list` shows what is here.")
    return name
