"""How far the CPU kernels' logits are from those of the fp32 reference on the same weights.

    python benchmarks/fidelity.py [MODEL] [--isa avx2 amx] [--tokens 4096] [--gate 1e-3]

Both backends get the same quantized weights, so this shows what the kernels' rounding costs (int8
activations, mostly), not what quantizing the weights did. The text is English prose, cut into
pieces of ``--context`` tokens that each start with an empty cache; every position counts. KL is
KL(reference || kernels) in nats. Ends with status 1 if a mean is over the gate.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from common import SETS, machine, show_facts, show_table, usable

from llmrun.cli.choice import Choice, change, choose_scheme, plan_weights
from llmrun.cli.conversation import open_conversation
from llmrun.cli.fetching import fetch_model
from llmrun.cli.settings import read_settings
from llmrun.cli.source import Source, open_source
from llmrun.engine.cache import KvCache
from llmrun.kernels.cpu.topology import recommended_threads
from llmrun.kernels.forms import Form
from llmrun.kernels.ops import Backend, Span
from llmrun.kernels.reference.backend import TorchBackend
from llmrun.model.decoder import MAX_TOKENS, build
from llmrun.store.progress import SilentProgress

TEXT = Path(__file__).with_name("text.txt")


@dataclass(frozen=True)
class Difference:
    """Of one instruction set: KL at each position, and whether the likeliest id is the same."""

    kl: torch.Tensor
    same: torch.Tensor


def main() -> None:
    """Measure and print."""
    options = _options()
    path = fetch_model(options.model, read_settings(os.environ), SilentProgress()).path
    source = open_source(path)
    choice = choose_scheme(options.quant, source, None, options.requantize)
    ids = _ids(path, source, options.text, options.tokens)
    show_facts(machine() | {"model": path.name, "weights": choice.note})
    show_facts({"tokens": len(ids), "context": options.context, "text": options.text.name})
    backends = usable(options.isa, options.threads)
    oracle = cast(Backend, TorchBackend("cpu", options.threads))
    reference = Reader(source, choice, oracle, options.context)
    readers = {
        name: Reader(source, choice, cast(Backend, backend), options.context)
        for name, backend in backends.items()
    }
    differences = _compare(ids, options.context, reference, readers)
    header = ["kernels", "KL mean", "median", "p99", "most", "same top id"]
    show_table(header, [_line(name, found) for name, found in differences.items()])
    worst = max(found.kl.mean().item() for found in differences.values())
    print(f"largest mean KL {worst:.2e}, at most {options.gate:.0e}")
    sys.exit(worst > options.gate)


class Reader:
    """A decoder that tells the log probabilities of every position."""

    def __init__(self, source: Source, choice: Choice, backend: Backend, context: int) -> None:
        planned = plan_weights(choice, source, resident=True)
        parameters = source.binding.parameters

        def brought(name: str, form: Form) -> Form:
            return change(choice, parameters[name].role, planned[name], name, form)

        spec = source.binding.spec
        self._backend = backend
        self._decoder = build(spec, source.tensors(brought), backend, max_rows=MAX_TOKENS)
        self._cache = KvCache(backend, spec, 1, context)

    def read(self, position: int, ids: Sequence[int]) -> torch.Tensor:
        """Log probabilities [T, V] behind each of these ids, the first of them at ``position``."""
        spans = [Span(0, 0, len(ids), position)]
        logits = self._decoder.forward(ids, spans, self._cache.layers, range(len(ids)))
        host = self._backend.to_host(logits, len(ids))
        return torch.frombuffer(host.data, dtype=torch.float32).view(host.shape).log_softmax(-1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a name or a path")
    parser.add_argument("--isa", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--quant", default="auto", help="a scheme, as -q of llmrun")
    parser.add_argument("--requantize", action="store_true")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--gate", type=float, default=1e-3, help="most mean KL")
    parser.add_argument("--threads", type=int, default=recommended_threads().count)
    return parser.parse_args()


def _ids(path: Path, source: Source, text: Path, n_tokens: int) -> list[int]:
    tokenizer = open_conversation(path, source, None).tokenizer
    ids = tokenizer.encode_plain(text.read_text("utf-8"))
    if len(ids) < n_tokens:
        raise SystemExit(f"{text} has {len(ids)} tokens, not {n_tokens}: give another --text")
    return ids[:n_tokens]


def _compare(
    ids: Sequence[int], context: int, reference: Reader, readers: dict[str, Reader]
) -> dict[str, Difference]:
    """All of them over the same text, a chunk at a time, so that logits need not be kept."""
    found: dict[str, list[Difference]] = {name: [] for name in readers}
    for position, part in _chunks(ids, context):
        right = reference.read(position, part)
        for name, reader in readers.items():
            other = reader.read(position, part)
            kl = (right.exp() * (right - other)).sum(-1)
            found[name].append(Difference(kl, right.argmax(-1) == other.argmax(-1)))
    return {
        name: Difference(torch.cat([p.kl for p in parts]), torch.cat([p.same for p in parts]))
        for name, parts in found.items()
    }


def _chunks(ids: Sequence[int], context: int) -> Iterator[tuple[int, Sequence[int]]]:
    for piece in range(0, len(ids), context):
        end = min(piece + context, len(ids))
        for start in range(piece, end, MAX_TOKENS):
            yield start - piece, ids[start : min(start + MAX_TOKENS, end)]


def _line(name: str, found: Difference) -> list[str]:
    kl = found.kl
    values = (kl.mean(), kl.median(), kl.quantile(0.99), kl.max())
    return [name, *(f"{value:.2e}" for value in values), f"{found.same.float().mean():.2%}"]


if __name__ == "__main__":
    main()
