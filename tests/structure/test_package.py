"""The package as installed: names, lean imports, contents of the wheel."""

import importlib.util
import os
import shutil
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


def wheel(out: Path, *options: str, **environment: str) -> Path:
    """Build the wheel of this tree without fetching anything, so CMake must be here already."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake on the path")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", *options]
    env = {**os.environ, **environment}
    subprocess.run([*build, "-w", str(out), str(ROOT)], check=True, capture_output=True, env=env)
    (built,) = out.glob("*.whl")
    return built


def check_contents(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"llmrun"}
    for needed in ("models.toml", "py.typed", "quant/int4.py", "kernels/ops.py", "cli/app.py"):
        assert f"llmrun/{needed}" in names
    sources = (".c", ".cpp", ".h", ".inc", ".o", "CMakeLists.txt")
    assert [name for name in names if name.endswith(sources)] == []


@pytest.mark.slow
def test_without_a_working_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    # A build folder of its own: CMake remembers the compiler it found in the usual one.
    folder = f"--config-settings=build-dir={tmp_path / 'build'}"
    built = wheel(tmp_path, folder, CXX=shutil.which("false") or "no-such-compiler")
    assert built.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(built).namelist()
    check_contents(names)
    assert [name for name in names if Path(name).suffix in BUILT] == []


@pytest.mark.slow
@pytest.mark.timeout(600)  # the whole library, on a machine that has not built it yet
def test_with_a_compiler_the_wheel_holds_the_library(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on the path")
    built = wheel(tmp_path)
    assert "-py3-none-" in built.name  # any Python: the library is opened with ctypes
    assert not built.name.endswith("-any.whl"), "the library does not compile: `pip install -v .`"
    names = zipfile.ZipFile(built).namelist()
    check_contents(names)
    (library,) = [name for name in names if Path(name).suffix in BUILT]
    assert library.startswith("llmrun/kernels/cpu/")
    assert "llmrun_cpu" in library
