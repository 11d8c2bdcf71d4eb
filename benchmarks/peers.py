"""llmrun beside llama.cpp: one command, both in one run, a table of ratios.

    python benchmarks/peers.py --peer-python PEER/bin/python --model SECOND.gguf --json out.json

Each engine is a process of its own with the same number of threads. They take turns, sample by
sample, so that a neighbour's load and the processor's clock hit both; ratios are those of two
samples that were taken one after the other. benchmarks/README.md says more.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common import Spread, machine, show_facts, show_table
from contest import Outcome, run
from rows import ROWS, Models, Row, rows

from llmrun.kernels.cpu.topology import recommended_threads


def main() -> None:
    """Measure, print, write the JSON."""
    options = _options()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    about = machine() | {"threads": options.threads, "rounds": options.rounds}
    show_facts(about)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        models = Models(
            starter=options.starter,
            second=options.model,
            int4=options.int4,
            peer_python=options.peer_python,
            work=options.work or Path(temporary),
            threads=options.threads,
        )
        for row in rows(options.rows, models, quick=options.quick):
            outcome = run(row, options.peer_python, options.threads, options.rounds)
            outcomes.append(outcome)
            _show(outcome)
    if options.json:
        document = {
            "schema": "llmrun.peers/1",
            "machine": about,
            "rows": [asdict(outcome) for outcome in outcomes],
        }
        text = json.dumps(document, indent=1, default=str)
        options.json.write_text(text + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--peer-python", required=True, help="a Python that has llama_cpp")
    parser.add_argument("--starter", default="smollm2-135m", help="a name or a .gguf file")
    parser.add_argument("--model", type=Path, help="the second model, a Q4_K_M .gguf file")
    parser.add_argument("--int4", type=Path, help="its int4 checkpoint (otherwise made from it)")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--quick", action="store_true", help="2 rounds of short work")
    parser.add_argument("--rounds", type=int, help="rounds that count (5)")
    parser.add_argument("--threads", type=int, default=recommended_threads().count)
    parser.add_argument("--work", type=Path, help="where requantized files are kept")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    return options


def _show(outcome: Outcome) -> None:
    row: Row = outcome.row
    print(f"\n{row.name}: {row.title}")
    for name, facts in outcome.facts.items():
        known = [f"{key} {value}" for key, value in facts.items() if value is not None]
        print(f"  {name}: {', '.join(known[1:])}")
    for name, reason in outcome.failures.items():
        print(f"  {name}: {reason}")
    header = ["  work", "ours", "tokens/s", "theirs", "tokens/s", "ratio"]
    lines = [
        [
            f"  {ratio.job}",
            ratio.ours,
            _cell(outcome, ratio.job, ratio.ours),
            ratio.theirs,
            _cell(outcome, ratio.job, ratio.theirs),
            _ratio(ratio.ratio),
        ]
        for ratio in outcome.ratios
    ]
    show_table(header, lines)
    for derived in outcome.derived:
        print(f"  {derived.title}, {derived.contender}: {_ratio(derived.value)}")


def _cell(outcome: Outcome, job: str, contender: str) -> str:
    reason = outcome.failures.get(contender)
    speeds: Sequence[float] = outcome.speeds[job].get(contender, ())
    spread = outcome.spread(job, contender)
    if spread is None:
        return reason or "-"
    return f"{spread}" if reason is None else f"{spread} of {len(speeds)}, then it {reason}"


def _ratio(ratio: Spread | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.2f} ({ratio.least:.2f}-{ratio.most:.2f})"


if __name__ == "__main__":
    main()
