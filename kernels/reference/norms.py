"""Norms and activations of the reference backend."""

import torch
from torch.nn import functional

from llmrun.kernels.ops import CLAMP, CLAMP_SLOPE, Norm


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """``x`` normed over the last dimension in fp32, as ``kernels.ops.Norm`` says; None: x."""
    if norm is None:
        return x
    gamma: torch.Tensor = norm.gamma if norm.offset == 0.0 else norm.gamma + norm.offset
    if norm.centered:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * gamma
    return y if norm.beta is None else y + norm.beta


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """``silu`` or ``gelu_tanh``, in place where torch can."""
    if activation == "silu":
        return functional.silu(x, inplace=True)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    raise ValueError(f"activation {activation!r}")


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """The activated gate times ``up``; ``gate`` may be overwritten."""
    if activation == "swiglu_clamped":
        gate = gate.clamp(max=CLAMP)
        return gate * torch.sigmoid(CLAMP_SLOPE * gate) * (up.clamp(-CLAMP, CLAMP) + 1)
    return activate(gate, activation).mul_(up)
