"""Kernels that measure the card and not llmrun: reading, and waiting for one another."""

import torch
import triton
import triton.language as tl

READ_BLOCK = 8192
READ_TURNS = 16


@triton.jit
def _read(source, out, turns: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN202
    start = tl.program_id(0).to(tl.int64) * (turns * block)
    total = tl.zeros([block], dtype=tl.int32)
    for turn in range(turns):
        total += tl.load(source + start + turn * block + tl.arange(0, block))
    tl.store(out + tl.program_id(0), tl.sum(total))


def read(source: torch.Tensor, out: torch.Tensor) -> None:
    """Read int32 [n]; one sum for each READ_BLOCK * READ_TURNS of them goes to ``out``."""
    programs = source.numel() // (READ_BLOCK * READ_TURNS)
    _read[(programs,)](source, out, READ_TURNS, READ_BLOCK, num_warps=8)


@triton.jit
def _step(cell, early: tl.constexpr):  # noqa: ANN001, ANN202
    if early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(cell, tl.load(cell) + 1)


def step(cell: torch.Tensor, *, early: bool) -> None:
    """Count one up, after the kernel before. ``early``: launched before that one has ended."""
    if early:
        _step[(1,)](cell, True, num_warps=1, launch_pdl=True)
    else:
        _step[(1,)](cell, False, num_warps=1)
