import os
import platform
import subprocess
import sys

import pytest

from llmrun.measure.environment import environment


def test_fields_of_the_environment() -> None:
    env = environment({"llmrun": "1.2.3", "torch": "2.99"})
    assert list(env) == [
        "cpu",
        "cores",
        "usable_cores",
        "memory_bytes",
        "os",
        "python_version",
        "llmrun_version",
        "torch_version",
    ]
    assert env["python_version"] == platform.python_version()
    assert env["llmrun_version"] == "1.2.3"
    assert env["cores"] == os.cpu_count()
    assert isinstance(env["memory_bytes"], int)
    assert env["memory_bytes"] > 2**28


@pytest.mark.skipif(sys.platform == "win32", reason="the system does not tell")
def test_peak_follows_an_allocation_and_stays() -> None:
    # In a process of its own: this one may have held far more before.
    code = (
        "from llmrun.measure.environment import peak_host_bytes as peak\n"
        "before = peak(); block = bytearray(b'x') * 2**27; del block; print(before, peak())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, out.stdout.split())
    assert 2**22 < before < 2**27  # a bare interpreter, not the process that started it
    assert 0.95 * 2**27 < after - before < 1.5 * 2**27
