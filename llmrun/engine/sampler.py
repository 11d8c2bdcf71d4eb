"""How ids are chosen: checked options in, requests for the ``pick`` op out.

The repeat penalty is off by default and looks at the ids generated in this answer only, never at
the prompt: a penalty on the prompt makes models unable to quote it. Choices are numbered from 0
in each request, so a request with the same seed gives the same answer whatever ran before it.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.errors import UsageError
from llmrun.kernels.ops import PickRequest, Sampling

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling as a user asks for it; ``resolve`` checks it.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``repeat_penalty`` 1
    are off; ``seed`` None draws one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None
    top_logprobs: int = 0


def resolve(options: SamplingOptions) -> Sampling:
    """Check the options and return what the ``pick`` op takes, with a seed in any case.

    UsageError names the option, the value and the range. NaN is in no range.
    """
    o = options
    _require(0 <= o.temperature < math.inf, "temperature", o.temperature, "0 (greedy) or more")
    _require(o.top_k >= 0, "top-k", o.top_k, "0 (off) or more")
    _require(0 < o.top_p <= 1, "top-p", o.top_p, "above 0, at most 1 (off)")
    _require(0 <= o.min_p < 1, "min-p", o.min_p, "0 (off) or more, below 1")
    penalty = o.repeat_penalty
    _require(0 < penalty < math.inf, "repeat-penalty", penalty, "above 0 (1 is off)")
    _require(o.top_logprobs >= 0, "top-logprobs", o.top_logprobs, "0 (off) or more")
    seed = int.from_bytes(os.urandom(4)) if o.seed is None else o.seed
    _require(0 <= seed <= MAX_SEED, "seed", seed, f"from 0 to {MAX_SEED}")
    return Sampling(o.temperature, o.top_k, o.top_p, o.min_p, penalty, seed, o.top_logprobs)


def _require(ok: bool, name: str, value: float, meaning: str) -> None:
    if not ok:
        raise UsageError(
            f"--{name} {value} is out of range.", f"Give --{name} a value that is {meaning}."
        )


@dataclass(frozen=True)
class Sampler:
    """Makes the request for each choice; holds no state, so it serves any number of requests.

    ``vocab``: ids from here on are padding rows of the head and are never chosen. ``bias`` adds
    to the logits of single ids.
    """

    sampling: Sampling
    vocab: int
    bias: tuple[tuple[int, float], ...] = ()

    def request(self, generated: Sequence[int]) -> PickRequest:
        """The request for the id that follows ``generated``, the ids of this answer so far."""
        history = generated if self.sampling.repeat_penalty != 1.0 else ()
        return PickRequest(self.sampling, len(generated), self.vocab, history, bias=self.bias)
