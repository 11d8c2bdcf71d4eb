"""Linears of decode steps, at most ``SMALL`` rows: weights are read once, in their storage form.

Launches of ``linear_kernels`` on the current stream; nothing is allocated and the host waits for
nothing. Inputs are ``Prepared`` by their producer; rows at and behind ``m`` are neither read nor
written, and a row's result does not depend on the others. A weight's columns are taken in order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from llmrun.kernels.gpu.arrays import (
    SMALL,
    TILE_N,
    Factor,
    Fold,
    GpuWeight,
    Prepared,
    Workspace,
    padded,
)
from llmrun.kernels.gpu.heuristics import Launch, Shape, Tuned, card_of, choose
from llmrun.kernels.gpu.linear_kernels import (
    add_kernel,
    gate_up_kernel,
    head_kernel,
    linears_kernel,
)

Part = tuple[GpuWeight, torch.Tensor | None]
"""A weight and its bias, fp32 [N] or None."""

MOST_PARTS = 3
"""Weights of one launch: queries, keys and values."""

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "f32"}
"""How a dense weight is multiplied; tf32 has the 11 significant bits of f16."""

SCALES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True, eq=False)
class Best:
    """What is known of each 64 logits of a row, those of ids below ``vocab``: [rows, ceil(N / 64)].

    ``values`` fp32: the largest, not a number if one of them is not finite. ``sums`` fp32: of
    exponentials of the logits less the largest. ``ids`` int32: the lowest that has the largest.
    """

    values: torch.Tensor
    sums: torch.Tensor
    ids: torch.Tensor
    vocab: int

    @staticmethod
    def empty(rows: int, n: int, device: torch.device) -> "Best":
        """Memory for N logits of each row, all of which count."""
        values = torch.zeros(rows, padded(n, TILE_N) // TILE_N, device=device)
        ids = torch.zeros_like(values, dtype=torch.int32)
        return Best(values, torch.zeros_like(values), ids, n)


def linears(
    x: Prepared,
    factor: Factor | None,
    parts: Sequence[Part],
    y: torch.Tensor,
    m: int,
    work: Workspace,
    tuned: Tuned | None = None,
) -> None:
    """y[:m] = factor * (W u) + b, the parts' results side by side; y fp32 [rows, sum N].

    Neighbours of the same form share launches.
    """
    column = 0
    for group in _launch_groups(parts):
        _linears(x, factor, group, y[:, column:], m, work, tuned)
        column += sum(weight.shape[0] for weight, _ in group)


def _launch_groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    def form(part: Part) -> tuple[object, ...]:
        weight, bias = part
        scales = None if weight.scales is None else weight.scales.dtype
        mins = weight.mins is not None
        return weight.form, weight.group, weight.codes.dtype, scales, mins, bias is not None

    for _, same in groupby(parts, form):
        run = list(same)
        for start in range(0, len(run), MOST_PARTS):
            yield run[start : start + MOST_PARTS]


def _linears(
    x: Prepared,
    factor: Factor | None,
    parts: list[Part],
    y: torch.Tensor,
    m: int,
    work: Workspace,
    tuned: Tuned | None,
) -> None:
    weights = [weight for weight, _ in parts]
    padding = [parts[-1]] * (MOST_PARTS - len(parts))
    pointers = [pointer for part in (*parts, *padding) for pointer in _pointers(*part)]
    sizes = [weight.shape[0] for weight, _ in (*parts, *padding)]
    tiles = [padded(weight.shape[0], TILE_N) // TILE_N for weight in weights]
    n = sum(weight.shape[0] for weight in weights)
    places = sum(tiles)
    launch = _launch(weights[0], n, places, False, work, tuned)
    linears_kernel[(places * launch.splits,)](
        *pointers,
        tiles[0],
        sum(tiles[:2]),
        *sizes,
        weights[0].shape[1],
        x.u,
        *_factor_arguments(x, factor),
        y,
        y.stride(0),
        m,
        launch.splits,
        work.partials,
        work.counters,
        PARTS=len(parts),
        BIAS=parts[0][1] is not None,
        FACTOR=factor is not None,
        **_variant(weights[0], launch, m),
    )


def linear_add(
    x: Prepared,
    weight: GpuWeight,
    bias: torch.Tensor | None,
    scale: float,
    h: torch.Tensor,
    m: int,
    onto: Prepared | None,
    fold: Fold | None,
    work: Workspace,
    tuned: Tuned | None = None,
) -> None:
    """h[:m] += scale * (W u + b); ``onto``: the new h, folded, as inputs of the next linear."""
    n, k = weight.shape
    places = padded(n, TILE_N) // TILE_N
    launch = _launch(weight, n, places, False, work, tuned)
    written = x if onto is None else onto
    add_kernel[(places * launch.splits,)](
        *_pointers(weight, bias),
        n,
        k,
        x.u,
        scale,
        h,
        h.stride(0),
        m,
        written.u,
        written.squares,
        written.squares if fold is None else fold.gamma,
        0.0 if fold is None else fold.offset,
        launch.splits,
        work.partials,
        work.counters,
        BIAS=bias is not None,
        ONTO=onto is not None,
        FOLD=fold is not None,
        **_variant(weight, launch, m),
    )


def gate_up(
    x: Prepared,
    factor: Factor | None,
    gate: Part | None,
    up: Part,
    activation: str,
    a: torch.Tensor,
    onto: Prepared,
    m: int,
    work: Workspace,
    tuned: Tuned | None = None,
) -> None:
    """a[:m] = activation(gate) * up (without a gate, activation(up)), and as the next inputs.

    A gate of another form than ``up`` takes a launch of its own.
    """
    weight, bias = up
    n, k = weight.shape
    kind = "none"
    if gate is not None:
        (_, *others) = _launch_groups([(gate[0], None), (weight, None)])
        kind = "ready" if others else "same"
    if kind == "ready":
        assert gate is not None
        linears(x, factor, [gate], a, m, work, tuned)
    beside = gate if gate is not None and kind == "same" else up
    places = padded(n, TILE_N) // TILE_N
    launch = _launch(weight, n, places, kind == "same", work, tuned)
    gate_up_kernel[(places * launch.splits,)](
        *_pointers(*beside),
        *_pointers(*up),
        n,
        k,
        x.u,
        *_factor_arguments(x, factor),
        a,
        a.stride(0),
        m,
        onto.u,
        onto.squares,
        launch.splits,
        work.partials,
        work.counters,
        GATE=kind,
        ACTIVATION=activation,
        GATE_BIAS=beside[1] is not None,
        UP_BIAS=bias is not None,
        FACTOR=factor is not None,
        **_variant(weight, launch, m),
    )


def head(
    x: Prepared,
    factor: Factor | None,
    weight: GpuWeight,
    rows: torch.Tensor,
    n_rows: int,
    scale: float,
    softcap: float | None,
    logits: torch.Tensor,
    best: Best | None,
    work: Workspace,
    bias: torch.Tensor | None = None,
    tuned: Tuned | None = None,
) -> None:
    """logits[r] = softcap((factor * (W u) + b) * scale) of row ``rows[r]`` (int32), r < n_rows.

    With ``best`` also what that says of them.
    """
    n, k = weight.shape
    places = padded(n, TILE_N) // TILE_N
    launch = _launch(weight, n, places, False, work, tuned)
    head_kernel[(places * launch.splits,)](
        *_pointers(weight, bias),
        n,
        k,
        x.u,
        *_factor_arguments(x, factor),
        rows,
        n_rows,
        scale,
        1.0 if softcap is None else softcap,
        logits,
        logits.stride(0),
        work.partials if best is None else best.values,
        work.partials if best is None else best.sums,
        work.counters if best is None else best.ids,
        n if best is None else min(best.vocab, n),
        launch.splits,
        work.partials,
        work.counters,
        BIAS=bias is not None,
        FACTOR=factor is not None,
        SOFTCAP=softcap is not None,
        BEST=best is not None,
        **_variant(weight, launch, n_rows),
    )


def packed_pointers(weight: GpuWeight) -> tuple[torch.Tensor, ...]:
    """Codes, scales, minima and table as the kernels take them; what is missing is not read."""
    codes = weight.codes
    return (
        codes,
        codes if weight.scales is None else _in_pairs(weight.scales),
        codes if weight.mins is None else _in_pairs(weight.mins),
        codes if weight.table is None else weight.table,
    )


def _pointers(weight: GpuWeight, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return (*packed_pointers(weight), weight.codes if bias is None else bias)


def _in_pairs(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.element_size() == 2 else torch.int64)


def _factor_arguments(x: Prepared, factor: Factor | None) -> tuple[torch.Tensor, int, int, float]:
    if factor is None:
        return x.squares, 1, 1, 0.0
    return x.squares, x.squares.shape[1], factor.k, factor.eps


def _launch(
    weight: GpuWeight, n: int, places: int, pair: bool, work: Workspace, tuned: Tuned | None
) -> Launch:
    """The launch for N rows, ``places`` tiles with the padding of each part."""
    shape = Shape(weight.form, weight.group, n, weight.shape[1], pair)
    launch = choose(card_of(weight.codes.device), shape, tuned)
    floats = places * TILE_N * SMALL * (2 if pair else 1)
    splits = launch.splits
    while splits > 1 and splits * floats > work.partials.numel():
        splits //= 2  # by the most rows, lest the bits depend on them
    return Launch(splits, launch.stages, launch.warps)


def _variant(weight: GpuWeight, launch: Launch, m: int) -> dict[str, object]:
    scales = weight.scales
    return {
        "FORM": weight.form,
        "GROUP": weight.group,
        "SCALES": PRECISIONS[weight.codes.dtype] if scales is None else SCALES[scales.dtype],
        "MINS": weight.mins is not None,
        "SPLIT": launch.splits > 1,
        "BM": 8 if m <= 8 else 16 if m <= 16 else 32,
        "num_warps": launch.warps,
        "num_stages": launch.stages_for(m),
    }
