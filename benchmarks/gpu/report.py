"""The tables that people read and the document that programs read, from a journal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpu.goals import MEASURED_ON, verdicts
from gpu.journal import Journal

SCHEMA = 1
NONE = "-"


def document(journal: Journal, about: Mapping[str, object]) -> dict[str, Any]:
    """Everything, as JSON takes it."""
    return {
        "schema": SCHEMA,
        **about,
        "goals": [
            {
                "name": verdict.goal.name,
                "goal": verdict.goal.goal,
                "must": verdict.goal.must,
                "value": verdict.value,
                "met": verdict.met,
            }
            for verdict in verdicts(journal)
        ],
        "facts": journal.facts,
        "sections": {
            name: {
                "state": section.state,
                "seconds": round(section.seconds, 1),
                "why": section.why,
                "cases": {label: _case(asdict(case)) for label, case in section.cases.items()},
            }
            for name, section in journal.sections.items()
        },
    }


def _case(case: dict[str, Any]) -> dict[str, Any]:
    values = case.pop("values")
    return {key: value for key, value in case.items() if value is not None} | values


def show(journal: Journal, about: Mapping[str, object]) -> None:
    """Print all tables."""
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for name, values in _machine(journal).items():
        print(f"{name}: {values}")
    _show("sections", ("section", "state", "s", "cases", "not right", "why"), _sections(journal))
    _show("what went wrong", ("section", "case", "state", "why"), _bad(journal))
    _show("linears: us and share of the read ceiling", _GEMV, _gemv(journal))
    for name in ("gap", "crossover", "attention", "e2e"):
        if name in journal.sections:
            _show(name, ("case", "values"), _plain(journal, name))
    header = ("goal", "measured", "goal", "must", "met")
    _show(f"goals ({MEASURED_ON})", header, _goals(journal))


def _show(title: str, header: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    """A table with columns as wide as they need to be; nothing if it has no rows."""
    lines = [header, *rows]
    if len(lines) == 1:
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print(f"\n{title}")
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())


def _machine(journal: Journal) -> Mapping[str, Any]:
    section = journal.sections.get("env")
    found = {} if section is None else dict(journal.good("env")).get("machine", {})
    return {**found, **{name: value for name, value in journal.facts.items()}}


def _sections(journal: Journal) -> Iterator[Sequence[str]]:
    for name, section in journal.sections.items():
        bad = sum(case.state != "ok" for case in section.cases.values())
        yield (
            name,
            section.state,
            f"{section.seconds:.1f}",
            str(len(section.cases)),
            str(bad),
            section.why or "",
        )


def _bad(journal: Journal) -> Iterator[Sequence[str]]:
    for section, label, case in journal.bad():
        yield section, label, case.state, (case.why or "")[:160]


_GEMV = ("case", "MB", "m=1", "m=4", "m=8", "m=16", "8 / 1")


def _gemv(journal: Journal) -> Iterator[Sequence[str]]:
    if "gemv" not in journal.sections:
        return
    ceiling = journal.facts.get("read_gb_per_s")
    for name, values in journal.good("gemv"):
        us, rates = values["us"], values["gb_per_s"]
        cells = []
        for m in ("1", "4", "8", "16"):
            share = f" {rates[m] / ceiling:.0%}" if m in rates and ceiling else ""
            cells.append(f"{us[m]}{share}" if m in us else NONE)
        ratio = f"{us['8'] / us['1']:.2f}" if "8" in us else NONE
        yield name, f"{values['bytes'] / 1e6:.1f}", *cells, ratio


def _plain(journal: Journal, section: str) -> Iterator[Sequence[str]]:
    for name, values in journal.good(section):
        yield name, ", ".join(f"{key} {_text(value)}" for key, value in values.items())


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    return str(value)


def _goals(journal: Journal) -> Iterator[Sequence[str]]:
    for verdict in verdicts(journal):
        goal = verdict.goal
        measured = NONE if verdict.value is None else f"{verdict.value:g}"
        met = verdict.met or "not measured"
        yield goal.name, measured, f"{goal.goal:g}", f"{goal.must:g}", met
