"""Who may import whom, and which file owns which library."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "kernels": set(),
    "quant": {"kernels"},
    "text": set(),
    "store": set(),
    "formats": {"quant", "kernels"},
    "model": {"kernels", "quant"},
    "engine": {"model", "kernels"},
    "measure": {"engine"},
    "cli": {"measure", "engine", "model", "formats", "store", "text", "quant", "kernels"},
    "__main__": {"cli"},
}
OWNERS: dict[str, tuple[str, ...]] = {
    "typer": ("llmrun/cli/",),
    "click": ("llmrun/cli/",),
    "rich": ("llmrun/cli/",),
    "prompt_toolkit": ("llmrun/cli/",),
    "plotext": ("llmrun/cli/",),
    "huggingface_hub": ("llmrun/store/hub.py",),
    "tokenizers": ("llmrun/text/tokenizer.py",),
    "jinja2": ("llmrun/text/",),
    "safetensors": ("llmrun/formats/",),
    "bitsandbytes": ("kernels/bnb.py",),
    "triton": ("kernels/gpu/",),
    "ctypes": ("kernels/cpu/", "kernels/bnb.py", "llmrun/store/", "llmrun/text/"),
    "torch": (
        "kernels/reference/",
        "kernels/gpu/",
        "kernels/cuda.py",
        "kernels/bnb.py",
        "kernels/bnb_cuda/",
        "quant/",
    ),
    "numpy": ("quant/", "llmrun/measure/"),
    "transformers": (),
    "compressed_tensors": (),
    "gguf": (),
}


def sources() -> list[tuple[str, Path]]:
    """All product modules by their path from the repository root."""
    return [
        (path.relative_to(ROOT).as_posix(), path)
        for top in ("llmrun", "quant", "kernels")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]


def imported(path: Path) -> Iterator[str]:
    """Dotted names a module imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            if node.module == "llmrun":
                yield from (f"llmrun.{alias.name}" for alias in node.names)


def room_of(inner: str) -> str:
    """The room a module lives in."""
    return inner.removeprefix("llmrun/").split("/")[0].removesuffix(".py")


@pytest.mark.parametrize(("inner", "path"), sources(), ids=[inner for inner, _ in sources()])
def test_edges_and_owners(inner: str, path: Path) -> None:
    room = room_of(inner)
    for name in imported(path):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0] if first == "llmrun" else ""
        if target in ROOMS and target not in {room, "errors"} and room != "__init__":
            assert target in ROOMS[room], f"{inner} imports {name}"
        assert first not in OWNERS or inner.startswith(OWNERS[first] or ("-",)), (
            f"{inner} imports {name}"
        )
        assert first not in {"kernels", "quant"}, f"{inner} imports {name}"


def test_the_check_sees_a_forbidden_edge(tmp_path: Path) -> None:
    module = tmp_path / "store.py"
    module.write_text("def f():\n    import torch\n    from llmrun import cli\n")
    names = set(imported(module))
    assert {"torch", "llmrun.cli"} <= names
    assert "cli" not in ROOMS["store"]
    assert not "llmrun/store/hub.py".startswith(OWNERS["torch"])


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - {"errors", "quant", "kernels", "__main__"}))
def test_room_init_holds_a_docstring_only(room: str) -> None:
    tree = ast.parse((ROOT / "llmrun" / room / "__init__.py").read_text(encoding="utf-8"))
    assert len(tree.body) == 1
    assert ast.get_docstring(tree)


def mentioned(path: Path) -> Iterator[str]:
    """Dotted attributes a module mentions, such as ``os.environ``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def environment_readers() -> list[str]:
    """Modules that read environment variables."""
    return [
        inner for inner, path in sources() if {"os.environ", "os.getenv"} & set(mentioned(path))
    ]


def test_environment_is_read_in_cli_only() -> None:
    # store/pypi.py and text's render child hand a cleaned copy to their child process.
    allowed = ("llmrun/cli/", "llmrun/store/pypi.py", "llmrun/text/")
    assert [inner for inner in environment_readers() if not inner.startswith(allowed)] == []
