"""Words of the command line that need no checking become values without typer's machinery.

typer converts through pydantic, whose import takes longer than all else that happens between the
start of the process and the command. What is plain is converted here, to the same value; anything
else (a number out of range, an unknown choice, a missing argument) goes typer's way, which also
words the error.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.core import TyperGroup
from typer.models import ParameterInfo

Convert = Callable[[Any], object]
"""From a word, or a default that is a value already, to the value."""

Typers = Any
"""A command, parameter or context of typer's, whose classes are private."""

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


class NotPlainError(Exception):
    """Left to typer."""


def convert_plainly(program: TyperGroup, commands: Mapping[str, Callable[..., None]]) -> None:
    """Let the parameters of ``commands`` (functions by name) convert plain words themselves."""
    _help_without_a_value(program)
    for name, function in commands.items():
        command = program.commands[name]
        _help_without_a_value(command)
        declared = inspect.signature(function).parameters
        for parameter in command.params:
            if parameter.name not in declared or parameter.callback is not None:
                continue
            convert = converter(declared[parameter.name].annotation)
            if convert is not None:
                _replace(parameter, convert)


def converter(annotation: object) -> Convert | None:
    """How plain words become a value of ``Annotated[type, typer.Option(...)]``; None: they never
    do. The function raises NotPlainError for what is not plain.
    """
    declared, *described = get_args(annotation) or (annotation,)
    info = described[0] if described else None
    if not isinstance(info, ParameterInfo):
        return None
    alternatives = [kind for kind in _alternatives(declared) if kind is not type(None)]
    kind = alternatives[0] if len(alternatives) == 1 else None
    if get_origin(kind) is not list:
        return _converter(kind, info)
    one = _converter(get_args(kind)[0], info)
    return None if one is None else lambda words: [one(word) for word in _several(words)]


def _alternatives(declared: object) -> tuple[object, ...]:
    return (declared,) if get_origin(declared) in (None, list) else get_args(declared)


def _converter(kind: object, info: ParameterInfo) -> Convert | None:
    parse = info.parser
    if parse is not None:
        return lambda word: _parsed(parse, word)
    if kind is str:
        return _text
    if kind is int:
        return lambda word: _integer(word, info.min, info.max)
    if kind is float and info.min is None and info.max is None:
        return _number
    if kind is Path and not _is_checked(info):
        return _path
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda word: _choice(kind, word)
    return None


def _replace(parameter: Typers, convert: Convert) -> None:
    typers_way = parameter.process_value
    is_list = parameter.multiple or parameter.nargs == -1

    def process(context: Typers, value: object) -> object:
        if value is None and not parameter.required:
            return () if is_list else None
        if parameter.required and value in (None, (), []):
            return typers_way(context, value)
        try:
            return convert(value)
        except NotPlainError:
            return typers_way(context, value)

    parameter.process_value = process


def _help_without_a_value(command: Typers) -> None:
    """typer converts even the ``--help`` that nobody typed. Its option is made late, and once."""
    make = command.get_help_option
    done: list[Typers] = []

    def get_help_option(context: Typers) -> Typers:
        option = make(context)
        if option is not None and not done:
            done.append(option)
            typers_way = option.process_value
            option.process_value = lambda context, value: (
                None if value is None else typers_way(context, value)
            )
        return option

    command.get_help_option = get_help_option


def _several(words: object) -> list[object]:
    if not isinstance(words, list | tuple):
        raise NotPlainError
    return list(words)


def _parsed(parse: Convert, word: object) -> object:
    try:
        return parse(word)
    except ValueError as err:
        raise NotPlainError from err


def _text(word: object) -> str:
    if not isinstance(word, str):
        raise NotPlainError
    return word


def _integer(word: object, least: float | None, most: float | None) -> int:
    if isinstance(word, str) and _INTEGER.fullmatch(word):
        word = int(word)
    if not isinstance(word, int) or isinstance(word, bool):
        raise NotPlainError
    if (least is not None and word < least) or (most is not None and word > most):
        raise NotPlainError
    return word


def _number(word: object) -> float:
    if isinstance(word, str) and _NUMBER.fullmatch(word):
        return float(word)
    if not isinstance(word, int | float) or isinstance(word, bool):
        raise NotPlainError
    return float(word)


def _path(word: object) -> Path:
    if not isinstance(word, str) or "\0" in word:
        raise NotPlainError
    try:
        name = os.fsencode(word)
    except UnicodeEncodeError as err:
        raise NotPlainError from err
    if os.path.exists(name) and not os.access(name, os.R_OK):
        raise NotPlainError  # typer refuses what is there but cannot be read
    return Path(word)


def _is_checked(info: ParameterInfo) -> bool:
    """Whether typer looks at more of a path than that it can be read."""
    asks = info.exists or info.writable or info.resolve_path or info.allow_dash or info.path_type
    return bool(asks) or not (info.file_okay and info.dir_okay)


def _choice(kind: type[Enum], word: object) -> Enum:
    if isinstance(word, kind):
        return word
    for choice in kind:
        if choice.value == word:
            return choice
    raise NotPlainError
