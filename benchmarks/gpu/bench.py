"""Where the sections measure: the device, its clock, its caches, and what was found out so far."""

from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.timing import Timer, on_host


@dataclass(frozen=True)
class Bench:
    """``dry``: on the CPU, with tiny shapes, so that the whole control flow runs anywhere.

    ``facts``: what sections told those behind them. ``stream_bytes``: what a set of weights must
    exceed so that none of it is still in a cache when its turn comes again.
    """

    dry: bool
    device: torch.device
    per_call: Timer
    stream_bytes: int
    facts: dict[str, Any] = field(default_factory=dict)

    def alive(self) -> bool:
        """Whether the device still takes orders: after an illegal access it does not."""
        if self.dry:
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()


def open_bench(dry: bool, facts: dict[str, Any]) -> Bench:
    """The device of this process. RuntimeError without one."""
    if dry:
        return Bench(True, torch.device("cpu"), on_host, 1, facts)
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no usable GPU")
    from llmrun.kernels.gpu.timing import per_call

    torch.cuda.init()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return Bench(False, torch.device("cuda", 0), per_call, 4 * cache, facts)
