"""Which units get 8 bits: their errors against transformers, and a case that is known."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmrun.cli.calibration import SEQUENCE_TOKENS, Calibration, drawn
from llmrun.cli.choice import Choice
from llmrun.cli.source import Source, open_source
from llmrun.cli.upgrades import SEQUENCES, TRIED_TOKENS, errors_of_units, find_widened
from llmrun.errors import ModelFileError
from llmrun.kernels.forms import Dense
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import architectures
from llmrun.quant.dequantize import dequantize
from llmrun.quant.mixing import Unit
from llmrun.quant.roles import Role
from llmrun.quant.scheme import find

PARTS = {
    Role.ATTN_QKV: ("q_proj", "k_proj", "v_proj"),
    Role.ATTN_OUT: ("o_proj",),
    Role.GATE_UP: ("gate_proj", "up_proj"),
    Role.DOWN: ("down_proj",),
}
TEXT = Calibration(tuple(tuple((7 * i + s * s) % 131 for i in range(90)) for s in range(4)), "some")


def made(folder: Path, name: str = "llama", **changes: Any) -> tuple[Any, Source]:
    torch.manual_seed(0)
    wanted = deepcopy(dict(architectures()[name].tiny[0])) | changes
    config = CONFIG_MAPPING[wanted["model_type"]](**wanted)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model, open_source(folder)


def chosen(scheme: str = "int4") -> Choice:
    return Choice(find(scheme), scheme, "")


def untold(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def states(model: Any, layer: int, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Hidden states [T, D] behind a layer."""
    seen = []

    def hook(module: Any, args: Any, output: Any) -> None:
        seen.append(output if torch.is_tensor(output) else output[0])

    with torch.no_grad():
        handle = model.model.layers[layer].register_forward_hook(hook)
        for ids in sequences:
            model(torch.tensor([ids]))
        handle.remove()
    return torch.cat([part[0] for part in seen]).double()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_errors_are_those_of_each_unit_quantized_alone(name: str, tmp_path: Path) -> None:
    model, source = made(tmp_path, name)
    told: list[tuple[int, int]] = []
    drawn_ids = drawn(source.binding.spec.vocab, SEQUENCES * SEQUENCE_TOKENS).sequences
    sequences = [ids[:TRIED_TOKENS] for ids in drawn_ids]
    errors = errors_of_units(
        source, chosen(), None, TorchBackend("cpu", 1), lambda _, n, total: told.append((n, total))
    )
    n_layers = len(source.binding.spec.layers)
    assert set(errors) == {Unit(layer, role) for layer in range(n_layers) for role in PARTS}
    assert told == [(layer + 1, n_layers) for layer in range(n_layers)]
    assert len(set(errors.values())) == len(errors)
    for unit, error in errors.items():
        right = states(model, unit.layer, sequences)
        other = deepcopy(model)
        for part in PARTS[unit.role]:
            canonical = f"model.layers.{unit.layer}.{_block(part)}.{part}.weight"
            form = source.layer(unit.layer)[canonical]
            assert isinstance(form, Dense)
            weight = as_tensor(dequantize(find("int4").quantize(form.w)))
            other.get_parameter(canonical).data = weight.float()
        wrong = states(other, unit.layer, sequences) - right
        expected = float((wrong.square().sum(-1) / right.square().sum(-1)).mean())
        assert error == pytest.approx(expected, rel=0.01), unit


def _block(part: str) -> str:
    return "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"


def test_a_unit_that_suffers_most_is_widened_first(tmp_path: Path) -> None:
    model, _ = made(tmp_path, num_hidden_layers=4)
    layer = model.model.layers[2]
    with torch.no_grad():
        # One weight of each group is large and its input small: it counts like any other, but the
        # others lose the group's scale to it.
        for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
            weight[:, ::32] *= 40
        layer.post_attention_layernorm.weight[::32] /= 40
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    share = 1 / 9 / 4  # of all weights: gate and up of one layer
    backend = TorchBackend("cpu", 1)
    for calibration in (None, TEXT):
        errors = errors_of_units(source, chosen("int4-g64"), calibration, backend, untold)
        planted = Unit(2, Role.GATE_UP)
        others = [error for unit, error in errors.items() if unit != planted]
        assert errors[planted] > 3 * max(others)
        widened, note = find_widened(
            source, chosen("int4-g64"), 4.25 + 4 * 16 * share, calibration, lambda: backend, untold
        )
        assert planted in widened
        read = "ids drawn at random" if calibration is None else "some"
        assert note.startswith(f"{len(widened)} of 16 units get 8 bits (")
        assert note.endswith(f"tried on {read}")


def test_q10_states_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    model, _ = made(tmp_path)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match="layer 1 attn_out are not finite"):
        errors_of_units(open_source(tmp_path), chosen(), None, TorchBackend("cpu", 1), untold)
