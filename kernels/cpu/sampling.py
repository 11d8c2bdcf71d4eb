"""The ``pick`` op: requests in native form, and what came out."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int32

from llmrun.errors import InternalError
from llmrun.kernels.cpu import abi
from llmrun.kernels.ops import Pick, PickRequest

NOT_FINITE, NO_MEMORY, NOTHING_ALLOWED = 1, 2, 3  # PickStatus of pick.h


class Picker:
    """Chooses ids with the native library."""

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._library = library
        self._context = context

    def pick(self, logits: int, request: PickRequest) -> Pick:
        """Choose from the row of logits at an address. InternalError if one is not finite."""
        sampling = request.sampling
        history = _ids(request.history)
        allowed = None if request.allowed is None else _ids(request.allowed)
        bias_ids = _ids([token_id for token_id, _ in request.bias])
        bias = (c_double * len(request.bias))(*(amount for _, amount in request.bias))
        native = abi.PickRequest(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repeat_penalty=sampling.repeat_penalty,
            seed=sampling.seed,
            draw=request.draw,
            vocab=request.vocab,
            top_k=sampling.top_k,
            n_top=min(sampling.top_logprobs, request.vocab),
            n_history=len(request.history),
            n_allowed=0 if request.allowed is None else len(request.allowed),
            n_bias=len(request.bias),
            history=ctypes.addressof(history),
            allowed=None if allowed is None else ctypes.addressof(allowed),
            bias_ids=ctypes.addressof(bias_ids),
            bias=ctypes.addressof(bias),
        )
        top_ids = (c_int32 * native.n_top)()
        top_logprobs = (c_double * native.n_top)()
        result = abi.PickResult(
            top_ids=ctypes.addressof(top_ids), top_logprobs=ctypes.addressof(top_logprobs)
        )
        status = self._library.llmr_pick(self._context, logits, native, result)
        if status == NOT_FINITE:
            raise InternalError(
                "the model produced logits that are not finite numbers",
                "check the model's files with a fresh `llmrun pull`, or try another scheme with -q",
            )
        if status == NOTHING_ALLOWED:
            raise InternalError(
                "mask and bias leave no token to choose from",
                "allow at least one id of the vocabulary",
            )
        if status == NO_MEMORY:
            raise InternalError("there was no memory to choose a token", "close other programs")
        top = tuple(zip(top_ids, top_logprobs, strict=True))
        return Pick(result.token_id, result.logprob, top)


def _ids(values: Sequence[int]) -> "ctypes.Array[c_int32]":
    return (c_int32 * len(values))(*values)
