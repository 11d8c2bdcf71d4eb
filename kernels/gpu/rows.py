"""Ops of whole rows: norms, and activations prepared for the linear that reads them.

A decode step calls ``prepare``, ``norm_add`` and ``permute`` with at most SMALL rows where a linear
could not fold the work into its own kernel; prefill calls ``normed`` and ``gated``. Sums are taken
in a fixed order that depends on nothing but the number of columns.
"""

from collections.abc import Mapping

import torch
import triton
from triton.runtime.jit import JITFunction

from llmrun.kernels.gpu import row_kernels
from llmrun.kernels.gpu.arrays import SMALL, Fold, Prepared
from llmrun.kernels.gpu.mode import Specialization
from llmrun.kernels.gpu.variants import variant
from llmrun.kernels.ops import Norm

_FEW = 512
"""Columns of a program in a decode step, where rows alone would leave most of a GPU idle."""

_MANY = 4096
"""Most columns of a program in prefill."""


def prepare(x: torch.Tensor, norm: Norm | None, onto: Prepared, m: int) -> None:
    """Write the first m rows of x, fp32 [rows, K], as input of a linear.

    With an RMSNorm, u is ``x * (gamma + offset)`` and the consumer applies the norm's factor. A
    centered norm is finished here: u is its result. In both cases squares are those of the values
    before gamma; None: u is x.
    """
    k = x.shape[1]
    row_kernels.prepare_kernel[m, triton.cdiv(k, _FEW)](
        x,
        *_norm_arguments(norm),
        *_prepared_arguments(onto),
        x.stride(0),
        *_prepared_strides(onto),
        K=k,
        CENTERED=norm is not None and norm.centered,
        BLOCK=_FEW,
    )


def norm_add(
    x: torch.Tensor,
    norm: Norm,
    scale: float,
    h: torch.Tensor,
    m: int,
    onto: Prepared | None,
    fold: Fold | None,
) -> None:
    """h[:m] += scale * norm(x[:m]), both fp32 [rows, K].

    ``onto`` takes the new h as input of a linear: u is ``h * (gamma + offset)`` of ``fold``, or h.
    """
    k = x.shape[1]
    block = _FEW if m <= SMALL else _many(k)
    gamma, offset = (None, 0.0) if fold is None else (fold.gamma, fold.offset)
    row_kernels.norm_add_kernel[m, triton.cdiv(k, block)](
        x,
        *_norm_arguments(norm),
        scale,
        h,
        gamma,
        offset,
        *((None, None) if onto is None else _prepared_arguments(onto)),
        x.stride(0),
        h.stride(0),
        *((0, 0) if onto is None else _prepared_strides(onto)),
        K=k,
        CENTERED=norm.centered,
        BLOCK=block,
    )


def permute(x: Prepared, columns: torch.Tensor, onto: Prepared, m: int) -> None:
    """Gather u along K: column j of ``onto`` is column ``columns[j]`` (int32 [K]) of x.

    Squares (a whole row's) are copied.
    """
    k = columns.shape[0]
    row_kernels.permute_kernel[m, triton.cdiv(k, _FEW)](
        x.u,
        x.squares,
        columns,
        *_prepared_arguments(onto),
        *_prepared_strides(onto),
        K=k,
        BLOCK=_FEW,
    )


def normed(x: torch.Tensor, norm: Norm | None, out: torch.Tensor) -> None:
    """out = norm(x), or x: fp32 [T, K] to bf16 [T, K], rounded once."""
    t, k = x.shape
    block = _many(k)
    row_kernels.normed_kernel[t, triton.cdiv(k, block)](
        x,
        *_norm_arguments(norm),
        out,
        x.stride(0),
        out.stride(0),
        K=k,
        CENTERED=norm is not None and norm.centered,
        BLOCK=block,
        num_warps=8,
    )


def gated(gate: torch.Tensor | None, up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """out = activation(gate) * up, or activation(up): fp32 [T, F] to bf16 or fp32 [T, F].

    ``gate`` and ``up`` may be columns of a wider tensor.
    """
    t, k = up.shape
    block = _many(k)
    row_kernels.gated_kernel[t, triton.cdiv(k, block)](
        gate,
        up,
        out,
        0 if gate is None else gate.stride(0),
        up.stride(0),
        out.stride(0),
        K=k,
        ACTIVATION=activation,
        BLOCK=block,
        num_warps=8,
    )


def _many(k: int) -> int:
    block: int = triton.next_power_of_2(max(k, 128))
    return min(_MANY, block)


def _norm_arguments(
    norm: Norm | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, float, float]:
    if norm is None:
        return None, None, 0.0, 0.0
    return norm.gamma, norm.beta, norm.offset, norm.eps


def _prepared_arguments(onto: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
    return onto.u, onto.squares


def _prepared_strides(onto: Prepared) -> tuple[int, int]:
    return onto.u.stride(0), onto.squares.stride(0)


def specializations() -> list[Specialization]:
    """The variants that are compiled ahead: each kernel with and without what it may leave out."""
    floats = {"offset": "fp32", "eps": "fp32"}
    rms: dict[str, str | None] = {"gamma": "*fp32", "beta": None, **floats}
    layer: dict[str, str | None] = {"gamma": "*fp32", "beta": "*fp32", **floats}
    onto = {"u": "*bf16", "squares": "*fp32"}
    strides = {"u_stride": "i32", "squares_stride": "i32"}
    block = {"K": 3072, "BLOCK": _FEW}
    in_out = {"x_stride": "i32", "out_stride": "i32"}
    added: dict[str, str | None] = {
        "x": "*fp32",
        **rms,
        "scale": "fp32",
        "h": "*fp32",
        "fold": "*fp32",
    }
    added |= {"fold_offset": "fp32", **onto, "x_stride": "i32", "h_stride": "i32", **strides}
    gathered = {"u": "*bf16", "squares": "*fp32", "order": "*i32", "u_out": "*bf16"}
    gathered |= {"squares_out": "*fp32", **strides}
    gate = {"gate": "*fp32", "up": "*fp32", "out": "*bf16", "gate_stride": "i32"}
    gate |= {"up_stride": "i32", "out_stride": "i32"}
    found = [
        _variant("norm_add", row_kernels.norm_add_kernel, added, {**block, "CENTERED": False}),
        _variant("permute", row_kernels.permute_kernel, gathered, block),
    ]
    for name, norm, centered in (("RMS", rms, False), ("layer", layer, True)):
        few = {"x": "*fp32", **norm, **onto, "x_stride": "i32", **strides}
        many = {"x": "*fp32", **norm, "out": "*bf16", **in_out}
        shape = {**block, "CENTERED": centered}
        found += [
            _variant(f"prepare, {name} norm", row_kernels.prepare_kernel, few, shape),
            _variant(
                f"normed, {name} norm",
                row_kernels.normed_kernel,
                many,
                {**shape, "BLOCK": _MANY},
                8,
            ),
        ]
    wide = {"K": 8192, "ACTIVATION": "gelu_tanh", "BLOCK": _MANY}
    found.append(_variant("gated", row_kernels.gated_kernel, gate, wide, 8))
    return found


def _variant(
    name: str,
    kernel: JITFunction,
    types: Mapping[str, str | None],
    constants: Mapping[str, object],
    warps: int = 4,
) -> Specialization:
    wide = tuple(name for name in types if name.endswith("_stride"))
    return variant(name, kernel, types, constants, warps=warps, multiples_of_16=wide)
