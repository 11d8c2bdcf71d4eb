"""What is known of the inputs of a linear layer, for quantizers that weigh errors by it.

Measured on a text by a streamed run of the model; the arithmetic is in ``quant.moments``.
"""

from dataclasses import dataclass

from llmrun.kernels.host import HostArray

FLOOR = 1e-4
"""Least importance of a column: one that no text excites is still not free."""

WIDEST_BLOCK = 2048
"""Columns of a Gram block at most: the work of compensating grows with the square."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Statistics of the inputs x [K] of a linear over ``tokens`` tokens.

    ``importance``: F32 [K], E[x_k^2] scaled to mean 1, at least ``FLOOR``. ``gram``: E[x x^T] in
    blocks along the diagonal, F32 [B, B] each, of consecutive columns, together K; None where
    errors are not to be compensated.
    """

    tokens: int
    importance: HostArray
    gram: tuple[HostArray, ...] | None = None
