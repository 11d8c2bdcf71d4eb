"""One turn of a conversation as chat templates see it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """``role``: system, user, assistant, tool or developer; ``content``: the words."""

    role: str
    content: str
