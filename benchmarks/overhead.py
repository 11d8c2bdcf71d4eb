"""What Python takes of each decoded token: the time between the calls of the native library.

    python benchmarks/overhead.py --tokens 400

One answer of ``generate`` for each way of sampling. A token's time is the gap between two events,
as an idle consumer sees it; what the native calls in it took (the step and the choice) is taken
off. The rest is the sampling request, the step's description, the events and the generator itself.

The last column is the same with the native step left out. Python's code and objects then stay in
the processor's caches; beside a real step the weights that pass drive them out, and fetching them
again costs several times the work itself.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from common import machine, show_facts, show_table, spread

from llmrun.cli.assemble import LoadedModel, LoadOptions, load
from llmrun.cli.settings import read_settings
from llmrun.engine.generate import generate
from llmrun.engine.sampler import Sampler, SamplingOptions, resolve
from llmrun.kernels.cpu.backend import CpuBackend
from llmrun.store.progress import SilentProgress

GOAL_US = 50
"""What Python should take of a token at most, at the median of greedy decoding."""

WAYS = {
    "greedy": SamplingOptions(),
    "top-k, top-p": SamplingOptions(temperature=0.8, top_k=40, top_p=0.95, seed=1),
    "repeat penalty": SamplingOptions(temperature=0.8, repeat_penalty=1.1, seed=1),
    "5 alternatives": SamplingOptions(top_logprobs=5),
}

UNCOUNTED = 3
"""The first id is the prompt's, the steps of the next two are recorded."""


class Watched:
    """The native library of a backend; adds up the time in the calls that a token needs."""

    def __init__(self, backend: CpuBackend) -> None:
        self.native_ns = 0
        self.leaves_out_steps = False
        self._library = backend._library
        self.llmr_run = self._timed(self._library.llmr_run)
        self.llmr_pick = self._timed(self._library.llmr_pick)
        backend._library = backend._picker._library = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)

    def _timed(self, function: Callable[..., int]) -> Callable[..., int]:
        is_step = function is self._library.llmr_run

        def timed(*arguments: object) -> int:
            if is_step and self.leaves_out_steps:
                return 1
            start_ns = time.perf_counter_ns()
            result = function(*arguments)
            self.native_ns += time.perf_counter_ns() - start_ns
            return result

        return timed


def main() -> None:
    """Measure and print."""
    options = _options()
    asked = LoadOptions(options.model, device="cpu", chat=False)
    loaded = load(asked, read_settings(os.environ), SilentProgress())
    if not isinstance(loaded.backend, CpuBackend):
        sys.exit("the native CPU library is not there")
    watched = Watched(loaded.backend)
    show_facts(machine())
    print(f"\nmicroseconds of a token: median (least-most); the goal is {GOAL_US} for Python\n")
    rows = []
    for name, sampling in WAYS.items():
        sampler = Sampler(resolve(sampling), loaded.tokenizer.n_ids)
        native_us, python_us = _measure(loaded, watched, sampler, options.tokens, alone=False)
        _, alone_us = _measure(loaded, watched, sampler, options.tokens, alone=True)
        rows.append((name, *(str(spread(us)) for us in (native_us, python_us, alone_us))))
    show_table(("", "native", "Python", "Python, no steps"), rows)


def _measure(
    loaded: LoadedModel, watched: Watched, sampler: Sampler, tokens: int, *, alone: bool
) -> tuple[Sequence[float], Sequence[float]]:
    """Microseconds of each decoded token: inside native calls, and outside."""
    prompt = loaded.tokenizer.encode_plain("Once upon a time there was a pipe.")
    native_us, python_us = [], []
    cache, most = loaded.new_cache(), tokens + UNCOUNTED
    answer = generate(loaded.decoder, cache, prompt, sampler, stop_ids=(), max_tokens=most)
    before_ns = 0
    for number, _ in enumerate(answer):
        now_ns = time.perf_counter_ns()
        if number >= UNCOUNTED:
            native_us.append(watched.native_ns / 1000)
            python_us.append((now_ns - before_ns - watched.native_ns) / 1000)
        watched.leaves_out_steps = alone and number >= UNCOUNTED - 1
        watched.native_ns = 0
        before_ns = time.perf_counter_ns()
    watched.leaves_out_steps = False
    return native_us, python_us


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=400)
    return parser.parse_args()


if __name__ == "__main__":
    main()
