"""Mixtures of experts in GGUF: the same decoder as from the published checkpoint, bit for bit.

A tiny random model of transformers is written twice: as it saves itself, and as the ggml project's
converter would, with the gguf package's names: experts stacked, gate and up apart, queries and
keys interleaved where it does so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmrun.cli.source import Source, open_source
from llmrun.kernels.cpu import library as native
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.forms import Dense, Form
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import find
from llmrun.model.decoder import build
from llmrun.quant.dequantize import dequantize

EXACT: dict[str, object] = {
    "rms_norm_eps": 2.0**-17,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.25,
}
"""Numbers that f32, in which GGUF keeps them, holds as they are."""

CASES = {
    "mixtral": ("llama", {"num_hidden_layers": 3}),
    "qwen3_moe": ("qwen3moe", {"moe_intermediate_size": 32}),
    "olmoe": ("olmoe", {}),
    "granitemoe": ("granitemoe", {"num_experts_per_tok": 3}),
    "gpt_oss": ("gpt-oss", {"rope_parameters": None, "sliding_window": 8}),
}
INTERLEAVED = ("mixtral", "granitemoe")
N_TOKENS = 24


@dataclass(frozen=True)
class Made:
    """One model in both formats."""

    name: str
    kind: Kind
    published: Path
    converted: Path


def stacks(name: str, state: dict[str, torch.Tensor], layer: int) -> Iterator[tuple[str, Any]]:
    """What the converter calls and makes of a layer's experts, from transformers' own stacks."""
    module = "block_sparse_moe" if name == "granitemoe" else "mlp"
    prefix = f"model.layers.{layer}.{module}.experts"
    gate_up, down = state[f"{prefix}.gate_up_proj"], state[f"{prefix}.down_proj"]
    if name == "gpt_oss":
        both = gate_up.transpose(1, 2)
        gate, up, down = both[:, ::2], both[:, 1::2], down.transpose(1, 2)
        bias = state[f"{prefix}.gate_up_proj_bias"]
        yield "ffn_gate_exps.bias", bias[:, ::2]
        yield "ffn_up_exps.bias", bias[:, 1::2]
        yield "ffn_down_exps.bias", state[f"{prefix}.down_proj_bias"]
    else:
        gate, up = gate_up.chunk(2, dim=1)
    yield "ffn_gate_exps.weight", gate
    yield "ffn_up_exps.weight", up
    yield "ffn_down_exps.weight", down


def permuted(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of each head with rotary pairs next to each other."""
    shape = (n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
    return weight.view(shape).transpose(1, 2).reshape(weight.shape)


def converted(name: str, ggml: str, model: Any, folder: Path) -> Iterator[tuple[str, Any]]:
    """All tensors of the model under their GGUF names."""
    config = model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == ggml)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for published, weight in load_file(folder / "model.safetensors").items():
        if ".experts." in published or "_linear" in published:
            continue
        known = published + ".weight" if published.endswith("sinks") else published
        found = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert found is not None, published
        if name in INTERLEAVED and ".attn_q." in found:
            weight = permuted(weight, config.num_attention_heads)
        if name in INTERLEAVED and ".attn_k." in found:
            weight = permuted(weight, config.num_key_value_heads)
        yield found, weight
    for layer in range(config.num_hidden_layers):
        for part, weight in stacks(name, model.state_dict(), layer):
            yield f"blk.{layer}.{part}", weight


def add_metadata(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    """The keys that the converter writes for this architecture."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if name in INTERLEAVED:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if name in ("qwen3_moe", "gpt_oss"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if name == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(0)
    if name == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if name == "gpt_oss":
        rope = config.rope_parameters
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def write(path: Path, name: str, ggml: str, model: Any, folder: Path, kind: Kind) -> None:
    """Write the GGUF, matrices of a layer (router and norms excepted) as ``kind``."""
    writer = gguf.GGUFWriter(str(path), ggml)
    add_metadata(writer, name, model.config)
    for tensor, weight in converted(name, ggml, model, folder):
        array: Any = weight.contiguous().numpy()
        if kind is Kind.F32 or not quantized(tensor, weight.ndim, kind):
            writer.add_tensor(tensor, array)
        else:
            writer.add_tensor(tensor, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(tensor: str, dimensions: int, kind: Kind) -> bool:
    """Whether the converter stores a tensor as ``kind``; MXFP4 is for experts alone."""
    if "_exps" in tensor:
        return dimensions == 3
    return (
        kind is not Kind.MXFP4
        and dimensions == 2
        and tensor.startswith("blk.")
        and ("gate_inp" not in tensor)
    )


def rounded(model: Any, kind: Kind) -> None:
    """Give the model the values its matrices have once they are of this kind."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            experts = parameter.ndim == 3
            linear = name.endswith("_proj.weight") and kind is not Kind.MXFP4
            if not experts and not linear:
                continue
            turned = experts and model.config.model_type == "gpt_oss"
            array = (parameter.mT if turned else parameter).contiguous().numpy()
            blocks = gguf.quants.quantize(array, kind)
            values = torch.from_numpy(gguf.quants.dequantize(blocks, kind).reshape(array.shape))
            parameter.copy_(values.mT if turned else values)


KINDS = [(name, kind) for name in CASES for kind in (Kind.F32, Kind.Q8_0)]
KINDS += [("gpt_oss", Kind.MXFP4)]


@pytest.fixture(scope="module", params=KINDS, ids=[f"{name}-{kind.name}" for name, kind in KINDS])
def made(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Made:
    name, kind = request.param
    ggml, change = CASES[name]
    torch.manual_seed(0)
    tiny = {**find(name).tiny[0], **change}
    tiny |= {key: value for key, value in EXACT.items() if key in tiny}
    config = CONFIG_MAPPING[name](**tiny)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder: Path = tmp_path_factory.mktemp(name)
    plain = folder / "plain"
    model.save_pretrained(plain)
    path = folder / "model.gguf"
    write(path, name, ggml, model, plain, kind)
    if kind is not Kind.F32:
        rounded(model, kind)
    model.save_pretrained(folder / "published")
    return Made(name, kind, folder / "published", path)


def values(form: Form) -> torch.Tensor:
    return as_tensor(form.w if isinstance(form, Dense) else dequantize(form))


def logits(source: Source, backend: Any) -> torch.Tensor:
    spec = source.binding.spec
    tensors = source.tensors(lambda _, form: form)
    decoder = build(spec, tensors, backend, max_tokens=N_TOKENS, max_rows=N_TOKENS)
    cache = [backend.kv_layer(1, N_TOKENS, spec.heads, "f32") for _ in spec.layers]
    ids = [7 * i % spec.vocab for i in range(N_TOKENS)]
    got = decoder.forward(ids, [Span(0, 0, N_TOKENS, 0)], cache, list(range(N_TOKENS)))
    host = backend.to_host(got, N_TOKENS)
    return torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)


def test_parameters_and_logits_are_those_of_the_published_checkpoint(made: Made) -> None:
    published, converted = open_source(made.published), open_source(made.converted)
    assert converted.binding.spec == published.binding.spec
    assert converted.binding.inexpressible is not None
    theirs = dict(published.tensors(lambda _, form: form))
    found = set()
    for name, form in converted.tensors(lambda _, form: form):
        assert torch.equal(values(form), values(theirs[name])), name
        found.add(name)
    assert found == theirs.keys()
    backend = TorchBackend("cpu", 1)
    got, want = logits(converted, backend), logits(published, backend)
    if made.kind is Kind.MXFP4:  # 4-bit products are summed in another order
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(got, want)


def test_native_kernels_agree(made: Made) -> None:
    if reason := native.problem():
        pytest.skip(reason)
    want = logits(open_source(made.published), TorchBackend("cpu", 1))
    # Exact: tables are multiplied in fp32.
    got = logits(open_source(made.converted), CpuBackend(2, exact=made.kind is Kind.MXFP4))
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(error.max()) < (1e-5 if made.kind is Kind.F32 else 2e-3)


def test_the_converted_matrices_are_what_was_written(made: Made) -> None:
    reader = gguf.GGUFReader(str(made.converted))
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up_exps.weight")
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    source = open_source(made.converted)
    by_name = dict(source.tensors(lambda _, form: form))
    for expert, matrix in enumerate(np.asarray(array)):
        mine = values(by_name[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"])
        assert torch.equal(mine, torch.from_numpy(matrix.copy()))
    wanted = {Kind.F32: "f32", Kind.Q8_0: "int8 g32", Kind.MXFP4: "lut4 g32"}[made.kind]
    assert by_name["model.layers.1.mlp.experts.0.up_proj.weight"].kind == wanted
    assert by_name["model.layers.1.mlp.gate.weight"].kind == "f32"
