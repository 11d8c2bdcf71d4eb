"""File names that come from a model or go into one: plain names inside one folder, on any OS."""

import re

from llmrun.formats.limits import FILE_NAME_CHARS

_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d|conin\$|conout\$)(\..*)?", re.IGNORECASE)


def is_plain(name: str) -> bool:
    """Whether a name is a single, portable path component.

    No separator, drive, stream or control character, no parent step, no trailing dot or space,
    no device name of any system.
    """
    return (
        0 < len(name) <= FILE_NAME_CHARS
        and name.isprintable()
        and not set(name) & set('/\\:*?"<>|')
        and name not in (".", "..")
        and name[-1] not in ". "
        and _DEVICE.fullmatch(name) is None
    )
