"""The ``pick`` op: requests in native form, and what came out."""

import ctypes
from array import array
from ctypes import c_double, c_int32

from llmrun.errors import InternalError
from llmrun.kernels.cpu import abi
from llmrun.kernels.ops import Pick, PickRequest, Sampling

NOT_FINITE, NO_MEMORY, NOTHING_ALLOWED = 1, 2, 3  # PickStatus of pick.h


class Picker:
    """Chooses ids with the native library.

    The native request is kept: the next choice mostly differs in its number alone, and making
    ctypes objects anew would be a large part of what Python takes of a token.
    """

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._library = library
        self._context = context
        self._sampling: Sampling | None = None
        self._native = abi.PickRequest()
        self._result = abi.PickResult()
        self._top_ids = (c_int32 * 0)()
        self._top_logprobs = (c_double * 0)()

    def pick(self, logits: int, request: PickRequest) -> Pick:
        """Choose from the row of logits at an address. InternalError if one is not finite."""
        native, result = self._native, self._result
        if request.sampling is not self._sampling or request.vocab != native.vocab:
            self._set_sampling(request.sampling, request.vocab)
        native.draw = request.draw
        lists = self._set_lists(request)
        status = self._library.llmr_pick(self._context, logits, native, result)
        del lists  # the native request points into them
        if status:
            raise _error(status)
        if native.n_top == 0:
            return Pick(result.token_id, result.logprob)
        top = tuple(zip(self._top_ids, self._top_logprobs, strict=True))
        return Pick(result.token_id, result.logprob, top)

    def _set_sampling(self, sampling: Sampling, vocab: int) -> None:
        self._sampling = sampling
        native = self._native
        native.temperature, native.top_k = sampling.temperature, sampling.top_k
        native.top_p, native.min_p = sampling.top_p, sampling.min_p
        native.repeat_penalty, native.seed = sampling.repeat_penalty, sampling.seed
        native.vocab = vocab
        n_top = native.n_top = min(sampling.top_logprobs, vocab)
        self._top_ids, self._top_logprobs = (c_int32 * n_top)(), (c_double * n_top)()
        self._result.top_ids = ctypes.addressof(self._top_ids)
        self._result.top_logprobs = ctypes.addressof(self._top_logprobs)

    def _set_lists(self, request: PickRequest) -> object:
        """Point the native request at the request's lists; returns what must stay alive."""
        native = self._native
        history = array("i", request.history)
        native.history, native.n_history = history.buffer_info()
        native.n_bias = len(request.bias)
        native.allowed = None
        if not request.bias and request.allowed is None:
            return history
        bias_ids = array("i", [token_id for token_id, _ in request.bias])
        bias = array("d", [amount for _, amount in request.bias])
        native.bias_ids, native.bias = bias_ids.buffer_info()[0], bias.buffer_info()[0]
        # One more than there are: an empty array has no address, which would mean no limit.
        allowed = array("i", [*(request.allowed or ()), 0])
        if request.allowed is not None:
            native.allowed, native.n_allowed = allowed.buffer_info()[0], len(request.allowed)
        return history, bias_ids, bias, allowed


def _error(status: int) -> InternalError:
    if status == NOT_FINITE:
        return InternalError(
            "the model produced logits that are not finite numbers",
            "check the model's files with a fresh `llmrun pull`, or try another scheme with -q",
        )
    if status == NOTHING_ALLOWED:
        return InternalError(
            "mask and bias leave no token to choose from",
            "allow at least one id of the vocabulary",
        )
    return InternalError("there was no memory to choose a token", "close other programs")
