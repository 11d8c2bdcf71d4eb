"""Integer zero points become minima: w = (u - z) * s is s * u + m with m = -s * z in fp32.

The product of an f16 or bf16 scale and an 8-bit zero point is exact in fp32. torch is imported
when the function is called.
"""

from llmrun.kernels.host import DType, HostArray, empty


def minima(packed: HostArray, scales: HostArray, bits: int) -> HostArray:
    """Return the minima f32 [N, G] of ``scales`` [N, G] (f16, bf16, f32).

    ``packed``: i32 [ceil(N * bits / 32), G], the unsigned zero points packed along the rows,
    lowest bits first; ``bits`` 4 or 8.
    """
    import torch

    rows, groups = scales.shape
    floats = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}
    words = torch.frombuffer(packed.data, dtype=torch.int32).view(packed.shape[0], 1, groups)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(1, -1, 1)
    zeros = ((words >> shifts) & (2**bits - 1)).view(-1, groups)[:rows]
    scale = torch.frombuffer(scales.data, dtype=floats[scales.dtype]).view(rows, groups)
    out = empty(DType.F32, (rows, groups))
    target = torch.frombuffer(out.data, dtype=torch.float32).view(rows, groups)
    torch.mul(scale.float(), zeros.float(), out=target).neg_()
    return out
