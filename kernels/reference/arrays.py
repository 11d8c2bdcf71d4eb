"""Host arrays as torch tensors and back, without copies and without numpy."""

import torch

from llmrun.kernels.host import DType, HostArray, empty

TORCH_DTYPES = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.I16: torch.int16,
    DType.I8: torch.int8,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
}


def as_tensor(host: HostArray) -> torch.Tensor:
    """View a host array as a CPU tensor of the same dtype and shape (shared memory)."""
    dtype = TORCH_DTYPES[host.dtype]
    if host.size == 0:
        return torch.empty(host.shape, dtype=dtype)
    return torch.frombuffer(host.data, dtype=dtype).view(host.shape)


def like_host(dtype: DType, shape: tuple[int, ...]) -> tuple[HostArray, torch.Tensor]:
    """Make a zero-filled host array and a tensor view of it: write the one, pass on the other."""
    host = empty(dtype, shape)
    return host, as_tensor(host)


def to_host(tensor: torch.Tensor) -> HostArray:
    """Copy a tensor into a host array of the same dtype."""
    dtype = next(ours for ours, theirs in TORCH_DTYPES.items() if theirs == tensor.dtype)
    host, view = like_host(dtype, tuple(tensor.shape))
    view.copy_(tensor)
    return host
