"""Step and cache memory of the reference backend."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmrun.kernels.ops import Heads, Rope, Span

KV_DTYPES = {"f16": torch.float16, "f32": torch.float32, "int8": torch.int8}  # of ops.KV_FORMS

SCALE_COLUMNS = 64
"""Values of a head that share a scale in form int8."""


class TorchStep:
    """The ids, spans and wanted rows of one call, on the device."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.n_tokens = 0
        self.n_rows = 0
        self.spans: tuple[Span, ...] = ()
        self._ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._rows = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}

    def set(self, token_ids: Sequence[int], spans: Sequence[Span], rows: Sequence[int]) -> None:
        """Describe the next call; see ``kernels/ops.py``."""
        self.n_tokens, self.n_rows, self.spans = len(token_ids), len(rows), tuple(spans)
        positions = [s.position + i for s in spans for i in range(s.count)]
        for target, values in (
            (self._ids, token_ids),
            (self._positions, positions),
            (self._rows, rows),
        ):
            target[: len(values)] = torch.tensor(values, dtype=torch.int64)
        self._rotations.clear()

    @property
    def token_ids(self) -> torch.Tensor:
        """[T] int64."""
        return self._ids[: self.n_tokens]

    @property
    def positions(self) -> torch.Tensor:
        """[T] int64."""
        return self._positions[: self.n_tokens]

    @property
    def rows(self) -> torch.Tensor:
        """[R] int64."""
        return self._rows[: self.n_rows]

    def rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [T, 1, rotated/2] fp32 of every token, made once per call and rope."""
        if rope not in self._rotations:
            inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=self._ids.device)
            angles = self.positions.float()[:, None, None] * inv_freq
            factor = rope.attention_factor
            self._rotations[rope] = angles.cos() * factor, angles.sin() * factor
        return self._rotations[rope]


@dataclass(frozen=True, eq=False)
class TorchKvLayer:
    """Keys and values of one layer: [slots, Hkv, capacity, dh] each, f16, f32 or int8.

    int8 holds codes ``c = round(x / s)``, ties to even, cut to +-127, beside scales f16
    [slots, Hkv, capacity, dh / 64]: ``s = f16(max|x| / 127)`` of 64 values that follow each other
    in a head, or of the whole head where dh is no multiple of 64; where s is 0, c is 0.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, slot: int, there: slice, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, fp32 [n, Hkv, dh] each, as the tokens ``there`` of a slot."""
        for x, kept, scales in (
            (keys, self.keys, self.key_scales),
            (values, self.values, self.value_scales),
        ):
            if scales is None:
                kept[slot, :, there].copy_(x.transpose(0, 1))
            else:
                codes, found = _quantized(x.transpose(0, 1), scales.shape[-1])
                kept[slot, :, there].copy_(codes)
                scales[slot, :, there].copy_(found)

    def read(self, slot: int, there: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens ``there`` of a slot, fp32 [Hkv, n, dh] each."""
        keys, values = self.keys[slot, :, there].float(), self.values[slot, :, there].float()
        if self.key_scales is None or self.value_scales is None:
            return keys, values
        keys = _dequantized(keys, self.key_scales[slot, :, there])
        return keys, _dequantized(values, self.value_scales[slot, :, there])


def kv_layer(
    n_slots: int, capacity: int, heads: Heads, form: str, device: torch.device
) -> TorchKvLayer:
    """Reserve cache memory. Pages that are never written cost address space only."""
    size = heads.head_dim
    shape = (n_slots, heads.n_kv_heads, capacity)
    keys, values = (
        torch.empty(*shape, size, dtype=KV_DTYPES[form], device=device) for _ in range(2)
    )
    if form != "int8":
        return TorchKvLayer(keys, values)
    groups = size // SCALE_COLUMNS if size % SCALE_COLUMNS == 0 else 1
    key_scales, value_scales = (
        torch.empty(*shape, groups, dtype=torch.float16, device=device) for _ in range(2)
    )
    return TorchKvLayer(keys, values, key_scales, value_scales)


def _quantized(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Codes of fp32 [..., dh], still fp32, and their scales f16 [..., groups].
    parts = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    scales = (parts.abs().amax(-1) / 127).half()
    divisor = scales.float().unsqueeze(-1)
    codes = (parts / divisor).round_().clamp_(-127, 127).masked_fill_(divisor == 0, 0)
    return codes.flatten(-2), scales


def _dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    parts = codes.reshape(*scales.shape, codes.shape[-1] // scales.shape[-1])
    return (parts * scales.float().unsqueeze(-1)).flatten(-2)
