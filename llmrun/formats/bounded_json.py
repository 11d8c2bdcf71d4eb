"""JSON objects from files nobody vouches for: bounded before parsing, strict while parsing.

A text over its limits, duplicate keys, absurd numbers or nesting, and anything but an object are
damage (ModelFileError), never a crash.
"""

import json
from collections import Counter
from pathlib import Path

from llmrun.formats.damage import damaged, shown
from llmrun.formats.limits import CONFIG, JsonLimits
from llmrun.formats.mapping import read_file


def parse_object(text: bytes, limits: JsonLimits, path: Path, what: str) -> dict[str, object]:
    """Return the JSON object in ``text``; ``what`` names it in errors, ``path`` its file."""
    if len(text) > limits.max_bytes:
        raise damaged(path, f"{what} has {len(text):,} bytes, over {limits.max_bytes:,}")
    for character, most in ((b"{", limits.braces), (b"[", limits.brackets), (b",", limits.commas)):
        count = text.count(character)
        if count > most:
            sign = character.decode()
            raise damaged(path, f"{what} has {count:,} times {sign!r}, over {most:,}")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
            raise damaged(path, f"{what} names {shown(twice)} twice")
        return members

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{what} is not valid JSON ({shown(str(error))})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"{what} is not a JSON object")
    return value


def read_object(path: Path, what: str, limits: JsonLimits = CONFIG) -> dict[str, object]:
    """Return the JSON object in a file."""
    return parse_object(read_file(path, limits.max_bytes), limits, path, what)
