"""What this machine can do at most, measured here: memory bandwidth and matrix-multiply rate.

Measuring takes seconds, so it happens when a value is first asked for, once per object.
"""

from functools import cached_property
from typing import Protocol


class Measurable(Protocol):
    """A backend, as far as its ceilings go."""

    def measure_bandwidth(self) -> float:
        """Best read bandwidth in bytes per second, measured now."""

    def measure_flops(self) -> float:
        """Best matrix-multiply rate in FLOP per second, measured now."""


class Ceilings:
    """The ceilings of one backend."""

    def __init__(self, backend: Measurable) -> None:
        self._backend = backend

    @cached_property
    def bandwidth_bytes_per_s(self) -> float:
        """Read bandwidth of the device's memory."""
        return self._backend.measure_bandwidth()

    @cached_property
    def flops_per_s(self) -> float:
        """Rate of the matrix multiply that prefill runs on."""
        return self._backend.measure_flops()

    def measure_again(self) -> None:
        """Keep the better of what was measured and what is measured now."""
        self.bandwidth_bytes_per_s = max(
            self.bandwidth_bytes_per_s, self._backend.measure_bandwidth()
        )
        self.flops_per_s = max(self.flops_per_s, self._backend.measure_flops())
