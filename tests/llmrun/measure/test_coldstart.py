import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from llmrun.engine.cache import KvCache
from llmrun.engine.generate import generate
from llmrun.engine.sampler import Sampler
from llmrun.measure.coldstart import Stage, waterfall

FakeModel = Any  # defined in fake.py

MS = 1_000_000


def test_stages_sum_to_the_cold_ttft(
    model: FakeModel, make_cache: Callable[..., KvCache], sampler: Sampler
) -> None:
    clock = model.backend.clock
    start_ns = clock()
    ends = []
    for name, ms in (("import", 300), ("open", 20), ("load", 150)):
        clock.advance(ms * MS)
        ends.append((name, clock()))
    clock.advance(4 * MS)
    first = next(
        generate(
            model, make_cache(model), [1, 2, 3], sampler, stop_ids=(), max_tokens=9, clock=clock
        )
    )
    stages = waterfall(start_ns, ends, first)
    assert stages == (
        Stage("import", 300 * MS),
        Stage("open", 20 * MS),
        Stage("load", 150 * MS),
        Stage("prompt", 4 * MS),
        Stage("lookup", 0),
        Stage("prefill", 3 * MS),
        Stage("sample", 2 * MS),
    )
    assert sum(stage.duration_ns for stage in stages) == first.time_ns - start_ns


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_process_start_lies_between_launch_and_now() -> None:
    code = "from llmrun.measure.coldstart import process_start_ns; print(process_start_ns())"
    before_ns = time.monotonic_ns()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after_ns = time.monotonic_ns()
    assert before_ns - 20 * MS <= int(out.stdout) < after_ns
