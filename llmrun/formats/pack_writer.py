"""How integer weights are written: compressed-tensors' ``pack-quantized``, which vLLM loads."""

from collections.abc import Mapping, Sequence

from llmrun.errors import InternalError
from llmrun.formats.config_groups import METHOD
from llmrun.formats.pack_config import GROUPS, Packing, write_pack_config
from llmrun.formats.planned import Part, Planned, Writing, linears, of_type, parse_kind, part
from llmrun.kernels.forms import ROW, Form, GroupInt
from llmrun.kernels.host import DType
from llmrun.quant.zero_points import packed_zeros


def packing_of(tensor: Planned) -> Packing | None:
    """Return how a quantized tensor is packed; None if the format cannot say it."""
    kind = parse_kind(tensor.kind)
    if kind is None or kind.is_lookup or kind.shift == "min" or tensor.columns:
        return None
    whole_words = len(tensor.shape) == 2 and tensor.shape[1] * kind.bits % 32 == 0
    fits = tensor.is_matrix and whole_words and kind.group in (ROW, *GROUPS)
    if tensor.is_expert and kind.shift:
        return None  # neither vLLM nor transformers reads zero points of experts
    return Packing(kind.bits, kind.group, not kind.shift) if fits else None


def _holds(quantized: Sequence[Planned]) -> bool:
    return all(tensor.scale is None and packing_of(tensor) is not None for tensor in quantized)


def _packing(tensor: Planned) -> Packing:
    packing = packing_of(tensor)
    if packing is None:
        raise InternalError(f"{tensor.name} {tensor.kind} was to be packed.")
    return packing


def _parts(tensor: Planned, scale_dtype: DType) -> tuple[Part, ...]:
    packing, (n, k) = _packing(tensor), tensor.shape
    groups = k // (packing.group or k)
    parts = (
        part(f"{tensor.name}_packed", "I32", (n, k * packing.bits // 32)),
        part(f"{tensor.name}_scale", scale_dtype.name, (n, groups)),
        part(f"{tensor.name}_shape", "I64", (2,)),
    )
    if packing.symmetric:
        return parts
    words = -(-n * packing.bits // 32)
    return (*parts, part(f"{tensor.name}_zero_point", "I32", (words, groups)))


def _contents(form: Form, tensor: Planned, scale_dtype: DType) -> Mapping[str, memoryview]:
    assert isinstance(form, GroupInt)
    key = f"{tensor.name}_scale"
    extents = b"".join(extent.to_bytes(8, "little") for extent in form.shape)
    contents = {
        f"{tensor.name}_packed": form.codes.data,
        key: of_type(form.scales, scale_dtype, key),
        f"{tensor.name}_shape": memoryview(extents),
    }
    if form.mins is not None:
        contents[f"{tensor.name}_zero_point"] = packed_zeros(form.mins, form.bits).data
    return contents


def _config(planned: Sequence[Planned], scale_dtype: DType) -> Mapping[str, object]:
    packed = {tensor.module: _packing(tensor) for tensor in planned if not tensor.is_plain}
    return write_pack_config(packed, linears(planned))


WRITING = Writing(METHOD, ("vLLM", "transformers", "llmrun"), _holds, _parts, _contents, _config)
