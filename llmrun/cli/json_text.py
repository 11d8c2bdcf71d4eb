"""JSON as text for stdout: readable, and harmless where a terminal shows it.

``json.dumps`` escapes C0 controls only. What else the terminal's filter would drop (DEL, C1
controls, bidirectional overrides) becomes ``\\uXXXX`` too: the same value, nothing lost.
"""

import json
import re

from llmrun.text.terminal import clean

_NOT_PLAIN = re.compile(r"[^ -~\n]")


def json_text(document: object, *, for_terminal: bool, indent: int | None = None) -> str:
    """The document and a newline. ``for_terminal``: nothing in it can drive one."""
    text = json.dumps(document, indent=indent, ensure_ascii=False) + "\n"
    return _NOT_PLAIN.sub(_escaped_if_harmful, text) if for_terminal else text


def _escaped_if_harmful(found: re.Match[str]) -> str:
    character = found[0]
    return character if clean(character) else f"\\u{ord(character):04x}"
