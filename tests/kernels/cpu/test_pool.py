"""The threads: too many of them, busy neighbours, idling, forks, other libraries' threads.

Each in a process of its own, so that a hang ends and nothing of the tests' own libraries (torch,
OpenMP) is there. How fast it is meanwhile belongs to the benchmarks.
"""

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.cpu.library import problem

pytestmark = pytest.mark.skipif(problem() is not None, reason="no native library")
linux = pytest.mark.skipif(sys.platform != "linux", reason="affinity and /proc are Linux's")

PRELUDE = """
import hashlib, os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import tiny
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.kernels.ops import Span

made = tiny.forms("int4 g32")
text = tiny.ids(60)
chunks = [40, *[1] * 20]

def model(threads):
    return tiny.decoder(made, CpuBackend(threads, huge_pages=False))

def watched(backend):
    # Fills a list with the threads allowed and taken in each native call.
    library, seen = backend._library, []
    class Watched:
        def __getattr__(self, name):
            return getattr(library, name)
        def llmr_run(self, *arguments):
            seen.append((arguments[-1], library.llmr_run(*arguments)))
            return seen[-1][1]
    backend._library = Watched()
    return seen

"""


def python(code: str, timeout: float = 60, prelude: str = PRELUDE) -> str:
    """What a script prints; an error if it fails or hangs."""
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- too few cores --------------------------------------------------------------------------------


@linux
def test_04_8_threads_on_2_processors_do_not_hang() -> None:
    python("""
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        want = tiny.run(model(1), text, chunks)
        crowded = model(8)
        for _ in range(10):
            assert tiny.run(crowded, text, chunks) == want
        """)


@linux
def test_04_under_3_busy_neighbours_it_goes_on_with_fewer_threads_and_tries_again() -> None:
    python(
        """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # inherited by the neighbours
        want = tiny.run(model(1), text, chunks)
        crowded = model(2)
        cache, seen = tiny.cache(crowded), watched(crowded.backend)

        def answer_until(threads):
            seen.clear()
            while threads not in [taken for _, taken in seen]:
                cache.truncate(0, 0)
                assert tiny.run(crowded, text, chunks, cache) == want

        hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        try:
            for _ in range(2):
                answer_until(threads=1)
                answer_until(threads=2)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        answer_until(threads=2)
        """,
        timeout=120,
    )


@linux
def test_04_many_threads_on_one_core_shrink_to_what_runs_well() -> None:
    out = python("""
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        crowded = model(8)
        cache, seen = tiny.cache(crowded), watched(crowded.backend)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            cache.truncate(0, 0)
            tiny.run(crowded, text, chunks, cache)
        late = [taken for _, taken in seen[len(seen) // 2:]]
        print(sum(late) / len(late))
        """)
    assert float(out) < 4


# --- number of threads ----------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [(-1, 1), (0, 1), (1, 1), (3, 3), (1000, 256)])
def test_02_the_number_of_threads_is_kept_in_bounds(asked: int, given: int) -> None:
    cpu = CpuBackend(asked, huge_pages=False)
    memory = (ctypes.c_float * 64)()
    taken = cpu._library.llmr_read(cpu._context, ctypes.addressof(memory), ctypes.sizeof(memory))
    assert taken == given


@pytest.mark.parametrize(("decode", "expected"), [(0, 4), (1, 1), (3, 3)])
def test_short_steps_may_have_fewer_threads(decode: int, expected: int) -> None:
    python(f"""
        few = tiny.decoder(made, CpuBackend(4, decode_threads={decode}, huge_pages=False))
        seen = watched(few.backend)
        tiny.run(few, text[:9], [9])
        assert all(most in (0, 4) for most, _ in seen)
        seen.clear()
        tiny.run(few, text[:8], [8])
        assert all(most == {decode} and taken <= {expected} for most, taken in seen)
        """)


# --- idle, forks, neighbours in the process -------------------------------------------------------


def test_05_idle_threads_cost_nothing() -> None:
    out = python("""
        crowded = model(4)
        tiny.run(crowded, text, chunks)
        start = time.process_time()
        time.sleep(2)
        print(time.process_time() - start)
        """)
    assert float(out) < 0.02  # 1 % of a processor


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_07_a_child_forked_after_an_answer_answers_and_so_does_its_parent() -> None:
    out = python("""
        both = model(4)
        cache = tiny.cache(both)
        want = tiny.run(both, text, chunks, cache)
        sys.stdout.flush()
        for generation in range(2):
            child = os.fork()
            if child == 0:
                same = tiny.run(both, text, chunks) == want
                cache.truncate(0, 59)
                same &= tiny.run(both, text[59:], [1], cache) == want[59:]
                if generation == 0:
                    grandchild = os.fork()
                    if grandchild == 0:
                        os._exit(0 if tiny.run(both, text, chunks) == want else 4)
                    same &= os.waitpid(grandchild, 0)[1] == 0
                del both  # its threads are not here to be joined
                os._exit(0 if same else 3)
            assert tiny.run(both, text, chunks) == want
            assert os.waitpid(child, 0)[1] == 0
            assert tiny.run(both, text, chunks) == want
        print("done")
        """)
    assert out == "done\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_07_a_forked_child_may_leave_without_computing() -> None:
    python("""
        both = model(4)
        want = tiny.run(both, text, chunks)
        child = os.fork()
        if child == 0:
            del both
            sys.exit(0)  # with all finalizers
        assert os.waitpid(child, 0)[1] == 0
        assert tiny.run(both, text, chunks) == want
        """)


def test_many_pools_come_and_go() -> None:
    python("""
        import threading
        want = tiny.run(model(1), text, chunks)
        for _ in range(30):
            assert tiny.run(model(3), text, chunks) == want
        assert len(os.listdir("/proc/self/task")) == 1 if os.path.isdir("/proc/self/task") else True
        """)


@linux
def test_06_no_openmp_and_no_torch_is_mapped() -> None:
    out = python("""
        tiny.run(model(2), text, chunks)
        print(open("/proc/self/maps").read())
        """)
    assert "libllmrun_cpu" in out
    for foreign in ("gomp", "iomp", "libomp", "torch", "mkl", "blas", "stdc++", "numpy"):
        assert foreign not in out.lower()


TORCH = """
import torch
a = torch.randn(200, 200, generator=torch.Generator().manual_seed(1))
def multiply():
    return (a @ a).sum().item()
"""
NATIVE = (
    PRELUDE
    + """
def answer():
    return hashlib.sha256(b"".join(tiny.run(model(2), text, chunks))).hexdigest()
"""
)


@pytest.fixture(scope="module")
def answer() -> str:
    """What a process without torch answers."""
    return python("print(answer())", prelude=NATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("first", [TORCH, NATIVE], ids=["torch", "native"])
@pytest.mark.parametrize("used", [True, False], ids=["used", "loaded"])
def test_06_torch_in_the_same_process(first: str, used: bool, answer: str) -> None:
    # Both orders; `used`: the first one has started its threads when the other is loaded.
    second = NATIVE if first == TORCH else TORCH
    use = {TORCH: "multiply()\n", NATIVE: "answer()\n"}[first] if used else ""
    out = python(
        """
        for _ in range(3):
            assert multiply() == multiply()
            print(answer())
        """,
        prelude=first + use + second,
    )
    assert out == 3 * answer
