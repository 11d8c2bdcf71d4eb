"""Shared material: the starter model, and the same weights as a Hugging Face folder.

The starter is fetched through the product's own store into the user's cache, once for all runs.
The folder is made from it with independent tools (gguf, transformers), anew in each session.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

# Kernels for GPUs run in Triton's interpreter here, which is decided when it is first imported.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from llmrun.cli.fetching import fetch_model
from llmrun.cli.settings import Settings, read_settings
from llmrun.store.progress import SilentProgress

STARTER = "smollm2-135m"
HEAD_DIM = 64


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> None:
    """Tests send Ctrl-C and hang-ups; a run in a script's background, or by nohup, ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def user_settings() -> Settings:
    """The settings of whoever runs the tests, so that their store is used."""
    return read_settings(os.environ)


@pytest.fixture(scope="session")
def starter_gguf(user_settings: Settings) -> Path:
    """The starter model's file."""
    return fetch_model(STARTER, user_settings, SilentProgress()).path


@pytest.fixture(scope="session")
def starter_state(starter_gguf: Path) -> dict[str, torch.Tensor]:
    """The starter's exact weights in fp32 under their Hugging Face names, by gguf's own
    dequantization."""
    return support("real_models").state_of(starter_gguf, paired_heads=HEAD_DIM)


@pytest.fixture(scope="session")
def starter_folder(
    starter_gguf: Path,
    starter_state: dict[str, torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The starter as a Hugging Face checkpoint in bf16, as a publisher would have it: 269 MB.

    Config and tokenizer come from transformers' own conversion.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    out = tmp_path_factory.mktemp("starter") / "hf"
    source = {"gguf_file": starter_gguf.name}
    config = AutoConfig.from_pretrained(starter_gguf.parent, **source)
    config.tie_word_embeddings = True
    config.dtype = "bfloat16"
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(out)
    state = {name: t.to(torch.bfloat16).contiguous() for name, t in starter_state.items()}
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(starter_gguf.parent, **source).save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def gemma_gguf(user_settings: Settings) -> Path:
    """Gemma 3 270M: sliding windows of 512, norms on queries and keys, 262,144 tokens."""
    return _real_model("GEMMA3", user_settings)


@pytest.fixture(scope="session")
def qwen_gguf(user_settings: Settings) -> Path:
    """Qwen2.5-Coder-1.5B-Instruct, 1.1 GB; for tests marked ``large`` only."""
    return _real_model("QWEN_CODER", user_settings)


def _real_model(name: str, settings: Settings) -> Path:
    models = support("real_models")
    folder = settings.store_root.parent / "llmrun-test-models"
    fetched: Path = models.fetch(getattr(models, name), folder)
    return fetched


@pytest.fixture(scope="session")
def real_models() -> ModuleType:
    """Fetching real models, and their exact weights."""
    return support("real_models")


@pytest.fixture(scope="session")
def hub_module() -> ModuleType:
    """A hub on loopback with switches for faults."""
    return support("hub_server")


def support(name: str) -> ModuleType:
    """A module of tests/support, loaded by path."""
    if name in sys.modules:
        return sys.modules[name]
    path = Path(__file__).parent / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
