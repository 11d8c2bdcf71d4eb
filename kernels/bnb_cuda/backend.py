"""The reference backend with nf4 and fp4 weights as bitsandbytes lays them out, and its product.

A block of bitsandbytes is a group of ``Lut16``, since groups divide rows; only the nibbles change
places. Products run in fp32: what they add to the reference is the order of summation.
"""

from dataclasses import dataclass
from typing import Any

import torch

from llmrun.kernels import bnb
from llmrun.kernels.forms import Form, Lut16
from llmrun.kernels.reference.allocation import allocating
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.kernels.reference.weights import TorchWeight


@dataclass(frozen=True, eq=False)
class BnbWeight(TorchWeight):
    """A weight [N, K] of 4 bits: ``packed`` u8 [N, K / 2], high nibble = even k; ``absmax`` f32
    [N, K / block]; ``table``: ``nf4`` or ``fp4``; ``product``: bitsandbytes' operator."""

    packed: torch.Tensor | None = None
    absmax: torch.Tensor | None = None
    block: int = 64
    table: str = "nf4"
    product: Any = None

    def gather_rows(self, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the rows ``index`` [n] into ``out`` [n, K] fp32 and return it."""
        assert self.packed is not None
        assert self.absmax is not None
        packed, absmax = self.packed[index].view(-1, 1), self.absmax[index].view(-1)
        shape = (len(index), self.shape[1])
        dense = bnb.dequantized_4bit(packed, absmax, self.block, self.table, shape)
        return out.copy_(dense)

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """y[M, N] = x[M, K] W^T."""
        assert self.packed is not None
        assert self.absmax is not None
        packed, absmax = self.packed.view(-1, 1), self.absmax.view(-1)
        y.copy_(self.product(x, packed, list(self.shape), absmax, self.block, self.table))


class BnbBackend(TorchBackend):
    """Plain torch in fp32, and bitsandbytes for tables of 16; the contract is
    ``kernels.ops.Backend``."""

    name = "bitsandbytes"

    def weight(self, form: Form) -> TorchWeight:
        """Take over a 2-D weight in any form."""
        table = table_of(form)
        if table is None or not isinstance(form, Lut16):
            return super().weight(form)
        with allocating(f"a weight of {form.codes.nbytes + form.scales.nbytes:,} bytes"):
            codes = as_tensor(form.codes).to(self._device)
            packed = torch.bitwise_or(codes >> 4, codes << 4)
            absmax = as_tensor(form.scales).to(self._device, torch.float32)
        return BnbWeight(
            form.kind,
            form.shape,
            packed.nbytes + absmax.nbytes,
            Lut16,
            {},
            (),
            packed=packed,
            absmax=absmax,
            block=form.group,
            table=table,
            product=bnb.product_4bit(),
        )


def table_of(form: Form) -> str | None:
    """Which of bitsandbytes' tables a form has; None for any other form or table."""
    if not isinstance(form, Lut16):
        return None
    values = as_tensor(form.table)
    for name in ("nf4", "fp4"):
        if torch.allclose(values, bnb.table_4bit(name), rtol=0, atol=1e-6):
            return name
    return None
