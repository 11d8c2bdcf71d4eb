"""What other engines want of a quantized checkpoint, checked on the plan alone.

vLLM, by its sources (compressed-tensors' loader, Marlin): what it fuses (q, k, v; gate, up; all
experts of a layer) has one scheme; integers are packed, symmetric but for 4-bit linears; widths
divide. transformers (5.24): one scheme for the experts of all layers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llmrun.errors import UnavailableError
from llmrun.formats import pack_writer
from llmrun.formats.layout import published_format
from llmrun.formats.planned import Kind, Planned, parse_kind
from llmrun.kernels.forms import ROW

Mode = Literal["on", "auto", "off"]
MARLIN_K, MARLIN_N = 128, 64
GROUPS = (ROW, 32, 64, 128)

_FUSED = re.compile(r"(.*\.)?((?:q|k|v)_proj|(?:gate|up)_proj)\.weight")
_EXPERTS = re.compile(r"(.*\bexperts)\.\d+\.(\w+)\.weight")
_OUTER = re.compile(r"(?:.*\.)?(embed_tokens|wte|word_embeddings|lm_head)\.weight")


@dataclass(frozen=True)
class Violation:
    """A rule that a tensor breaks. ``problem``: what is wanted, without the tensor's name."""

    tensor: str
    rule: str
    problem: str
    program: str = "vLLM"


def violations(planned: Sequence[Planned]) -> tuple[Violation, ...]:
    """Return every rule of vLLM's that a plan breaks, in the plan's order; each tensor's all."""
    found = []
    units = _units(planned)
    packed = published_format(planned) in (None, pack_writer.WRITING)
    for tensor in planned:
        unit = units[_unit(tensor)]
        if not tensor.is_plain:
            if not packed:
                found.append(_violation(tensor, "format", "it loads integers that are packed"))
            found += _of_kind(tensor)
            found += _of_extents(tensor, unit)
        if tensor.is_matrix and tensor is not unit[0] and _scheme(tensor) != _scheme(unit[0]):
            apart = f"{tensor.kind} beside {unit[0].kind}: it fuses both, so they need one scheme"
            found.append(_violation(tensor, "one scheme", apart))
    return (*found, *_of_all_experts(planned))


def _of_all_experts(planned: Sequence[Planned]) -> list[Violation]:
    experts = [tensor for tensor in planned if tensor.is_expert and not tensor.is_plain]
    problem = "it reads the experts of all layers by one scheme"
    return [
        Violation(tensor.name, "experts", problem, "transformers")
        for tensor in experts
        if tensor.kind != experts[0].kind
    ]


def dense_instead(planned: Sequence[Planned]) -> frozenset[str]:
    """Names of quantized tensors that have to stay dense for the plan to break no rule of vLLM's.

    Whatever is fused with such a tensor is among them, since one scheme must serve both.
    """
    units = _units(planned)
    bad = {found.tensor for found in violations(planned) if found.program == "vLLM"}
    named = (tensor for unit in units.values() if bad & {t.name for t in unit} for tensor in unit)
    return frozenset(tensor.name for tensor in named if not tensor.is_plain)


def check(planned: Sequence[Planned], mode: Mode) -> tuple[str, ...]:
    """Return what is worth saying about a plan, in sentences.

    ``on``: UnavailableError, naming rules and tensors, for a plan that vLLM would not load;
    ``auto``: says which rules are broken where; ``off``: says only who loads the result, if it is
    nobody but llmrun.
    """
    writing = published_format(planned)
    alone = writing is not None and writing.readers == ("llmrun",)
    if mode == "off":
        return ("only llmrun loads the result",) if alone else ()
    broken = _sentences(violations(planned))
    if mode == "on" and broken:
        count = len(dense_instead(planned))
        raise UnavailableError(
            f"other engines would not load the result: {'; '.join(broken)}",
            f"Choose another scheme, keep {count} tensors at 16 bit, or write it all the same with "
            "--portable auto.",
        )
    return tuple(f"other engines may refuse the result: {sentence}" for sentence in broken)


def _sentences(found: Iterable[Violation]) -> list[str]:
    """One sentence per rule: the program, the problem, the first tensor, and how many more."""
    by_problem: dict[str, list[str]] = {}
    for violation in found:
        problem = f"{violation.program}: {violation.problem}"
        by_problem.setdefault(problem, []).append(violation.tensor)
    return [
        f"{problem} ({names[0]}{f' and {len(names) - 1} more' if names[1:] else ''})"
        for problem, names in by_problem.items()
    ]


def _units(planned: Sequence[Planned]) -> Mapping[str, list[Planned]]:
    units: dict[str, list[Planned]] = {}
    for tensor in planned:
        units.setdefault(_unit(tensor), []).append(tensor)
    return units


def _unit(tensor: Planned) -> str:
    """Names what vLLM makes one weight of."""
    experts = _EXPERTS.fullmatch(tensor.name)
    if experts is not None:
        return experts[1]
    fused = _FUSED.fullmatch(tensor.name)
    if fused is None:
        return tensor.name
    return f"{fused[1] or ''}{'qkv' if fused[2][0] in 'qkv' else 'gate_up'}"


def _scheme(tensor: Planned) -> str:
    return "" if tensor.is_plain else tensor.kind


def _of_kind(tensor: Planned) -> list[Violation]:
    kind = parse_kind(tensor.kind)
    if _OUTER.fullmatch(tensor.name):
        return [_violation(tensor, "outer", "embedding and head stay at 16 bit")]
    if kind is None or kind.is_lookup:
        return [_violation(tensor, "integers", f"it has no kernel for {tensor.kind}")]
    found = []
    if kind.group not in GROUPS:
        found.append(_violation(tensor, "groups", "groups are 32, 64, 128 or a row"))
    if kind.shift and (kind.bits == 8 or tensor.is_expert):
        what = "experts are symmetric" if tensor.is_expert else "zero points have 4 bits only"
        found.append(_violation(tensor, "symmetric", what))
    return found


def _of_extents(tensor: Planned, unit: Sequence[Planned]) -> list[Violation]:
    kind = parse_kind(tensor.kind)
    if kind is None or len(tensor.shape) != 2:
        return []
    k = tensor.shape[1]
    if tensor.is_expert:
        return _of_expert(tensor, kind)
    n = sum(other.shape[0] for other in unit)  # what is fused is stacked
    found = []
    if k % MARLIN_K:
        found.append(_violation(tensor, "K", f"{MARLIN_K} divides the inputs, not so {k}"))
    if n % MARLIN_N:
        found.append(_violation(tensor, "N", f"{MARLIN_N} divides the outputs, not so {n}"))
    return found


def _of_expert(tensor: Planned, kind: Kind) -> list[Violation]:
    n, k = tensor.shape
    hidden, inner = (n, k) if tensor.module.endswith("down_proj") else (k, n)
    step = max(MARLIN_N, kind.group)
    found = []
    if hidden % MARLIN_K:
        what = f"{MARLIN_K} divides the hidden width of experts, not so {hidden}"
        found.append(_violation(tensor, "hidden", what))
    if inner % step:
        what = f"{step} divides the inner width of experts, not so {inner}"
        found.append(_violation(tensor, "intermediate", what))
    return found


def _violation(tensor: Planned, rule: str, problem: str) -> Violation:
    return Violation(tensor.name, rule, problem)
