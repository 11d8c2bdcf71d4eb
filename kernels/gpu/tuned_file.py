"""The file in which measured launches are kept: one for each name of a card, JSON."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import triton

from llmrun.errors import UsageError
from llmrun.kernels.gpu.heuristics import Launch, Shape, Tuned

SCHEMA = 1


def card_name(device: str) -> str:
    """The name of a card, which those of a kind share."""
    return torch.cuda.get_device_name(device)


def path_in(folder: Path, card: str) -> Path:
    """The file for cards of a name."""
    return folder / ("".join(c if c.isalnum() else "-" for c in card.lower()) + ".json")


def read(path: Path) -> Tuned:
    """What is kept in a file; nothing if there is none. UsageError if it makes no sense."""
    try:
        return dict(_entries(json.loads(path.read_text("utf-8"))))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"The file of measured launches {path} cannot be read: {error}",
            "Remove it; `llmrun tune` makes a new one.",
        ) from error


def _entries(document: Any) -> Iterator[tuple[tuple[int, Shape], Launch]]:  # noqa: ANN401
    if document["schema"] != SCHEMA:
        raise ValueError(f"it has schema {document['schema']}, not {SCHEMA}")
    for entry in document["launches"]:
        shape = Shape(**{field.name: entry[field.name] for field in fields(Shape)})
        few, some, many = entry["stages"]
        launch = Launch(entry["splits"], (few, some, many), entry["warps"])
        if min(launch.splits, launch.warps, *launch.stages, shape.n, shape.k) < 1:
            raise ValueError(f"there is no launch like {asdict(launch)}")
        yield (entry["sm"], shape), launch


def write(path: Path, card: str, found: Tuned) -> None:
    """Add what was found to what the file has, in one step. UsageError if that is of no use."""
    launches = {**read(path), **found}
    document = {
        "schema": SCHEMA,
        "card": card,
        "triton": triton.__version__,
        "launches": [
            {"sm": sm, **asdict(shape), **asdict(launch)}
            for (sm, shape), launch in launches.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.part")
    draft.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    draft.replace(path)
