"""What the user decides about fetching; the cli reads it from options and the environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FetchSettings:
    """How models are fetched.

    ``update``: ask which commit a branch means today, even if the model is here. ``endpoint`` and
    ``token`` are the hub's; blank counts as unset. ``retries``: tries in a row that bring no new
    bytes. ``backoff_s`` doubles with each, up to a minute. ``timeout_s``: silence on a connection.
    ``lock_timeout_s``: how long to wait for another process that pulls the same model.
    ``reserve_bytes``: space that must stay free for what follows, e.g. a quantized copy.
    ``environment``: all that pip sees; the cli passes its own, and hub tokens are taken out here.
    """

    offline: bool = False
    update: bool = False
    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)
    retries: int = 5
    backoff_s: float = 1.0
    timeout_s: float = 30.0
    lock_timeout_s: float = 1800.0
    reserve_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
