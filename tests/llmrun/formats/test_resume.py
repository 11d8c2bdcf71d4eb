"""Killed at any moment: the result is absent or whole, and the next run goes on with the same
bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, random, signal, sys
from pathlib import Path
from llmrun.formats.layout import plan_layout
from llmrun.formats.planned import Planned
from llmrun.formats.write import Content, write_folder
from llmrun.kernels.forms import Dense, GroupInt
from llmrun.kernels.host import DType, HostArray
from llmrun.store.disk import Disk
from llmrun.store.export import export

out, kill_at, recipe = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
calls = 0

def step(*what):
    global calls
    calls += 1
    if calls == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

def made(dtype, shape, seed):
    size = dtype.bits // 8
    for extent in shape:
        size *= extent
    raw = bytearray(byte & 0x3f for byte in random.Random(seed).randbytes(size))
    return HostArray(dtype, shape, memoryview(raw))

planned = []
for layer in range(6):
    planned.append(Planned(f"model.layers.{layer}.mlp.up_proj.weight", "int4 g32", (32, 64)))
    planned.append(Planned(f"model.layers.{layer}.norm.weight", "bf16", (37,)))

def form(number):
    tensor = planned[number]
    if tensor.is_plain:
        return Dense(made(DType.BF16, tensor.shape, number))
    codes, scales = made(DType.U8, (32, 32), number), made(DType.BF16, (32, 2), number)
    return GroupInt(4, 32, codes, scales, None, (32, 64))

def stream(start):
    print("from", start, flush=True)
    for number in range(start, len(planned)):
        step()
        yield planned[number].name, form(number), {"relative_mse": number / 7}

# Whatever touches the disk is a moment at which the process may die.
for name in ("fsync", "replace", "unlink"):
    def stepping(*args, own=getattr(os, name), **more):
        step()
        return own(*args, **more)
    setattr(os, name, stepping)

layout = plan_layout(planned, DType.BF16, {"format": "pt"}, shard_bytes=1300)
content = Content(layout, {"dtype": "bfloat16"}, {"tokenizer.json": b"{}"}, {"recipe": recipe})
export(out, lambda folder: write_folder(folder, stream, content), recipe, Disk(step))
print("steps", calls)
"""


def _run(folder: Path, kill_at: int, recipe: str = "int4") -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "out"), str(kill_at), recipe],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, done.stdout.splitlines()


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def _start(lines: list[str]) -> int:
    """The tensor the stream was asked to begin with; all of them if it was not asked."""
    return next((int(line.split()[1]) for line in lines if line.startswith("from")), 99)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_q031_killed_anywhere_it_is_absent_or_whole_and_goes_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    lines = _run(whole, 0)[1]
    steps = int(lines[-1].split()[1])
    expected = _files(whole)
    shards = [name for name in expected if name.endswith(".safetensors")]
    assert len(shards) > 3
    starts = []
    for kill_at in range(1, steps + 1, 6):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        assert _run(folder, kill_at)[0] == -9
        if (folder / "out").exists():
            assert _files(folder) == expected
            continue
        code, lines = _run(folder, 0)
        assert code == 0
        assert _files(folder) == expected
        assert sorted(path.name for path in folder.iterdir()) == ["out"]
        starts.append(_start(lines))
    assert starts == sorted(starts)
    assert len(set(starts)) > 3  # work was really taken over, more of it the later the end


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_q031_nothing_of_another_recipe_or_damaged_is_taken_over(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    steps = int(_run(whole, 0)[1][-1].split()[1])
    expected = _files(whole)
    late = steps * 3 // 4
    assert _run(tmp_path, late)[0] == -9
    code, lines = _run(tmp_path, late, "another")
    assert (code, _start(lines)) == (-9, 0)
    (job,) = (tmp_path / ".llmrun-unfinished").glob("*/job.json")
    record = json.loads(job.read_text())
    assert len(record["shards"]) >= 3
    second = job.parent / list(record["shards"])[1]
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    code, lines = _run(tmp_path, 0, "another")
    assert code == 0
    first = json.loads(expected["model.safetensors.index.json"])["weight_map"].values()
    kept = list(first).count("model-00001-of-00006.safetensors")
    assert 0 < _start(lines) <= kept
    found = _files(tmp_path)
    assert found.keys() == expected.keys()
    different = {name for name in expected if found[name] != expected[name]}
    assert different == {"llmrun.json"}  # which names the recipe
