"""Opening a weight that is quantized already, so that another scheme can start from it.

The result is bf16, the type most models are published in: its rounding (relative error 0.1 %) is
far below that of any scheme here, and scales made from it take 16 bits.
"""

from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.host import DType

OPENED_KIND = "bf16"


def opened(form: Form) -> Dense:
    """Return the dense bf16 weight a storage form stands for; a dense form comes back as it is."""
    from llmrun.kernels.reference.arrays import as_tensor, like_host
    from llmrun.quant.dequantize import dequantize

    if isinstance(form, Dense):
        return form
    dense, view = like_host(DType.BF16, form.shape)
    view.copy_(as_tensor(dequantize(form)))
    return Dense(dense)
