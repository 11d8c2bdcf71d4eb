"""The store's calls on the disk: announced, exclusive, private."""

import os
import stat
from pathlib import Path

import pytest

from llmrun.store import disk as disks
from llmrun.store.disk import Disk, sha256_of


def test_every_change_is_announced_before_it_happens(tmp_path: Path) -> None:
    seen: list[tuple[str, str, bool]] = []
    disk = Disk(lambda call, path: seen.append((call, path.name, path.exists())))
    disk.make_folder(tmp_path / "a")
    with disk.create(tmp_path / "a" / "f") as file:
        disk.write(file, b"x")
        disk.sync(file)
    disk.sync_file(tmp_path / "a" / "f")
    disk.replace(tmp_path / "a" / "f", tmp_path / "a" / "g")
    disk.link(tmp_path / "a" / "g", tmp_path / "a" / "h")
    disk.remove_file(tmp_path / "a" / "g")
    disk.rename(tmp_path / "a", tmp_path / "b")
    disk.sync_folder(tmp_path / "b")
    disk.remove_tree(tmp_path / "b")
    assert seen == [
        ("make_folder", "a", False),
        ("create", "f", False),
        ("write", "f", True),
        ("sync", "f", True),
        ("sync_file", "f", True),
        ("replace", "g", False),
        ("link", "h", False),
        ("remove_file", "g", True),
        ("rename", "b", False),
        ("sync_folder", "b", True),
        ("remove_tree", "b", True),
    ]


def test_files_are_created_exclusively_and_never_through_links(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"keep")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("target", "link", "dangling"):
        with pytest.raises(FileExistsError):
            Disk().create(tmp_path / name)
    with pytest.raises(OSError, match="link"):
        Disk().reopen(tmp_path / "link")
    assert (tmp_path / "target").read_bytes() == b"keep"


def test_removing_a_link_spares_what_it_points_at(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    Disk().remove_tree(tmp_path / "link")
    assert (tmp_path / "kept" / "f").exists()
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_r085_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        Disk().make_folders(tmp_path / "a" / "b")
        Disk().make_folder(tmp_path / "c")
    finally:
        os.umask(before)
    for name in ("a", "a/b", "c"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_a_copy_stands_in_where_links_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(b"123")
    Disk().link(tmp_path / "a", tmp_path / "b")
    assert sha256_of(tmp_path / "a") == sha256_of(tmp_path / "b")


def test_r063_r065_no_file_lock_is_used_anywhere() -> None:
    for path in Path(disks.__file__).parent.glob("*.py"):
        text = path.read_text("utf-8")
        assert not [word for word in ("fcntl", "msvcrt", "filelock", "lockf(") if word in text]


def test_a_full_disk_is_told_from_other_errors() -> None:
    assert disks.is_full(OSError(28, "No space left on device"))
    assert not disks.is_full(OSError(5, "Input/output error"))
