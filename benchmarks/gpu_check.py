"""Everything about the GPU kernels that only a GPU can say: right, fast, and as fast as promised.

    python benchmarks/gpu_check.py [--budget-s 480] [--sections gemv e2e] [--json FILE] [--dry-run]

Needs torch and triton, and a checkout: nothing is installed and nothing is fetched. Ends within its
budget, and prints tables and one JSON line whatever happens meanwhile, SIGTERM included. Status 0:
all ran and was right; 1: something was wrong, or did not run.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from gpu import checkout, plan
from gpu.conductor import Setting, conduct
from gpu.journal import Journal
from gpu.report import document, show


class StoppedError(BaseException):
    """SIGTERM or Ctrl-C."""


def main() -> None:
    """Run and report."""
    start_s = time.monotonic()
    options = _options()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    journal = Journal(dict.fromkeys(options.sections, 0.0))
    ends = plan.ends(start_s, options.budget_s, options.sections)
    try:
        with tempfile.TemporaryDirectory(prefix="llmrun-gpu-check-") as folder:
            environment = _environment(Path(folder), options.dry_run)
            end_s = start_s + options.budget_s - plan.REPORT_S
            ended = conduct(journal, ends, Setting(options.dry_run, environment, end_s))
    except StoppedError as stopped:
        ended = str(stopped)
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the report is on its way
    journal.close(ended)
    about = {
        "budget_s": options.budget_s,
        "took_s": round(time.monotonic() - start_s, 1),
        "ended": ended,
        "dry_run": options.dry_run,
    }
    show(journal, about)
    found = document(journal, about)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, separators=(",", ":")), flush=True)
    good = ended == "complete" and not list(journal.bad())
    sys.exit(0 if good and all(s.state == "done" for s in journal.sections.values()) else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--budget-s", type=float, default=480.0, metavar="S")
    parser.add_argument("--sections", nargs="+", choices=plan.SECTIONS, default=[*plan.SECTIONS])
    parser.add_argument("--json", type=Path, metavar="FILE", help="the JSON line, indented")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    options.sections = [name for name in plan.SECTIONS if name in options.sections]
    return options


def _stop(number: int, frame: FrameType | None) -> None:
    raise StoppedError(signal.Signals(number).name)


def _environment(folder: Path, dry: bool) -> dict[str, str]:
    """That of the workers: this checkout, and an empty cache, so that compiling is seen."""
    tree = checkout.lay(folder / "tree")
    path = [str(tree), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_INTERPRET": "1" if dry else "0",
    }


if __name__ == "__main__":
    main()
