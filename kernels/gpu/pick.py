"""Choosing ids on the device: the op ``pick``, and the last launches of a chained step.

What a choice depends on lies in memory with fixed addresses (``PickState``): it can be captured in
a graph once and serves any sampling. The same seed gives the same choice as the reference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmrun.errors import InternalError
from llmrun.kernels.gpu.device import Launch
from llmrun.kernels.gpu.greedy_kernel import choose_best
from llmrun.kernels.gpu.linear import Best
from llmrun.kernels.gpu.mode import Specialization
from llmrun.kernels.gpu.pick_kernels import BLOCK, NUMBERS, choose, gather, narrow, scan
from llmrun.kernels.gpu.variants import variant
from llmrun.kernels.ops import Pick, PickRequest
from llmrun.kernels.reference import sampling as reference

_SIGN = 1 << 63

SCAN_WARPS, CHOOSE_WARPS = 4, 8


def served(request: PickRequest) -> bool:
    """Whether the kernels make this choice; the reference makes the others."""
    return not request.bias and request.allowed is None and request.sampling.top_logprobs == 0


@dataclass(frozen=True, eq=False)
class PickState:
    """Memory for choices from ``rows`` rows of logits over ``vocab`` ids.

    ``numbers`` int64 [rows, NUMBERS]: parameters of each row (see ``pick_kernels``). ``seen`` uint8
    [rows, vocab]: ids the penalty looks at. ``result`` fp64 [rows, 2]: what was chosen. The rest
    is what the kernels hand each other.
    """

    rows: int
    vocab: int
    numbers: torch.Tensor
    seen: torch.Tensor
    best: torch.Tensor
    best_ids: torch.Tensor
    sums: torch.Tensor
    bounds: torch.Tensor
    counts: torch.Tensor
    scaled: torch.Tensor
    ids: torch.Tensor
    result: torch.Tensor

    @staticmethod
    def empty(rows: int, vocab: int, device: torch.device) -> "PickState":
        """Memory without a request: no row is in use."""
        blocks = math.ceil(vocab / BLOCK)

        def take(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return PickState(
            rows,
            vocab,
            numbers=take(NUMBERS, dtype=torch.int64),
            seen=take(vocab, dtype=torch.uint8),
            best=take(3, blocks, dtype=torch.float64),
            best_ids=take(3, blocks, dtype=torch.int32),
            sums=take(2, blocks, dtype=torch.float32),
            bounds=take(dtype=torch.float64),
            counts=take(blocks, dtype=torch.int32),
            scaled=take(vocab, dtype=torch.float64),
            ids=take(vocab, dtype=torch.int32),
            result=take(2, dtype=torch.float64),
        )

    def set(self, requests: Sequence[PickRequest]) -> None:
        """Choose the first rows as ``requests`` say; the others are not in use.

        Only requests that are ``served``.
        """
        numbers = torch.zeros(self.rows, NUMBERS, dtype=torch.int64)
        values = numbers.view(torch.float64)
        for row, request in enumerate(requests):
            s = request.sampling
            numbers[row, :4] = torch.tensor(
                [_signed(s.seed), _signed(request.draw), s.top_k, request.vocab]
            )
            values[row, 4:] = torch.tensor(
                [s.temperature, s.top_p, s.min_p, s.repeat_penalty], dtype=torch.float64
            )
            if s.repeat_penalty != 1.0:
                ids = [i for i in set(request.history) if 0 <= i < request.vocab]
                self.seen[row].zero_()
                self.seen[row, torch.tensor(ids, dtype=torch.int64, device=self.seen.device)] = 1
        self.numbers.copy_(numbers)


@dataclass(frozen=True, eq=False)
class Feed:
    """Where a chosen id goes for the next step, int32 [rows]: ids and positions of the rows."""

    ids: torch.Tensor
    positions: torch.Tensor


def filtered(requests: Sequence[PickRequest]) -> bool:
    """Whether one of them leaves ids out, which takes two launches more."""
    samplings = [request.sampling for request in requests if request.sampling.temperature > 0.0]
    return any(s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 for s in samplings)


def greedy(requests: Sequence[PickRequest]) -> int | None:
    """The number of ids that all of them take the largest logit of; None if they do not."""
    samplings = [request.sampling for request in requests]
    plain = all(s.temperature == 0.0 and s.repeat_penalty == 1.0 for s in samplings)
    vocabs = {request.vocab for request in requests}
    return vocabs.pop() if plain and len(vocabs) == 1 else None


def launches(
    logits: torch.Tensor, state: PickState, feed: Feed | None, *, filters: bool = True
) -> list[Launch]:
    """What chooses from logits fp32 [rows or more, vocab], contiguous: four launches.

    With ``feed`` each row moves on to its next choice. ``filters`` False: two launches, where
    none of the requests is ``filtered``.
    """
    vocab, blocks = state.vocab, state.best.shape[2]
    sizes = {"V": vocab, "BLOCKS": blocks}
    wide = {**sizes, "WIDTH": 1 << (blocks - 1).bit_length()}
    row = (logits, state.numbers, state.numbers.view(torch.float64), state.seen)
    grid = (blocks, state.rows)
    fed_ids, fed_positions = (state.ids, state.ids) if feed is None else (feed.ids, feed.positions)
    first = lambda: scan[grid](  # noqa: E731
        *row, state.best, state.best_ids, state.sums, **sizes, num_warps=SCAN_WARPS
    )
    between = [
        lambda: narrow[grid](
            *row, state.best, state.bounds, state.counts, **wide, num_warps=SCAN_WARPS
        ),
        lambda: gather[grid](
            *row, state.bounds, state.counts, state.scaled, state.ids, **wide, num_warps=SCAN_WARPS
        ),
    ]
    last = lambda: choose[state.rows,](  # noqa: E731
        *row, state.best, state.best_ids, state.sums, state.bounds, state.counts, state.scaled,
        state.ids, state.result, fed_ids, fed_positions, **wide, FILTERS=filters,
        FEED=feed is not None, num_warps=CHOOSE_WARPS,
    )  # fmt: skip
    return [first, *(between if filters else []), last]


def best_launch(best: Best, state: PickState, feed: Feed) -> Launch:
    """What chooses where the head has found the best of its logits; the requests are ``greedy``."""
    tiles = best.values.shape[1]
    return lambda: choose_best[state.rows,](
        best.values, best.sums, best.ids, state.numbers, state.result, feed.ids, feed.positions,
        TILES=tiles, WIDTH=1 << (tiles - 1).bit_length(), num_warps=CHOOSE_WARPS,
    )  # fmt: skip


def pick(logits: torch.Tensor, requests: Sequence[PickRequest], state: PickState) -> list[Pick]:
    """The op: choose one id per row of logits fp32 [rows or more, vocab] and wait for it.

    ``state`` has a row for each request. InternalError if a row is not finite.
    """
    if not all(map(served, requests)):
        host = logits[: len(requests)].cpu()
        return [reference.pick(row, one) for row, one in zip(host, requests, strict=True)]
    state.set(requests)
    for launch in launches(logits, state, None, filters=filtered(requests)):
        launch()
    return picks(state.result[: len(requests)].cpu())


class Picker:
    """The op ``pick`` with memory of its own, for as many rows as were ever asked for at once."""

    def __init__(self) -> None:
        self._state: PickState | None = None

    def pick(self, logits: torch.Tensor, requests: Sequence[PickRequest]) -> list[Pick]:
        """Choose one id per row of logits fp32 [rows or more, V], contiguous, and wait for it."""
        state, vocab = self._state, logits.shape[1]
        if state is None or state.vocab != vocab or state.rows < len(requests):
            state = self._state = PickState.empty(len(requests), vocab, logits.device)
        return pick(logits, requests, state)


def picks(result: torch.Tensor) -> list[Pick]:
    """Read results fp64 [n, 2] on the host. InternalError if a row of logits was not finite."""
    chosen = [Pick(int(token_id), logprob) for token_id, logprob in result.tolist()]
    if any(one.token_id < 0 for one in chosen):
        raise InternalError(
            "the model produced logits that are not finite numbers",
            "check the model's files with a fresh `llmrun pull`, or try another scheme with -q",
        )
    return chosen


def _signed(word: int) -> int:
    """An unsigned 64-bit number as the signed one with the same bits."""
    word &= 2 * _SIGN - 1
    return word - 2 * _SIGN if word >= _SIGN else word


def specializations() -> list[Specialization]:
    """The kernels as a chain of one sequence launches them, for a large vocabulary."""
    vocab = 128256
    blocks = math.ceil(vocab / BLOCK)
    sizes = {"V": vocab, "BLOCKS": blocks}
    wide = {**sizes, "WIDTH": 1 << (blocks - 1).bit_length()}
    row = {"logits": "*fp32", "numbers": "*i64", "values": "*fp64", "seen": "*u8"}
    first = {"best": "*fp64", "best_ids": "*i32", "sums": "*fp32"}
    some = {"bounds": "*fp64", "counts": "*i32"}
    few = {"scaled": "*fp64", "ids": "*i32"}
    end = {"result": "*fp64", "fed_ids": "*i32", "fed_positions": "*i32"}
    fed = {**wide, "FEED": True}
    tiles = math.ceil(vocab / 64)
    found = {"values": "*fp32", "sums": "*fp32", "ids": "*i32", "numbers": "*i64"}
    tiled = {"TILES": tiles, "WIDTH": 1 << (tiles - 1).bit_length()}
    made = [
        ("scan", scan, row | first, sizes, SCAN_WARPS),
        ("narrow", narrow, row | {"best": "*fp64"} | some, wide, SCAN_WARPS),
        ("gather", gather, row | some | few, wide, SCAN_WARPS),
        ("choose", choose, row | first | some | few | end, fed | {"FILTERS": False}, CHOOSE_WARPS),
        ("filter", choose, row | first | some | few | end, fed | {"FILTERS": True}, CHOOSE_WARPS),
        ("best", choose_best, found | end, tiled, CHOOSE_WARPS),
    ]
    return [
        variant(f"pick-{name}", kernel, types, constants, warps=warps)
        for name, kernel, types, constants, warps in made
    ]
