"""Models split over several GGUF files, ``NAME-00001-of-00003.gguf`` and so on: any part opens all.

Every file says which part it is, of how many, and how many tensors they hold together; the first
has the metadata of the model. What they say is held against each other and against their names:
a part that is missing, of another model or out of order is a ModelFileError naming the file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from llmrun.formats import limits
from llmrun.formats.damage import damaged, shown
from llmrun.formats.gguf_header import GgufTensor, read_header
from llmrun.formats.gguf_values import Metadata
from llmrun.formats.mapping import map_file

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_ALL_PARTS = "Put all parts of the model, under the names they were published with, in one folder."


@dataclass(frozen=True, eq=False)
class Part:
    """A mapped file with its header read."""

    path: Path
    view: memoryview
    metadata: Metadata
    tensors: tuple[GgufTensor, ...]


def read_parts(path: Path) -> tuple[Part, ...]:
    """Map a GGUF file and, if it is a part of a split model, the others; in their order."""
    given = _read(path)
    count = _number(given, _COUNT) if _COUNT in given.metadata else 1
    if count <= 1:
        return (given,)
    paths = _part_paths(given, count)
    parts = tuple(given if other == path else _read(other) for other in paths)
    total = _number(given, _TENSORS)
    for index, part in enumerate(parts):
        _expect(part, _NUMBER, index, "its name")
        _expect(part, _COUNT, count, shown(path.name))
        _expect(part, _TENSORS, total, shown(path.name))
    _check_tensors(parts, total)
    return parts


def is_later_part(name: str) -> bool:
    """Whether a file's name says that it is a part after the first: another way to one model."""
    found = PART_NAME.fullmatch(name)
    return found is not None and int(found["number"]) > 1


def _read(path: Path) -> Part:
    view = map_file(path)
    return Part(path, view, *read_header(view, path))


def _part_paths(given: Part, count: int) -> list[Path]:
    path = given.path
    if count > limits.GGUF_PARTS:
        raise damaged(path, f"{_COUNT} is {count:,}, over {limits.GGUF_PARTS:,}")
    name = PART_NAME.fullmatch(path.name)
    if name is None:
        problem = (
            f"one of the {count} parts of a split model, but not named like one "
            f"(NAME-00001-of-{count:05}.gguf), so that the others cannot be found"
        )
        raise damaged(path, problem, _ALL_PARTS)
    if int(name["count"]) != count:
        problem = f"{_COUNT} is {count}, but its name says {int(name['count'])}"
        raise damaged(path, problem, _ALL_PARTS)
    if not 1 <= int(name["number"]) <= count:
        raise damaged(path, f"its name says part {int(name['number'])} of {count}", _ALL_PARTS)
    paths = [
        path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [other.name for other in paths if not other.exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        named = ", ".join(shown(other) for other in missing[:3])
        verb = "is" if len(missing) == 1 else "are"
        raise damaged(path, f"of its {count} parts {named}{more} {verb} missing", _ALL_PARTS)
    return paths


def _expect(part: Part, key: str, value: int, where: str) -> None:
    found = _number(part, key)
    if found != value:
        problem = f"{key} is {found:,}, but {value:,} according to {where}"
        raise damaged(part.path, problem, _ALL_PARTS)


def _number(part: Part, key: str) -> int:
    if key not in part.metadata:
        raise damaged(part.path, f"{key} is missing, so it is no part of a split model")
    value = part.metadata[key]
    if type(value) is not int or value < 0:
        raise damaged(part.path, f"{key} is {shown(value)}, no count")
    return value


def _check_tensors(parts: tuple[Part, ...], total: int) -> None:
    owners: dict[str, Part] = {}
    for part in parts:
        for tensor in part.tensors:
            first = owners.setdefault(tensor.name, part)
            if first is not part:
                problem = f"tensor {shown(tensor.name)} is in {shown(first.path.name)} already"
                raise damaged(part.path, problem)
    if len(owners) != total:
        problem = f"{_TENSORS} is {total:,}, but the parts hold {len(owners):,}"
        raise damaged(parts[0].path, problem)
