"""The reference backend: every op in plain torch. It is the meaning of the op contract.

It runs wherever torch does, computes in fp32 and keeps weights in their storage form: rows are
dequantized panel by panel into a small scratch, never as a whole copy.
"""

from typing import cast

from llmrun.errors import UnavailableError
from llmrun.kernels.ops import Backend, BackendInfo, CpuOptions


def _available(device: str) -> str | None:
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    if kind in ("mps", "xpu", "rocm", "hip"):
        return f"{kind} devices are not supported yet"
    if kind != "cuda" or (index and not index.isdigit()):
        return f"unknown device {device!r} (known: cpu, cuda, cuda:N)"
    import torch

    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable NVIDIA GPU or driver"
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        return f"there are {count} CUDA devices, numbered from 0"
    return None


def _supports(op: str, kind: str) -> str | None:
    return None  # The definition serves every op and form; that is what it is for.


def _create(device: str, threads: int, options: CpuOptions) -> Backend:
    if options.isa is not None:
        raise UnavailableError(
            f"the instruction set {options.isa!r} cannot be chosen: torch's kernels are used here, "
            "and torch chooses by itself",
            "leave --cpu-isa out",
        )
    from llmrun.kernels.reference.backend import TorchBackend

    # A backend takes only the handles it made itself, which is narrower than the contract's types.
    return cast(Backend, TorchBackend(device, threads))


BACKEND = BackendInfo("reference", _available, _supports, _create)
