"""The one door to bitsandbytes: same codes, nothing printed, errors mapped, imported late."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmrun.errors import InternalError, UnavailableError
from llmrun.kernels import bnb
from llmrun.kernels.host import DType, HostArray


def host_array(tensor: torch.Tensor) -> HostArray:
    raw = tensor.contiguous().view(torch.uint8).flatten().tolist()
    dtype = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
    return HostArray(dtype[tensor.dtype], tuple(tensor.shape), memoryview(bytearray(raw)))


def test_available_here() -> None:
    assert bnb.available() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(1, 64), (5, 96), (33, 130), (3, 2)])
def test_equals_one_call_of_bitsandbytes(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in chunks and with a short last block."""
    from bitsandbytes import functional

    monkeypatch.setattr(bnb, "_CHUNK", 256)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, state = functional.quantize_4bit(tensor, blocksize=64, quant_type=kind)
    codes, absmax, table = bnb.quantize_4bit(host_array(tensor), kind)
    assert codes.shape == (tensor.numel() // 2,)
    assert bytes(codes.data) == bytes(packed.flatten().tolist())
    assert absmax.shape == tuple(state.absmax.shape)
    assert torch.frombuffer(absmax.data, dtype=torch.float32).equal(state.absmax)
    assert torch.frombuffer(table.data, dtype=torch.float32).equal(state.code)


def test_the_chunk_is_whole_blocks() -> None:
    assert bnb._CHUNK % bnb.BLOCK == 0


def test_an_odd_number_of_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="odd"):
        bnb.quantize_4bit(host_array(torch.ones(3, 3)), "nf4")


def test_a_failure_inside_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("no kernel")

    broken = SimpleNamespace(functional=SimpleNamespace(get_4bit_type=fail, quantize_4bit=fail))
    monkeypatch.setattr(bnb, "_import", lambda: broken)
    with pytest.raises(InternalError, match="no kernel") as caught:
        bnb.quantize_4bit(host_array(torch.ones(2, 64)), "nf4")
    assert isinstance(caught.value.__cause__, RuntimeError)


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    prefix = f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}; "
    return subprocess.run(
        [sys.executable, "-c", prefix + code], capture_output=True, text=True, check=True
    )


def test_importing_the_module_imports_nothing_heavy() -> None:
    done = run(
        "import llmrun.kernels.bnb; print(sorted({'torch', 'bitsandbytes'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]"


def test_a_broken_install_is_a_reason_and_quiet(tmp_path: Path) -> None:
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import logging, warnings\n"
        "logging.getLogger('bitsandbytes.cextension').error('library load error')\n"
        "warnings.warn('compiled without GPU support')\n"
        "raise OSError('libbitsandbytes_cpu.so: cannot open')\n"
    )
    code = (
        "import logging; from llmrun.kernels import bnb; print(bnb.available());"
        "logger = logging.getLogger('bitsandbytes');"
        "print(logger.level, logger.propagate, logger.handlers)"
    )
    done = run(code, tmp_path)
    assert done.stdout.splitlines() == [
        "bitsandbytes cannot be imported: libbitsandbytes_cpu.so: cannot open",
        "0 True []",
    ]
    assert done.stderr == ""


def test_importing_never_reaches_for_remote_kernels(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("print('would download')\n")
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "functional.py").write_text("")
    (package / "__init__.py").write_text(
        "try:\n    import kernels\nexcept ImportError:\n    print('refused')\n"
    )
    code = "from llmrun.kernels import bnb; print(bnb.available()); import kernels"
    done = run(code, tmp_path)
    assert done.stdout.splitlines() == ["refused", "None", "would download"]


def test_a_missing_package_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "cannot be imported" in str(bnb.available())
    with pytest.raises(UnavailableError) as caught:
        bnb.quantize_4bit(host_array(torch.ones(2, 64)), "nf4")
    assert "int4" in caught.value.next_step


@pytest.mark.slow
def test_quantizing_prints_nothing() -> None:
    code = (
        "from llmrun.kernels import bnb, host;"
        "bnb.quantize_4bit(host.empty(host.DType.BF16, (4, 64)), 'fp4')"
    )
    done = run(code)
    assert (done.stdout, done.stderr) == ("", "")
