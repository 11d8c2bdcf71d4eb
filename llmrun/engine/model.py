"""What the engine needs of a model; ``llmrun.model.decoder.Decoder`` is one, tests bring others.

The engine knows ids, cache slots and logits. It never looks into an array.
"""

from collections.abc import Sequence
from typing import Protocol

from llmrun.kernels.ops import Array, Backend, Chain, Interrupt, KvLayer, PickRequest, Span
from llmrun.model.spec import DecoderSpec


class Model(Protocol):
    """A decoder bound to a backend."""

    @property
    def spec(self) -> DecoderSpec:
        """What it computes."""

    @property
    def backend(self) -> Backend:
        """Where it computes."""

    @property
    def max_tokens(self) -> int:
        """Largest number of ids one ``forward`` takes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in stored form."""

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights one decode step of one sequence reads, in stored form."""

    @property
    def linear_parameters(self) -> int:
        """Linear weights each token passes, without embedding and head (P in docs/measuring.md)."""

    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: Sequence[KvLayer],
        rows: Sequence[int],
        interrupt: Interrupt = ...,
        stage: int = ...,
    ) -> Array | None:
        """Run T ids through the model: K and V go to the cache, logits [R, V] come back.

        ``rows`` are the R rows of this call whose logits are wanted; it may be empty, then no head
        is computed. ``stage``: ``spec.rope_stage`` of the length these sequences will have, which
        is also that of what their slots hold. The array is valid until the next call. ``interrupt``
        is asked between layers; None comes back if it said yes, and what was written is not to be
        counted.
        """

    def chain(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        kv: Sequence[KvLayer],
        requests: Sequence[PickRequest],
        stage: int = ...,
    ) -> Chain | None:
        """Decode steps, the first of which feeds these ids, one to each sequence; ``requests`` say
        how the first choices are made. Arguments as in ``forward``. None if the backend has none.

        The chain is closed by the next call of ``forward`` or ``chain``.
        """
