"""How far a kernel's result is from what it should be."""

import torch

from gpu.run import WrongError


def compare(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> float:
    """The largest relative error of a row; WrongError if it is above the tolerance."""
    got, wanted = got.double(), wanted.double()
    if not got.isfinite().all():
        raise WrongError("not finite")
    error = float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
    if error > tolerance:
        raise WrongError(f"relative error {error:.2g}, at most {tolerance:g}")
    return error
