"""What the GPU kernels work on: activations, weights, steps and caches, all tensors of one device.

A step of at most ``SMALL`` tokens is decoding: its linears read the weights once, in their storage
form, and multiply them with activations that were prepared by whoever produced them (``Prepared``).
Longer steps are prefill: weights are dequantized into a scratch and multiplied by the vendor's
library. Activations are fp32; only the two factors of a product are 16 bits wide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from llmrun.kernels.ops import Heads, Span

SMALL = 32
"""Most tokens of a decode step: two tiles of 16 rows, the least a tensor core multiplies."""

BUCKETS = (1, 2, 4, 8, 16, 32)
"""Rows a decode step is run with; those behind its tokens are not in use."""

TILE_N, TILE_K = 64, 128
"""Rows and columns of a tile of codes; N and K of a weight are padded to multiples of them."""


def padded(size: int, tile: int) -> int:
    """``size`` rounded up to a multiple of ``tile``."""
    return -(-size // tile) * tile


@dataclass(frozen=True, eq=False)
class Prepared:
    """Inputs [M, K] of a linear in a decode step, written by whoever produced the activations x.

    ``u``: bf16 [SMALL, Kp], Kp = K padded to TILE_K: x, times gamma where an RMSNorm follows; the
    columns behind K are zero and are never written.
    ``squares``: fp32 [SMALL, ceil(K / TILE_N)]: sums of x^2 over TILE_N columns each. A norm's
    factor ``rsqrt(mean(x^2) + eps)`` is one number per row and commutes with the linear, so the
    consumer applies it to its result.
    """

    u: torch.Tensor
    squares: torch.Tensor

    @staticmethod
    def empty(k: int, device: torch.device) -> "Prepared":
        """Zero-filled memory for K columns."""
        return Prepared(
            torch.zeros(SMALL, padded(k, TILE_K), dtype=torch.bfloat16, device=device),
            torch.zeros(SMALL, math.ceil(k / TILE_N), device=device),
        )


@dataclass(frozen=True)
class Factor:
    """The factor of an RMSNorm over ``k`` columns: ``rsqrt(sum(squares) / k + eps)`` per row."""

    k: int
    eps: float


@dataclass(frozen=True, eq=False)
class Fold:
    """What a producer multiplies into u: ``gamma + offset`` of the norm that follows, fp32 [K]."""

    gamma: torch.Tensor
    offset: float


@dataclass(frozen=True, eq=False)
class GpuArray:
    """Activations: ``values`` fp32 [rows, D], and what a decode step's linears read of them."""

    values: torch.Tensor

    @cached_property
    def prepared(self) -> Prepared:
        """Memory for these activations as inputs of a linear; taken when first asked for."""
        return Prepared.empty(self.values.shape[1], self.values.device)


@dataclass(frozen=True, eq=False)
class Workspace:
    """Memory of split sums: ``partials`` fp32 [n], ``counters`` int32 [n], all zero between
    kernels (the last one to arrive at a counter sets it back)."""

    partials: torch.Tensor
    counters: torch.Tensor

    @staticmethod
    def empty(device: torch.device, floats: int = 8 << 20, counters: int = 1 << 16) -> "Workspace":
        """Fresh memory."""
        return Workspace(
            torch.empty(floats, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )


class GpuStep:
    """Everything that changes from call to call.

    On the device, int32, at fixed addresses: ``ids``, ``positions`` and ``slots`` [max(max_tokens,
    SMALL)] of each token (slot -1: the row is not in use) and ``rows`` [max_rows], the rows whose
    logits are wanted. On the host: ``n_tokens``, ``n_rows`` and ``spans``.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        size = max(max_tokens, SMALL)
        self._staged = torch.zeros(4, size, dtype=torch.int32)
        self._uploaded: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._staged = self._staged.pin_memory()
            self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._on_device = torch.zeros(4, size, dtype=torch.int32, device=device)
        self.ids, self.positions, self.slots, self.rows = self._on_device
        self.n_tokens = 0
        self.n_rows = 0
        self.spans: tuple[Span, ...] = ()

    @property
    def small(self) -> bool:
        """Whether the decode kernels serve it."""
        return self.n_tokens <= SMALL

    @property
    def bucket(self) -> int:
        """Rows a decode step is run with."""
        return next(rows for rows in BUCKETS if rows >= self.n_tokens)

    @property
    def rows_bucket(self) -> int:
        """Rows of logits a decode step is run with."""
        return next(rows for rows in BUCKETS if rows >= self.n_rows)

    def set(self, token_ids: Sequence[int], spans: Sequence[Span], rows: Sequence[int]) -> None:
        """Describe the next call and copy it to the device."""
        self.n_tokens, self.n_rows, self.spans = len(token_ids), len(rows), tuple(spans)
        staged = self._staged
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the copy before may still be under way
        staged[2].fill_(-1)
        staged[3].zero_()  # a bucket may be wider than the rows asked for: it reads some row
        staged[0, : self.n_tokens] = torch.tensor(token_ids, dtype=torch.int32)
        for span in spans:
            part = slice(span.start, span.start + span.count)
            staged[1, part] = torch.arange(span.position, span.position + span.count)
            staged[2, part] = span.slot
        staged[3, : self.n_rows] = torch.tensor(rows, dtype=torch.int32)
        self._on_device.copy_(staged, non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record(torch.cuda.current_stream(self._on_device.device))


@dataclass(frozen=True, eq=False)
class GpuKvLayer:
    """Keys and values of one layer: [slots, Hkv, capacity, dh] each, f16, f32 or int8.

    int8 (form ``int8``): symmetric codes with scales f16 [slots, Hkv, capacity, dh / 64] (one for
    a whole head where dh is no multiple of 64), None for the other forms.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    heads: Heads

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, eq=False)
class GpuWeight:
    """A 2-D weight [N, K] in the layout of ``layout.py``.

    ``form``: ``w4``, ``w8``, ``lut`` or ``dense``. ``codes``: int32 tiles [Np/64, Kp/128, 64, 16]
    (w4, lut) or [Np/64, Kp/128, 64, 32] (w8), or the dense matrix [N, K] as it is (bf16, f16, f32).
    ``group``: columns of a scale, at most 128 (a row's one scale is repeated). ``scales``:
    [Np/64, Kp/group, 64] as stored; ``mins``: likewise, minima in fp32 (zero points already
    multiplied out: ``-(s * z)``), or None. ``table``: fp32 [24] of lut. ``columns``: int32 [K],
    the input that each column multiplies, None: in order.
    """

    form: str
    kind: str
    shape: tuple[int, int]
    nbytes: int
    codes: torch.Tensor
    group: int = 0
    scales: torch.Tensor | None = None
    mins: torch.Tensor | None = None
    table: torch.Tensor | None = None
    columns: torch.Tensor | None = None
