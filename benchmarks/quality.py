"""What each scheme loses on a model that favours none, beside llama.cpp's formats.

    python benchmarks/quality.py [--rows int4,nl4] [--calibration FILE] [--work DIR] [--json FILE]

The model is a dithered SmolLM2-135M (``dithered.py``): its own reference, on no quantizer's grid.
Each row is quantized as ``llmrun quantize`` does it and compared as ``llmrun eval`` does it:
windows of 512 tokens, the second half scored, all that the engine rounds included (8-bit
activations). The text is Python's own documentation (``pydoc_data.topics``). llmrun's calibration
text is the bundled one unless ``--calibration`` names another; llama.cpp's figures used licence
texts.

llmrun's figures are measured now; llama.cpp's are constants, measured once by the same protocol
with its own quantizer and engine (llama-cpp-python 0.3.36, AVX2, 2 cores of a Zen 3, November
2026).
"""

import argparse
import json
import math
import os
import pydoc_data.topics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import machine, show_facts, show_table
from dithered import STARTER, write_dithered

from llmrun.cli.choice import Choice, CopyOptions, choose_scheme
from llmrun.cli.eval_lockstep import Measured, run
from llmrun.cli.eval_models import Child, Counted, open_model, reference_side
from llmrun.cli.eval_text import EvalText, Extent, cut
from llmrun.cli.fetching import fetch_model
from llmrun.cli.quantizing import convert
from llmrun.cli.settings import Settings, read_settings
from llmrun.cli.source import open_source
from llmrun.cli.threads import choose_threads
from llmrun.kernels import dispatch
from llmrun.kernels.ops import CpuOptions
from llmrun.quant.audit import Coverage
from llmrun.store.progress import SilentProgress

CHARACTERS = 400_000
CONTEXT, WINDOWS = 512, 20
MIXED_BITS = 5.61
"""Bits per weight of the linear layers where the whole model, its embedding in 8 bits, has the 6.17
of llama.cpp's Q4_K_M."""

TEXT, RANDOM, WEIGHTS = "text", "random", "none"


@dataclass(frozen=True)
class Row:
    """A scheme, what it is calibrated on, the bits of a mixed recipe, and the peer it is held
    against with the largest ratio of KL that is wanted."""

    name: str
    scheme: str
    calibrate: str
    peer: str
    most: float | None = None
    target_bpw: float | None = None


PEERS = {  # bits per weight of the whole model, mean KL, same top-1 in per cent
    "Q8_0": (8.51, 0.005215, 95.39),
    "Q4_K_M": (6.17, 0.073734, 85.29),
    "Q4_K_M imatrix": (6.17, 0.050980, 87.71),
    "Q4_1": (5.74, 0.263657, 73.22),
    "Q4_0": (5.35, 0.398682, 68.18),
    "Q4_0 imatrix": (5.36, 0.200373, 76.49),
    "IQ4_NL": (5.37, 0.232283, 75.20),
    "IQ4_NL imatrix": (5.37, 0.117035, 81.65),
}
ROWS = (
    Row("int8", "int8", WEIGHTS, "Q8_0", 0.5),
    Row("bnb-int8", "bnb-int8", WEIGHTS, "Q8_0"),
    Row("int4", "int4", WEIGHTS, "Q4_0", 1.03),
    Row("int4", "int4", RANDOM, "Q4_0", 1.03),
    Row("int4", "int4", TEXT, "Q4_0 imatrix", 0.95),
    Row("int4-asym", "int4-asym", WEIGHTS, "Q4_1"),
    Row("int4-asym", "int4-asym", TEXT, "Q4_0 imatrix"),
    Row("int4-g64", "int4-g64", TEXT, "Q4_0 imatrix"),
    Row("int4-g128", "int4-g128", TEXT, "Q4_0 imatrix"),
    Row("nf4", "nf4", WEIGHTS, "IQ4_NL"),
    Row("nf4-dq", "nf4-dq", WEIGHTS, "IQ4_NL"),
    Row("fp4", "fp4", WEIGHTS, "IQ4_NL"),
    Row("fp4-dq", "fp4-dq", WEIGHTS, "IQ4_NL"),
    Row("nl4", "nl4", WEIGHTS, "IQ4_NL", 0.95),
    Row("nl4", "nl4", RANDOM, "IQ4_NL", 0.95),
    Row("nl4", "nl4", TEXT, "IQ4_NL imatrix", 0.90),
    Row("int4 mixed", "int4", RANDOM, "Q4_K_M", None, MIXED_BITS),
    Row("int4 mixed", "int4", TEXT, "Q4_K_M imatrix", None, MIXED_BITS),
    Row("nl4 mixed", "nl4", WEIGHTS, "Q4_K_M", None, MIXED_BITS),
    Row("nl4 mixed", "nl4", RANDOM, "Q4_K_M", 0.90, MIXED_BITS),
    Row("nl4 mixed", "nl4", TEXT, "Q4_K_M imatrix", 0.90, MIXED_BITS),
)


@dataclass(frozen=True)
class Made:
    """A row's checkpoint and the seconds it took."""

    row: Row
    child: Child
    seconds: float


def main() -> None:
    """Measure and print."""
    options = _options()
    here = read_settings(os.environ)
    rows = [row for row in ROWS if options.rows is None or row.name in options.rows.split(",")]
    show_facts(machine())
    text = _text()
    with _folder(options.work) as folder:
        parent = folder / "parent"
        if not parent.exists():
            write_dithered(fetch_model(STARTER, here, SilentProgress()).path, parent, options.seed)
        made = [_make(row, parent, folder, options.calibration, here) for row in rows]
        found = _compared(parent, made, text, options.windows, here)
    show_table(
        ["scheme", "calibrated on", "bits", "mean KL", "se", "same top-1", "against", "ratio",
         "wanted", "seconds"],
        [_line(one, measured, coverage) for one, measured, coverage in found],
    )  # fmt: skip
    if options.json:
        facts = [_facts(one, measured, coverage) for one, measured, coverage in found]
        options.json.write_text(json.dumps({"machine": machine(), "rows": facts}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", help="names with commas between; all if left out")
    parser.add_argument("--calibration", default="bundled", help="a text file, or bundled")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--seed", type=int, default=0, help="of the dithering")
    parser.add_argument("--work", type=Path, help="keep checkpoints here, and use those there")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _text() -> EvalText:
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    return EvalText("pydoc_data.topics", text, "")


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def _make(row: Row, parent: Path, folder: Path, calibration: str, here: Settings) -> Made:
    out = folder / f"{row.name}-{row.calibrate}".replace(" ", "-")
    seconds = math.nan
    if not out.exists():  # of an earlier call with the same --work
        how = CopyOptions(calibration if row.calibrate == TEXT else row.calibrate, row.target_bpw)
        start = time.monotonic()
        convert(str(parent), row.scheme, out, here, SilentProgress(), how)
        seconds = time.monotonic() - start
        print(f"made {row.name} ({row.calibrate}) in {seconds:.1f} s", flush=True)
    opened = open_model(str(out), here, SilentProgress())
    source = open_source(out)
    choice: Choice = choose_scheme("auto", source, None, requantize=False)
    return Made(row, Child(opened, choice, None, source, None), seconds)


def _compared(
    parent: Path, made: list[Made], text: EvalText, windows: int, here: Settings
) -> list[tuple[Made, Measured, Coverage]]:
    threads = choose_threads().prefill
    exact = dispatch.bind("cpu", threads, CpuOptions(exact=True))
    plain = dispatch.bind("cpu", threads)
    reference = open_model(str(parent), here, SilentProgress())
    counted = [Counted(one.child, plain, True) for one in made]
    extent = Extent(CONTEXT, None, windows * CONTEXT)
    what = cut(text, extent, reference.tokenizer(), reference.spec.vocab).windows
    sides = [each.side() for each in counted]
    floor, measured = run(reference_side(reference, exact), sides, what, lambda done, total: None)
    ppl = floor.ppl_reference or math.nan
    print(
        f"reference perplexity {ppl:.3f}, noise floor {floor.kl.mean:.2e} ({floor.tokens} scored)"
    )
    coverages = [each.coverage() for each in counted]
    return list(zip(made, measured, coverages, strict=True))


def _line(made: Made, measured: Measured, coverage: Coverage) -> list[str]:
    row, kl = made.row, measured.fidelity.kl
    bits, peer_kl, _ = PEERS[row.peer]
    ratio = (kl.mean or math.nan) / peer_kl
    wanted = (
        "" if row.most is None else f"<= {row.most:.2f}{'' if ratio <= row.most else ' MISSED'}"
    )
    return [
        row.name,
        row.calibrate,
        f"{coverage.total.bits_per_weight:.2f}",
        f"{kl.mean:.5f}",
        f"{kl.se:.5f}",
        f"{100 * (measured.fidelity.top1.value or 0):.2f} %",
        f"{row.peer} ({bits} bits, {peer_kl:.4f})",
        f"{ratio:.3f}",
        wanted,
        "" if math.isnan(made.seconds) else f"{made.seconds:.1f}",
    ]


def _facts(made: Made, measured: Measured, coverage: Coverage) -> dict[str, object]:
    row, fidelity = made.row, measured.fidelity
    return {
        "name": row.name,
        "calibrate": row.calibrate,
        "bits_per_weight": coverage.total.bits_per_weight,
        "kl_mean": fidelity.kl.mean,
        "kl_se": fidelity.kl.se,
        "kl_p99": fidelity.kl.p99,
        "kl_max": fidelity.kl.max,
        "top1": fidelity.top1.value,
        "ppl": fidelity.ppl,
        "ppl_reference": fidelity.ppl_reference,
        "peer": row.peer,
        "peer_kl": PEERS[row.peer][1],
        "wanted": row.most,
        "seconds": None if math.isnan(made.seconds) else made.seconds,
    }


if __name__ == "__main__":
    main()
