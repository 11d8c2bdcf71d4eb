"""How far a child's weights and hidden states are from its reference's.

Sums are taken in fp64; weights are undone in panels of rows, so that a large matrix never stands
in memory twice at 32 bits.
"""

import math
from typing import TYPE_CHECKING

from llmrun.kernels.forms import Dense, Form, rows
from llmrun.kernels.host import DType, HostArray
from llmrun.quant.arrays import floats
from llmrun.quant.dequantize import dequantize

if TYPE_CHECKING:
    from llmrun.quant.arrays import Floats

PANEL = 1 << 19
"""Weights compared at a time."""


def dense(form: Form) -> Form:
    """The weight as numbers: what is quantized becomes F32, to compute with it exactly."""
    return form if isinstance(form, Dense) else Dense(dequantize(form))


def relative_mse(reference: Form, child: Form) -> float:
    """Sum of squared differences of two weights [N, K] over the reference's sum of squares.

    inf if the reference is all zeros and the child is not. ValueError for different shapes.
    """
    import numpy as np

    if reference.shape != child.shape:
        raise ValueError(f"{reference.shape} against {child.shape}")
    n, k = reference.shape[0], math.prod(reference.shape[1:])
    step = max(1, PANEL // k)
    wrong = total = 0.0
    for start in range(0, n, step):
        picked = range(start, min(start + step, n))
        w, own = _numbers(rows(reference, picked)), _numbers(rows(child, picked))
        wrong += float(np.square(w - own).sum(dtype=np.float64))
        total += float(np.square(w).sum(dtype=np.float64))
    return wrong / total if total else (math.inf if wrong else 0.0)


class StateError:
    """The error of hidden states behind one layer, token by token.

    Each token counts alike: its squared error over its own squared norm. Some tokens (often a
    sequence's first) have a norm a thousand times that of the others and would hide them.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._tokens = 0

    def add(self, reference: HostArray, child: HostArray) -> None:
        """Compare the states F32 [T, D] of T tokens."""
        import numpy as np

        h, own = floats(reference).astype(np.float64), floats(child).astype(np.float64)
        norms = np.square(h).sum(axis=1)
        errors = np.square(h - own).sum(axis=1)
        self._sum += float((errors / np.maximum(norms, np.finfo(np.float64).tiny)).sum())
        self._tokens += len(h)

    @property
    def finite(self) -> bool:
        """Whether all states were finite."""
        return math.isfinite(self._sum)

    @property
    def relative(self) -> float:
        """Mean over the tokens of the squared error over the squared norm; nan if not finite."""
        return self._sum / self._tokens if self.finite and self._tokens else math.nan

    @property
    def sqnr_db(self) -> float:
        """Signal over noise in decibels: inf if the states are the same, nan if not finite."""
        mean = self.relative
        if math.isnan(mean):
            return math.nan
        return -10 * math.log10(mean) if mean else math.inf


def _numbers(form: Form) -> "Floats":
    if isinstance(form, Dense) and form.w.dtype in (DType.F32, DType.F16, DType.BF16):
        return floats(form.w)
    return floats(dequantize(form))
