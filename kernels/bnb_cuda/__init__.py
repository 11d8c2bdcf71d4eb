"""The torch reference with bitsandbytes' CUDA kernels for nf4 and fp4, in fp32.

For cards that our own GPU kernels do not serve: compute capability 7.5 (T4, RTX 20), or no Triton.
LLM.int8's product is not used: it rounds activations to 8 bits, which costs a percent.
"""

from typing import cast

from llmrun.kernels import bnb
from llmrun.kernels.cuda import why_not
from llmrun.kernels.ops import Backend, BackendInfo, CpuOptions
from llmrun.kernels.reference import BACKEND as REFERENCE

LEAST = (7, 5)
"""The lowest compute capability for which bitsandbytes is built."""


def _available(device: str) -> str | None:
    if device == "cpu":
        return "these kernels run on NVIDIA GPUs only"
    return why_not(device, LEAST) or bnb.unavailable_on_gpu()


def _supports(op: str, kind: str) -> str | None:
    return None  # What bitsandbytes does not serve, the reference does.


def _create(device: str, threads: int, options: CpuOptions) -> Backend:
    if options.isa is not None:
        return REFERENCE.create(device, threads, options)  # which refuses it
    from llmrun.kernels.bnb_cuda.backend import BnbBackend

    # A backend takes only the handles it made itself, which is narrower than the contract's types.
    return cast(Backend, BnbBackend(device, threads))


BACKEND = BackendInfo("bitsandbytes", _available, _supports, _create)
