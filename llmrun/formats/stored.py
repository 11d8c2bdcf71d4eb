"""Checks of the stored parts that make up one quantized weight.

A quantized weight is several tensors of a file: codes, scales, zero points. Each is checked
against what the config promises before a number of it is read; an error names the part.
"""

from collections.abc import Mapping
from pathlib import Path

from llmrun.formats.damage import damaged, shown
from llmrun.formats.safetensors_header import StoredTensor


def expect(stored: StoredTensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Check a part's shape and that its dtype is one of ``dtypes``; else ModelFileError."""
    if stored.shape != shape or stored.dtype not in dtypes:
        wanted = f"{' or '.join(dtypes)} {shape}"
        raise stored.refused(f"is {stored.dtype} {shown(stored.shape)}, expected {wanted}")


def extents(stored: StoredTensor, count: int) -> None:
    """Check that a part has ``count`` extents and is not empty; else ModelFileError."""
    if len(stored.shape) != count or 0 in stored.shape:
        raise stored.refused(
            f"is {stored.dtype} {shown(stored.shape)}, expected {count} extents of 1 or more"
        )


def need(parts: Mapping[str, StoredTensor], part: str, module: str, folder: Path) -> StoredTensor:
    """Return a part of a module; ModelFileError naming ``module.part`` if it is missing."""
    if part not in parts:
        raise damaged(folder, f"tensor {shown(f'{module}.{part}')} is missing")
    return parts[part]


def only(parts: Mapping[str, StoredTensor], known: tuple[str, ...], how: str) -> None:
    """Refuse a part that a weight stored in the way ``how`` does not have."""
    for part, stored in parts.items():
        if part not in known:
            raise stored.refused(f"is no part of a weight stored as {how}")
