"""The structures of ``abi.h`` for ctypes; ``library`` checks that both have the same sizes."""

import ctypes
from ctypes import c_double, c_float, c_int8, c_int32, c_int64, c_uint64, c_void_p

VERSION = 5
"""``LLMR_ABI`` of the library this package works with."""

F16, BF16, F32, U8 = range(4)
W4, W8, DENSE, LUT4, LUT8 = range(5)
# Numbers of ops, in the order of kernels.ops.OPS.
EMBED, NORM_LINEAR, ROPE_APPEND, ATTEND, LINEAR_ADD, NORM_GATE_UP, MOE_ADD, NORM_HEAD = range(8)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2}
NO_NORM, RMS_NORM, LAYER_NORM, WHOLE_RMS_NORM = range(4)


class Weight(ctypes.Structure):
    """``llmr_weight``."""

    _fields_ = (
        ("kind", c_int32),
        ("type", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("k_padded", c_int32),
        ("group", c_int32),
        ("panels", c_int32),
        ("min_type", c_int32),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("mins", c_void_p),
        ("table", c_void_p),
        ("order", c_void_p),
        ("unit", c_float),
        ("levels", c_int8 * 16),
    )


class Source(ctypes.Structure):
    """``llmr_source``."""

    _fields_ = (
        ("gguf", c_int32),
        ("row_blocks", c_int32),
        ("row_bytes", c_int64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("mins", c_void_p),
        ("order", c_void_p),
    )


class Kv(ctypes.Structure):
    """``llmr_kv``."""

    _fields_ = (
        ("n_slots", c_int32),
        ("capacity", c_int32),
        ("n_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("type", c_int32),
        ("reserved", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Span(ctypes.Structure):
    """``llmr_span``."""

    _fields_ = (
        ("slot", c_int32),
        ("start", c_int32),
        ("count", c_int32),
        ("position", c_int32),
    )


class Step(ctypes.Structure):
    """``llmr_step``."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("n_rows", c_int32),
        ("n_spans", c_int32),
        ("reserved", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("spans", c_void_p),
    )


class Instr(ctypes.Structure):
    """``llmr_instr``."""

    _fields_ = (
        ("op", c_int32),
        ("i", c_int32 * 7),
        ("f", c_float * 6),
        ("reserved", c_int32 * 2),
        ("p", c_void_p * 10),
    )


class PickRequest(ctypes.Structure):
    """``llmr_pick_request``."""

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repeat_penalty", c_double),
        ("seed", c_uint64),
        ("draw", c_uint64),
        ("vocab", c_int32),
        ("top_k", c_int32),
        ("n_top", c_int32),
        ("n_history", c_int32),
        ("n_allowed", c_int32),
        ("n_bias", c_int32),
        ("history", c_void_p),
        ("allowed", c_void_p),
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
    )


class PickResult(ctypes.Structure):
    """``llmr_pick_result``."""

    _fields_ = (
        ("token_id", c_int32),
        ("status", c_int32),
        ("logprob", c_double),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
    )


STRUCTURES = (Weight, Source, Kv, Span, Step, Instr, PickRequest, PickResult)
"""In the order of ``llmr_abi_sizes``."""
