"""Ops of long steps: norms and activations in Triton, products by the vendor's library.

Weights are dequantized block by block into one scratch (``large.py``), which for thousands of
tokens costs a few percent of the products.
"""

from collections.abc import Sequence

import torch

from llmrun.kernels.gpu import embedding, large, rows
from llmrun.kernels.gpu.arrays import GpuArray, GpuStep, GpuWeight
from llmrun.kernels.ops import Linear, Norm


class Prefill:
    """Ops on any number of tokens, with the scratch they share."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = large.Scratch(device)

    def embed(self, step: GpuStep, table: GpuWeight, scale: float, h: GpuArray) -> None:
        """h[T, D] = table[token_ids] * scale."""
        embedding.embed_rows(
            table, step.ids, step.slots, scale, h.values, None, None, step.n_tokens
        )

    def norm_linear(
        self,
        step: GpuStep,
        h: GpuArray,
        norm: Norm | None,
        linears: Sequence[Linear],
        y: GpuArray,
    ) -> None:
        """y[T, sum N] = concatenation of the linears of norm(h)."""
        x = normed(h.values[: step.n_tokens], norm)
        column = 0
        for linear in linears:
            stop = column + linear.weight.shape[0]
            self.multiply(x, linear, y.values[: step.n_tokens, column:stop])
            column = stop

    def linear_add(
        self,
        step: GpuStep,
        x: GpuArray,
        linear: Linear,
        post_norm: Norm | None,
        h: GpuArray,
        scale: float,
    ) -> None:
        """h[T, D] += scale * post_norm(linear(x))."""
        inputs = normed(x.values[: step.n_tokens], None)
        states = h.values[: step.n_tokens]
        if post_norm is None:
            self.multiply(inputs, linear, states, add=scale)
            return
        between = torch.empty_like(states)
        self.multiply(inputs, linear, between)
        rows.norm_add(between, post_norm, scale, states, step.n_tokens, None, None)

    def norm_gate_up(
        self,
        step: GpuStep,
        h: GpuArray,
        norm: Norm | None,
        gate: Linear | None,
        up: Linear,
        activation: str,
        a: GpuArray,
    ) -> None:
        """a[T, F] = activation(gate(norm(h))) * up(norm(h)); without a gate, of up alone."""
        x = normed(h.values[: step.n_tokens], norm)
        self.gate_up(x, gate, up, activation, a.values[: step.n_tokens])

    def gate_up(
        self,
        x: torch.Tensor,
        gate: Linear | None,
        up: Linear,
        activation: str,
        out: torch.Tensor,
    ) -> None:
        """out [T, F] of normed inputs bf16 [T, K]."""
        upper = torch.empty_like(out)
        self.multiply(x, up, upper)
        gated = None
        if gate is not None:
            gated = torch.empty_like(out)
            self.multiply(x, gate, gated)
        rows.gated(gated, upper, activation, out)

    def norm_head(
        self,
        step: GpuStep,
        h: GpuArray,
        norm: Norm,
        head: Linear,
        scale: float,
        logits: GpuArray,
        softcap: float | None,
    ) -> None:
        """logits[R, V] of the wanted rows."""
        wanted = h.values[step.rows[: step.n_rows].long()]
        out = logits.values[: step.n_rows]
        self.multiply(normed(wanted, norm), head, out)
        if scale != 1.0:
            out.mul_(scale)
        if softcap is not None:
            out.div_(softcap).tanh_().mul_(softcap)

    def multiply(
        self, x: torch.Tensor, linear: Linear, y: torch.Tensor, *, add: float | None = None
    ) -> None:
        """y[T, N] = x W^T + b of inputs bf16 [T, K]; with ``add``, y += add * that."""
        assert isinstance(linear.weight, GpuWeight)
        large.multiply(x, linear.weight, linear.bias, y, self._scratch, add=add)


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Inputs of a product: ``x`` fp32 [T, K], normed, rounded to bf16 once."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    rows.normed(x, norm, out)
    return out
