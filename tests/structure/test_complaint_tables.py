"""Tables of complaints name tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted((ROOT / "docs").glob("*-complaints.md"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_test_a_table_names_is_there(table: Path) -> None:
    lacking, named, content = [], 0, ""
    for word in re.findall(r"`([\w/]+(?:\.py)?)`", table.read_text(encoding="utf-8")):
        name = word.rpartition("/")[2]
        if not name.startswith("test_"):
            continue
        if name.endswith(".py"):
            files = [path for path in ROOT.joinpath("tests").rglob(name) if path.match(word)]
            content = "".join(path.read_text(encoding="utf-8") for path in files)
            lacking += [] if files else [word]
        elif not re.search(rf"^def {name}\(", content, re.MULTILINE):
            lacking.append(word)
        named += 1
    assert lacking == []
    assert named > 30


def test_tables_are_found() -> None:
    assert len(TABLES) >= 2
