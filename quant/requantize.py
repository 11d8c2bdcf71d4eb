"""Bringing a weight into the type another scheme can start from.

A weight that is quantized already is opened to bf16, the type most models are published in: its
rounding (relative error 0.1 %) is far below that of any scheme here, and scales made from it take
16 bits.
"""

from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.host import DType

OPENED_KIND = "bf16"


def opened(form: Form) -> Dense:
    """Return the dense bf16 weight a storage form stands for; a dense form comes back as it is."""
    if isinstance(form, Dense):
        return form
    from llmrun.kernels.reference.arrays import as_tensor, like_host
    from llmrun.quant.dequantize import dequantize

    dense, view = like_host(DType.BF16, form.shape)
    view.copy_(as_tensor(dequantize(form)))
    return Dense(dense)


def rounded(form: Form, dtype: DType) -> Form:
    """Return a dense weight in another type; other forms and the same type pass unchanged."""
    if not isinstance(form, Dense) or form.w.dtype is dtype:
        return form
    from llmrun.kernels.reference.arrays import as_tensor, like_host

    result, view = like_host(dtype, form.shape)
    view.copy_(as_tensor(form.w))
    return Dense(result)
