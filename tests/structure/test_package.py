"""The package as installed: names, lean imports, contents of the wheel."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = {".so", ".dylib", ".dll", ".pyd"}


def loaded_after(code: str, *names: str) -> list[str]:
    """Which of these modules are loaded after running code in a fresh interpreter."""
    ask = f"{code}\nimport sys; print(*sorted({set(names)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_no_top_init() -> None:
    assert not (ROOT / "quant/__init__.py").exists()
    assert not (ROOT / "kernels/__init__.py").exists()


@pytest.mark.parametrize("name", ["kernels", "quant"])
def test_not_ours(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


def test_no_built_files() -> None:
    built = [p for top in ("llmrun", "quant", "kernels") for p in (ROOT / top).rglob("*")]
    assert [p for p in built if p.suffix in BUILT] == []


def test_lean_import() -> None:
    assert loaded_after("import llmrun", "torch", "typer", "rich") == []


def test_lean_command_line() -> None:
    heavy = ("torch", "numpy", "huggingface_hub", "bitsandbytes", "tokenizers", "transformers")
    assert loaded_after("import llmrun.cli.app", *heavy) == []


@pytest.mark.parametrize(
    "module",
    [
        "llmrun.model.decoder",
        "llmrun.model.binding",
        "llmrun.engine.generate",
        "llmrun.measure.bench",
        "llmrun.formats.open",
        "llmrun.store.fetch",
        "llmrun.text.prompt",
        "llmrun.quant.scheme",
        "llmrun.quant.recipe",
        "llmrun.kernels.dispatch",
        "llmrun.cli.assemble",
    ],
)
def test_arrays_stay_opaque(module: str) -> None:
    assert loaded_after(f"import {module}", "torch", "numpy", "bitsandbytes") == []


def test_every_backend_and_scheme_is_listed_without_torch() -> None:
    code = (
        "from llmrun.kernels import dispatch; from llmrun.quant.scheme import schemes\n"
        "assert dispatch.backends() and dispatch.candidates('cpu') and schemes()"
    )
    assert loaded_after(code, "torch", "numpy", "bitsandbytes") == []


@pytest.mark.slow
def test_wheel_contents(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"llmrun"}
    for needed in ("models.toml", "py.typed", "quant/int4.py", "kernels/ops.py", "cli/app.py"):
        assert f"llmrun/{needed}" in names
    assert [name for name in names if name.endswith((".c", ".cpp", ".h"))] == []
