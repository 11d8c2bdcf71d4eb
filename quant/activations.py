"""Arithmetic on activations outside the kernels, for what is measured during a streamed run.

Host arrays in and out, F32 [T, K] unless said otherwise; numpy is imported on first use.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.arrays import floats

if TYPE_CHECKING:
    from numpy.typing import NDArray


def normed(
    x: HostArray,
    gamma: HostArray,
    beta: HostArray | None,
    *,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
) -> HostArray:
    """Each row normed in fp32, as ``kernels.ops.Norm`` says; ``gamma`` and ``beta`` are [K]."""
    import numpy as np

    rows = floats(x)
    if centered:
        rows = rows - rows.mean(-1, keepdims=True)
    factor = 1 / np.sqrt(np.square(rows).mean(-1, keepdims=True) + np.float32(eps))
    result = empty(DType.F32, x.shape)
    view = floats(result)
    np.multiply(rows * factor, floats(gamma) + np.float32(offset), out=view)
    if beta is not None:
        view += floats(beta)
    return result


def taken(x: HostArray, picked: Sequence[int]) -> HostArray:
    """Some rows of x, in that order."""
    import numpy as np

    result = empty(DType.F32, (len(picked), *x.shape[1:]))
    floats(result)[...] = floats(x)[np.asarray(picked, np.intp)]
    return result


def routed(scores: HostArray, top_k: int) -> list[list[int]]:
    """Rows that go to each expert: those that score it among their ``top_k``; scores [T, E]."""
    import numpy as np

    chosen = np.argsort(-floats(scores), axis=-1, kind="stable")[:, :top_k]
    return [np.nonzero(chosen == expert)[0].tolist() for expert in range(scores.shape[1])]


def noisy(x: HostArray, relative: float, seed: Sequence[int]) -> HostArray:
    """Each value times 1 + u with u uniform in [-relative, relative), the same for a seed.

    With 2^-9 it is what rounding to bf16 does to a value at most.
    """
    import numpy as np

    draws = np.random.Generator(np.random.PCG64(list(seed))).random(x.shape, np.float32)
    result = empty(DType.F32, x.shape)
    floats(result)[...] = floats(x) * (1 + np.float32(relative) * (2 * draws - 1))
    return result


def first_bad(x: HostArray) -> tuple[int, int] | None:
    """Row and column of the first value that is not finite; None if all are."""
    import numpy as np

    finite: NDArray[np.bool_] = np.isfinite(floats(x))
    if finite.all():
        return None
    row, column = divmod(int(finite.argmin()), x.shape[-1])
    return row, column
