"""An unquantized GGUF with scaled rotary frequencies, and the checkpoint made of it."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from llmrun.cli.assemble import LoadOptions, load
from llmrun.cli.quantizing import convert
from llmrun.cli.settings import Settings
from llmrun.cli.source import open_source
from llmrun.errors import UnavailableError
from llmrun.kernels.ops import Span
from llmrun.kernels.reference.arrays import as_tensor
from llmrun.model.config import ConfigReader
from llmrun.model.rope import read_rope
from llmrun.store.progress import SilentProgress

QUIET = SilentProgress()
THETA, HEAD_DIM = 500_000.0, 16
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def factors(distort: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    base = read_rope(ConfigReader({"rope_theta": THETA}), HEAD_DIM, 64).inv_freq
    scaled = read_rope(ConfigReader({"rope_parameters": LLAMA3}), HEAD_DIM, 64).inv_freq
    values = [b / s for b, s in zip(base, scaled, strict=True)]
    values[3] *= distort
    return np.array(values, dtype=np.float32)


def write_gguf(path: Path, rope_factors: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(260)
    tokens = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "ab",
        "<|bos|>",
        "<|eos|>",
        "<|eot_id|>",
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_eot_token_id(259)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        kind = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor(name, (rng.standard_normal(shape) * 0.1).astype(kind))

    add("token_embd.weight", 260, 64)
    add("output_norm.weight", 64)
    add("output.weight", 260, 64)
    writer.add_tensor("rope_freqs.weight", rope_factors)
    for layer in range(2):
        add(f"blk.{layer}.attn_norm.weight", 64)
        add(f"blk.{layer}.ffn_norm.weight", 64)
        for name, rows, columns in (
            ("attn_q", 64, 64),
            ("attn_k", 32, 64),
            ("attn_v", 32, 64),
            ("attn_output", 64, 64),
            ("ffn_gate", 128, 64),
            ("ffn_up", 128, 64),
            ("ffn_down", 64, 128),
        ):
            add(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_copy_means_the_same_model_to_us_and_to_transformers(
    settings: Settings, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", factors())
    out = tmp_path / "out"
    convert(str(path), "int8", out, settings, QUIET)
    source, copy = open_source(path), open_source(out)
    assert copy.binding.spec == source.binding.spec
    assert json.loads((out / "config.json").read_text())["rope_parameters"] == LLAMA3

    original = load(LoadOptions(str(path), quant="none", device="cpu"), settings, QUIET)
    loaded = load(LoadOptions(str(out), quant="none", device="cpu"), settings, QUIET)
    assert loaded.stop_ids == original.stop_ids == {258, 259}
    for name in ("bos_id", "add_bos", "special_tokens"):
        assert getattr(loaded.tokenizer, name) == getattr(original.tokenizer, name)

    ids = list(range(100))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0, -1]
    cache = loaded.new_cache()
    made = loaded.decoder.forward(ids, [Span(0, 0, 100, 0)], cache.layers, [99])
    got = as_tensor(loaded.backend.to_host(made, 1))[0]
    assert float((got - want).norm() / want.norm()) < 1e-2


def test_factors_of_no_published_kind_are_run_but_not_written(
    settings: Settings, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "odd.gguf", factors(distort=1.3))
    with pytest.raises(UnavailableError, match="rope_freqs"):
        convert(str(path), "int8", tmp_path / "no", settings, QUIET)
    loaded = load(LoadOptions(str(path), quant="int8", device="cpu"), settings, QUIET)
    assert "quantize" not in loaded.times.parts_ms
    assert loaded.coverage.kinds["int8 g64"] > 0
