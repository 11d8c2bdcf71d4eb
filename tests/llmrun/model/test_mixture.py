"""What GGUF files say of mixtures of experts: read, or refused by name."""

import pytest

from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Form
from llmrun.model.gguf import GgufFile
from llmrun.model.mixture import mixture_config, same_width

KEYS: dict[str, object] = {"expert_count": 32, "expert_used_count": 4}


def opened(keys: dict[str, object]) -> GgufFile:
    def read(name: str) -> Form:
        raise AssertionError(name)

    metadata = {f"some.{key}": value for key, value in keys.items()}
    return GgufFile(metadata | {"general.architecture": "some"}, {}, read, {})


def read_all(file: GgufFile) -> None:
    mixture_config(file, {}, normalize=True)
    file.finish()


def test_counts_are_read() -> None:
    config: dict[str, object] = {}
    file = opened(KEYS | {"expert_weights_norm": True, "expert_shared_feed_forward_length": 0})
    mixture_config(file, config, normalize=True)
    file.finish()
    assert config == {"num_local_experts": 32, "num_experts_per_tok": 4}


@pytest.mark.parametrize(
    ("normalize", "gating", "supported"),
    [(True, 1, True), (True, 3, True), (False, 1, True), (False, 3, False), (True, 2, False)],
)
def test_routers(normalize: bool, gating: int, supported: bool) -> None:
    # 1: softmax; 2: sigmoid; 3: softmax of the chosen, which is the first one normalized.
    file = opened(KEYS | {"expert_gating_func": gating})
    if supported:
        mixture_config(file, {}, normalize=normalize)
        file.finish()
        return
    with pytest.raises(ModelFileError, match="expert_gating_func"):
        mixture_config(file, {}, normalize=normalize)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_weights_norm", False),
        ("expert_weights_scale", 2.5),
        ("expert_shared_count", 1),
        ("expert_shared_feed_forward_length", 512),
        ("expert_group_count", 4),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=f"some.{key}"):
        read_all(opened(KEYS | {key: value}))


def test_experts_of_another_width_than_the_mlp_are_refused() -> None:
    same_width(opened({"expert_feed_forward_length": 96}), {"intermediate_size": 96})
    same_width(opened({}), {"intermediate_size": 96})
    with pytest.raises(ModelFileError, match="expert_feed_forward_length"):
        same_width(opened({"expert_feed_forward_length": 64}), {"intermediate_size": 96})
