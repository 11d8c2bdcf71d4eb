"""The GPU backend: Triton kernels for NVIDIA cards (docs/gpu.md)."""

from typing import cast

from llmrun.errors import UnavailableError
from llmrun.kernels import cuda
from llmrun.kernels.ops import Backend, BackendInfo, CpuOptions


def _available(device: str) -> str | None:
    if device == "cpu":
        return "these kernels run on NVIDIA GPUs only"
    if reason := cuda.why_not(device, cuda.KERNELS_NEED):
        return reason
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    del triton
    return None


def _supports(op: str, kind: str) -> str | None:
    return None  # Every storage form has its kernels; mixtures choose their experts on the host.


def _create(device: str, threads: int, options: CpuOptions) -> Backend:
    if options.isa is not None:
        raise UnavailableError(
            f"the instruction set {options.isa!r} is one of a CPU, and {device} computes",
            "leave --cpu-isa out",
        )
    from llmrun.kernels.gpu.backend import GpuBackend

    # A backend takes only the handles it made itself, which is narrower than the contract's types.
    return cast(Backend, GpuBackend(device))


BACKEND = BackendInfo("gpu", _available, _supports, _create)
