"""All 16 values of E2M1 under scales of eight-bit floats."""

import torch

from llmrun.kernels.host import DType, HostArray
from llmrun.quant.nvfp4 import group_int

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_every_value_is_kept() -> None:
    values = torch.tensor(E2M1 + [-value for value in E2M1])
    nibbles = torch.arange(16).repeat(2, 1)
    packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    scales = torch.tensor([[0.75], [448.0]])
    stored = scales.to(torch.float8_e4m3fn).view(torch.uint8)
    form = group_int(
        HostArray(DType.U8, (2, 8), memoryview(bytearray(packed.numpy().tobytes()))),
        HostArray(DType.U8, (2, 1), memoryview(bytearray(stored.numpy().tobytes()))),
        HostArray(DType.F32, (1,), memoryview(bytearray(torch.tensor([3.0]).numpy().tobytes()))),
    )
    assert form.kind == "int8 g16"
    assert form.shape == (2, 16)
    codes = torch.frombuffer(form.codes.data, dtype=torch.uint8).view(2, 16)
    halves = torch.frombuffer(form.scales.data, dtype=torch.float32).view(2, 1)
    assert torch.equal((codes.float() - 128) * halves, values * (scales / 3))
