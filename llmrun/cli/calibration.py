"""What ``--calibrate`` means: the text a model reads so that its quantizer knows what matters.

Without one, all inputs of a linear layer count the same. With one the model is pushed through it
layer by layer beside the quantizing (``llmrun.cli.calibrator``): errors are weighed by how large
the inputs are that they meet.
"""

import hashlib
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.cli.calibration_cost import dense_rate, predicted_seconds
from llmrun.cli.conversation import Conversation
from llmrun.cli.source import Source
from llmrun.errors import UsageError
from llmrun.kernels.ops import Backend

if TYPE_CHECKING:
    from llmrun.text.tokenizer import Tokenizer

SEQUENCE_TOKENS = 512
DEFAULT_TOKENS = 4096
"""Read by default: more changes little, and another kind of text changes more than more of it."""

LEAST_TOKENS = 256
"""A text of fewer tokens says nothing of which inputs are large."""

AUTOMATIC_SECONDS = 240
"""A text is read unasked if that takes less: two minutes each for the model as it was and as it is
quantized."""

SEED = 0
"""Of the ids drawn at random."""

BUNDLED_VERSION = "v1"
"""Of the text that comes with llmrun: counts up when it changes."""

CHARACTERS_PER_TOKEN = 12
"""No more of a text is looked at for each token wanted."""

TYPICAL_CHARACTERS = 3 * SEQUENCE_TOKENS
"""A text that is shorter fills no sequence, so it is not cut into more."""

NO_TEXT = "no calibration text: all inputs of a layer count the same"

WORDS = ("auto", "none", "bundled", "self", "random")


@dataclass(frozen=True)
class Calibration:
    """Sequences of ids to read, and what records say of them.

    ``is_text``: they mean something. Random ids tell which inputs are large, but not how inputs go
    together: errors are weighed by them, not compensated (int4 on SmolLM2-135M: a KL divergence of
    .174 with ids for weighing alone, .202 for both; of a text .177 and .151).
    ``sha256``: of all ids as little-endian 32-bit numbers, each sequence behind its length: it
    stands for text, tokenizer and template at once.
    """

    sequences: tuple[tuple[int, ...], ...]
    description: str
    is_text: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def sha256(self) -> str:
        """Hash of what is read."""
        digest = hashlib.sha256()
        for ids in self.sequences:
            digest.update(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids))
        return digest.hexdigest()


@dataclass(frozen=True)
class Decision:
    """A calibration, or None for no text at all, and a sentence that says what was decided."""

    calibration: Calibration | None
    note: str


def choose_calibration(
    wanted: str,
    source: Source,
    conversation: Conversation | None,
    make_backend: Callable[[], Backend],
    n_tokens: int = DEFAULT_TOKENS,
) -> Decision:
    """Turn ``--calibrate`` into a decision.

    ``auto``: the bundled text if that is quick, else none; ``bundled``, ``self`` (text the model
    makes up) and ``random`` (no text at all) by those names; anything else is a file.
    ``conversation`` may be missing where no tokenizer is needed (none, random). UsageError
    for a file that cannot be read or holds too little; DoesNotFitError if the model is too large
    to be run whole for ``self``.
    """
    if wanted == "none":
        return Decision(None, NO_TEXT)
    if wanted == "random":
        return _decided(drawn(source.binding.spec.vocab, n_tokens))
    assert conversation is not None
    if wanted == "self":
        from llmrun.cli.calibration_sampling import sampled

        sequences = sampled(source, conversation, make_backend(), n_tokens, SEQUENCE_TOKENS)
        return _decided(
            Calibration(sequences, _described("text sampled from the model", sequences))
        )
    if wanted in ("auto", "bundled"):
        seconds = calibrating_seconds(source, make_backend, n_tokens)
        if wanted == "auto" and seconds > AUTOMATIC_SECONDS:
            return Decision(
                None,
                f"no calibration text: reading {n_tokens:,} tokens would take about "
                f"{seconds / 60:.0f} minutes here (--calibrate bundled does it)",
            )
        return _decided(bundled(conversation, n_tokens), f", about {max(seconds, 1):.0f} s")
    return _decided(from_file(Path(wanted), conversation.tokenizer, n_tokens))


def calibrating_seconds(
    source: Source, make_backend: Callable[[], Backend], n_tokens: int = DEFAULT_TOKENS
) -> float:
    """How long reading a text would take here, measured in a moment."""
    return predicted_seconds(source.binding.spec, n_tokens, dense_rate(make_backend()))


def bundled(conversation: Conversation, n_tokens: int) -> Calibration:
    """The text that comes with llmrun: passages one after another, conversations through the
    model's own template, cut into sequences."""
    from llmrun.text.passages import FILE, encode_passage, passages

    tokenizer = conversation.tokenizer
    template = None if conversation.template_note else conversation.template
    start = _start(tokenizer)
    between = tokenizer.encode_plain("\n\n")
    ids: list[int] = []
    for passage in passages(FILE.read_text(encoding="utf-8")):
        own = encode_passage(tokenizer, template, passage)
        ids += [*(own[1:] if own[:1] == [tokenizer.bos_id] else own), *between]
        if len(ids) >= n_tokens:
            break
    room = SEQUENCE_TOKENS - len(start)
    sequences = [
        (*start, *ids[first : first + room]) for first in range(0, min(len(ids), n_tokens), room)
    ]
    kept = _cut(sequences, n_tokens)
    return Calibration(kept, _described(f"bundled text {BUNDLED_VERSION}", kept))


def drawn(vocab: int, n_tokens: int) -> Calibration:
    """Ids drawn at random, each as likely as any other: which inputs are large is mostly a matter
    of the weights before them, so that even these tell it."""
    rng = random.Random(SEED)
    sequences = tuple(
        tuple(rng.randrange(vocab) for _ in range(SEQUENCE_TOKENS))
        for _ in range(n_tokens // SEQUENCE_TOKENS)
    )
    described = _described("ids drawn at random, without any text", sequences)
    return Calibration(sequences, described, is_text=False)


def from_file(path: Path, tokenizer: "Tokenizer", n_tokens: int) -> Calibration:
    """A file's text: sequences from places spread evenly over it.

    UsageError if it cannot be read, is not UTF-8 or has too few tokens.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the calibration text {path} cannot be read: {error}",
            f"give --calibrate a UTF-8 text file, or one of: {', '.join(WORDS)}",
        ) from error
    count = max(1, min(n_tokens // SEQUENCE_TOKENS, len(text) // TYPICAL_CHARACTERS))
    start, sequences = _start(tokenizer), []
    for number in range(count):
        first = number * len(text) // count
        last = min(
            (number + 1) * len(text) // count, first + SEQUENCE_TOKENS * CHARACTERS_PER_TOKEN
        )
        ids = tokenizer.encode_plain(text[first:last])
        sequences.append((*start, *ids[: SEQUENCE_TOKENS - len(start)]))
    kept = _cut(sequences, n_tokens)
    calibration = Calibration(kept, _described(f"text of {path.name}", kept))
    if calibration.tokens < LEAST_TOKENS:
        raise UsageError(
            f"the calibration text {path} has {calibration.tokens} tokens, which says too little",
            f"give --calibrate a text of at least {LEAST_TOKENS} tokens; {DEFAULT_TOKENS:,} are "
            "read of a longer one",
        )
    return calibration


def _start(tokenizer: "Tokenizer") -> list[int]:
    return [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []


def _cut(sequences: Sequence[tuple[int, ...]], n_tokens: int) -> tuple[tuple[int, ...], ...]:
    """The first ``n_tokens`` of the sequences; none of a single token, which says nothing."""
    kept, left = [], n_tokens
    for ids in sequences:
        part = ids[: max(left, 0)]
        left -= len(part)
        if len(part) > 1:
            kept.append(part)
    return tuple(kept)


def _described(what: str, sequences: Sequence[Sequence[int]]) -> str:
    return f"{what}, {sum(map(len, sequences)):,} tokens"


def _decided(calibration: Calibration, more: str = "") -> Decision:
    return Decision(calibration, f"calibrated on {calibration.description}{more}")
