"""Dense models in GGUF, written as the ggml project's converter would: transformers' logits.

What it changes is changed here: queries and keys interleaved for some, 1 added to Gemma's norms,
gate and up of Granite 4 apart, and every number that is not a tensor a key of the metadata.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmrun.cli.source import open_source
from llmrun.engine.cache import KvCache
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.architecture import find
from llmrun.model.decoder import build

LINEAR = {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
CASES: dict[str, tuple[str, str, dict[str, object]]] = {
    "smollm3": ("smollm3", "smollm3", {}),
    "gemma2": ("gemma2", "gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
        },
    ),
    "granite": ("granite", "granite", {}),
    "granite 4": ("granitemoehybrid", "granite", {}),
    "ministral3": ("ministral3", "mistral3", {}),
    "ministral3 mscale": (
        "ministral3",
        "mistral3",
        {"rope_parameters": find("ministral3").tiny[1]["rope_parameters"]},
    ),
}
"""Architecture, its name in GGUF, and what to change of its first tiny config."""

INTERLEAVED = ("smollm3", "granite", "mistral3")
N_TOKENS = 80
"""Past every window (20), and the trained length (64) of all but Ministral."""


def permuted(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of each head with rotary pairs next to each other."""
    shape = (n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
    return weight.view(shape).transpose(1, 2).reshape(weight.shape)


def unfused(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by Hugging Face names, those of Granite 4 by the names of Granite 3."""
    for name, weight in state.items():
        if "shared_mlp.input_linear" in name:
            parts = zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True)
            yield from ((name.replace("shared_mlp.input_linear", f"mlp.{p}"), w) for p, w in parts)
        else:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), weight


def converted(ggml: str, config: Any, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the model under their GGUF names."""
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == ggml)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for published, weight in unfused(load_file(folder / "model.safetensors")):
        found = names.get_name(published, try_suffixes=(".weight", ".bias"))
        assert found is not None, published
        if ggml in INTERLEAVED and ".attn_q." in found:
            weight = permuted(weight, config.num_attention_heads)
        if ggml in INTERLEAVED and ".attn_k." in found:
            weight = permuted(weight, config.num_key_value_heads)
        if ggml.startswith("gemma") and found.endswith("norm.weight"):
            weight = weight + 1
        yield found, weight


def add_metadata(writer: GGUFWriter, ggml: str, config: Any) -> None:
    """The keys that the converter writes for this architecture."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(
        getattr(config, "shared_intermediate_size", 0) or config.intermediate_size
    )
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if ggml in INTERLEAVED:
        writer.add_vocab_size(config.vocab_size)
    else:
        writer.add_sliding_window(config.sliding_window)
    if ggml in ("gemma2", "gemma3", "mistral3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if ggml == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if ggml == "gemma3":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if ggml == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if ggml == "mistral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def write(path: Path, ggml: str, config: Any, folder: Path) -> None:
    writer = GGUFWriter(path, ggml)
    add_metadata(writer, ggml, config)
    for name, weight in converted(ggml, config, folder):
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits(case: tuple[str, str, dict[str, object]], tmp_path: Path) -> None:
    name, ggml, change = case
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**{**find(name).tiny[0], **change})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(0, config.vocab_size, (N_TOKENS,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        theirs = model(ids[None]).logits[0]
    model.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", ggml, config, tmp_path)
    source = open_source(tmp_path / "model.gguf")
    backend = TorchBackend("cpu", 1)
    decoder = build(
        source.binding.spec, source.tensors(lambda _, form: form), backend,
        max_tokens=N_TOKENS, max_rows=N_TOKENS,
    )  # fmt: skip
    cache = KvCache(backend, decoder.spec, 1, N_TOKENS, "f32")
    every = list(range(N_TOKENS))
    logits = decoder.forward(ids.tolist(), [Span(0, 0, N_TOKENS, 0)], cache.layers, every)
    host = backend.to_host(logits, N_TOKENS)
    ours = torch.frombuffer(bytearray(host.data), dtype=torch.float32).view(host.shape)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_gemma_files_cannot_become_published_checkpoints(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["gemma2"](**find("gemma2").tiny[0], pad_token_id=0)
    config.query_pre_attn_scalar = 32
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", "gemma2", config, tmp_path)
    binding = open_source(tmp_path / "model.gguf").binding
    assert binding.inexpressible is not None
    assert "1 added" in binding.inexpressible
