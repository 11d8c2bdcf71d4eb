"""One launch of each kind a decode step has: ready to run, to be checked and to be timed.

A launch is checked before it is timed, against float64 products of the same rounded inputs with
some rows of the weights as the reference dequantizes them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import silu

from gpu.bench import Bench
from gpu.compare import compare
from gpu.forms import random_form, sample
from gpu.shapes import Linears
from gpu.timing import Call
from llmrun.kernels.forms import Form
from llmrun.kernels.gpu import linear
from llmrun.kernels.gpu.arrays import SMALL, TILE_N, GpuWeight, Prepared, Workspace
from llmrun.kernels.gpu.tuning import copied
from llmrun.kernels.gpu.weights import take_over

TOLERANCE = 2e-3
"""Relative error of a product, over a row."""


def inputs(m: int, k: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, Prepared]:
    """Activations N(0, 1) fp32 [SMALL, K], and m rows of them as a producer leaves them."""
    x = torch.randn(SMALL, k, generator=torch.Generator().manual_seed(seed)).to(device)
    prepared = Prepared.empty(k, device)
    fill(prepared, x[:m])
    return x, prepared


def fill(prepared: Prepared, x: torch.Tensor) -> None:
    """Write what a producer without a norm writes, in plain torch."""
    m, k = x.shape
    prepared.u[:m, :k] = x.bfloat16()
    squares = torch.zeros(m, prepared.squares.shape[1] * TILE_N, device=x.device)
    squares[:, :k] = x * x
    prepared.squares[:m] = squares.view(m, -1, TILE_N).sum(-1)


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch on ``copies`` of its weights, in turn. ``forms``: of each of its weights."""

    linears: Linears
    forms: tuple[Form, ...]
    copies: tuple[tuple[GpuWeight, ...], ...]
    m: int
    x: Prepared
    y: torch.Tensor
    onto: Prepared
    work: Workspace
    rows: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one call reads."""
        return sum(weight.nbytes for weight in self.copies[0])

    @property
    def calls(self) -> list[Call]:
        """One call for each copy."""
        return [lambda weights=weights: self.run(weights) for weights in self.copies]

    def run(self, weights: Sequence[GpuWeight]) -> None:
        """Launch."""
        x, y, m = self.x, self.y, self.m
        first = weights[0]
        match self.linears.role:
            case "qkv":
                linear.linears(x, None, [(weight, None) for weight in weights], y, m, self.work)
            case "gate_up":
                gate, up = weights
                linear.gate_up(
                    x, None, (gate, None), (up, None), "silu", y, self.onto, m, self.work
                )
            case "head":
                linear.head(x, None, first, self.rows, m, 1.0, None, y, None, self.work)
            case _:
                linear.linear_add(x, first, None, 1.0, y, m, self.onto, None, self.work)

    def check(self) -> float:
        """Its relative error; WrongError if that is too much."""
        self.y.zero_()
        self.run(self.copies[0])
        u = self.x.u[: self.m, : self.linears.k].double()
        sampled = [sample(form, u.device) for form in self.forms]
        products = [u @ weight.T for _, weight in sampled]
        rows = [picked for picked, _ in sampled]
        if self.linears.role == "gate_up":
            wanted, picked = silu(products[0]) * products[1], rows[0]
        else:
            starts = [sum(self.linears.rows[:i]) for i in range(len(rows))]
            wanted = torch.cat(products, dim=1)
            picked = torch.cat([row + start for row, start in zip(rows, starts, strict=True)])
        return compare(self.y[: self.m, picked], wanted, TOLERANCE)


def launch(
    bench: Bench, linears: Linears, kind: str, m: int, *, copies: int | None = None
) -> Launch:
    """Make a launch; by default on so many copies that none of them is cached when it is read."""
    device = bench.device
    forms = tuple(random_form(kind, (n, linears.k)) for n in linears.rows)
    weights = tuple(take_over(form, device) for form in forms)
    held = sum(weight.nbytes for weight in weights)
    count = copies or max(2, math.ceil(bench.stream_bytes / held))
    n = linears.rows[0] if linears.role == "gate_up" else sum(linears.rows)
    _, x = inputs(m, linears.k, device)
    return Launch(
        linears,
        forms,
        (weights, *(tuple(copied(weight) for weight in weights) for _ in range(count - 1))),
        m,
        x,
        torch.zeros(SMALL, n, device=device),
        Prepared.empty(n, device),
        Workspace.empty(device),
        torch.arange(SMALL, dtype=torch.int32, device=device),
    )


def with_rows(one: Launch, m: int) -> Launch:
    """The same launch on the same weights with another number of rows."""
    _, x = inputs(m, one.linears.k, one.y.device)
    return replace(one, m=m, x=x)
