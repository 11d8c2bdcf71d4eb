"""A dictionary that keeps what was used last."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(dict[Key, Value]):
    """At most ``most`` values; setting one makes it the newest and drops the oldest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, key: Key) -> Value | None:
        """The value of a key, which becomes the newest; None if there is none."""
        value = self.get(key)
        if value is not None and next(reversed(self)) != key:
            self[key] = value
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]
