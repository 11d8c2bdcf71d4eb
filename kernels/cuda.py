"""NVIDIA GPUs as the backends that use them see them: which there are, and why one is no use.

A reason is one sentence without its full stop, for a person. Where there is no sign of a driver
torch is not even imported, which takes seconds.
"""

import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from llmrun.kernels.ops import Sizes

KERNELS_NEED = (8, 0)
"""The least compute capability of our own kernels: they multiply bf16 on tensor cores."""

NOT_YET = {
    "rocm": "AMD GPUs (ROCm)",
    "hip": "AMD GPUs (ROCm)",
    "xpu": "Intel GPUs (XPU)",
    "mps": "Apple GPUs (MPS)",
}
"""Devices that people ask for, by name."""

LIBRARIES_BYTES = 512 << 20
"""What the vendor's libraries, modules of machine code, recorded graphs and split sums take."""

BLOCK_WEIGHTS = 64 << 20
"""Weights of a head that are dequantized at a time for prompts, at most."""

CHOICE_BYTES = 14
"""What choosing an id takes beside its logit: a scaled one, its id, and marks."""

_QUERY = "index,name,memory.total,memory.free,compute_cap,driver_version"
_SMI_S = 10
_MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """One GPU. ``index`` is the N of ``cuda:N``; ``capability`` e.g. ``9.0``."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: str


def why_not(device: str, least: tuple[int, int] | None = None) -> str | None:
    """Why torch cannot use ``cuda`` or ``cuda:N`` here; None if it can.

    ``least``: the compute capability that the asker's kernels need.
    """
    kind, _, index = device.partition(":")
    if kind in NOT_YET:
        return f"{NOT_YET[kind]} are not supported yet"
    if kind != "cuda" or (index and not index.isdigit()):
        return f"unknown device {device!r} (known: cpu, cuda, cuda:N)"
    if not has_nvidia_driver():
        return "no NVIDIA driver is installed"
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return _unusable(torch) or _unfit(torch, int(index or 0), least)


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Whether the system shows signs of an NVIDIA driver, WSL's and Jetson's included.

    False only where there can be none; on other systems than Linux and macOS always True.
    """
    if sys.platform == "darwin":
        return False
    if sys.platform != "linux":
        return True
    signs = ("dev/nvidiactl", "dev/dxg", "dev/nvhost-ctrl", "dev/nvgpu", "proc/driver/nvidia")
    return any((root / sign).exists() for sign in signs)


def cards() -> tuple[Card, ...]:
    """The GPUs of this machine, numbered as torch does if it can use them."""
    if not has_nvidia_driver():
        return ()
    if why_not("cuda") is not None:
        return tuple(card for card, _ in _asked_of_the_driver())
    import torch

    return tuple(_card(torch, index) for index in range(torch.cuda.device_count()))


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of the NVIDIA driver; None if there is none or it does not say."""
    if not has_nvidia_driver(root):
        return None
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    if found := re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)\s", text):
        return found[1]
    return next((version for _, version in _asked_of_the_driver()), None)


def working_bytes(sizes: Sizes) -> int:
    """Bytes a decoder takes on a GPU beside weights and cache, at most.

    fp32 activations (hidden states and two copies on the way, queries with keys and values,
    attention's output; gate, up and their product) and their inputs in bf16, logits, a copy and
    what it takes to choose from them, the largest linear or block of the head dequantized to bf16
    for prompts, and what libraries take.
    """
    heads = sizes.heads
    queries = heads.n_heads * heads.head_dim
    keys = heads.n_kv_heads * heads.head_dim
    row = 3 * sizes.hidden + 2 * queries + 2 * keys + 3 * sizes.intermediate
    inputs = max(sizes.hidden, queries, sizes.intermediate)
    activations = sizes.max_tokens * (4 * row + 2 * inputs)
    logits = (2 * 4 + CHOICE_BYTES) * sizes.max_rows * sizes.vocab
    dequantized = 2 * max(sizes.largest, min(sizes.hidden * sizes.vocab, BLOCK_WEIGHTS))
    return LIBRARIES_BYTES + activations + logits + dequantized


def _unusable(torch: ModuleType) -> str | None:
    version = torch.__version__
    if torch.version.hip is not None:
        return f"this torch ({version}) is built for AMD GPUs (ROCm), which are not supported yet"
    if torch.version.cuda is None:
        return f"this torch ({version}) is built without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says the same as the error
        if torch.cuda.is_available():
            return None
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            first = str(error).partition("\n")[0].partition(". ")[0]  # then come links
            return f"torch cannot start CUDA: {first.rstrip('.')}"
    return "torch finds no usable NVIDIA GPU"


def _unfit(torch: ModuleType, index: int, least: tuple[int, int] | None) -> str | None:
    count = torch.cuda.device_count()
    if index >= count:
        found = "is one CUDA device" if count == 1 else f"are {count} CUDA devices"
        return f"there {found}, numbered from 0"
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    has = f"{name} has compute capability {_dotted(capability)}"
    if least is not None and capability < least:
        return f"{has}, these kernels need {_dotted(least)} or newer"
    if not _has_code_for(capability, torch.cuda.get_arch_list()):
        return f"{has}, for which this torch ({torch.__version__}) is not built"
    return None


def _has_code_for(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Machine code (``sm_86``) serves its generation from there on, ``compute_90`` all later."""
    for name in built:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if found is None:
            return True  # of a kind we do not know: torch will say
        least = (int(found[2]), int(found[3]))
        if capability >= least and (found[1] == "compute" or capability[0] == least[0]):
            return True
    return not tuple(built)


def _card(torch: ModuleType, index: int) -> Card:
    about = torch.cuda.get_device_properties(index)
    free_bytes, _ = torch.cuda.mem_get_info(index)
    capability = _dotted((about.major, about.minor))
    return Card(index, about.name, about.total_memory, free_bytes, capability)


def _asked_of_the_driver() -> list[tuple[Card, str]]:
    """Cards and the driver's version, by its own tool; nothing if that is not there or fails."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_S, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [
        (Card(int(index), name, int(total) * _MIB, int(free) * _MIB, capability), version)
        for index, name, total, free, capability, version in (row for row in rows if len(row) == 6)
        if index.isdigit() and total.isdigit() and free.isdigit()
    ]


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
