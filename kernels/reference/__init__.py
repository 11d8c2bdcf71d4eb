"""The reference backend: every op in plain torch. It is the meaning of the op contract.

It runs wherever torch does, computes in fp32 and keeps weights in their storage form: rows are
dequantized panel by panel into a small scratch, never as a whole copy.
"""

from typing import cast

from llmrun.errors import UnavailableError
from llmrun.kernels.cuda import why_not
from llmrun.kernels.ops import Backend, BackendInfo, CpuOptions


def _available(device: str) -> str | None:
    return None if device == "cpu" else why_not(device)


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
