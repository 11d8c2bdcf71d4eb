"""What goes wrong ends with its exit code, one clear message and nothing half-written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny_folder(starter_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 64 positions with the starter's tokenizer: loads in a blink."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(starter_folder / name, folder)
    return folder


def fails(done: Any, code: int, *words: str) -> None:
    """The exit code, nothing on stdout, the words on stderr, and no traceback."""
    text = done.stderr.decode()
    assert done.returncode == code, text
    assert done.stdout == b""
    assert "Traceback" not in text
    for word in words:
        assert word in text, text


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_unknown_model(llmrun: Any) -> None:
    fails(llmrun("run", "-m", "smollm2-135n", "hi"), 3, "smollm2-135n", "smollm2-135m")


def test_no_network(llmrun: Any, tmp_path: Path) -> None:
    done = llmrun("pull", "acme/other", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    fails(done, 4, "127.0.0.1:9")
    fails(llmrun("pull", "acme/other", "--offline"), 3, "offline")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_not_a_model_file(llmrun: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_bytes(b"these are notes, not weights")
    fails(llmrun("run", "-m", "notes.gguf", "hi"), 5, "notes.gguf")


@pytest.mark.parametrize("keep", [3, 40_000, 98_000_000 // 2])
def test_truncated_gguf(llmrun: Any, tmp_path: Path, starter_gguf: Path, keep: int) -> None:
    with starter_gguf.open("rb") as source:
        (tmp_path / "cut.gguf").write_bytes(source.read(keep))
    fails(llmrun("run", "-m", "./cut.gguf", "hi"), 5, "cut.gguf")


def test_truncated_safetensors(llmrun: Any, tmp_path: Path, tiny_folder: Path) -> None:
    path = copied(tiny_folder, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    fails(llmrun("run", "-m", str(path.parent), "hi"), 5, "model.safetensors")


def test_missing_shard(llmrun: Any, tmp_path: Path, tiny_folder: Path) -> None:
    folder = copied(tiny_folder, tmp_path)
    index = {
        "metadata": {},
        "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(llmrun("run", "-m", str(folder), "hi"), 5, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", "\x00\x01", '{"model_type": "llama"}'])
def test_wrong_json(llmrun: Any, tmp_path: Path, tiny_folder: Path, text: str) -> None:
    folder = copied(tiny_folder, tmp_path)
    (folder / "config.json").write_text(text)
    fails(llmrun("run", "-m", str(folder), "hi"), 5)


def test_a_missing_tensor(llmrun: Any, tmp_path: Path, tiny_folder: Path) -> None:
    from safetensors.torch import load_file

    folder = copied(tiny_folder, tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    fails(llmrun("run", "-m", str(folder), "hi"), 5, "model.layers.0.mlp.up_proj.weight")


def test_prompt_longer_than_the_context(llmrun: Any, tiny_folder: Path) -> None:
    done = llmrun("run", "-m", str(tiny_folder), "-q", "none", "word " * 200)
    fails(done, 7, "64", "shorten the prompt")


def test_context_longer_than_the_model_knows(llmrun: Any, tiny_folder: Path) -> None:
    fails(llmrun("run", "-m", str(tiny_folder), "--ctx", "4096", "hi"), 2, "4096", "64")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda"], ("cuda", "--device cpu")),
        (["--kv", "int8"], ("int8", "f16")),
        (["-q", "int3"], ("int3", "int4")),
    ],
)
def test_what_is_not_available(
    llmrun: Any, tiny_folder: Path, arguments: list[str], words: tuple[str, ...]
) -> None:
    fails(llmrun("run", "-m", str(tiny_folder), *arguments, "hi"), 9, *words)


def test_quantizing_again_is_refused_and_can_be_wanted(
    llmrun: Any, starter_gguf: Path, tmp_path: Path
) -> None:
    asked = ("quantize", str(starter_gguf), "-q", "int8", "-o", str(tmp_path / "out"))
    fails(llmrun(*asked), 9, "--requantize")
    assert not (tmp_path / "out").exists()
    done = llmrun(*asked, "--requantize")
    assert done.returncode == 0, done.stderr.decode()
    fails(llmrun(*asked, "--requantize"), 2, "exists")
    answered = llmrun(
        "run", "-m", str(tmp_path / "out"), "--raw", "-n", "8", "The capital of France is"
    )
    assert b"Paris" in answered.stdout


def test_nf4_is_written_for_bitsandbytes_and_no_other_engine(
    llmrun: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("quantize", str(tiny_folder), "-q", "nf4", "-o", str(out))
    fails(llmrun(*asked, "--portable", "on"), 9, "vLLM", "--portable auto")
    fails(llmrun(*asked, "--calibrate", "bundled"), 2, "nf4", "leave --calibrate out")
    assert not out.exists()
    done = llmrun(*asked)
    assert done.returncode == 0, done.stderr.decode()
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "bitsandbytes"
    answered = llmrun("run", "-m", str(out), "--raw", "-n", "2", "hi")
    assert answered.returncode == 0, answered.stderr.decode()
