"""The CPU backend: a native library of our own kernels (docs/cpu-kernels.md)."""

from typing import cast

from llmrun.kernels.ops import Backend, BackendInfo, CpuOptions


def _available(device: str) -> str | None:
    if device != "cpu":
        return "these kernels run on the CPU only"
    from llmrun.kernels.cpu.library import problem

    return problem()


def _supports(op: str, kind: str) -> str | None:
    from llmrun.kernels.cpu.weights import refusal

    return refusal(kind)


def _create(device: str, threads: int, options: CpuOptions) -> Backend:
    from llmrun.kernels.cpu.backend import CpuBackend

    # A backend takes only the handles it made itself, which is narrower than the contract's types.
    backend = CpuBackend(
        threads,
        decode_threads=options.decode_threads or 0,
        isa=options.isa,
        huge_pages=options.huge_pages,
        exact=options.exact,
    )
    return cast(Backend, backend)


BACKEND = BackendInfo("cpu", _available, _supports, _create)
