"""What a weight does in a model. Roles, never names, decide what is quantized.

Architecture files label each weight with its role; recipe and audit read nothing else.
"""

from enum import StrEnum


class Role(StrEnum):
    """The part a weight plays; the value is what reports print."""

    ATTN_QKV = "attn_qkv"
    ATTN_OUT = "attn_out"
    GATE_UP = "gate_up"
    DOWN = "down"
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    HEAD = "head"
    ROUTER = "router"
    NORM = "norm"
    CONV = "conv"
    BIAS = "bias"
    OTHER = "other"


QUANTIZED_ROLES = (Role.ATTN_QKV, Role.ATTN_OUT, Role.GATE_UP, Role.DOWN, Role.EXPERTS)
"""Roles a scheme quantizes, on disk and in memory."""
