"""RMSNorm and activations of the reference backend."""

import torch
from torch.nn import functional

from llmrun.kernels.ops import Norm


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * (gamma + offset)`` over the last dimension, fp32."""
    gamma: torch.Tensor = norm.gamma if norm.offset == 0.0 else norm.gamma + norm.offset
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * gamma


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """``silu`` or ``gelu_tanh``, in place where torch can."""
    if activation == "silu":
        return functional.silu(gate, inplace=True)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh")
    raise ValueError(f"activation {activation!r}")
