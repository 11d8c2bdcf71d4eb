"""How bnb-int8 weights are written: bitsandbytes' 8-bit layout, as transformers saves it.

Per weight ``X.weight``: ``X.weight`` i8 [N, K], ``X.SCB`` f32 [N], the absmax of each row, and
``X.weight_format`` u8, 0: rows as they are.
"""

from collections.abc import Mapping, Sequence

from llmrun.errors import InternalError
from llmrun.formats.bnb_writer import METHOD
from llmrun.formats.planned import Kind, Part, Planned, Writing, linears, of_type, parse_kind, part
from llmrun.kernels.forms import ROW, Form, GroupInt
from llmrun.kernels.host import DType
from llmrun.quant.bnb_blocks import absmax_of_rows, signed


def _fits(tensor: Planned) -> bool:
    # Experts are one stacked parameter in transformers, which bitsandbytes' layout does not know.
    as_rows = parse_kind(tensor.kind) == Kind(False, 8, ROW, "") and tensor.scale is DType.F32
    return as_rows and tensor.is_matrix and not tensor.is_expert and not tensor.columns


def _holds(quantized: Sequence[Planned]) -> bool:
    return all(_fits(tensor) for tensor in quantized)


def _parts(tensor: Planned, scale_dtype: DType) -> tuple[Part, ...]:
    n, k = tensor.shape
    return (
        part(tensor.name, "I8", (n, k)),
        part(f"{tensor.module}.SCB", "F32", (n,)),
        part(f"{tensor.module}.weight_format", "U8", ()),
    )


def _contents(form: Form, tensor: Planned, scale_dtype: DType) -> Mapping[str, memoryview]:
    assert isinstance(form, GroupInt)
    name = f"{tensor.module}.SCB"
    of_type(form.scales, DType.F32, name)
    absmax = absmax_of_rows(form.scales)
    if absmax is None:
        raise InternalError(f"{tensor.name}: its scales are not those of bitsandbytes.")
    return {
        tensor.name: signed(form.codes).data,
        name: absmax.data,
        f"{tensor.module}.weight_format": memoryview(bytes(1)),
    }


def _config(planned: Sequence[Planned], scale_dtype: DType) -> Mapping[str, object]:
    return {
        "quant_method": METHOD,
        "load_in_4bit": False,
        "load_in_8bit": True,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": sorted({"lm_head", *linears(planned)}),
    }


WRITING = Writing(METHOD, ("transformers", "llmrun"), _holds, _parts, _contents, _config)
