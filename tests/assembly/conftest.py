"""Tiny models on disk, with their transformers twins, for the seams between rooms."""

import io
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmrun.cli import app
from llmrun.cli.settings import Settings, read_settings
from llmrun.model.architecture import find

Folder = Callable[..., Path]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A store of its own, offline."""
    environ = {"LLMRUN_HOME": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    return read_settings(environ, home=tmp_path)


def state_of(config: LlamaConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Make a model folder; ``dtypes`` maps parts of names to dtypes, others are bf16."""

    def make(dtypes: dict[str, torch.dtype] | None = None, **changes: Any) -> Path:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(
            **{"vocab_size": 260, "max_position_embeddings": 128, **sizes, **heads, **changes}
        )
        state = state_of(config)
        for name, tensor in state.items():
            wanted = [d for part, d in (dtypes or {}).items() if part in name]
            state[name] = tensor.to(wanted[0] if wanted else torch.bfloat16).contiguous()
        out = tmp_path / "model"
        out.mkdir()
        save_file(state, out / "model.safetensors", metadata={"format": "pt"})
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = "bfloat16"
        config.save_pretrained(out)
        write_tokenizer(out)
        return out

    return make


@pytest.fixture
def tiny_model(tmp_path: Path) -> Folder:
    """Make a tiny bf16 model of any architecture, with a tokenizer beside it."""

    def make(model_type: str, number: int = 0, **changes: Any) -> Path:
        torch.manual_seed(0)
        tiny = deepcopy(dict(find(model_type).tiny[number]))
        config = CONFIG_MAPPING[model_type](**{**tiny, "vocab_size": 260, **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():  # biases start as zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
        out = tmp_path / model_type
        model.save_pretrained(out)
        write_tokenizer(out)
        return out

    return make


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a whole command in this process, with pipes; ``asked`` comes from standard input."""

    def run(*arguments: str, asked: bytes = b"") -> Result:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "12")
        monkeypatch.setenv("LLMRUN_HOME", str(settings.store_root))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(asked)))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as left:
            app.main([*arguments, "--offline"])
        said = [wrapper.buffer.getvalue().decode(errors="replace") for wrapper in (out, err)]  # type: ignore[attr-defined]
        return Result(int(left.value.code or 0), *said)

    return run


def write_tokenizer(out: Path) -> None:
    """A byte-level tokenizer of 256 bytes and three control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.save(str(out / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (out / "tokenizer_config.json").write_text(json.dumps(facts))
