"""From an unknown hub id to a quantized chat, and offline from then on.

Real HTTP against a hub on loopback that serves the starter's weights in two shards.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
MODEL = "acme/starter"
SHARD = "model-00002-of-00002.safetensors"


def test_pull_quantize_chat_offline(
    llmrun: Any, hub: Any, hub_module: Any, tmp_path: Path, home: dict[str, str]
) -> None:
    online = {"HF_ENDPOINT": hub.endpoint}
    hub.seen.clear()
    hub.fail(SHARD, hub_module.Fault("cut", 30_000_000))  # the pull goes on from there
    pulled = llmrun("pull", MODEL, "--json", env=online)
    assert pulled.returncode == 0, pulled.stderr.decode()
    ranges = [s.headers.get("range") for s in hub.bodies(SHARD)]
    assert any(value and value.startswith("bytes=") for value in ranges)
    assert not hub.bodies("pytorch_model.bin")
    assert not hub.bodies("modeling.py")
    listed = json.loads(llmrun("list", "--json").stdout)
    assert MODEL in json.dumps(listed)

    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    out = tmp_path / "quantized"
    made = llmrun("quantize", MODEL, "-q", "int4", "-o", str(out), env=offline)
    assert made.returncode == 0, made.stderr.decode()
    assert "bits per weight" in made.stdout.decode().lower()
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert [path for path in tmp_path.iterdir() if "partial" in path.name] == []

    for model in (str(out), MODEL):
        asked = llmrun(
            "run", "-m", model, "--raw", "-n", "8", "--json", "The capital of France is",
            env=offline,
        )  # fmt: skip
        assert asked.returncode == 0, asked.stderr.decode()
        answer = json.loads(asked.stdout)
        assert "Paris" in answer["text"]
        stored = model == str(out)
        assert answer["receipt"]["scheme"] == ("compressed-tensors int4 g32" if stored else "int8")
    piped = llmrun("chat", str(out), stdin=b"What is the capital of France?", env=offline)
    assert piped.returncode == 0, piped.stderr.decode()
    assert b"Paris" in piped.stdout
    assert b"TTFT" in piped.stderr
    assert b"TTFT" not in piped.stdout

    removed = llmrun("rm", MODEL, env=offline)
    assert removed.returncode == 0, removed.stderr.decode()
    assert llmrun("rm", MODEL, env=offline).returncode == 3
    assert llmrun("run", "-m", MODEL, "hi", env=offline).returncode == 3


def test_corrupted_bytes_are_fetched_again_once_then_refused(
    llmrun: Any, hub: Any, hub_module: Any, home: dict[str, str]
) -> None:
    online = {"HF_ENDPOINT": hub.endpoint}
    hub.fail(SHARD, *[hub_module.Fault("flip", 5_000_000)] * 2)
    refused = llmrun("pull", MODEL, env=online)
    assert refused.returncode == 4
    assert SHARD in refused.stderr.decode()
    assert b"Traceback" not in refused.stderr
    assert llmrun("list", "--json", env=online).returncode == 0
    hub.faults.clear()
    again = llmrun("pull", MODEL, env=online)
    assert again.returncode == 0, again.stderr.decode()
