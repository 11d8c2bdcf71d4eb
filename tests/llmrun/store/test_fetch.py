"""Whole pulls: space, kills, other processes, failing disks. Every case ends in a plain rerun."""

import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmrun.errors import DownloadError, ModelFileError
from llmrun.store import claim, layout
from llmrun.store import fetch as fetching
from llmrun.store.claim import Claim, new_claim
from llmrun.store.disk import Disk
from llmrun.store.fetch import FetchSettings, fetch
from llmrun.store.model import LocalModel
from llmrun.store.names import slug
from llmrun.store.progress import SilentProgress
from llmrun.store.reference import Reference
from llmrun.store.store import Store

Hub = Any  # a HubServer; its module is loaded by path
MakeFault = Callable[..., Any]
Resolve = Callable[..., Reference]
Pull = Callable[..., LocalModel]

PULLER = """
import sys
from pathlib import Path
from llmrun.store.catalog import Catalog
from llmrun.store.fetch import FetchSettings, fetch
from llmrun.store.progress import SilentProgress
from llmrun.store.reference import resolve
from llmrun.store.store import Store

class Shown(SilentProgress):
    def start(self, label, total_bytes):
        print(label, flush=True)

reference = resolve("org/tiny", Catalog({}, ""))
settings = FetchSettings(endpoint=sys.argv[2], backoff_s=0.1)
model = fetch(reference, Store(Path(sys.argv[1])), settings, Shown())
print(model.path)
"""


@pytest.fixture
def pull(store: Store, settings: FetchSettings, reference: Resolve) -> Pull:
    """Fetch org/tiny; keyword arguments change the settings."""

    def pull_it(**changes: object) -> LocalModel:
        changed = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
        return fetch(reference("org/tiny"), store, changed, SilentProgress())

    return pull_it


def start(store: Store, hub_server: Hub) -> subprocess.Popen[str]:
    """Another process that pulls org/tiny."""
    command = [sys.executable, "-c", PULLER, str(store.root), hub_server.endpoint]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_partial(store: Store, n_bytes: int) -> Path:
    """Wait until a partial of the weights has that many bytes."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for part in store.staging.rglob("model.safetensors.part"):
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_size >= n_bytes:
                    return part
        time.sleep(0.01)
    raise AssertionError("no partial grew")


@pytest.mark.slow
def test_r060_r064_kill_in_the_middle_then_a_plain_rerun(
    store: Store, hub_server: Hub, tiny_repo: str, pull: Pull, weights: bytes
) -> None:
    hub_server.bytes_per_s = 200_000
    killed = start(store, hub_server)
    wait_for_partial(store, 20_000)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert store.models() == []
    hub_server.bytes_per_s = None
    began = time.monotonic()
    model = pull()
    assert time.monotonic() - began < 5.0
    assert (model.path / "model.safetensors").read_bytes() == weights
    asked = hub_server.bodies("model.safetensors")[-1].headers["range"]
    assert int(asked.removeprefix("bytes=").removesuffix("-")) >= 20_000
    assert list(store.staging.iterdir()) == []


@pytest.mark.slow
def test_r060_interrupt_keeps_the_partial(
    store: Store, hub_server: Hub, tiny_repo: str, pull: Pull
) -> None:
    hub_server.bytes_per_s = 200_000
    stopped = start(store, hub_server)
    wait_for_partial(store, 20_000)
    stopped.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in stopped.communicate()[1]
    assert store.models() == []
    hub_server.bytes_per_s = None
    assert pull().problem is None
    assert "range" in hub_server.bodies("model.safetensors")[-1].headers


@pytest.mark.slow
def test_r066_a_second_process_waits_and_reuses(
    store: Store, hub_server: Hub, tiny_repo: str, weights: bytes
) -> None:
    hub_server.bytes_per_s = 300_000
    first = start(store, hub_server)
    wait_for_partial(store, 1)
    others = [start(store, hub_server) for _ in range(2)]
    ended = [process.communicate() for process in (first, *others)]
    assert [process.returncode for process in (first, *others)] == [0, 0, 0], ended
    assert len({out.splitlines()[-1] for out, _ in ended}) == 1
    assert f"waiting for process {first.pid}" in ended[1][0]
    on_cdn = [s for s in hub_server.bodies("model.safetensors") if s.server == "cdn"]
    assert len(on_cdn) == 1
    assert (store.models()[0].path / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_r067_r086_without_any_coordination_all_succeed_and_bytes_never_change(
    store: Store, hub_server: Hub, tiny_repo: str, weights: bytes
) -> None:
    blind = PULLER.replace(
        "reference =",
        "import llmrun.store.workspace as w\nw._rivals = lambda *a: []\nreference =",
        1,
    )
    hub_server.bytes_per_s = 400_000
    command = [sys.executable, "-c", blind, str(store.root), hub_server.endpoint]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    published: list[tuple[int, float]] = []
    while any(process.poll() is None for process in running):
        for model in store.models():
            path = model.path / "model.safetensors"
            published.append((path.stat().st_ino, path.stat().st_mtime))
            assert path.read_bytes() == weights
        time.sleep(0.02)
    assert [process.communicate()[1] for process in running] == [""] * 4
    assert len(set(published)) <= 1
    on_cdn = [s for s in hub_server.bodies("model.safetensors") if s.server == "cdn"]
    assert len(on_cdn) > 1


def claim_of(store: Store, reference: Resolve, commit: str, **changes: object) -> Claim:
    """A claim on org/tiny at ``commit`` with another owner; its folder exists."""
    target = layout.model_folder(store.root, reference("org/tiny")) / commit
    made = new_claim(store.staging, "pull", slug(f"{target.parent.name} {commit}"))
    made = dataclasses.replace(made, **changes)  # type: ignore[arg-type]
    name = f"{made.kind}.{made.key}.{made.machine}.{made.pid}.{made.started}.{made.token}"
    made = dataclasses.replace(made, path=store.staging / name)
    made.path.mkdir(parents=True)
    return made


def test_r062_a_live_owner_is_named_after_the_bound(
    store: Store, tiny_repo: str, pull: Pull, reference: Resolve
) -> None:
    claim_of(store, reference, tiny_repo, pid=os.getppid(), started=claim._process(os.getppid())[1])
    with pytest.raises(DownloadError, match=f"process {os.getppid()}"):
        pull(lock_timeout_s=0.3)


def test_r062_r064_a_dead_owner_is_not_waited_for(
    store: Store, tiny_repo: str, pull: Pull, reference: Resolve
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    left = claim_of(store, reference, tiny_repo, pid=int(ended.stdout))
    (left.path / "config.json").write_bytes(b"of another try")
    began = time.monotonic()
    assert pull().problem is None
    assert time.monotonic() - began < 2.0
    assert list(store.staging.iterdir()) == []


def test_a_reused_process_number_is_another_process(
    store: Store, tiny_repo: str, pull: Pull, reference: Resolve
) -> None:
    claim_of(store, reference, tiny_repo, pid=os.getppid(), started="1")
    assert pull(lock_timeout_s=0.0).problem is None


def test_r086_a_silent_owner_elsewhere_is_passed_and_its_bytes_stay(
    store: Store, tiny_repo: str, pull: Pull, reference: Resolve
) -> None:
    there = claim_of(store, reference, tiny_repo, machine="0badcafe", pid=1)
    part = there.path / "model.safetensors.part"
    part.write_bytes(b"half")
    before = time.time() - 61
    os.utime(there.path, (before, before))
    model = pull(lock_timeout_s=0.0)
    assert part.read_bytes() == b"half"
    part.write_bytes(b"a late write")
    assert model.problem is None
    assert store.models() == [model]


def test_a_beating_owner_elsewhere_is_waited_for(
    store: Store, tiny_repo: str, pull: Pull, reference: Resolve
) -> None:
    claim_of(store, reference, tiny_repo, machine="0badcafe", pid=1)
    with pytest.raises(DownloadError, match="on another machine"):
        pull(lock_timeout_s=0.3)


Usage = collections.namedtuple("Usage", "total used free")


def test_r071_p7_space_is_checked_before_the_first_byte(
    store: Store, hub_server: Hub, tiny_repo: str, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(len(data) for data in hub_server.repos["org/tiny"].commits[tiny_repo].values())
    taken = (
        size - len(b"# not needed") - len(b"raise SystemExit('code was run')") - len(b"a pickle")
    )
    needed = int(taken * 1.05)
    free = needed - 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(0, 0, free))
    with pytest.raises(DownloadError, match=f"needs {needed:,} bytes.*{free:,} free"):
        pull()
    assert not [s for s in hub_server.seen if "/resolve/" in s.path]
    assert list(store.staging.iterdir()) == []
    free = needed
    with pytest.raises(DownloadError, match="needs"):
        pull(reserve_bytes=1000)
    assert pull().problem is None


def test_p7_a_full_disk_gives_back_what_was_ours(
    store: Store, tiny_repo: str, settings: FetchSettings, reference: Resolve, pull: Pull
) -> None:
    def full(call: str, path: Path) -> None:
        if call == "write" and "model.safetensors" in path.name:
            raise OSError(28, "No space left on device")

    keep = store.root / "models" / "keep"
    keep.mkdir(parents=True)
    with pytest.raises(DownloadError, match="No space left"):
        fetch(reference("org/tiny"), Store(store.root, Disk(full)), settings, SilentProgress())
    assert list(store.staging.iterdir()) == []
    assert keep.is_dir()
    assert pull().problem is None


def test_pull_repairs_by_fetching_damaged_files_only(
    store: Store, hub_server: Hub, tiny_repo: str, pull: Pull, weights: bytes
) -> None:
    path = pull().path
    (path / "config.json").write_bytes(b"{")
    hub_server.seen.clear()
    with pytest.raises(ModelFileError, match=r"config\.json has 1 bytes"):
        pull(offline=True)
    assert hub_server.seen == []
    repaired = pull()
    assert (repaired.path, repaired.problem) == (path, None)
    fetched = {s.path.rpartition("/")[2] for s in hub_server.seen if "/resolve/" in s.path}
    assert fetched == {"config.json"}
    assert (path / "model.safetensors").read_bytes() == weights


def test_p2_a_damaged_file_of_right_size_is_not_salvaged(
    store: Store, hub_server: Hub, tiny_repo: str, pull: Pull, weights: bytes
) -> None:
    path = pull().path
    (path / "model.safetensors").write_bytes(b"?" + weights[1:])
    (path / "manifest.json").unlink()
    assert (pull().path / "model.safetensors").read_bytes() == weights


def test_margin_is_the_documented_one() -> None:
    assert fetching.MARGIN == 0.05


@pytest.mark.slow
@pytest.mark.parametrize("number", [28, 5])
def test_io_errors_at_every_step_of_a_pull(
    number: int,
    tmp_path: Path,
    settings: FetchSettings,
    hub_server: Hub,
    reference: Resolve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub_server.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"x" * 500})
    monkeypatch.setattr(claim, "BEAT_S", 0.02)
    for fail_at in range(1, 100):
        calls = 0

        def hook(call: str, path: Path, fail_at: int = fail_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(number, os.strerror(number))

        root = tmp_path / str(fail_at)
        with contextlib.suppress(DownloadError):
            fetch(reference("org/tiny"), Store(root, Disk(hook)), settings, SilentProgress())
        assert all(model.problem is None for model in Store(root).models())
        assert fetch(reference("org/tiny"), Store(root), settings, SilentProgress()).path.is_dir()
        if calls < fail_at:
            assert fail_at > 25
            return
    pytest.fail("never got through")


KILLER = """
import os, signal, sys
from pathlib import Path
import huggingface_hub.errors
from huggingface_hub import constants, get_session
from llmrun.store.catalog import Catalog
from llmrun.store.disk import Disk
from llmrun.store.fetch import FetchSettings, fetch
from llmrun.store.progress import SilentProgress
from llmrun.store.reference import resolve
from llmrun.store.store import Store

root, settings = Path(sys.argv[1]), FetchSettings(endpoint=sys.argv[2], backoff_s=0.0)
reference = resolve("org/tiny", Catalog({}, ""))

def pull(folder, kill_at):
    calls = 0
    def hook(call, path):
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    model = fetch(reference, Store(folder, Disk(hook)), settings, SilentProgress())
    assert (model.path / "model.safetensors").read_bytes() == b"x" * 500

def forked(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as err:
            print(repr(err), flush=True)
            os._exit(1)
    return os.waitpid(pid, 0)[1]

get_session()  # once, before the forks: it reads the trust store
for kill_at in range(1, 200):
    folder = root / str(kill_at)
    status = forked(lambda: pull(folder, kill_at))
    assert all(model.problem is None for model in Store(folder).models()), kill_at
    assert forked(lambda: pull(folder, 0)) == 0, kill_at
    assert len(Store(folder).models()) == 1, kill_at
    assert not list((folder / "staging").iterdir()), kill_at
    if status == 0:
        break
print(kill_at)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_p1_p3_killed_at_every_step_of_a_pull(tmp_path: Path, hub_server: Hub) -> None:
    hub_server.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"x" * 500})
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), hub_server.endpoint],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 25
