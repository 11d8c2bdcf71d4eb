"""Pulling from a hub on loopback: what is taken, how it is verified, what every fault leads to."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmrun.errors import DownloadError, ModelFileError, ModelNotFoundError, UsageError
from llmrun.store.catalog import Catalog, parse
from llmrun.store.fetch import FetchSettings, fetch
from llmrun.store.model import LocalModel
from llmrun.store.progress import SilentProgress
from llmrun.store.reference import Reference, resolve
from llmrun.store.store import Store

Resolve = Callable[..., Reference]
Hub = Any  # a HubServer; its module is loaded by path
MakeFault = Callable[..., Any]
Tables = Mapping[str, Callable[..., Any]]
Setting = Any
CANARY = "hf_CanaryTokenThatMustNotLeak1234"


class Counting(SilentProgress):
    """Adds up what a transfer reports."""

    def __init__(self) -> None:
        self.total_bytes: int | None = None
        self.seen_bytes = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        """Note the total."""
        self.total_bytes = total_bytes

    def advance(self, n_bytes: int) -> None:
        """Add."""
        self.seen_bytes += n_bytes


@pytest.fixture
def pull(store: Store, settings: FetchSettings, reference: Resolve) -> Callable[..., LocalModel]:
    """Fetch by name from the loopback hub; keyword arguments change the settings."""

    def pull_it(
        name: str = "org/tiny", revision: str | None = None, **changes: Setting
    ) -> LocalModel:
        changed = dataclasses.replace(settings, **changes)
        return fetch(reference(name, revision), store, changed, SilentProgress())

    return pull_it


def test_pull_takes_the_allowed_files_of_one_commit(
    pull: Callable[..., LocalModel], tiny_repo: str, taken: set[str], weights: bytes
) -> None:
    model = pull()
    assert {record.path for record in model.files} == taken
    assert {p.name for p in model.path.iterdir()} == taken | {"manifest.json"}
    assert model.revision == tiny_repo
    assert (model.path / "model.safetensors").read_bytes() == weights
    digest = {record.path: record.sha256 for record in model.files}["model.safetensors"]
    assert digest == hashlib.sha256(weights).hexdigest()
    assert model.license == "apache-2.0"
    assert model.problem is None


def test_progress_adds_up_to_the_total(
    store: Store,
    settings: FetchSettings,
    reference: Resolve,
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
) -> None:
    hub_server.fail("model.safetensors", fault("cut", 1000), fault("ignore_range"))
    counting = Counting()
    model = fetch(reference("org/tiny"), store, settings, counting)
    assert counting.seen_bytes == counting.total_bytes == model.bytes


def test_r078_complete_model_opens_no_socket(
    pull: Callable[..., LocalModel], tiny_repo: str, no_sockets_later: Callable[[], None]
) -> None:
    first = pull()
    no_sockets_later()
    assert pull() == first
    assert pull("org/tiny@" + tiny_repo).path == first.path
    assert pull(offline=True) == first


def test_r079_offline_and_missing_is_not_found(
    pull: Callable[..., LocalModel], no_sockets: None, hub_server: Hub
) -> None:
    with pytest.raises(ModelNotFoundError, match="offline"):
        pull(offline=True)
    assert hub_server.seen == []


def test_r059_cut_three_times_is_continued_each_time(
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    weights: bytes,
) -> None:
    parts = [int(len(weights) * share) for share in (0.5, 0.2, 0.1)]
    hub_server.fail("model.safetensors", *(fault("cut", n) for n in parts))
    model = pull(retries=0 + 1)
    assert (model.path / "model.safetensors").read_bytes() == weights
    ranges = [
        seen.headers.get("range")
        for seen in hub_server.bodies("model.safetensors")
        if seen.server == "cdn"
    ]
    sums = [parts[0], parts[0] + parts[1], sum(parts)]
    assert ranges == [None, *(f"bytes={n}-" for n in sums)]


def test_a_second_run_continues_what_the_first_left(
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    weights: bytes,
    store: Store,
    hidden_state: Callable[[Store], list[str]],
) -> None:
    hub_server.fail("model.safetensors", fault("cut", 1000), fault("status", 503))
    with pytest.raises(DownloadError, match="in a row"):
        pull(retries=0)
    assert store.models() == []
    assert len(hidden_state(store)) == 1
    hub_server.faults.clear()
    model = pull()
    assert (model.path / "model.safetensors").read_bytes() == weights
    assert hub_server.bodies("model.safetensors")[-1].headers["range"] == "bytes=1000-"
    assert hidden_state(store) == []


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_cut_at_any_place_ends_with_right_bytes(
    share: float,
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    weights: bytes,
) -> None:
    hub_server.fail("model.safetensors", fault("cut", int(len(weights) * share)))
    assert (pull().path / "model.safetensors").read_bytes() == weights


def test_r061_wrong_byte_is_fetched_once_more(
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    weights: bytes,
) -> None:
    hub_server.fail("model.safetensors", fault("flip", 500))
    assert (pull().path / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_r061_wrong_byte_twice_ends_the_pull(
    path: str,
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    store: Store,
) -> None:
    hub_server.fail(path, *[fault("flip", 5)] * 2)
    with pytest.raises(DownloadError, match="wrong bytes"):
        pull()
    assert store.models() == []
    assert not list(store.root.rglob(f"{path}*"))


@pytest.mark.parametrize("kind", ["empty", "short", "long"])
def test_r070_wrong_lengths_are_retried_then_given_up(
    kind: str,
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    weights: bytes,
    store: Store,
) -> None:
    hub_server.fail("model.safetensors", *[fault(kind, 7)] * 3)
    with pytest.raises(DownloadError):
        pull(retries=1)
    assert store.models() == []
    hub_server.faults.clear()
    assert (pull().path / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    "second", ["etag", "no_etag", "ignore_range", "shift_range", "status_range"]
)
def test_p6_unproven_ranges_restart_from_zero(
    second: str,
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    weights: bytes,
) -> None:
    value = {"shift_range": 10, "status_range": 416, "etag": 5}.get(second, 0)
    hub_server.fail("model.safetensors", fault("cut", 4000), fault(second, value))
    assert (pull().path / "model.safetensors").read_bytes() == weights


def test_p6_without_an_etag_nothing_is_continued(
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    weights: bytes,
) -> None:
    hub_server.fail("model.safetensors", fault("cut_no_etag", 4000))
    assert (pull().path / "model.safetensors").read_bytes() == weights
    assert all("range" not in seen.headers for seen in hub_server.seen)


def test_p6_a_partial_of_other_bytes_is_found_out(
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    fault: MakeFault,
    weights: bytes,
    store: Store,
) -> None:
    hub_server.fail("model.safetensors", fault("cut", 1000), fault("status", 503))
    with pytest.raises(DownloadError):
        pull(retries=0)
    part = next(store.staging.rglob("model.safetensors.part"))
    part.write_bytes(b"\0" + part.read_bytes()[1:])
    hub_server.faults.clear()
    assert (pull().path / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_bursts_of_passing_errors_are_waited_out(
    status: int, pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str, fault: MakeFault
) -> None:
    burst = [fault("status", status, (("Retry-After", "0"),))] * 3
    hub_server.fail("api", *burst)
    hub_server.fail("config.json", *burst)
    assert pull().problem is None


def test_compressed_bodies_are_refused(
    pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str, fault: MakeFault
) -> None:
    hub_server.fail("config.json", fault("gzip"))
    with pytest.raises(DownloadError, match="compressed"):
        pull()
    assert all(seen.headers["accept-encoding"] == "identity" for seen in hub_server.seen)


@pytest.mark.parametrize(
    ("refusal", "token", "error", "says"),
    [
        ((401, "RepoNotFound"), None, DownloadError, "private or gated"),
        ((401, "GatedRepo"), None, DownloadError, "gated"),
        ((401, "RepoNotFound"), CANARY, ModelNotFoundError, "does not exist"),
        ((401, ""), CANARY, DownloadError, "does not accept"),
        ((403, "GatedRepo"), CANARY, DownloadError, "not granted"),
        ((404, "RepoNotFound"), None, ModelNotFoundError, "does not exist"),
        ((404, "RevisionNotFound"), None, ModelNotFoundError, "no revision"),
        ((418, ""), None, DownloadError, "418"),
    ],
)
def test_r080_r081_refusals(
    refusal: tuple[int, str],
    token: str | None,
    error: type[Exception],
    says: str,
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
) -> None:
    hub_server.repos["org/tiny"].refusal = refusal
    with pytest.raises(error, match=says) as caught:
        pull(token=token)
    assert CANARY not in str(caught.value)
    if "Your token" in str(caught.value):
        assert CANARY[-4:] in str(caught.value)


def test_r082_token_goes_to_the_configured_origin_only(
    pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str
) -> None:
    hub_server.repos["org/tiny"].token = CANARY
    pull(token=f" {CANARY}\n")
    auth = {seen.server: set() for seen in hub_server.seen}
    for seen in hub_server.seen:
        auth[seen.server].add(seen.headers.get("authorization"))
    assert auth == {"hub": {f"Bearer {CANARY}"}, "cdn": {None}}


def test_r082_token_does_not_come_back_after_leaving(
    pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str
) -> None:
    hub_server.redirect_back = True
    pull(token=CANARY)
    back = [seen for seen in hub_server.seen if "back=1" in seen.path]
    assert back
    assert all("authorization" not in seen.headers for seen in back)


def test_token_is_in_no_file_and_no_repr(
    pull: Callable[..., LocalModel], tiny_repo: str, store: Store, settings: FetchSettings
) -> None:
    pull(token=CANARY)
    assert CANARY not in repr(dataclasses.replace(settings, token=CANARY))
    for path in store.root.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes()


def test_a_token_that_is_none_is_not_shown(pull: Callable[..., LocalModel]) -> None:
    with pytest.raises(UsageError) as caught:
        pull(token="hf_secret\r\nX-Other: 1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("blank", ["   ", "", None])
def test_r084_blank_endpoint_is_unset(blank: str | None) -> None:
    from llmrun.store.hub import DEFAULT_ENDPOINT, connect

    assert connect(FetchSettings(endpoint=blank)).endpoint == DEFAULT_ENDPOINT


def test_r084_endpoint_slash_and_scheme_are_checked(hub_server: Hub) -> None:
    from llmrun.store.hub import connect

    assert connect(FetchSettings(endpoint="http://x:1//")).endpoint == "http://x:1"
    with pytest.raises(UsageError, match="http"):
        connect(FetchSettings(endpoint="huggingface.co"))


def test_r077_pinned_commit_survives_a_moving_main(
    pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str
) -> None:
    first = pull()
    moved = hub_server.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"new"})
    assert pull() == first
    assert pull(update=True).revision == moved
    assert pull().revision == moved
    assert pull(revision=tiny_repo).path == first.path


def test_sec11_all_files_come_from_the_commit_resolved_once(
    pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str
) -> None:
    pull()
    files = [seen.path for seen in hub_server.seen if "/resolve/" in seen.path]
    assert files
    assert all(f"/resolve/{tiny_repo}/" in path for path in files)


def test_catalog_pins_are_compared(
    store: Store,
    settings: FetchSettings,
    hub_server: Hub,
    tiny_repo: str,
    tables: Tables,
    weights: bytes,
) -> None:
    def pinned(path: str, data: bytes) -> Reference:
        pin = {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        table = tables["hub"](tiny_repo, files=[pin])
        return resolve("tiny", parse({"default": "tiny", "models": {"tiny": table}}, "x"))

    for path, data in (
        ("model.safetensors", weights[:-1] + b"?"),
        ("config.json", b'{"model_type": "llamo"}'),
        ("absent.json", b"x"),
    ):
        with pytest.raises(DownloadError, match="pins"):
            fetch(pinned(path, data), store, settings, SilentProgress())
    assert store.models() == []
    right = pinned("config.json", b'{"model_type": "llama"}')
    assert fetch(right, store, settings, SilentProgress()).alias == "tiny"


def test_sec04_a_repo_of_pickles_is_refused(
    pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    hub_server.add("org/old", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ModelFileError, match="pickles"):
        pull("org/old")
    assert not hub_server.bodies(".bin")


def test_r074_r075_the_index_decides_which_weights_are_taken(
    pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "part-1.safetensors": b"one",
        "part-2.safetensors": b"two",
        "consolidated.safetensors": b"the same again",
    }
    hub_server.add("org/sharded", files)
    taken = {record.path for record in pull("org/sharded").files}
    assert taken == set(files) - {"consolidated.safetensors"}


def test_r072_a_shard_the_repo_does_not_hold(
    pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    index = {"weight_map": {"a": "../../escape.safetensors"}}
    name = "model.safetensors.index.json"
    hub_server.add("org/broken", {name: json.dumps(index).encode(), "x.safetensors": b"x"})
    with pytest.raises(ModelFileError, match=r"escape\.safetensors"):
        pull("org/broken")


def test_gguf_files_are_named_one_by_one(
    pull: Callable[..., LocalModel], hub_server: Hub, store: Store
) -> None:
    hub_server.add("org/g", {"a-q4.gguf": b"four", "a-q8.gguf": b"eight", "config.json": b"{}"})
    with pytest.raises(UsageError, match=r"a-q4\.gguf, a-q8\.gguf"):
        pull("org/g")
    model = pull("org/g/a-q8.gguf")
    assert model.path.name == "a-q8.gguf"
    assert model.path.read_bytes() == b"eight"
    assert pull("org/g/a-q4.gguf").path.read_bytes() == b"four"
    with pytest.raises(ModelNotFoundError, match="a-q4"):
        pull("org/g/other.gguf")
    assert len(store.models()) == 2


def test_a_projector_beside_a_model_is_no_second_model(
    pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    hub_server.add("org/v", {"m-q4.gguf": b"four", "mmproj-f16.gguf": b"eyes"})
    assert pull("org/v").path.name == "m-q4.gguf"


SPLIT = {f"m-q8-0000{n}-of-00003.gguf": b"part %d" % n for n in (3, 1, 2)}


def test_all_parts_of_a_split_model_are_fetched(
    pull: Callable[..., LocalModel], hub_server: Hub, store: Store
) -> None:
    hub_server.add("org/s", {**SPLIT, "a-q4.gguf": b"four"})
    with pytest.raises(UsageError, match=r"2 GGUF files: a-q4\.gguf, m-q8-00001-of-00003\.gguf"):
        pull("org/s")
    model = pull("org/s/m-q8-00001-of-00003.gguf")
    assert model.path.name == "m-q8-00001-of-00003.gguf"
    assert {f.path: f.size for f in model.files} == dict.fromkeys(SPLIT, 6)
    assert (model.path.parent / "m-q8-00003-of-00003.gguf").read_bytes() == b"part 3"
    assert pull("org/s/m-q8-00002-of-00003.gguf").path == model.path
    assert len(store.models()) == 1


def test_the_only_model_of_a_repository_may_be_split(
    pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    hub_server.add("org/s", dict(SPLIT))
    assert pull("org/s").path.name == "m-q8-00001-of-00003.gguf"


def test_gguf_files_in_folders_are_named_with_them(
    pull: Callable[..., LocalModel], hub_server: Hub, store: Store
) -> None:
    parts = {f"Q8_0/{name}": data for name, data in SPLIT.items()}
    small = {"BF16/deep/m.gguf": b"small", "config.json": b"{}", "Q8_0/config.json": b"[]"}
    hub_server.add("org/f", {**parts, **small})
    with pytest.raises(
        UsageError, match=r"2 GGUF files: BF16/deep/m\.gguf, Q8_0/m-q8-00001"
    ) as caught:
        pull("org/f")
    assert caught.value.next_step == "Name one: org/f/BF16/deep/m.gguf"
    with pytest.raises(ModelNotFoundError, match=r"no file Q4/m\.gguf") as absent:
        pull("org/f/Q4/m.gguf")
    assert "BF16/deep/m.gguf, Q8_0/m-q8-00001-of-00003.gguf" in absent.value.next_step
    model = pull("org/f/Q8_0/m-q8-00002-of-00003.gguf")
    assert model.path.name == "m-q8-00001-of-00003.gguf"
    assert {f.path: f.size for f in model.files} == {**dict.fromkeys(SPLIT, 6), "config.json": 2}
    assert (model.path.parent / "m-q8-00003-of-00003.gguf").read_bytes() == b"part 3"
    assert pull("org/f/BF16/deep/m.gguf").path.read_bytes() == b"small"
    assert sorted(m.name for m in store.models()) == [
        "org/f/BF16/deep/m.gguf",
        "org/f/Q8_0/m-q8-00001-of-00003.gguf",
    ]
    assert pull("org/f/BF16/deep/m.gguf", offline=True).bytes == 7
    store.remove("org/f/BF16/deep/m.gguf@main")
    assert len(store.models()) == 1


def test_a_gguf_file_in_a_folder_is_not_taken_unasked(
    pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    hub_server.add("org/one", {"Q8_0/m.gguf": b"x"})
    with pytest.raises(UsageError, match=r"1 GGUF file: Q8_0/m\.gguf"):
        pull("org/one")
    hub_server.add("org/top", {"Q8_0/m.gguf": b"x", "m.gguf": b"top"})
    assert pull("org/top").path.read_bytes() == b"top"


def test_a_listing_full_of_parts_of_split_models_costs_no_time(
    pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    names = [f"m{n}-00001-of-01024.gguf" for n in range(5_000)]
    hub_server.add("org/many", {"m-00001-of-99999.gguf": b"x"})
    hub_server.listing_extra = [{"rfilename": n, "size": 1, "blobId": "0" * 40} for n in names]
    start = time.process_time()
    with pytest.raises(UsageError, match="5001 GGUF files"):
        pull("org/many")
    assert time.process_time() - start < 1


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_part_the_repository_does_not_hold(
    gone: int, pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    missing = f"m-q8-0000{gone}-of-00003.gguf"
    hub_server.add("org/s", {name: data for name, data in SPLIT.items() if name != missing})
    for name in ("org/s", "org/s/m-q8-00001-of-00003.gguf"):
        with pytest.raises(ModelFileError, match=f"2 of the 3 parts .*{missing} is missing"):
            pull(name)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.json",
        "a/../../b",
        "..\\x.json",
        "C:\\x.json",
        "C:x",
        "a\0b",
        "x//y",
        "./x",
        "line\nbreak",
    ],
)
def test_sec09_hostile_file_names_refuse_the_repo(
    name: str, pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str, tmp_path: Path
) -> None:
    hub_server.listing_extra = [{"rfilename": name, "size": 1, "blobId": "0" * 40}]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ModelFileError, match="outside"):
        pull()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["con.safetensors", "ab:c.safetensors", "a .safetensors", "tokenizer\u2024.json"]
)
def test_sec09_unsafe_names_that_would_be_taken(
    name: str, pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    hub_server.add("org/odd", {name: b"x", "w.safetensors": b"y"})
    with pytest.raises(ModelFileError, match="safe on every system"):
        pull("org/odd")


def test_sec09_names_that_differ_in_case_only(
    pull: Callable[..., LocalModel], hub_server: Hub
) -> None:
    hub_server.add("org/case", {"W.safetensors": b"x", "w.safetensors": b"y"})
    with pytest.raises(ModelFileError, match="safe on every system"):
        pull("org/case")


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"<html>", b'{"sha": "main", "siblings": []}', b'{"sha": 1}', b"\xff"]
)
def test_answers_that_are_no_listing(
    answer: bytes,
    pull: Callable[..., LocalModel],
    hub_server: Hub,
    tiny_repo: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = hub_server._servers[0].RequestHandlerClass
    monkeypatch.setattr(handler, "_api", lambda self, *_: self._plain(200, {}, answer))
    with pytest.raises(DownloadError):
        pull(retries=1)


def test_nobody_listens(pull: Callable[..., LocalModel]) -> None:
    with pytest.raises(DownloadError, match="in a row"):
        pull(endpoint="http://127.0.0.1:1", retries=1)


def test_redirect_to_no_address_is_refused(
    pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str, fault: MakeFault
) -> None:
    for target in ("ftp://x/y", "file:///etc/passwd", "http://[::1", "http://x:99999/"):
        hub_server.fail("api", fault("status", 302, (("Location", target),)))
        with pytest.raises(DownloadError, match="usable address"):
            pull()


def test_endless_redirects_end(
    pull: Callable[..., LocalModel], hub_server: Hub, tiny_repo: str, fault: MakeFault
) -> None:
    here = f"{hub_server.endpoint}/api/models/org/tiny/revision/main"
    hub_server.fail("api", *[fault("status", 302, (("Location", here),))] * 20)
    with pytest.raises(DownloadError, match="redirected"):
        pull()


def test_r083_https_to_http_is_refused() -> None:
    from llmrun.store.request import _next_url

    with pytest.raises(DownloadError, match="unencrypted"):
        _next_url("https://hub.example/x", "http://hub.example/x")
    assert _next_url("https://hub.example/x", "/y") == "https://hub.example/y"


def test_without_a_network_it_does_not_try_for_long(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("llmrun.store.request.time.sleep", pauses.append)
    reference = resolve("acme/nowhere", Catalog({}, ""))
    settings = FetchSettings(endpoint="http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="3 times in a row"):
        fetch(reference, store, settings, SilentProgress())
    assert pauses == [1.0, 2.0]
