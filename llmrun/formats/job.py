"""``job.json``: what of an unfinished folder is done, so that a killed conversion can go on.

It names the plan (a hash of all that is known beforehand) and every finished shard with its hash;
it is replaced in one step after each. A folder of another plan is emptied. What nobody can resume
is never kept: shards count from the first on, up to the first that is missing or damaged.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import InternalError

JOB_NAME = "job.json"
PROVENANCE_NAME = "llmrun.json"
_NEW_NAME = "job.json.new"

Details = Mapping[str, object]
"""What is worth recording of one tensor, as JSON: its relative error, for instance."""


@dataclass(frozen=True)
class Finished:
    """A shard that is on the disk: its hash and what was said of its tensors."""

    sha256: str
    details: Mapping[str, Details]


def begin(out: Path, plan: str, files: Sequence[str], ours: Sequence[str]) -> list[Finished]:
    """Return the finished shards of ``files`` in a folder, which keeps nothing else.

    ``plan``: the hash of the plan. ``ours``: names that a call which was killed may have left
    beside the shards. InternalError for a folder that holds anything that is not of such a call.
    """
    names = {path.name for path in out.iterdir()}
    if names and JOB_NAME not in names and not names <= {_NEW_NAME, *files, *ours}:
        raise InternalError(f"{out} is not empty.")
    finished = _verified(out, plan, files)
    kept = set(files[: len(finished)])
    for name in names - kept:
        (out / name).unlink()
    record(out, plan, files, finished)
    return finished


def record(out: Path, plan: str, files: Sequence[str], finished: Sequence[Finished]) -> None:
    """Write down which shards are finished; durable when this returns."""
    shards = {
        file: {"sha256": shard.sha256, "tensors": shard.details}
        for file, shard in zip(files, finished, strict=False)
    }
    text = json.dumps({"plan": plan, "shards": shards})
    with (out / _NEW_NAME).open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    (out / _NEW_NAME).replace(out / JOB_NAME)


def end(out: Path) -> None:
    """The folder is complete."""
    (out / JOB_NAME).unlink()


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified(out: Path, plan: str, files: Sequence[str]) -> list[Finished]:
    finished = []
    for file, shard in zip(files, _recorded(out, plan, files), strict=False):
        path = out / file
        if path.is_symlink() or not path.is_file() or sha256_of(path) != shard.sha256:
            break
        finished.append(shard)
    return finished


def _recorded(out: Path, plan: str, files: Sequence[str]) -> list[Finished]:
    """What the record says, or the provenance file of a folder that only lacked its name."""
    try:
        path = out / JOB_NAME
        complete = not path.exists()
        document = json.loads((out / PROVENANCE_NAME if complete else path).read_bytes())
        if document["plan"] != plan:
            return []
        if complete:
            hashes = [document["files"][file]["sha256"] for file in files]
            details = [document["tensors"], *({} for _ in files[1:])]
            return [Finished(*pair) for pair in zip(hashes, details, strict=True)]
        return [
            Finished(shard["sha256"], shard["tensors"]) for shard in document["shards"].values()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # none was written yet, or it is damaged: then the work begins anew
