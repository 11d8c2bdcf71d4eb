"""Cutting a weight into blocks of groups, so that a quantizer works inside the processor's cache.

Groups are independent, so the block size changes speed and never a byte of the result.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmrun.errors import ModelFileError
from llmrun.kernels.host import DType, HostArray

if TYPE_CHECKING:
    import torch

WEIGHTS_PER_THREAD = 1 << 16
"""Weights of one block and thread: three fp32 arrays of this size (768 KiB) stay near a core."""

SHARING_THREADS = 4
"""Threads from which a block is shared. Threads wait for each other after every operation: two
bring a factor of 1.4 on an idle machine (106 M weights in 3.6 s instead of 5.2 s), but take ten
times as long when something else runs on their cores (54 s, measured on 2 cores)."""


@contextmanager
def working_blocks() -> Iterator[int]:
    """Give the number of weights a block should have with torch's present threads.

    With fewer than ``SHARING_THREADS``, torch works in the calling thread alone meanwhile.
    """
    import torch

    threads = torch.get_num_threads()
    if threads >= SHARING_THREADS:
        yield WEIGHTS_PER_THREAD * threads
        return
    torch.set_num_threads(1)
    try:
        yield WEIGHTS_PER_THREAD
    finally:
        torch.set_num_threads(threads)


def blocks_of_groups(
    host: HostArray, group: int, block_weights: int
) -> Iterator[tuple[int, "torch.Tensor"]]:
    """Yield (index of the first group, [B, group] view) over a weight [N, K], K % group == 0.

    ModelFileError naming the first weight of a block that is not finite.
    """
    from llmrun.kernels.reference.arrays import as_tensor

    groups = as_tensor(host).view(-1, group)
    step = max(1, block_weights // group)
    for start in range(0, groups.shape[0], step):
        block = groups[start : start + step]
        # min and max are NaN if a weight is, and infinite if one is: one pass, no mask in memory.
        low, high = block.aminmax()
        if not (low.isfinite() and high.isfinite()):
            bad = int((~block.isfinite()).flatten().nonzero()[0])
            raise not_finite(host, start * group + bad)
        yield start, block


def not_finite(host: HostArray, index: int) -> ModelFileError:
    """The error for the weight [N, K] whose number at a flat ``index`` is not finite."""
    row, column = divmod(index, host.shape[-1])
    width = host.dtype.bits // 8
    raw = bytes(host.data[index * width : (index + 1) * width])
    if host.dtype is DType.BF16:
        raw = bytes(2) + raw
    (number,) = struct.unpack("<e" if host.dtype is DType.F16 else "<f", raw)
    return ModelFileError(
        f"the weight at [{row}, {column}] is {number}; "
        "a weight that is not a finite number cannot be quantized",
        "Fetch the model again; if the published file is like this, use another model.",
    )
