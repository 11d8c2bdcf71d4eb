"""Limits of the text room, in one place so that tests read the numbers they check.

Files of a model come from strangers: a tokenizer past these sizes and a template past these bounds
is refused by name. Sizes are bytes, times are seconds.
"""

from dataclasses import dataclass

MIB = 1024 * 1024

TOKENIZER_FILE_BYTES = 64 * MIB
TOKENIZER_CONFIG_BYTES = 16 * MIB
VOCABULARY_IDS = 2_000_000
ADDED_TOKENS = 65_536
TEMPLATE_FILE_BYTES = MIB

# A string sequence of a terminal (OSC, DCS, ...) that never ends hides at most this much text.
HIDDEN_TERMINAL_CHARACTERS = 4096


@dataclass(frozen=True)
class RenderLimits:
    """Bounds of one template rendering; ``memory_bytes`` is on top of the idle process.

    The output may have ``max(output_bytes, output_factor * input bytes)`` bytes. Starting the
    process is not part of ``seconds``, since a busy machine starts it late.
    """

    seconds: float = 2.0
    memory_bytes: int = 256 * MIB
    output_bytes: int = MIB
    output_factor: int = 8
    startup_seconds: float = 30.0
