"""bitsandbytes' own quantizers and 4-bit products: the only file that imports bitsandbytes.

It is imported on first use (seconds), never at import of this module. What it logs or warns does
not reach the terminal; what it raises is mapped to llmrun's errors.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmrun.errors import InternalError, UnavailableError
from llmrun.kernels.host import DType, HostArray

if TYPE_CHECKING:
    import torch

BLOCK = 64
"""Weights that share one absmax, counted over the flattened weight."""

NESTED_BLOCK = 256
"""Blocks whose absmax share one of their own, where these are quantized too."""

_CHUNK = 1 << 20
"""Weights per call: bitsandbytes needs about five fp32 copies of what it is given."""


def available() -> str | None:
    """Return None if bitsandbytes can be used, else the reason."""
    try:
        _import()
    except UnavailableError as error:
        return error.what
    return None


def quantize_4bit(
    host: HostArray, kind: Literal["nf4", "fp4"]
) -> tuple[HostArray, HostArray, HostArray]:
    """Quantize a bf16, f16 or f32 array of even size over its flattened weights.

    Returns codes u8 [size/2] (high nibble = even index), absmax f32 [ceil(size/64)] and the table
    f32 [16]. The last block may be short. UnavailableError if bitsandbytes cannot be imported,
    InternalError if it fails.
    """
    from llmrun.kernels.reference.arrays import as_tensor, like_host

    if host.size % 2:
        raise ValueError(f"an odd number of weights: {host.shape}")
    functional = _import().functional
    codes, codes_view = like_host(DType.U8, (host.size // 2,))
    absmax, absmax_view = like_host(DType.F32, (-(-host.size // BLOCK),))
    table, table_view = like_host(DType.F32, (16,))
    weights = as_tensor(host).view(-1)
    try:
        with _quiet():
            table_view.copy_(functional.get_4bit_type(kind, device="cpu"))
            for start in range(0, host.size, _CHUNK):
                chunk = weights[start : start + _CHUNK]
                packed, state = functional.quantize_4bit(chunk, blocksize=BLOCK, quant_type=kind)
                codes_view[start // 2 : start // 2 + packed.numel()] = packed.flatten()
                block = start // BLOCK
                absmax_view[block : block + state.absmax.numel()] = state.absmax
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise InternalError(
            f"bitsandbytes failed while quantizing to {kind}: {error}",
            "Update bitsandbytes, or choose another scheme (int4 needs no bitsandbytes).",
        ) from error
    return codes, absmax, table


@dataclass(frozen=True, eq=False)
class Nested:
    """Scales quantized once more: ``table[codes[i]] * absmax[i // 256] + offset``, in fp32.

    ``codes`` u8 [n], ``absmax`` f32 [ceil(n/256)], ``table`` f32 [256].
    """

    codes: HostArray
    absmax: HostArray
    table: HostArray
    offset: float


def nest(absmax: HostArray) -> Nested:
    """Quantize the absmax f32 [n] of blocks as bitsandbytes does for ``compress_statistics``.

    UnavailableError if bitsandbytes cannot be imported, InternalError if it fails.
    """
    from llmrun.kernels.reference.arrays import as_tensor, to_host

    functional = _import().functional
    scales = as_tensor(absmax)
    try:
        with _quiet():
            offset = scales.mean()
            codes, state = functional.quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
            outer, table = to_host(state.absmax), to_host(state.code)
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise InternalError(
            f"bitsandbytes failed while quantizing scales: {error}",
            "Update bitsandbytes, or choose a scheme without quantized scales.",
        ) from error
    return Nested(to_host(codes), outer, table, offset.item())


def quantize_rows(host: HostArray) -> tuple[HostArray, HostArray]:
    """Quantize [N, K] (bf16, f16 or f32, finite in f16) row by row, as LLM.int8 does.

    Returns codes u8 [N, K] (q + 128) and absmax f32 [N]; a row of zeros has codes 128 and absmax 0.
    UnavailableError if bitsandbytes cannot be imported, InternalError if it fails.
    """
    from llmrun.kernels.reference.arrays import as_tensor, like_host

    functional = _import().functional
    n, k = host.shape
    codes, codes_view = like_host(DType.U8, (n, k))
    absmax, absmax_view = like_host(DType.F32, (n,))
    weights = as_tensor(host)
    step = max(1, _CHUNK // k)
    try:
        with _quiet():
            for start in range(0, n, step):
                chunk = weights[start : start + step].half()
                signed, largest, _ = functional.int8_vectorwise_quant(chunk)
                signed[largest == 0] = 0  # 0 times infinity: whatever the processor makes of it
                codes_view[start : start + step] = signed.short().add_(128)
                absmax_view[start : start + step] = largest
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise InternalError(
            f"bitsandbytes failed while quantizing to 8 bits: {error}",
            "Update bitsandbytes, or choose another scheme (int8 needs no bitsandbytes).",
        ) from error
    return codes, absmax


def unavailable_on_gpu() -> str | None:
    """Return None if bitsandbytes has a library for this CUDA, else the reason."""
    try:
        library = getattr(getattr(_import(), "cextension", None), "lib", None)
    except UnavailableError as error:
        return error.what
    if getattr(library, "compiled_with_cuda", False):
        return None
    return "bitsandbytes has no library for this version of CUDA"


def product_4bit() -> Any:  # noqa: ANN401 - an operator of torch's registry
    """The operator ``(x, packed, [N, K], absmax, block, type) -> x W^T`` in the type of x.

    ``packed`` u8 [N K / 2, 1] (high nibble = even index), ``absmax`` f32 [N K / block].
    """
    import torch

    _import()
    return torch.ops.bitsandbytes.gemm_4bit.default


def dequantized_4bit(
    packed: "torch.Tensor", absmax: "torch.Tensor", block: int, kind: str, shape: tuple[int, int]
) -> "torch.Tensor":
    """The weight f32 [N, K] of what ``product_4bit`` takes."""
    import torch

    _import()
    dense: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed, absmax, block, kind, list(shape), torch.float32
    )
    return dense


def table_4bit(kind: str) -> "torch.Tensor":
    """The 16 values f32 of ``nf4`` or ``fp4``."""
    with _quiet():
        table: torch.Tensor = _import().functional.get_4bit_type(kind, device="cpu")
    return table


def _import() -> Any:  # noqa: ANN401 - a module; its types differ between versions
    try:
        with _quiet(), _without_remote_kernels():
            import bitsandbytes
            import bitsandbytes.functional
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UnavailableError(
            f"bitsandbytes cannot be imported: {error}",
            "Reinstall bitsandbytes, or choose a scheme that does not need it, such as int4.",
        ) from error
    return bitsandbytes


@contextmanager
def _without_remote_kernels() -> Iterator[None]:
    """Hide the package ``kernels``, with which bitsandbytes (0.50, processors with AVX512-BF16)
    would download a compiled kernel while it is imported. The quantizer has no use for it."""
    hidden = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment] # makes the import fail
    try:
        yield
    finally:
        del sys.modules["kernels"]
        if hidden is not None:
            sys.modules["kernels"] = hidden


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep bitsandbytes' logging and any warning off the terminal."""
    logger = logging.getLogger("bitsandbytes")
    level, propagate = logger.level, logger.propagate
    silent = logging.NullHandler()
    logger.addHandler(silent)
    logger.setLevel(logging.CRITICAL + 1)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(silent)
        logger.setLevel(level)
        logger.propagate = propagate
