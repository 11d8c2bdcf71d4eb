"""Every limit on what a model file may claim, in one place; tests read them from here.

They exist so that a hostile or damaged header costs at most about a second and 64 MiB, and they
leave room for the largest public models. Counts of JSON characters are taken before parsing,
because eight megabytes of empty lists cost Python's parser 160 MiB.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class JsonLimits:
    """Bounds on a JSON text: bytes, and how often ``{``, ``[`` and ``,`` may occur in it."""

    max_bytes: int
    braces: int
    brackets: int
    commas: int


MIB = 1 << 20

SAFETENSORS_HEADER = JsonLimits(8 * MIB, braces=40_000, brackets=80_000, commas=240_000)
SAFETENSORS_TENSORS = 32_768
ELEMENTS = 2**63 - 1

INDEX_ENTRIES = 100_000
INDEX = JsonLimits(12 * MIB, braces=64, brackets=64, commas=INDEX_ENTRIES + 1_000)
CONFIG = JsonLimits(4 * MIB, braces=20_000, brackets=20_000, commas=200_000)
FILE_NAME_CHARS = 255

PATTERN_CHARS = 1_024
PATTERNS = 256
"""Of one list in a config, and groups of modules: each module's name is held against each."""

GGUF_HEADER_BYTES = 48 * MIB
GGUF_KEYS = 4_096
GGUF_KEY_BYTES = 256
GGUF_STRING_BYTES = MIB
GGUF_TOKENIZER_JSON_BYTES = 40 * MIB
GGUF_ELEMENT_BYTES = 64 * 1024
GGUF_ARRAY_ELEMENTS = 2_097_152
GGUF_STRINGS = 1_500_000
GGUF_TENSORS = 16_384
GGUF_TENSOR_NAME_BYTES = 64
GGUF_PARTS = 1_024
GGUF_DIMS = 4
GGUF_DIM = 2**31 - 1
GGUF_ALIGNMENT = (8, 65_536)

SHARD_BYTES = 256_000_000
"""Of a written shard. A conversion that was killed goes on after the last finished shard: at this
size a model of 1 GB loses a quarter of the work at most, and one of 70 billion weights in 4 bits
is 160 files, as many as large models are published in."""

SHARD_PARTS = 24_000
"""Stored tensors per written shard, well under what the readers accept."""
