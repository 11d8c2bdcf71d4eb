"""What ``llmrun quantize`` publishes: complete, as the source says, and loaded by transformers."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmrun.cli.source import open_source

pytestmark = pytest.mark.slow


def _tokenizer() -> str:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made.to_str()


BESIDE = {
    "tokenizer.json": _tokenizer(),
    "tokenizer_config.json": '{"bos_token": "<s>", "eos_token": "</s>"}',
    "generation_config.json": '{"eos_token_id": 2}',
    "chat_template.jinja": "{{ messages }}",
    "special_tokens_map.json": "{}",
}


@pytest.fixture(scope="module", params=["tied", "untied, biased"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Llama and what int4 makes of it: ``source``, ``out``, ``weights``, ``tied``."""
    base = tmp_path_factory.mktemp("published")
    tied = request.param == "tied"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        attention_bias=not tied,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).bfloat16()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith("bias"):
            tensor.normal_()
    if tied:
        del weights["lm_head.weight"]
    source = base / "source"
    source.mkdir()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(source)
    for name, text in BESIDE.items():
        (source / name).write_text(text)
    out = base / "out"
    command = [sys.executable, "-m", "llmrun", "quantize", str(source), "-q", "int4"]
    subprocess.run([*command, "--calibrate", "none", "-o", str(out)], check=True, timeout=240)
    return SimpleNamespace(source=source, out=out, weights=weights, tied=tied)


def test_q003_q005_embedding_and_head_are_16_bit_and_stored_once(published: Any) -> None:
    stored = load_file(published.out / "model.safetensors")
    outer = {name for name in stored if "embed_tokens" in name or "lm_head" in name}
    assert outer == {"model.embed_tokens.weight"} | (
        set() if published.tied else {"lm_head.weight"}
    )
    for name in outer:
        assert torch.equal(stored[name], published.weights[name])
    config = json.loads((published.out / "config.json").read_text())
    assert config["tie_word_embeddings"] is published.tied
    assert config["dtype"] == "bfloat16"


def test_q004_every_stored_tensor_is_consumed_and_every_parameter_filled(published: Any) -> None:
    opened = open_source(published.out)
    assert not opened.binding.unused
    index = json.loads((published.out / "model.safetensors.index.json").read_text())
    stored = load_file(published.out / "model.safetensors")
    assert index["weight_map"].keys() == stored.keys()
    parts = ("_packed", "_scale", "_shape")
    named = {
        f"{name}{part}"
        for name, info in opened.checkpoint.tensors.items()
        for part in (parts if info.kind.startswith("int") else ("",))
    }
    assert named == stored.keys()
    filled = {name for name, _ in opened.tensors(lambda _, form: form)}
    assert filled == set(opened.binding.parameters) - (
        {"lm_head.weight"} if published.tied else set()
    )


def test_q015_biases_and_norms_are_the_sources_bits(published: Any) -> None:
    stored = load_file(published.out / "model.safetensors")
    plain = {name for name in published.weights if name.endswith("bias") or "norm" in name}
    assert any(name.endswith("bias") for name in plain) is not published.tied
    assert {name for name in stored if name.endswith("bias") or "norm" in name} == plain
    for name in plain:
        assert torch.equal(stored[name], published.weights[name])


def test_q016_the_files_beside_the_weights_are_there(published: Any) -> None:
    for name, text in BESIDE.items():
        assert (published.out / name).read_text() == text
    held = {path.name for path in published.out.iterdir()}
    assert {"config.json", "model.safetensors.index.json", "llmrun.json"} <= held
    recorded = json.loads((published.out / "llmrun.json").read_text())["files"]
    assert recorded.keys() == held - {"llmrun.json"}


def test_q021_transformers_loads_a_real_head(published: Any) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(published.out, dtype="auto").eval()
    with torch.no_grad():
        logits = loaded(torch.arange(1, 33).view(1, -1)).logits
    head = loaded.lm_head.weight
    assert head.device.type == "cpu"
    embedding = published.weights["model.embed_tokens.weight"]
    assert torch.equal(head, published.weights.get("lm_head.weight", embedding))
    assert (head is loaded.model.embed_tokens.weight) is published.tied
    assert logits.dtype is torch.bfloat16
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


def test_q023_dequantized_weights_have_the_models_dtype(published: Any) -> None:
    stored = load_file(published.out / "model.safetensors")
    scales = {name: tensor for name, tensor in stored.items() if name.endswith("_scale")}
    assert len(scales) == 14
    assert {tensor.dtype for tensor in scales.values()} == {torch.bfloat16}
