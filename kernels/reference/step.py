"""Step and cache memory of the reference backend."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmrun.kernels.ops import Heads, Rope, Span

KV_DTYPES = {"f16": torch.float16, "f32": torch.float32}  # of ops.KV_FORMS


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
    """Keys and values of one layer: [slots, Hkv, capacity, dh] each, f16 or f32."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.keys.nbytes + self.values.nbytes


def kv_layer(
    n_slots: int, capacity: int, heads: Heads, form: str, device: torch.device
) -> TorchKvLayer:
    """Reserve cache memory. Pages that are never written cost address space only."""
    shape = (n_slots, heads.n_kv_heads, capacity, heads.head_dim)
    dtype = KV_DTYPES[form]
    return TorchKvLayer(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
