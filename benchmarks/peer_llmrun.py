"""llmrun's side of the comparison, through its own assembly; started by ``peers.py``.

    python benchmarks/peer_llmrun.py MODEL --capacity 640 --sequences 1 --threads 2 [--quant int8]

The model is loaded as ``llmrun run`` loads it; the work goes to the decoder itself, without
sampling, detokenizing or a terminal.
"""

import argparse
import os
from collections.abc import Sequence

from work import Facts, compiler, serve

import llmrun
from llmrun.cli.assemble import LoadOptions, load
from llmrun.cli.settings import read_settings
from llmrun.kernels.cpu.library import path as library_path
from llmrun.kernels.ops import Span
from llmrun.store.progress import SilentProgress


def main() -> None:
    """Serve the work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens of one sequence")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--requantize", action="store_true")
    options = parser.parse_args()
    wanted = LoadOptions(
        model=options.model,
        quant=options.quant,
        requantize=options.requantize,
        ctx=options.capacity,
        threads=options.threads,
        device="cpu",
        chat=False,
    )
    serve(Llmrun(wanted, options.sequences), options.sequences)


class Llmrun:
    """The engine of ``work.serve``."""

    def __init__(self, options: LoadOptions, sequences: int) -> None:
        loaded = load(options, read_settings(os.environ), SilentProgress())
        loaded.close()
        self._decoder = loaded.decoder
        self._cache = loaded.new_cache(sequences)
        self.vocab = loaded.spec.vocab
        library = library_path()
        self.facts: Facts = {
            "engine": "llmrun",
            "version": f"llmrun {llmrun.__version__}",
            "model": f"{loaded.scheme}, {loaded.coverage.actual_bits:.2f} bits per linear weight",
            "model_bytes": loaded.decoder.weight_bytes,
            "load_s": round(loaded.times.total_ms / 1e3, 3),
            "threads": loaded.backend.threads,
            "features": f"{loaded.backend.name} {getattr(loaded.backend, 'isa', '')}".strip(),
            "compiler": compiler(library) if library else None,
        }

    def forget(self, sequence: int, length: int) -> None:
        """Nothing to do: a step says at which position it writes, and reads up to there."""

    def feed(self, sequence: int, position: int, ids: Sequence[int]) -> None:
        """Append tokens, with the logits of the last."""
        chunk = self._decoder.max_tokens
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            rows = [len(part) - 1] if start + chunk >= len(ids) else []
            self._forward(part, [Span(sequence, 0, len(part), position + start)], rows)

    def step(self, position: int, token_id: int, sequences: int) -> None:
        """Append one token to each sequence, with logits."""
        spans = [Span(sequence, sequence, 1, position) for sequence in range(sequences)]
        self._forward([token_id] * sequences, spans, range(sequences))

    def _forward(self, ids: Sequence[int], spans: Sequence[Span], rows: Sequence[int]) -> None:
        self._decoder.forward(ids, spans, self._cache.layers, rows)
        self._decoder.backend.synchronize()


if __name__ == "__main__":
    main()
