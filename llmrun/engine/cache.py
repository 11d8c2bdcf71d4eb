"""The KV cache of one model: K and V of every layer, and which ids each slot holds.

A slot is one sequence. Its ids are recorded only after their K and V were computed, so after an
interrupt or an error the cache still describes exactly what was fed; whatever lies behind a slot's
length is overwritten by the next step. Asking for more than the capacity fails before any compute.
"""

from collections.abc import Sequence

from llmrun.errors import ContextError, UnavailableError
from llmrun.kernels.ops import KV_FORMS, Backend
from llmrun.model.spec import DecoderSpec


class KvCache:
    """``n_slots`` sequences of at most ``capacity`` tokens, stored as ``form``.

    The memory is taken here, once. UnavailableError for an unknown form; a backend without enough
    memory raises DoesNotFitError.
    """

    def __init__(
        self, backend: Backend, spec: DecoderSpec, n_slots: int, capacity: int, form: str = "f16"
    ) -> None:
        if form not in KV_FORMS:
            raise UnavailableError(
                f"There is no KV cache form named {form!r}.",
                f"Use one of: {', '.join(KV_FORMS)}.",
            )
        self.backend = backend
        self.spec = spec
        self.n_slots = n_slots
        self.capacity = capacity
        self.form = form
        self.layers = [
            backend.kv_layer(n_slots, capacity, spec.heads, form) for _ in range(len(spec.layers))
        ]
        self._ids: list[list[int]] = [[] for _ in range(n_slots)]
        self._stages = [0] * n_slots

    @property
    def nbytes(self) -> int:
        """Bytes the cache occupies, all slots and layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return self._layer_bytes_per_token * len(self.spec.layers)

    @property
    def _layer_bytes_per_token(self) -> int:
        heads = self.spec.heads
        return int(2 * heads.n_kv_heads * heads.head_dim * KV_FORMS[self.form])

    def read_bytes(self, length: int) -> int:
        """Bytes of K and V one step of a sequence reads that holds ``length`` tokens with it.

        A layer with a sliding window reads its window only.
        """
        tokens = sum(
            length if layer.window is None else min(length, layer.window)
            for layer in self.spec.layers
        )
        return tokens * self._layer_bytes_per_token

    def length(self, slot: int) -> int:
        """Number of tokens the slot holds."""
        return len(self._ids[slot])

    def ids(self, slot: int) -> tuple[int, ...]:
        """The ids the slot holds, in order."""
        return tuple(self._ids[slot])

    def outgrown(self, slot: int, n_tokens: int) -> bool:
        """Whether the slot's keys are rotated for another length than with ``n_tokens`` more.

        They must be computed anew then; false for all models but those with a ``RopeByLength``.
        """
        length = self.length(slot)
        return length > 0 and self._stages[slot] != self.spec.rope_stage(length + n_tokens)

    def append(self, slot: int, token_ids: Sequence[int], stage: int = 0) -> None:
        """Record ids whose K and V have just been written behind the slot's length.

        ``stage``: how they were rotated, the same for all the slot holds.
        """
        self._ids[slot].extend(token_ids)
        self._stages[slot] = stage

    def truncate(self, slot: int, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` of the slot."""
        del self._ids[slot][n_tokens:]

    def fork(self, source: int, target: int) -> None:
        """Make slot ``target`` hold what slot ``source`` holds."""
        for layer in self.layers:
            self.backend.kv_copy(layer, source, target, self.length(source))
        self._ids[target] = list(self._ids[source])
        self._stages[target] = self._stages[source]

    def reuse(self, slot: int, prompt_ids: Sequence[int]) -> int:
        """Keep the longest prefix the slot shares with the prompt; return its length.

        The last prompt id is always left to compute: its logits give the first answer id. Nothing
        is kept if the prompt needs another rotation than the slot's keys have.
        """
        if self.outgrown(slot, len(prompt_ids) - self.length(slot)):
            self.truncate(slot, 0)
            return 0
        limit = max(len(prompt_ids) - 1, 0)
        pairs = enumerate(zip(self._ids[slot], prompt_ids[:limit], strict=False))
        kept = next(
            (i for i, (held, wanted) in pairs if held != wanted), min(self.length(slot), limit)
        )
        self.truncate(slot, kept)
        return kept

    def check_prompt(self, n_tokens: int) -> None:
        """ContextError if a prompt of ``n_tokens`` is longer than a slot."""
        if n_tokens <= self.capacity:
            return
        trained = self.spec.max_positions
        if n_tokens < trained:
            more = min(n_tokens + 512, trained)
            way_out = f"Give it more room with --ctx {more}, or shorten the prompt."
        else:
            way_out = (
                f"The model was trained for {trained} tokens and takes no more: "
                "shorten the prompt, or use a model with a longer context."
            )
        raise ContextError(
            f"The prompt has {n_tokens} tokens, the context holds {self.capacity}.", way_out
        )

    def check_room(self, slot: int, n_tokens: int) -> None:
        """ContextError if the slot cannot take ``n_tokens`` more."""
        length = self.length(slot)
        if length + n_tokens > self.capacity:
            raise ContextError(
                f"The context holds {self.capacity} tokens; {length} are in use and "
                f"{n_tokens} more do not fit.",
                "Give it more room with --ctx N, or start again with a shorter text.",
            )
