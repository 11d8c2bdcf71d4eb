"""Configs as GGUF files hold them, and the names of their tensors by the gguf package."""

from collections.abc import Callable, Mapping, Sequence

import gguf
import pytest
import torch

from llmrun.kernels.forms import Dense
from llmrun.kernels.reference.arrays import to_host
from llmrun.model.architecture import Config, find_gguf
from llmrun.model.gguf import GgufFile


@pytest.fixture(scope="session")
def gguf_config() -> Callable[..., dict[str, object]]:
    """``(name, metadata, tensors)`` to the config llmrun makes of such a file.

    Keys of the metadata without the architecture's name; tensors are shapes, or the numbers of an
    f32 vector.
    """

    def make(
        name: str, metadata: Config, tensors: Mapping[str, Sequence[float]]
    ) -> dict[str, object]:
        whole = {f"{name}.{key}": value for key, value in metadata.items()}
        whole["general.architecture"] = name
        shapes = {
            tensor: (len(value),) if isinstance(value, list) else tuple(map(int, value))
            for tensor, value in tensors.items()
        }
        _, form = find_gguf(whole)
        file = GgufFile(
            whole, shapes, lambda tensor: Dense(to_host(torch.tensor(tensors[tensor]))), form.names
        )
        config = form.config(file)
        file.finish()
        return config

    return make


@pytest.fixture(scope="session")
def named_back() -> Callable[[gguf.MODEL_ARCH, Sequence[str]], None]:
    """Asserts that Hugging Face names become GGUF names by the gguf package, and these by llmrun
    the same Hugging Face names again. Names are parts of layer 1."""

    def check(arch: gguf.MODEL_ARCH, parts: Sequence[str]) -> None:
        name = gguf.MODEL_ARCH_NAMES[arch]
        metadata = {"general.architecture": name}
        _, form = find_gguf(metadata)
        file = GgufFile(metadata, {}, lambda tensor: Dense(to_host(torch.zeros(1))), form.names)
        names = gguf.get_tensor_name_map(arch, 2)
        wanted = [f"model.layers.1.{part}.weight" for part in parts]
        stored = [names.get_name(one, try_suffixes=(".weight",)) for one in wanted]
        assert None not in stored, dict(zip(wanted, stored, strict=True))
        assert [file.published_name(str(one)) for one in stored] == wanted

    return check
