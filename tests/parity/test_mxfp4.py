"""gpt-oss with MXFP4 experts, as it is published: our logits against transformers'.

Theirs are of the weights that transformers' own conversion makes of the same blocks and scales.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmrun.cli.source import open_source
from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import find
from llmrun.model.decoder import Decoder, build

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
N_TOKENS = 40


def encoded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks u8 [E, N, K/32, 16] and scales u8 [E, N, K/32] of a weight [E, N, K]."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2  # 6 = 1.5 * 2**2 is the largest number
    scaled = groups / exponent.exp2().unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


@dataclass(frozen=True)
class Published:
    """A folder with MXFP4 experts, and transformers' model of the same numbers."""

    folder: Path
    model: Any
    ids: list[int]

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([self.ids])).logits[0]
        return logits


@pytest.fixture(scope="module", params=[64, 96], ids=["as wide as the model", "wider"])
def published(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Published:
    torch.manual_seed(0)
    tiny = dict(find("gpt_oss").tiny[0]) | {"intermediate_size": request.param}
    config = GptOssConfig(**tiny)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder: Path = tmp_path_factory.mktemp("gpt-oss")
    packed = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                continue
            # Large enough for some activations to be clamped.
            blocks, scales = encoded((10 * parameter).mT.contiguous())
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    plain = {n: t for n, t in state.items() if f"{n}_blocks" not in packed}
    save_file(plain | packed, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(described))
    ids = torch.randint(0, config.vocab_size, (N_TOKENS,)).tolist()
    return Published(folder, model, ids)


def decoder(folder: Path, backend: Any) -> Decoder:
    source = open_source(folder)
    tensors = source.tensors(lambda _, form: form)
    spec = source.binding.spec
    return build(spec, tensors, backend, max_tokens=N_TOKENS, max_rows=N_TOKENS)


def logits(ours: Decoder, ids: list[int]) -> torch.Tensor:
    spec, backend = ours.spec, ours.backend
    cache = [backend.kv_layer(1, N_TOKENS, spec.heads, "f32") for _ in spec.layers]
    got = ours.forward(ids, [Span(0, 0, N_TOKENS, 0)], cache, list(range(N_TOKENS)))
    host = backend.to_host(got, N_TOKENS)
    return torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)


def error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative error of each position."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def test_logits_equal_transformers(published: Published) -> None:
    ours = decoder(published.folder, TorchBackend("cpu", 1))
    assert float(error(logits(ours, published.ids), published.logits()).max()) < 1e-4


def test_native_logits_equal_transformers(published: Published) -> None:
    if reason := native.problem():
        pytest.skip(reason)
    want = published.logits()
    exact = decoder(published.folder, CpuBackend(2, exact=True))
    assert float(error(logits(exact, published.ids), want).max()) < 2e-3
    # Activations of 8 bits, which now and then choose another expert.
    rounded = decoder(published.folder, CpuBackend(2))
    assert float(error(logits(rounded, published.ids), want).median()) < 4e-2


def test_some_activations_are_clamped(published: Published) -> None:
    # Or else the tests above say nothing about the limit.
    want = published.logits()
    experts = [layer.mlp.experts for layer in published.model.model.layers]
    for each in experts:
        each.limit = 1000.0
    free = published.logits()
    for each in experts:
        each.limit = 7.0
    assert float(error(free, want).max()) > 1e-2


def test_experts_stay_four_bit(published: Published) -> None:
    source = open_source(published.folder)
    forms = dict(source.tensors(lambda _, form: form))
    gate = forms["model.layers.1.mlp.experts.2.gate_proj.weight"]
    assert gate.kind == "lut4 g32"
    assert gate.shape == (published.model.config.intermediate_size, 64)
    assert forms["model.layers.1.mlp.gate.weight"].kind == "f32"
