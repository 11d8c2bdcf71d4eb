"""What a model's own files say about answering: end ids and sampling defaults."""

import json
from collections.abc import Mapping
from pathlib import Path

from llmrun.engine.sampler import SamplingOptions
from llmrun.errors import ModelFileError

GENERATION_CONFIG = "generation_config.json"


def read_generation_config(folder: Path) -> Mapping[str, object]:
    """generation_config.json of a folder, empty if there is none. ModelFileError if damaged."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path} cannot be read: {error}", "fetch the model again with `llmrun pull`"
        ) from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} is not a JSON object", "fetch the model again")
    return value


def end_ids(*sources: object) -> frozenset[int]:
    """The union of end-of-sequence ids from tokenizer, config and generation config.

    Each source is an id, a list of ids or None: publishers put further end ids into either file.
    """
    found: set[int] = set()
    for source in sources:
        values = source if isinstance(source, list | frozenset) else [source]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
    return frozenset(found)


def sampling_defaults(generation: Mapping[str, object]) -> SamplingOptions:
    """Sampling as the publisher recommends it; greedy where nothing is recommended."""
    if generation.get("do_sample") is not True:
        return SamplingOptions(temperature=0.0)

    def number(key: str, default: float) -> float:
        value = generation.get(key)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if fits else default  # type: ignore[arg-type]

    return SamplingOptions(
        temperature=number("temperature", 1.0),
        top_k=int(number("top_k", 0)),
        top_p=number("top_p", 1.0),
        min_p=number("min_p", 0.0),
        repeat_penalty=number("repetition_penalty", 1.0),
    )
