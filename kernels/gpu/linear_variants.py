"""Variants of the linear kernels that are compiled ahead of time to be checked: each form and each
ending once, the forms at 8 and 16 rows, with what their machine code must keep to.

A gate's instructions per weight are those a card can issue while it reads the weight, with a
margin: an H200 has 4 for each 4-bit weight, 8 for 8 bits, 16 for bf16.
"""

from collections.abc import Mapping

from llmrun.kernels.gpu import linear_kernels
from llmrun.kernels.gpu.heuristics import Card, Shape, by_rule
from llmrun.kernels.gpu.mode import Gate, Specialization

H200 = Card(90, 132)

TILE_WEIGHTS = 64 * 128

FORMS = {
    "w4 g128": ("w4", 128, "bf16", False),
    "w4 g32": ("w4", 32, "f16", False),
    "w4 g32 +min": ("w4", 32, "f16", True),
    "w8 g128": ("w8", 128, "bf16", False),
    "w8 g16": ("w8", 16, "f32", False),
    "w8 g32 +min": ("w8", 32, "bf16", True),
    "lut g64": ("lut", 64, "bf16", False),
    "bf16": ("dense", 0, "bf16", False),
    "f16": ("dense", 0, "tf32", False),
    "f32": ("dense", 0, "f32", False),
}
"""Form, group, scales (of dense weights the precision), minima."""

GATES = {
    ("w4 g128", 8): 3.0,
    ("w4 g128", 16): 3.0,
    ("w4 g32", 8): 4.0,
    ("w4 g32", 16): 4.0,
    ("w4 g32 +min", 8): 4.0,
    ("w8 g128", 8): 4.0,
    ("w8 g128", 16): 4.0,
    ("w8 g16", 8): 4.0,
    ("w8 g32 +min", 8): 4.5,
    ("lut g64", 8): 6.0,
    ("lut g64", 16): 6.0,
    ("bf16", 8): 6.0,
    ("bf16", 16): 6.0,
}
"""Most instructions per weight in the main loop, by form and rows."""

CODES = {"bf16": "*bf16", "tf32": "*fp16", "f32": "*fp32"}


def specializations() -> list[Specialization]:
    """All of them."""
    forms = {(name, 8) for name in FORMS} | set(GATES) | {("w4 g128", 32)}
    variants = [_linears(name, bm) for name, bm in sorted(forms)]
    heads = [_head("w8 g128", best=best) for best in (False, True)]
    return [*variants, _add("w4 g128"), _gate_up("w4 g128"), *heads]


def _weight(name: str, prefix: str = "", suffix: str = "") -> dict[str, str]:
    form, _, scales, _ = FORMS[name]
    codes = CODES[scales] if form == "dense" else "*i32"
    group_type = codes if form == "dense" else "*i64" if scales == "f32" else "*i32"
    types = {
        "codes": codes,
        "scales": group_type,
        "mins": "*i64" if FORMS[name][3] else codes,
        "table": "*fp32" if form == "lut" else codes,
        "bias": codes,
    }
    return {f"{prefix}{part}{suffix}": kind for part, kind in types.items()}


SPLITTING = {"splits": "i32", "partials": "*fp32", "counters": "*i32"}
NORM = {"squares": "*fp32", "norm_columns": "i32", "norm_k": "i32", "eps": "fp32"}
ONTO = {"onto_u": "*bf16", "onto_squares": "*fp32"}


def _variant(
    title: str,
    name: str,
    bm: int,
    kernel: object,
    signature: dict[str, str],
    constants: Mapping[str, object],
    pair: bool = False,
) -> Specialization:
    form, group, scales, mins = FORMS[name]
    launch = by_rule(H200, Shape(form, group, 4096, 4096, pair))
    constants = {
        **constants,
        "FORM": form,
        "GROUP": group,
        "SCALES": scales,
        "MINS": mins,
        "SPLIT": True,
        "BM": bm,
    }
    limit = GATES.get((name, bm))
    weights = TILE_WEIGHTS * (2 if pair else 1) // (32 * launch.warps)
    return Specialization(
        f"{title} {name} m{bm}",
        kernel,
        {**signature, **dict.fromkeys(constants, "constexpr")},
        constants,
        num_warps=launch.warps,
        num_stages=launch.stages_for(bm),
        multiples_of_16=("k",),
        gate=None if limit is None else Gate(weights, limit),
    )


def _linears(name: str, bm: int) -> Specialization:
    signature = {
        **_weight(name, suffix="_0"),
        **_weight(name, suffix="_1"),
        **_weight(name, suffix="_2"),
        **dict.fromkeys(("first_1", "first_2", "n_0", "n_1", "n_2", "k"), "i32"),
        "u": "*bf16",
        **NORM,
        "y": "*fp32",
        "y_stride": "i32",
        "m": "i32",
        **SPLITTING,
    }
    constants = {"PARTS": 3, "BIAS": False, "FACTOR": True}
    return _variant("linears", name, bm, linear_kernels.linears_kernel, signature, constants)


def _add(name: str) -> Specialization:
    signature = {
        **_weight(name),
        "n_rows": "i32",
        "k": "i32",
        "u": "*bf16",
        "scale": "fp32",
        "h": "*fp32",
        "h_stride": "i32",
        "m": "i32",
        **ONTO,
        "gamma": "*fp32",
        "offset": "fp32",
        **SPLITTING,
    }
    constants = {"BIAS": False, "ONTO": True, "FOLD": True}
    return _variant("linear_add", name, 8, linear_kernels.add_kernel, signature, constants)


def _gate_up(name: str) -> Specialization:
    signature = {
        **_weight(name, "gate_"),
        **_weight(name, "up_"),
        "n_rows": "i32",
        "k": "i32",
        "u": "*bf16",
        **NORM,
        "a": "*fp32",
        "a_stride": "i32",
        "m": "i32",
        **ONTO,
        **SPLITTING,
    }
    constants = {
        "GATE": "same",
        "ACTIVATION": "silu",
        "GATE_BIAS": False,
        "UP_BIAS": False,
        "FACTOR": True,
    }
    kernel = linear_kernels.gate_up_kernel
    return _variant("gate_up", name, 8, kernel, signature, constants, pair=True)


def _head(name: str, *, best: bool) -> Specialization:
    signature = {
        **_weight(name),
        "n_rows": "i32",
        "k": "i32",
        "u": "*bf16",
        **NORM,
        "wanted_rows": "*i32",
        "n_wanted": "i32",
        "scale": "fp32",
        "softcap": "fp32",
        "logits": "*fp32",
        "logits_stride": "i32",
        "best_values": "*fp32",
        "best_sums": "*fp32",
        "best_ids": "*i32",
        "vocab": "i32",
        **SPLITTING,
    }
    constants = {"BIAS": False, "FACTOR": True, "SOFTCAP": False, "BEST": best}
    title = "head with best" if best else "head"
    return _variant(title, name, 8, linear_kernels.head_kernel, signature, constants)
