"""Maps are private; links, pipes and folders are refused."""

import mmap
import os
import sys
from pathlib import Path

import pytest

from llmrun.errors import ModelFileError, ModelNotFoundError
from llmrun.formats.mapping import map_file, passing, read_file


def test_a_map_can_be_written_without_touching_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    view = map_file(path)
    view[0:1] = b"x"
    assert bytes(view) == b"xbc"
    assert path.read_bytes() == b"abc"


def test_a_slice_outlives_the_map(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcdef")
    part = map_file(tmp_path / "f")[2:4]
    (tmp_path / "f").unlink()
    assert bytes(part) == b"cd"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_a_part_nobody_holds_are_given_back(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size = 64 << 20
    (tmp_path / "f").write_bytes(bytes(range(256)) * (size // 256))
    view = map_file(tmp_path / "f")
    before = resident()
    part = passing(view, 7, size)
    assert sum(part[:: mmap.PAGESIZE]) == size // mmap.PAGESIZE * 7
    assert resident() - before > size // 2
    del part
    assert resident() - before < size // 4
    assert view[:9].tobytes() == bytes(range(9))
    assert bytes(passing(view, 5, 8)) == b"\5\6\7"  # shorter than a page


def test_an_empty_file_is_an_empty_view(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert map_file(tmp_path / "f").nbytes == 0


def test_sec07_links_pipes_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("f")
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("link", "link"), ("broken", "link"), ("pipe", "not a regular file")):
        with pytest.raises(ModelFileError, match=words):
            map_file(tmp_path / name)
    with pytest.raises(ModelFileError, match="not a regular file"):
        map_file(tmp_path)
    with pytest.raises(ModelFileError, match="not a regular file"):
        map_file(Path("/dev/null"))
    with pytest.raises(ModelNotFoundError):
        map_file(tmp_path / "absent")


def test_a_snapshot_may_not_link_past_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "repo" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "repo" / "blobs").mkdir()
    (tmp_path / "secret").write_bytes(b"s")
    (snapshot / "f").symlink_to("../../../secret")
    with pytest.raises(ModelFileError, match="symbolic link"):
        map_file(snapshot / "f")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abcd")
    assert read_file(tmp_path / "f", 4) == b"abcd"
    with pytest.raises(ModelFileError, match="4 bytes, more than the 3"):
        read_file(tmp_path / "f", 3)
