"""Errors of one column made good by the later ones (GPTQ, arXiv 2210.17323).

``prepare`` turns what is known of a linear's inputs into factors, once for all linears that read
the same inputs. With H = E[x x^T] of a block of columns and U the upper Cholesky factor of its
inverse, the error d of column j is followed by w_i -= d * (U_ji / U_jj) for every later column i
of the block: the best that they can do. ``quant.search`` applies them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.kernels.host import HostArray
from llmrun.quant.inputs import Inputs
from llmrun.quant.weighting import usable

if TYPE_CHECKING:
    import torch

DAMPING = (0.1, 1.0)
"""Added to the diagonal, as shares of its mean: the first with which H is positive definite.

With 4,000 tokens a hundredth fits their chance correlations: SmolLM2-135M, int4, KL divergence .167
against .165 without compensation; with a tenth, .151 against .177 (another text of that length).
"""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Inputs ready for quantizers.

    ``importance``: F32 [K] or None: errors weigh as without inputs. ``factors``: F32 [B, B] for
    each block of consecutive columns, unit upper triangular; () where errors are not compensated.
    ``notes``: what could not be used, as sentences for the user.
    """

    importance: HostArray | None
    factors: tuple[HostArray, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING = Prepared(None)
"""Nothing is known of the inputs."""


def prepare(inputs: Inputs) -> Prepared:
    """Check the statistics and factor the Gram blocks. Statistics that are not finite or not
    positive are left out, with a note; nothing is raised."""
    notes = []
    importance: HostArray | None = inputs.importance
    if not usable(inputs.importance):
        importance = None
        notes.append(
            "the importance of some columns is not a positive number: "
            "errors are weighed as if nothing were known of the inputs"
        )
    factors = []
    for index, block in enumerate(inputs.gram or ()):
        factor = _factor(block)
        if factor is None:
            notes.append(
                f"block {index + 1} of {len(inputs.gram or ())} of the inputs' second moments is "
                "not positive definite: errors are not compensated there"
            )
        factors.append(_identity(block.shape[0]) if factor is None else factor)
    return Prepared(importance, tuple(factors), tuple(notes))


def as_prepared(inputs: "Inputs | Prepared | None") -> Prepared:
    """Whatever a quantizer was given, prepared."""
    if inputs is None:
        return NOTHING
    return prepare(inputs) if isinstance(inputs, Inputs) else inputs


def _factor(gram: HostArray) -> HostArray | None:
    """U_ji / U_jj of a Gram block [B, B]; None if no damping makes it positive definite."""
    import torch

    from llmrun.kernels.reference.arrays import as_tensor, to_host

    moments = as_tensor(gram).double()
    if not bool(moments.isfinite().all()):
        return None
    diagonal = moments.diagonal()
    if bool((diagonal < 0).any()) or not bool((diagonal > 0).any()):
        return None
    mean = diagonal.mean()
    dead = diagonal == 0
    diagonal[dead] = mean  # columns that no token excites: their neighbours do not answer for them
    for damping in DAMPING:
        damped = moments.clone()
        damped.diagonal().add_(damping * mean)
        # H = V V^T with V upper triangular, from the lower factor of H read backwards. Then
        # H^-1 = U^T U with U = V^-1.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if int(failed) == 0:
            upper = _inverse(lower.flip(0, 1))
            upper /= upper.diagonal().clone().unsqueeze(1)
            return to_host(upper.float())
    return None


_SMALL = 128


def _inverse(upper: "torch.Tensor") -> "torch.Tensor":
    """The inverse of an upper triangular matrix, by halves."""
    import torch

    n = upper.shape[0]
    if n <= _SMALL:
        solved: torch.Tensor = torch.linalg.solve_triangular(
            upper, torch.eye(n, dtype=upper.dtype), upper=True
        )
        return solved
    half = n // 2
    result = torch.zeros_like(upper)
    first, last = _inverse(upper[:half, :half]), _inverse(upper[half:, half:])
    result[:half, :half], result[half:, half:] = first, last
    result[:half, half:] = -(first @ (upper[:half, half:] @ last))
    return result


def _identity(n: int) -> HostArray:
    import torch

    from llmrun.kernels.reference.arrays import to_host

    return to_host(torch.eye(n, dtype=torch.float32))
