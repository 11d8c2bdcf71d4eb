"""The one writer: a stream of tensors becomes a folder other engines load.

Dense tensors are copied bit for bit; the layout says how quantized ones are stored. Peak memory is
one tensor. Every shard is read back when it is finished and recorded, so that a killed call can go
on from there; the provenance file comes last. The same input gives the same bytes, after however
many attempts. The folder is the caller's: nothing is renamed.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

from llmrun.errors import InternalError
from llmrun.formats import job
from llmrun.formats.damage import shown
from llmrun.formats.job import JOB_NAME, PROVENANCE_NAME, Details, Finished
from llmrun.formats.layout import RESERVED, Layout, json_bytes
from llmrun.formats.names import is_plain
from llmrun.formats.open import open_checkpoint
from llmrun.formats.safetensors import CONFIG_NAME, INDEX_NAME
from llmrun.formats.shard_writer import ShardWriter, check_planned
from llmrun.kernels.forms import Form

Progress = Callable[[str, int, int], None]
"""Called after each tensor: its name, bytes of tensors written so far, bytes in all."""

Item = tuple[str, Form, Details]
"""A tensor of the stream: its name, its form, and what llmrun.json shall say about it."""

Tensors = Callable[[int], Iterable[Item]]
"""Gives the stream from the planned tensor of a number on: those before are on the disk already."""

Audit = Callable[[Iterator[tuple[str, Form]]], Mapping[str, object]]
"""Looks at every tensor as it is read back; what it returns goes into llmrun.json."""

_NO_HASH = "0" * 64


@dataclass(frozen=True, eq=False)
class Content:
    """What a finished folder holds, as far as it is known before any weight is read.

    ``config``: the source's config.json; its quantization is replaced. ``sidecars``: tokenizer and
    other files by name. ``provenance``: what goes into llmrun.json beside the list of files and
    tensors; with the layout it tells this result from every other.
    """

    layout: Layout
    config: Mapping[str, object]
    sidecars: Mapping[str, bytes | Path]
    provenance: Mapping[str, object]

    @property
    def predicted_bytes(self) -> int:
        """Bytes of the whole folder, from the plan alone."""
        sizes = {shard.file: shard.nbytes for shard in self.layout.shards}
        sizes |= {name: len(text) for name, text in self.texts.items()}
        for name, sidecar in self.sidecars.items():
            sizes[name] = sidecar.stat().st_size if isinstance(sidecar, Path) else len(sidecar)
        hashes = dict.fromkeys(sorted(sizes), _NO_HASH)
        return sum(sizes.values()) + len(
            json_bytes(_manifest(self, _NO_HASH, sizes, hashes, {}, {}))
        )

    @property
    def texts(self) -> dict[str, bytes]:
        """config.json and the index."""
        writing, layout = self.layout.writing, self.layout
        stated = self.config.get("dtype", self.config.get("torch_dtype"))
        names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
        model_dtype = names.get(str(stated), layout.scale_dtype.name)
        if writing is not None and model_dtype != layout.scale_dtype.name:
            raise InternalError(f"Scales are {layout.scale_dtype.name}, but the model is {stated}.")
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        if writing is not None:
            config["quantization_config"] = writing.config(layout.planned, layout.scale_dtype)
        return {CONFIG_NAME: json_bytes(config), INDEX_NAME: json_bytes(layout.index)}

    @property
    def plan(self) -> str:
        """A hash of all this: work on one plan is never continued under another."""
        digest = hashlib.sha256()
        for shard in self.layout.shards:
            digest.update(shard.header)
        texts = {**self.texts, PROVENANCE_NAME: json_bytes(self.provenance), **self.sidecars}
        for name, text in texts.items():
            own = (
                job.sha256_of(text) if isinstance(text, Path) else hashlib.sha256(text).hexdigest()
            )
            digest.update(f"{name}\n{own}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class WrittenReport:
    """What was written: bytes and sha256 per file, and what had been predicted in all.

    ``resumed``: number of shards that an earlier call had finished. ``details``: of each tensor.
    """

    files: Mapping[str, int]
    sha256: Mapping[str, str]
    predicted_bytes: int
    resumed: int
    details: Mapping[str, Details]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def write_folder(
    out: Path,
    tensors: Tensors,
    content: Content,
    progress: Progress | None = None,
    audit: Audit | None = None,
) -> WrittenReport:
    """Write a checkpoint into the folder ``out``: empty, or left by a call that was killed.

    ``tensors(start)``: the forms of ``layout.planned[start:]``, in that order. Of a call for the
    same content the finished shards are kept, of any other nothing.
    Raises InternalError when the disk is too small or a write fails, when the stream differs from
    the plan or the result from what was written; ModelFileError for a tensor that is not finite.
    """
    layout = content.layout
    texts, predicted = content.texts, content.predicted_bytes
    _check_names(content)
    files = [shard.file for shard in layout.shards]
    plan = content.plan
    try:
        own = (*texts, *content.sidecars, PROVENANCE_NAME)
        finished = job.begin(out, plan, files, own)
        resumed = len(finished)
        _check_space(out, predicted - sum(s.nbytes for s in layout.shards[:resumed]))
        _write_shards(out, plan, tensors, layout, finished, progress)
        sizes = {shard.file: shard.nbytes for shard in layout.shards}
        hashes = {file: shard.sha256 for file, shard in zip(files, finished, strict=True)}
        for name, source in {**texts, **content.sidecars}.items():
            sizes[name], hashes[name] = _write(out / name, source)
        pairs = _read_back(out, layout)
        audited = {} if audit is None else audit(pairs)
        for _ in pairs:
            pass  # whatever the audit left unread
        details = {name: own for shard in finished for name, own in shard.details.items()}
        hashes = dict(sorted(hashes.items()))
        manifest = _manifest(content, plan, sizes, hashes, details, audited)
        text = json_bytes(manifest)
        sizes[PROVENANCE_NAME], hashes[PROVENANCE_NAME] = _write(out / PROVENANCE_NAME, text)
        job.end(out)
        _sync_folder(out)
    except InterruptedError:
        raise  # somebody wants to stop, the disk is well
    except OSError as error:
        raise InternalError(f"Writing to {out} failed: {error}.", "Free some space.") from error
    return WrittenReport(sizes, hashes, predicted, resumed, details)


def _write_shards(
    out: Path,
    plan: str,
    tensors: Tensors,
    layout: Layout,
    finished: list[Finished],
    progress: Progress | None,
) -> None:
    """Write the shards that are not finished yet, adding each to ``finished``."""
    files = [shard.file for shard in layout.shards]
    written = layout.shards[: len(finished)]
    done = sum(shard.nbytes - len(shard.header) for shard in written)
    start = sum(len(shard.parts) for shard in written)
    total = sum(shard.nbytes - len(shard.header) for shard in layout.shards)
    if start == len(layout.planned):
        return
    stream = iter(tensors(start))
    planned = iter(layout.planned[start:])
    for shard in layout.shards[len(finished) :]:
        details = {}
        with ShardWriter(out, shard, layout) as writer:
            for _ in shard.parts:
                expected = next(planned)
                name, form, said = next(stream, ("", None, {}))
                check_planned(expected, name, form)
                assert form is not None
                done += writer.add(expected, form)
                details[name] = dict(said)
                # The form is the one tensor in memory; without this it would outlive the next.
                form = None
                if progress is not None:
                    progress(name, done, total)
            finished.append(Finished(writer.finish(), details))
        job.record(out, plan, files, finished)
    extra = next(stream, None)
    if extra is not None:
        raise InternalError(f"Tensor {shown(extra[0])} was not planned.")


def _read_back(out: Path, layout: Layout) -> Iterator[tuple[str, Form]]:
    """Open what was written as anybody would; every tensor is there in its planned form."""
    written = open_checkpoint(out)
    for tensor in layout.planned:
        form = written.read(tensor.name)
        check_planned(tensor, tensor.name, form)
        yield tensor.name, form


def _manifest(
    content: Content,
    plan: str,
    sizes: Mapping[str, int],
    hashes: Mapping[str, str],
    details: Mapping[str, Details],
    audited: Mapping[str, object],
) -> dict[str, object]:
    layout = content.layout
    stored = {
        name: sum(part.nbytes for part in parts)
        for name, parts in chain.from_iterable(shard.parts.items() for shard in layout.shards)
    }
    return {
        "schema": "llmrun.checkpoint/1",
        "plan": plan,
        **content.provenance,
        "format": "safetensors" if layout.writing is None else layout.writing.name,
        **audited,
        "files": {name: {"bytes": sizes[name], "sha256": hashes[name]} for name in hashes},
        "tensors": {
            tensor.name: {
                "form": tensor.kind,
                "bits_per_weight": round(8 * stored[tensor.name] / prod(tensor.shape), 4),
                **details.get(tensor.name, {}),
            }
            for tensor in layout.planned
        },
    }


def _check_names(content: Content) -> None:
    files: Sequence[str] = [shard.file for shard in content.layout.shards]
    taken = {CONFIG_NAME, PROVENANCE_NAME, JOB_NAME, *RESERVED, *files}
    for name in content.sidecars:
        if not is_plain(name) or name in taken:
            raise InternalError(f"{shown(name)} cannot be a file beside the weights.")


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise InternalError(
            f"The checkpoint needs {needed:,} bytes, but {out} has {free:,} bytes free.",
            "Free some space or write to another disk.",
        )


def _write(path: Path, source: bytes | Path) -> tuple[int, str]:
    """Write or copy a small file; return its bytes and sha256."""
    text = source.read_bytes() if isinstance(source, Path) else source
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return len(text), hashlib.sha256(text).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
