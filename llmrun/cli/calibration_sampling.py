"""Text sampled from the model itself, to calibrate it on what it would say."""

from collections.abc import Sequence

from llmrun.cli import memory
from llmrun.cli.conversation import Conversation
from llmrun.cli.fitting import sizes_of
from llmrun.cli.source import Source
from llmrun.engine.cache import KvCache
from llmrun.engine.phases import choose, decode_step, prefill
from llmrun.errors import DoesNotFitError
from llmrun.kernels.ops import KV_FORMS, Array, Backend, PickRequest, Sampling
from llmrun.model.decoder import MAX_TOKENS, Decoder, build
from llmrun.text.message import Message

SEED = 20260101

TOGETHER = 16
"""Sequences made at once: weights are read once for all of them, and each has a cache."""

QUESTIONS = (
    "Tell me a short story about somebody who finds an old map.",
    "Write a Python function that parses a date, and explain it.",
    "What should one know before growing tomatoes on a balcony?",
    "Erkläre mir bitte, wie ein Kühlschrank funktioniert.",
    "Compare trains and planes in a table.",
    "¿Qué pasó en la historia de tu ciudad favorita?",
    "Solve step by step: a train leaves at 9:40 and takes 135 minutes. When does it arrive?",
    "请介绍一下中国的四大发明。",
)
"""How conversations begin; for models without a template, how texts do."""


def sampled(
    source: Source, conversation: Conversation, backend: Backend, n_tokens: int, length: int
) -> tuple[tuple[int, ...], ...]:
    """Sequences of ``length`` ids that the model makes up at temperature 1, the same each time.

    Many are made at once, so that the weights are read once for each id of them all.
    DoesNotFitError if the whole model and its cache have no room.
    """
    _check_room(source, backend, n_tokens)
    spec = source.binding.spec
    decoder = build(spec, source.tensors(lambda _, form: form), backend)
    backend.synchronize()
    count = max(1, n_tokens // length)
    sequences: list[tuple[int, ...]] = []
    for first in range(0, count, TOGETHER):
        numbers = range(first, min(first + TOGETHER, count))
        starts = [_start(conversation, number) for number in numbers]
        sequences += _continued(decoder, conversation.tokenizer.n_ids, starts, numbers, length)
    return tuple(sequences)


def _continued(
    decoder: Decoder, n_ids: int, starts: Sequence[list[int]], seeds: Sequence[int], length: int
) -> list[tuple[int, ...]]:
    spec = decoder.spec
    cache = KvCache(decoder.backend, spec, len(starts), length)
    sequences = [ids[:length] for ids in starts]
    vocab = min(spec.vocab, n_ids)

    def extend(slots: Sequence[int], logits: Array) -> None:
        requests = [
            PickRequest(Sampling(1.0, seed=SEED + seeds[slot]), len(sequences[slot]), vocab)
            for slot in slots
        ]
        picks = choose(decoder, cache, slots, logits, requests)
        for slot, pick in zip(slots, picks, strict=True):
            sequences[slot].append(pick.token_id)

    for slot, ids in enumerate(sequences):
        if len(ids) < length:
            extend([slot], prefill(decoder, cache, ids, slot))
    while slots := [slot for slot, ids in enumerate(sequences) if len(ids) < length]:
        extend(slots, decode_step(decoder, cache, slots, [sequences[s][-1] for s in slots]))
    return [tuple(ids) for ids in sequences]


def _start(conversation: Conversation, number: int) -> list[int]:
    from llmrun.text.passages import NOW
    from llmrun.text.prompt import encode_chat, encode_raw

    question = QUESTIONS[number % len(QUESTIONS)]
    if conversation.template_note:
        return encode_raw(conversation.tokenizer, question)
    messages = [Message("user", question)]
    return encode_chat(conversation.tokenizer, conversation.template, messages, now=NOW)


def _check_room(source: Source, backend: Backend, n_tokens: int) -> None:
    heads, layers = source.binding.spec.heads, len(source.binding.spec.layers)
    weights = sum(source.kept_bytes().values())
    cache = int(n_tokens * layers * 2 * heads.n_kv_heads * heads.head_dim * KV_FORMS["f16"])
    free = backend.free_bytes()
    working = backend.workspace_bytes(sizes_of(source, MAX_TOKENS))
    if free is None or working is None:
        free, working = memory.free_bytes(), memory.WORKSPACE_BYTES
    else:
        weights = int(memory.ROUNDED * weights)
    need = weights + cache + working
    if free is not None and need > free:
        raise DoesNotFitError(
            f"to sample text from the model takes {need / (1 << 30):.1f} GiB; "
            f"{free / (1 << 30):.1f} GiB of memory are free",
            "use --calibrate bundled, which needs one layer in memory at a time",
        )
