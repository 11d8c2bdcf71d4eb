"""Will it fit: bytes a model needs, bytes this machine has free, and the context that fits both.

Decided before anything is loaded; a model that does not fit is refused with the numbers.
"""

from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import DoesNotFitError, UsageError

HOST_SHARE, DEVICE_SHARE = 0.5, 0.9
"""Part of the memory left beside the weights that an automatic context may reserve: others live in
host memory too, a card is there for this."""

ROUNDED = 1.03
"""Weights on a card take so much more: allocations are rounded up to 2 MiB each."""

WORKSPACE_BYTES = 512 << 20
"""In host memory: activations, scratch, attention scores (bounded) and what torch takes."""

CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Folder, limit and usage of control groups, version 2 and 1."""


@dataclass(frozen=True)
class Need:
    """Bytes a model needs: weights as they will be resident, cache per token of context, and what
    it works in."""

    weight_bytes: int
    kv_bytes_per_token: int
    workspace_bytes: int = WORKSPACE_BYTES


@dataclass(frozen=True)
class Room:
    """Memory a model is to lie in, as messages call it; ``free_bytes`` None: unknown.

    ``on_device``: a device's own, beside which there is that of the host.
    """

    name: str
    free_bytes: int | None
    on_device: bool = False

    @property
    def kv_share(self) -> float:
        """Part of what is left beside weights that an automatic context may reserve."""
        return DEVICE_SHARE if self.on_device else HOST_SHARE

    @property
    def smaller(self) -> str:
        """What a person can do if a model does not fit here."""
        fewer = "use fewer bits (-q int4), a smaller model (`llmrun list --catalog`)"
        if not self.on_device:
            return f"{fewer}, or close other programs"
        return f"{fewer}, --offload (some layers stay on the CPU: slow), or --device cpu"


def host_room() -> Room:
    """The memory of this machine."""
    return Room("memory", free_bytes())


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can be taken without swapping, container limits included; None if unknown."""
    limits = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" in values:
        limits.append(int(values["MemAvailable"].split()[0]) * 1024)
    for folder, limit_file, usage_file in CGROUPS:
        limit, usage = _number(root / folder / limit_file), _number(root / folder / usage_file)
        if limit is not None and usage is not None:
            # Files that were read count as usage, but the system gives them up when asked.
            limits.append(max(0, limit - usage + _file_cache(root / folder / "memory.stat")))
    return min(limits, default=None)


def fit_context(
    need: Need, wanted: int | None, max_positions: int, room: Room
) -> tuple[int, str | None]:
    """The context to run with, and a note if it was decided by memory.

    ``wanted`` None: as long as the model was trained for, less if memory is short. UsageError for
    a longer one; DoesNotFitError with the numbers if weights or the wanted context do not fit.
    """
    check_trained(wanted, max_positions)
    free = room.free_bytes
    if free is None:
        return wanted or max_positions, None
    left = free - need.weight_bytes - need.workspace_bytes
    if left < need.kv_bytes_per_token:
        raise DoesNotFitError(
            f"the model needs {gib(need.weight_bytes)} for its weights and "
            f"{gib(need.workspace_bytes)} to work; {gib(free)} of {room.name} are free",
            room.smaller,
        )
    fitting = left // need.kv_bytes_per_token
    if wanted is not None:
        if wanted > fitting:
            halved = ", --kv int8" if room.on_device else ""
            raise DoesNotFitError(
                f"--ctx {wanted} needs {gib(wanted * need.kv_bytes_per_token)} for the cache; "
                f"beside the weights {gib(left)} of {room.name} are free",
                f"use --ctx {fitting} or less{halved}, or fewer bits (-q int4)",
            )
        return wanted, None
    automatic = min(max_positions, max(1, int(fitting * room.kv_share)))
    if automatic == max_positions:
        return automatic, None
    share = "nine tenths" if room.on_device else "half"
    return automatic, (
        f"context {automatic} of {max_positions} tokens: more would take over {share} of the free "
        f"{room.name} (--ctx sets it)"
    )


def fits(need: Need, context: int, room: Room) -> bool:
    """Whether a model fits with a context; True where nobody knows."""
    total = need.weight_bytes + need.workspace_bytes + context * need.kv_bytes_per_token
    return room.free_bytes is None or total <= room.free_bytes


def check_trained(wanted: int | None, max_positions: int) -> None:
    """UsageError for a context longer than the model was trained for."""
    if wanted is not None and wanted > max_positions:
        raise UsageError(
            f"--ctx {wanted} is longer than the {max_positions} tokens the model was trained for",
            f"use --ctx {max_positions} or less",
        )


def _file_cache(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get("inactive_file", values.get("total_inactive_file", "0")))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def gib(n_bytes: float) -> str:
    """Bytes in the unit memory is sold in."""
    return f"{n_bytes / (1 << 30):.2f} GiB"
