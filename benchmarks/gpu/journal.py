"""What the workers reported, case by case; the one source of table, goals and JSON line.

A worker may die at any moment, so each case is announced before it runs: one without a result is
the one that killed it. Records are JSON objects, one a line:
``{"at": "section", ...}``, ``{"at": "case", ...}``, ``{"at": "result", ...}``,
``{"at": "end", ...}`` and ``{"at": "fact", "name": ..., "value": ...}``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]

GOOD = "ok"
WRONG = "wrong"
"""A kernel computed something else than the reference: no speed of it is shown."""


@dataclass
class Case:
    """One case: ``ok``, ``wrong``, ``error``, ``skipped``, ``crashed`` or ``cut``."""

    state: str
    seconds: float = 0.0
    values: Values = field(default_factory=dict)
    why: str | None = None


@dataclass
class Section:
    """One section: ``done``, ``skipped``, ``cut``, ``failed`` or ``waiting``."""

    state: str = "waiting"
    seconds: float = 0.0
    why: str | None = None
    cases: dict[str, Case] = field(default_factory=dict)


class Journal:
    """All sections of a run. ``facts``: what one section tells those behind it."""

    def __init__(self, sections: Mapping[str, float]) -> None:
        self.sections = {name: Section() for name in sections}
        self.facts: dict[str, Any] = {}
        self.running: tuple[str, str] | None = None
        """Section and case under way."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one record in."""
        at = record["at"]
        if at == "fact":
            self.facts[record["name"]] = record["value"]
            return
        section = self.sections[record["section"]]
        if at == "section":
            section.state = "running"
        elif at == "case":
            self.running = record["section"], record["case"]
        elif at == "result":
            self.running = None
            section.cases[record["case"]] = Case(
                record["state"], record["seconds"], record["values"], record["why"]
            )
        elif at == "end":
            section.state, section.why = record["state"], record["why"]
            section.seconds += record["seconds"]

    def lost(self, state: str, why: str) -> None:
        """The worker is gone: settle the case it was at."""
        if self.running is not None:
            name, case = self.running
            self.sections[name].cases[case] = Case(state, why=why)
            self.running = None

    def close(self, why: str) -> None:
        """Nothing more will come: settle the sections that have not ended."""
        self.lost("cut", why)
        for section in self.sections.values():
            if section.state == "running":
                section.state, section.why = "cut", why
            elif section.state == "waiting":
                section.state, section.why = "skipped", why

    def done(self, section: str) -> list[str]:
        """Cases of a section that need not run again."""
        return list(self.sections[section].cases)

    def good(self, section: str) -> Iterator[tuple[str, Values]]:
        """Names and values of the cases that went well."""
        for name, case in self.sections[section].cases.items():
            if case.state == GOOD:
                yield name, case.values

    def bad(self) -> Iterator[tuple[str, str, Case]]:
        """Section, name and case of all that did not, skipped ones aside."""
        for name, section in self.sections.items():
            for label, case in section.cases.items():
                if case.state not in (GOOD, "skipped"):
                    yield name, label, case

    def value(self, section: str, case: str, name: str) -> Any:  # noqa: ANN401 - as reported
        """One value; None if the case did not run or did not go well."""
        found = self.sections[section].cases.get(case)
        return found.values.get(name) if found is not None and found.state == GOOD else None
