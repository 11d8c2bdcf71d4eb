"""Why an NVIDIA GPU cannot be used, asked of torches and drivers that are not here."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.kernels import cuda
from llmrun.kernels.cuda import KERNELS_NEED, Card, why_not, working_bytes
from llmrun.kernels.ops import Heads, Sizes

GIB = 1 << 30
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CARDS = {
    "NVIDIA H200": ((9, 0), 141),
    "NVIDIA A100-SXM4-80GB": ((8, 0), 80),
    "NVIDIA L40S": ((8, 9), 48),
    "NVIDIA GeForce RTX 4090": ((8, 9), 24),
    "NVIDIA GeForce RTX 5090": ((12, 0), 32),
    "Tesla T4": ((7, 5), 15),
    "Tesla P100": ((6, 0), 16),
}


def torch_with(
    *names: str,
    built_for: str | None = "12.8",
    hip: str | None = None,
    error: Exception | None = None,
    archs: tuple[str, ...] = ARCHS,
) -> SimpleNamespace:
    """A torch that sees these cards."""

    def is_available() -> bool:
        if error is not None:
            warnings.warn(str(error), stacklevel=1)
        return error is None and bool(names)

    def init() -> None:
        raise error or RuntimeError("No CUDA GPUs are available")

    def properties(index: int) -> SimpleNamespace:
        (major, minor), gigabytes = CARDS[names[index]]
        return SimpleNamespace(
            name=names[index], major=major, minor=minor, total_memory=gigabytes * GIB
        )

    return SimpleNamespace(
        __version__="2.9.0",
        version=SimpleNamespace(cuda=built_for, hip=hip),
        cuda=SimpleNamespace(
            is_available=is_available,
            init=init,
            device_count=lambda: len(names),
            get_device_name=lambda index: names[index],
            get_device_capability=lambda index: CARDS[names[index]][0],
            get_arch_list=lambda: list(archs),
            get_device_properties=properties,
            mem_get_info=lambda index: (GIB, CARDS[names[index]][1] * GIB),
        ),
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """A driver is there, and this torch."""

    def install(torch: Any) -> None:
        monkeypatch.setattr(cuda, "has_nvidia_driver", lambda root=None: True)
        monkeypatch.setitem(sys.modules, "torch", torch)

    return install


@pytest.mark.parametrize("name", [name for name, (least, _) in CARDS.items() if least >= (8, 0)])
def test_a_card_our_kernels_serve(name: str, driver: Callable[[Any], None]) -> None:
    driver(torch_with(name))
    for device in ("cuda", "cuda:0"):
        assert why_not(device) is None
        assert why_not(device, KERNELS_NEED) is None
    assert why_not("cuda:1") == "there is one CUDA device, numbered from 0"


def test_a_card_too_old_for_our_kernels_but_not_for_torch(driver: Callable[[Any], None]) -> None:
    driver(torch_with("NVIDIA H200", "Tesla T4"))
    assert why_not("cuda:1") is None
    reason = why_not("cuda:1", KERNELS_NEED)
    assert reason == "Tesla T4 has compute capability 7.5, these kernels need 8.0 or newer"
    assert why_not("cuda:0", KERNELS_NEED) is None
    assert why_not("cuda:2") == "there are 2 CUDA devices, numbered from 0"


@pytest.mark.parametrize(
    ("name", "archs", "served"),
    [
        ("Tesla P100", ARCHS, False),
        ("Tesla P100", ("sm_50", "sm_60"), True),
        ("NVIDIA GeForce RTX 4090", ("sm_80", "sm_90"), True),  # 8.0's code runs on 8.9
        ("NVIDIA A100-SXM4-80GB", ("sm_86", "sm_90"), False),  # 8.6's does not on 8.0
        ("NVIDIA GeForce RTX 5090", ("sm_80", "sm_90"), False),
        ("NVIDIA GeForce RTX 5090", ("sm_80", "compute_90"), True),  # compiled on the way
        ("NVIDIA H200", ("sm_80", "sm_90a"), True),
        ("NVIDIA H200", (), True),
    ],
)
def test_a_torch_without_code_for_the_card(
    name: str, archs: tuple[str, ...], served: bool, driver: Callable[[Any], None]
) -> None:
    driver(torch_with(name, archs=archs))
    reason = why_not("cuda")
    assert (reason is None) == served
    assert served or "is not built" in str(reason)


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (torch_with(built_for=None), ("2.9.0", "built without CUDA")),
        (torch_with(built_for=None, hip="6.4"), ("AMD", "not supported yet")),
        (torch_with(), ("torch cannot start CUDA: No CUDA GPUs are available",)),
        (
            torch_with(
                "NVIDIA H200",
                error=RuntimeError(
                    "The NVIDIA driver on your system is too old (found version 11040). Please "
                    "update your GPU driver by downloading and installing a new version."
                ),
            ),
            ("The NVIDIA driver on your system is too old (found version 11040)",),
        ),
        (None, ("torch cannot be imported",)),
    ],
)
def test_a_torch_that_cannot_use_the_card(
    torch: Any, words: tuple[str, ...], driver: Callable[[Any], None]
) -> None:
    driver(torch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reason = str(why_not("cuda"))
    assert all(word in reason for word in words)
    assert "\n" not in reason
    assert "update your" not in reason


def test_without_a_driver_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "has_nvidia_driver", lambda root=None: False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert why_not("cuda") == "no NVIDIA driver is installed"
    assert cuda.cards() == ()
    assert cuda.driver_version() is None


@pytest.mark.parametrize("device", ["mps", "xpu", "xpu:1", "rocm", "hip"])
def test_other_makers(device: str) -> None:
    assert "not supported yet" in str(why_not(device))


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:-1"])
def test_unknown_devices(device: str) -> None:
    assert repr(device) in str(why_not(device))


@pytest.mark.parametrize("sign", ["dev/nvidiactl", "dev/dxg", "proc/driver/nvidia"])
def test_signs_of_a_driver(sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert not cuda.has_nvidia_driver(tmp_path)
    (tmp_path / sign).mkdir(parents=True)
    assert cuda.has_nvidia_driver(tmp_path)


def test_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cuda.has_nvidia_driver(tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not cuda.has_nvidia_driver(tmp_path)


SMI = "0, NVIDIA H200, 143771, 143000, 9.0, 570.86.15\n1, Tesla T4, 15360, [N/A], 7.5, 570.86.15\n"


def test_cards_as_torch_numbers_them(driver: Callable[[Any], None]) -> None:
    driver(torch_with("Tesla T4", "NVIDIA H200"))
    assert cuda.cards() == (
        Card(0, "Tesla T4", 15 * GIB, GIB, "7.5"),
        Card(1, "NVIDIA H200", 141 * GIB, GIB, "9.0"),
    )


def test_cards_and_version_as_the_driver_tells(
    driver: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver(torch_with(built_for=None))
    done = SimpleNamespace(stdout=SMI)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert cuda.cards() == (Card(0, "NVIDIA H200", 143771 << 20, 143000 << 20, "9.0"),)
    assert cuda.driver_version(tmp_path) == "570.86.15"

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert cuda.cards() == ()
    assert cuda.driver_version(tmp_path) is None


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build",
    ],
)
def test_the_version_of_the_driver(
    line: str, driver: Callable[[Any], None], tmp_path: Path
) -> None:
    driver(torch_with())
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(f"{line}\nGCC version: gcc version 12.2.0\n")
    assert cuda.driver_version(tmp_path) == "570.86.15"


def test_the_work_of_a_prompt_is_counted_to_the_last_product() -> None:
    """Hidden states, queries with keys and values, attention, and three of the MLP's width at
    once; what dequantizes a head; and each row's logits with what chooses from them."""
    heads, tokens, hidden, inner, vocab = Heads(32, 8, 128), 4096, 4096, 14336, 128256
    sizes = Sizes(tokens, 1, hidden, inner, vocab, heads, inner * hidden)
    floats = hidden + (32 + 2 * 8) * 128 + 32 * 128 + 3 * inner
    most = 4 * tokens * floats + 2 * tokens * inner
    head = 2 * (64 << 20)
    needed = most + head + (4 + 14) * vocab
    assert needed <= working_bytes(sizes) - cuda.LIBRARIES_BYTES <= 1.2 * needed
    tiny = Sizes(tokens, 1, 64, 128, 1000, heads, 64 * 128)
    wide = replace(tiny, vocab=2000)
    assert working_bytes(wide) - working_bytes(tiny) == 1000 * (22 + 2 * 64)


def test_what_a_decoder_works_in() -> None:
    eight = Sizes(256, 16, 4096, 14336, 128256, Heads(32, 8, 128), 14336 * 4096)
    assert 0.6 * GIB < working_bytes(eight) < 0.9 * GIB
    long = Sizes(8192, 16, 4096, 14336, 128256, Heads(32, 8, 128), 14336 * 4096)
    assert 2 * GIB < working_bytes(long) < 4 * GIB
