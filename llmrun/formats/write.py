"""The one writer: a stream of tensors becomes a folder other engines load.

Dense tensors are copied bit for bit, symmetric GroupInt becomes pack-quantized. Peak memory is
one tensor. Everything written is read back and compared before the provenance file, which is
last; the same input gives the same bytes. The folder is the caller's: nothing is renamed, and
after an exception it is only fit to be deleted.
"""

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmrun.errors import InternalError, ModelFileError
from llmrun.formats.damage import shown
from llmrun.formats.finite import nonfinite_part
from llmrun.formats.layout import RESERVED, Layout, Part, Planned, Shard, json_bytes
from llmrun.formats.names import is_plain
from llmrun.formats.open import open_checkpoint
from llmrun.formats.pack_config import write_pack_config
from llmrun.formats.safetensors import CONFIG_NAME, INDEX_NAME
from llmrun.formats.safetensors_header import open_safetensors
from llmrun.kernels.forms import Dense, Form, GroupInt

PROVENANCE_NAME = "llmrun.json"
Progress = Callable[[str, int, int], None]
"""Called after each tensor: its name, bytes of tensors written so far, bytes in all."""

_NO_HASH = "0" * 64


@dataclass(frozen=True)
class WrittenReport:
    """What was written: bytes and sha256 per file, and what had been predicted in all."""

    files: Mapping[str, int]
    sha256: Mapping[str, str]
    predicted_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Form]],
    layout: Layout,
    config: Mapping[str, object],
    sidecars: Mapping[str, bytes | Path],
    provenance: Mapping[str, object],
    progress: Progress | None = None,
) -> WrittenReport:
    """Write a checkpoint into the existing, empty folder ``out``.

    ``tensors``: the forms of ``layout.planned``, in that order. ``config``: the source's
    config.json; its quantization is replaced. ``sidecars``: tokenizer and other files by name.
    ``provenance``: what goes into llmrun.json beside the list of files and tensors.
    Raises InternalError when the disk is too small or a write fails, when the stream differs from
    the plan or the result from what was written; ModelFileError for a tensor that is not finite.
    """
    texts = _texts(layout, config)
    predicted = predict_bytes(layout, config, sidecars, provenance)
    _check_names(sidecars, layout)
    _check_space(out, predicted)
    try:
        checksums = _write_shards(out, iter(tensors), layout, progress)
        for name, text in texts.items():
            _write(out / name, text)
        sizes = {path.name: path.stat().st_size for path in out.iterdir()}
        for name, sidecar in sidecars.items():
            if isinstance(sidecar, Path):
                sizes[name] = _copy(sidecar, out / name)
            else:
                sizes[name] = _write(out / name, sidecar)
        _verify(out, layout, checksums)
        hashes = {name: _sha256(out / name) for name in sorted(sizes)}
        text = json_bytes(_manifest(layout, provenance, sizes, hashes))
        sizes[PROVENANCE_NAME] = _write(out / PROVENANCE_NAME, text)
        hashes[PROVENANCE_NAME] = hashlib.sha256(text).hexdigest()
        _sync_folder(out)
    except OSError as error:
        raise InternalError(f"Writing to {out} failed: {error}.", "Free some space.") from error
    return WrittenReport(sizes, hashes, predicted)


def predict_bytes(
    layout: Layout,
    config: Mapping[str, object],
    sidecars: Mapping[str, bytes | Path],
    provenance: Mapping[str, object],
) -> int:
    """Return the bytes of the whole folder, from the plan alone."""
    sizes = {shard.file: shard.nbytes for shard in layout.shards}
    sizes |= {name: len(text) for name, text in _texts(layout, config).items()}
    for name, sidecar in sidecars.items():
        sizes[name] = sidecar.stat().st_size if isinstance(sidecar, Path) else len(sidecar)
    manifest = _manifest(layout, provenance, sizes, dict.fromkeys(sorted(sizes), _NO_HASH))
    return sum(sizes.values()) + len(json_bytes(manifest))


def _texts(layout: Layout, config: Mapping[str, object]) -> dict[str, bytes]:
    """Return config.json and the index."""
    stated = config.get("dtype", config.get("torch_dtype"))
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    if layout.packings and names.get(str(stated), layout.scale_dtype.name) != (
        layout.scale_dtype.name
    ):
        raise InternalError(f"Scales are {layout.scale_dtype.name}, but the model is {stated}.")
    written = {key: value for key, value in config.items() if key != "quantization_config"}
    if layout.packings:
        others = [tensor.module for tensor in layout.planned if _is_linear(tensor, layout)]
        written["quantization_config"] = write_pack_config(layout.packings, others)
    return {CONFIG_NAME: json_bytes(written), INDEX_NAME: json_bytes(layout.index)}


def _is_linear(tensor: Planned, layout: Layout) -> bool:
    """Whether a tensor may be the weight of an unpacked linear layer, to be listed as such."""
    matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    return matrix and "embed" not in tensor.module and tensor.module not in layout.packings


def _manifest(
    layout: Layout,
    provenance: Mapping[str, object],
    sizes: Mapping[str, int],
    hashes: Mapping[str, str],
) -> dict[str, object]:
    return {
        "schema": "llmrun.checkpoint/1",
        **provenance,
        "files": {name: {"bytes": sizes[name], "sha256": hashes[name]} for name in hashes},
        "tensors": {tensor.name: tensor.kind for tensor in layout.planned},
    }


def _check_names(sidecars: Mapping[str, object], layout: Layout) -> None:
    taken = {CONFIG_NAME, PROVENANCE_NAME, *RESERVED, *(shard.file for shard in layout.shards)}
    for name in sidecars:
        if not is_plain(name) or name in taken:
            raise InternalError(f"{shown(name)} cannot be a file beside the weights.")


def _check_space(out: Path, predicted: int) -> None:
    free = shutil.disk_usage(out).free
    if predicted > free:
        raise InternalError(
            f"The checkpoint needs {predicted:,} bytes, but {out} has {free:,} bytes free.",
            "Free some space or write to another disk.",
        )


def _write_shards(
    out: Path, stream: Iterator[tuple[str, Form]], layout: Layout, progress: Progress | None
) -> dict[str, int]:
    """Write every shard; return a checksum per stored tensor."""
    checksums: dict[str, int] = {}
    planned = iter(layout.planned)
    total = sum(shard.nbytes - len(shard.header) for shard in layout.shards)
    done = 0
    for shard in layout.shards:
        with ExitStack() as stack:
            file = stack.enter_context((out / shard.file).open("xb"))
            file.write(shard.header)
            for parts in shard.parts.values():
                name, form = next(stream, ("", None))
                _check_planned(next(planned), name, form)
                done += _write_tensor(file, shard, parts, form, checksums)
                # The form is the one tensor in memory; without this it would outlive the next.
                form = None
                if progress is not None:
                    progress(name, done, total)
            file.flush()
            os.fsync(file.fileno())
    extra = next(stream, None)
    if extra is not None:
        raise InternalError(f"Tensor {shown(extra[0])} was not planned.")
    return checksums


def _check_planned(planned: Planned, name: str, form: Form | None) -> None:
    if form is None or (name, form.kind, form.shape) != (
        planned.name,
        planned.kind.lower(),
        planned.shape,
    ):
        got = "the end" if form is None else f"{shown(name)} {form.kind} {form.shape}"
        raise InternalError(f"Planned {planned.name} {planned.kind} {planned.shape}, got {got}.")


def _write_tensor(
    file: BinaryIO,
    shard: Shard,
    parts: tuple[Part, ...],
    form: Form | None,
    checksums: dict[str, int],
) -> int:
    contents: dict[str, memoryview] = {}
    if isinstance(form, GroupInt):
        _check_scales(form, parts)
    if isinstance(form, Dense):
        contents[parts[0].key] = form.w.data
    elif isinstance(form, GroupInt):
        extents = b"".join(extent.to_bytes(8, "little") for extent in form.shape)
        views = {"packed": form.codes.data, "scale": form.scales.data, "shape": memoryview(extents)}
        contents = {part.key: views[part.key.rpartition("_")[2]] for part in parts}
    for part in parts:
        data = contents[part.key]
        if data.nbytes != part.nbytes:
            raise InternalError(f"{part.key}: {data.nbytes} bytes, planned {part.nbytes}.")
        file.seek(len(shard.header) + part.begin)
        file.write(data)
        checksums[part.key] = zlib.crc32(data)
    return sum(part.nbytes for part in parts)


def _check_scales(form: GroupInt, parts: tuple[Part, ...]) -> None:
    # Sizes agree between bf16 and f16, so only this tells one from the other.
    for part in parts:
        if part.key.endswith("_scale") and part.dtype != form.scales.dtype.name:
            raise InternalError(
                f"{part.key} was planned as {part.dtype}, its scales are {form.scales.dtype.name}."
            )


def _verify(out: Path, layout: Layout, checksums: Mapping[str, int]) -> None:
    """Read everything back: the same bytes, finite, and opened by the safetensors library."""
    seen: dict[str, int] = {}
    for shard in layout.shards:
        parts = open_safetensors(out / shard.file)
        seen |= {key: zlib.crc32(part.data) for key, part in parts.items()}
        _check_with_library(out / shard.file, shard)
    if seen != dict(checksums):
        broken = sorted(key for key, value in checksums.items() if seen.get(key) != value)
        raise InternalError(f"Read back differently than written: {', '.join(broken[:3])}.")
    written = open_checkpoint(out)
    for tensor in layout.planned:
        form = written.read(tensor.name)
        _check_planned(tensor, tensor.name, form)
        fault = nonfinite_part(form)
        if fault is not None:
            part, index = fault
            raise ModelFileError(
                f"Tensor {shown(tensor.name)} is not finite at element {index:,} of its {part}.",
                "The source model is damaged; fetch it again.",
            )


def _check_with_library(path: Path, shard: Shard) -> None:
    from safetensors import SafetensorError, safe_open

    expected = {
        part.key: (part.dtype, list(part.shape)) for parts in shard.parts.values() for part in parts
    }
    try:
        with safe_open(path, framework="np") as opened:
            slices = {key: opened.get_slice(key) for key in sorted(opened.keys())}
            found = {key: (s.get_dtype(), list(s.get_shape())) for key, s in slices.items()}
    except SafetensorError as error:
        raise InternalError(f"The safetensors library refuses {path.name}: {error}.") from error
    if found != expected:
        raise InternalError(f"The safetensors library reads {path.name} differently.")


def _write(path: Path, content: bytes) -> int:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content)


def _copy(source: Path, target: Path) -> int:
    with source.open("rb") as read, target.open("xb") as file:
        shutil.copyfileobj(read, file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
