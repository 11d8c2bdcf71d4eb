"""What a model's own files say about answering: end ids and sampling defaults."""

import math
from collections.abc import Mapping
from pathlib import Path

from llmrun.engine.sampler import SamplingOptions, resolve
from llmrun.errors import ModelFileError, UsageError
from llmrun.formats.bounded_json import read_object

GENERATION_CONFIG = "generation_config.json"


def read_generation_config(folder: Path) -> Mapping[str, object]:
    """generation_config.json of a folder, empty if there is none. ModelFileError if damaged."""
    path = folder / GENERATION_CONFIG
    return read_object(path, "the model's generation settings") if path.is_file() else {}


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
    """Sampling as the publisher recommends it; greedy where no sampling is asked for.

    ModelFileError names a value that is out of its range.
    """
    penalty = _number(generation, "repetition_penalty", 1.0)
    if generation.get("do_sample") is not True:
        options = SamplingOptions(temperature=0.0, repeat_penalty=penalty)
    else:
        options = SamplingOptions(
            temperature=_number(generation, "temperature", 1.0),
            top_k=int(_number(generation, "top_k", 0.0)),
            top_p=_number(generation, "top_p", 1.0),
            min_p=_number(generation, "min_p", 0.0),
            repeat_penalty=penalty,
        )
    try:
        resolve(options)
    except UsageError as error:
        raise ModelFileError(
            f"the model's {GENERATION_CONFIG} recommends sampling that makes no sense: "
            f"{error.what}",
            "correct the file; options on the command line come after it",
        ) from error
    return options


def _number(generation: Mapping[str, object], key: str, default: float) -> float:
    value = generation.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelFileError(
            f"the model's {GENERATION_CONFIG} says {key} = {value!r}; expected a finite number",
            "correct the file or fetch the model again",
        )
    return float(value)
