"""The written quantization_config is the template, and the library understands it as meant."""

import json
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.utils.match import is_match

from llmrun.errors import InternalError
from llmrun.formats.pack_config import Packing, write_pack_config
from llmrun.kernels.forms import ROW

LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
DENSE_MODEL = [f"model.layers.{n}.{name}" for n in range(12) for name in LINEARS]
MOE_MODEL = [
    *(f"model.layers.{n}.self_attn.o_proj" for n in range(2)),
    *(f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(2) for e in range(3)),
]


def test_one_precision_is_the_template_for_what_the_model_has() -> None:
    written = write_pack_config(dict.fromkeys(DENSE_MODEL, Packing(4, 32)), ["lm_head"])
    assert written == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": [
                    "re:.*self_attn\\.(q|k|v|o|qkv)_proj$",
                    "re:.*(mlp|shared_experts?)\\.(gate|up|gate_up|down)_proj$",
                ],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "observer": "minmax",
                },
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
        "ignore": ["lm_head", "re:.*mlp\\.gate$", "re:.*shared_expert_gate$"],
        "kv_cache_scheme": None,
    }


def _mixed() -> dict[str, Packing]:
    packed = dict.fromkeys(DENSE_MODEL, Packing(4, 32))
    for layer in (0, 1, 10, 11):
        packed[f"model.layers.{layer}.mlp.down_proj"] = Packing(8, 128)
    packed["model.projector"] = Packing(8, ROW)
    return packed


def _moe() -> dict[str, Packing]:
    packed = dict.fromkeys(MOE_MODEL, Packing(8, 128))
    for expert in range(3):
        packed[f"model.layers.1.mlp.experts.{expert}.up_proj"] = Packing(4, 64)
    return packed


@pytest.mark.parametrize(
    "packed",
    [dict.fromkeys(MOE_MODEL, Packing(4, ROW)), _mixed(), _moe(), {"odd.name": Packing(8, 64)}],
)
def test_the_library_sees_every_module_in_exactly_its_group(packed: dict[str, Packing]) -> None:
    others = ["lm_head", "model.layers.0.mlp.gate", "model.layers.7.self_attn.q_proj"]
    others = [name for name in others if name not in packed]
    written = write_pack_config(packed, others)
    config = QuantizationConfig.model_validate(written)
    linear = torch.nn.Linear(1, 1)
    for module, packing in packed.items():
        own = [
            group.weights
            for group in config.config_groups.values()
            if is_match(module, linear, group.targets, config.ignore)
        ]
        assert len(own) == 1
        assert own[0].num_bits == packing.bits
        assert (own[0].group_size or ROW) == packing.group
        assert own[0].strategy == ("group" if packing.group else "channel")
    for module in others:
        assert is_match(module, linear, config.ignore)


@pytest.mark.parametrize(("experts", "others"), [(8, 4), (4, 8)])
def test_the_experts_group_is_the_first_that_speaks_of_experts(experts: int, others: int) -> None:
    """transformers takes it for all experts, and shared ones are "experts" by name as well."""
    packed = {
        "model.layers.0.mlp.shared_experts.up_proj": Packing(others, 32),
        "model.layers.0.mlp.experts.0.up_proj": Packing(experts, 32),
    }
    groups: Any = write_pack_config(packed, [])["config_groups"]
    first = next(
        group for group in groups.values() if any("experts" in name for name in group["targets"])
    )
    assert first["weights"]["num_bits"] == experts


def test_q034_asymmetric_weights_and_8_bits_are_packed() -> None:
    packed = {
        "model.layers.0.self_attn.q_proj": Packing(4, 32, symmetric=False),
        "model.layers.0.mlp.up_proj": Packing(8, 128),
    }
    written: Any = write_pack_config(packed, [])
    assert written["format"] == "pack-quantized"
    weights = [group["weights"] for group in written["config_groups"].values()]
    assert [(w["num_bits"], w["symmetric"], w["type"]) for w in weights] == [
        (4, False, "int"),
        (8, True, "int"),
    ]
    assert all(group["format"] == "pack-quantized" for group in written["config_groups"].values())
    QuantizationConfig.model_validate(written)


@pytest.mark.parametrize(
    "packed",
    [dict.fromkeys(MOE_MODEL, Packing(4, ROW)), _mixed(), {"odd.name": Packing(4, 64, False)}],
)
def test_q035_every_key_is_one_the_library_knows(packed: dict[str, Packing]) -> None:
    """Unknown keys of a group are refused by the library, those of the whole are not."""
    written: Any = write_pack_config(packed, ["lm_head"])
    config = QuantizationConfig.model_validate(written)
    for group in written["config_groups"].values():
        assert group.keys() <= set(QuantizationScheme.model_fields)
        assert group["weights"].keys() <= set(QuantizationArgs.model_fields)
    extra = set(QuantizationConfig.model_fields) | {"quantization_status"}
    assert written.keys() <= extra
    for name, group in config.config_groups.items():
        stated = written["config_groups"][name]["weights"]
        read = json.loads(group.weights.model_dump_json())
        assert {key: read[key] for key in stated} == stated


def test_a_config_that_would_not_say_what_was_packed_is_our_fault() -> None:
    packed = {f"model.layers.0.mlp.experts.{e}.up_proj": Packing(4, 32) for e in range(2)}
    packed["model.layers.0.mlp.experts.1.up_proj"] = Packing(8, 32)
    with pytest.raises(InternalError, match="would not describe"):
        write_pack_config(packed, [])
