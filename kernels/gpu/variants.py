"""How a kernel's variant is described for ahead-of-time compilation."""

from collections.abc import Mapping

from triton.runtime.jit import JITFunction

from llmrun.kernels.gpu.mode import Specialization


def variant(
    name: str,
    kernel: JITFunction,
    types: Mapping[str, str | None],
    constants: Mapping[str, object],
    *,
    warps: int = 4,
    stages: int = 2,
    multiples_of_16: tuple[str, ...] = (),
) -> Specialization:
    """Describe a variant by the types of its arguments; those that are None have None for a type.

    The compiler takes an absent argument as a constant.
    """
    named = {**types, **dict.fromkeys(constants)}
    signature = {argument: named[argument] or "constexpr" for argument in kernel.arg_names}
    absent = {argument: None for argument, kind in types.items() if kind is None}
    return Specialization(
        name,
        kernel,
        signature,
        {**absent, **constants},
        num_warps=warps,
        num_stages=stages,
        multiples_of_16=multiples_of_16,
    )
