"""A plain checkout made importable: links that put quant/ and kernels/ where imports expect them.

An installed llmrun is not used, and nothing is installed; the native CPU library is not needed.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lay(folder: Path) -> Path:
    """Make the package ``llmrun`` in a new folder, and return what belongs on PYTHONPATH."""
    tree = folder / "llmrun"
    tree.mkdir(parents=True)
    parts = [*(ROOT / "llmrun").iterdir(), ROOT / "quant", ROOT / "kernels", ROOT / "models.toml"]
    for part in parts:
        if part.name != "__pycache__":
            (tree / part.name).symlink_to(part)
    return folder
