"""Types of weights, and that quantizing does without torch where the library is."""

import subprocess
import sys

import pytest

from llmrun.kernels.cpu.library import problem

WITHOUT_TORCH = """
import sys
from array import array
from llmrun.kernels.forms import Dense
from llmrun.kernels.host import DType, HostArray, empty
from llmrun.quant.compensation import prepare
from llmrun.quant.inputs import Inputs
from llmrun.quant.int4 import quantize
from llmrun.quant.requantize import opened, rounded

def numbers(shape, values):
    return HostArray(DType.F32, shape, memoryview(bytearray(array("f", values).tobytes())))

weight = Dense(empty(DType.BF16, (8, 64)))
assert rounded(opened(weight), DType.BF16) is weight
one = numbers((64, 64), [float(i % 65 == 0) for i in range(64 * 64)])
inputs = prepare(Inputs(300, numbers((64,), [1.0] * 64), (one,)))
assert inputs.factors and not inputs.notes
quantize(weight.w)
quantize(weight.w, inputs)
sys.exit("torch" in sys.modules)
"""


@pytest.mark.skipif(problem() is not None, reason="no native library")
def test_quantizing_a_16_bit_weight_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)
