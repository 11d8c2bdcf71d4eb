"""Models from a hub with Hugging Face's URL layout: the only owner of huggingface_hub.

A revision is resolved to a full commit once, and every file comes from that commit. Only files on
the allow-list are taken, never pickles or code. The library lends its HTTP session (proxies,
trust store), but not its download: it keeps no partial file across runs, checks sizes only, and
forwards credentials to a list of hosts of its own. transfer.py does those things to our rules.
"""

import importlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from llmrun.errors import DownloadError, ModelFileError, ModelNotFoundError, UsageError
from llmrun.store import names
from llmrun.store.disk import Disk
from llmrun.store.model import FileRecord, LocalModel
from llmrun.store.progress import Progress
from llmrun.store.reference import PICKLES, Reference
from llmrun.store.request import Hub
from llmrun.store.settings import FetchSettings
from llmrun.store.source import Listing, WantedFile
from llmrun.store.store import Store
from llmrun.store.transfer import download_file, read_small

DEFAULT_ENDPOINT = "https://huggingface.co"
LISTING_BYTES = 32 * 1024 * 1024
INDEX_BYTES = 12 * 1024 * 1024
INDEX_ENTRIES = 100_000
INDEX = "model.safetensors.index.json"
SMALL_FILES = frozenset(
    [
        "config.json",
        "generation_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        INDEX,
    ]
)


class HubSource:
    """Repositories of a hub."""

    def handles(self, reference: Reference) -> bool:
        """Hub references."""
        return reference.kind == "hub"

    def present(self, reference: Reference, store: Store) -> LocalModel | None:
        """The model in the store."""
        return store.inspect(reference)

    def resolve(self, reference: Reference, settings: FetchSettings) -> Listing:
        """Ask the hub for the commit and its files, and choose what to take."""
        hub = connect(settings)
        revision = reference.revision or "main"
        url = f"{hub.endpoint}/api/models/{reference.repo}/revision/{quote(revision, safe='')}"
        text = read_small(hub, f"{url}?{urlencode({'blobs': 'true'})}", LISTING_BYTES, reference)
        commit, siblings, license_name = _parse_listing(text, reference)
        if names.is_commit(revision) and commit != revision:
            raise DownloadError(
                f"The hub answered with commit {commit} when asked for {revision}.",
                "Try again later, or check HF_ENDPOINT.",
            )
        files = _choose(hub, reference, commit, siblings)
        _compare_with_pins(reference, files)
        ggufs = [file.path for file in files if file.path.endswith(".gguf")]
        return Listing(commit, files, opens=ggufs[0] if ggufs else "", license=license_name)

    def download(
        self,
        reference: Reference,
        listing: Listing,
        folder: Path,
        settings: FetchSettings,
        progress: Progress,
        disk: Disk,
    ) -> tuple[FileRecord, ...]:
        """Bring the files one after the other; parts of an earlier try are continued."""
        hub = connect(settings)
        _drop_strangers(folder, listing, disk)
        pins = {pin.path: pin for pin in reference.pinned.files} if reference.pinned else {}
        records = []
        progress.start(reference.name, listing.size)
        try:
            for wanted in listing.files:
                published = wanted.folder + wanted.path
                url = _file_url(hub, reference, listing.revision, published)
                record = download_file(hub, url, wanted, folder, reference, progress, disk)
                pin = pins.get(wanted.path)
                if pin and record.sha256 != pin.sha256:
                    disk.remove_file(folder / wanted.path)
                    raise _pin_mismatch(reference, wanted.path)
                records.append(record)
        finally:
            progress.finish()
        disk.sync_folder(folder)
        return tuple(records)


def connect(settings: FetchSettings) -> Hub:
    """A hub to talk to. UsageError for an endpoint that is no URL or a token that is no token."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            "The hub is needed, but the hub library is set to be offline.", "Unset HF_HUB_OFFLINE."
        )
    endpoint = (settings.endpoint or "").strip().rstrip("/") or DEFAULT_ENDPOINT
    if not endpoint.startswith(("https://", "http://")) or not endpoint.isprintable():
        raise UsageError(
            f"The hub endpoint {endpoint!a} is not an http(s) URL.",
            "Set HF_ENDPOINT to a URL such as https://huggingface.co, or unset it.",
        )
    token = (settings.token or "").strip() or None
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise UsageError(
            "The hub token holds characters no token has.", "Set HF_TOKEN to the token alone."
        )
    transport_errors, connect_errors = _session_errors()
    return Hub(
        endpoint=endpoint,
        token=token,
        session=get_session(),
        transport_errors=transport_errors,
        connect_errors=connect_errors,
        settings=settings,
    )


Errors = tuple[type[Exception], ...]


def _session_errors() -> tuple[Errors, Errors]:
    """What the session raises when a request fails, and when no connection came about at all.

    The library brings httpx up to version 1 and httpx2 since version 2; its own error class
    derives from the base class of the one in use.
    """
    from huggingface_hub.errors import HfHubHTTPError

    base = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    library = importlib.import_module(base.__module__.partition(".")[0])
    failed = (base, library.InvalidURL, library.StreamError)
    return failed, (library.ConnectError, library.ConnectTimeout)


def _file_url(hub: Hub, reference: Reference, commit: str, path: str) -> str:
    return f"{hub.endpoint}/{reference.repo}/resolve/{commit}/{quote(path)}"


def _parse_listing(
    text: bytes, reference: Reference
) -> tuple[str, dict[str, WantedFile], str | None]:
    """Commit, files by path, licence. DownloadError if the answer is not such a listing."""
    try:
        answer = json.loads(text)
        commit = answer["sha"]
        siblings = {row["rfilename"]: row for row in answer["siblings"]}
        card = answer.get("cardData") or {}
        if not names.is_commit(commit):
            raise ValueError("no commit")
        hostile = [path for path in siblings if names.leaves_folder(path)]
        files = {path: _wanted(path, row) for path, row in siblings.items() if path not in hostile}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise DownloadError(
            f"The hub's answer about {reference.repo} is not a file list llmrun understands.",
            "Check HF_ENDPOINT and any proxy, then run the command again.",
        ) from err
    if hostile:
        raise ModelFileError(
            f"{reference.repo} lists the file {hostile[0][:100]!a}, which points outside its "
            "folder; nothing was downloaded.",
            "Do not use this repository.",
        )
    license_name = card.get("license") if isinstance(card, dict) else None
    return commit, files, license_name if isinstance(license_name, str) else None


def _wanted(path: str, row: dict[str, Any]) -> WantedFile:
    lfs = row.get("lfs") or {}
    size = lfs.get("size", row.get("size"))
    sha256, blob_id = lfs.get("sha256"), row.get("blobId")
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"no size for {path}")
    if sha256 is not None and not names.is_sha256(sha256):
        raise ValueError(f"bad sha256 for {path}")
    if sha256 is None and not (isinstance(blob_id, str) and names.is_commit(blob_id)):
        raise ValueError(f"no hash for {path}")
    return WantedFile(path, size, sha256, None if sha256 else blob_id)


def _choose(
    hub: Hub, reference: Reference, commit: str, siblings: dict[str, WantedFile]
) -> tuple[WantedFile, ...]:
    """The files to take: configuration and tokenizer, and one set of weights."""
    top = {path: file for path, file in siblings.items() if "/" not in path}
    if reference.file:
        weights = _named(reference, reference.file, siblings)
    else:
        weights = [top[path] for path in _choose_weights(hub, reference, commit, siblings, top)]
    small = [
        path
        for path in top
        if path in SMALL_FILES or (path.startswith("tokenizer") and path.endswith(".json"))
    ]
    chosen = {path: top[path] for path in small} | {file.path: file for file in weights}
    folded = {path.lower() for path in chosen}
    bad = [path for path in chosen if not names.is_file(path)]
    if bad or len(folded) != len(chosen):
        raise ModelFileError(
            f"{reference.repo} has file names that are not safe on every system: "
            f"{ascii(bad or sorted(chosen))[:200]}.",
            "Do not use this repository.",
        )
    return tuple(chosen[path] for path in sorted(chosen))


def _named(reference: Reference, path: str, siblings: dict[str, WantedFile]) -> list[WantedFile]:
    """The GGUF file that was named, or all parts of its model, to be kept without their folder."""
    if siblings.keys().isdisjoint(names.parts_of(path)):
        raise ModelNotFoundError(
            f"{reference.repo} has no file {path}.", f"It has: {_enumerate(_ggufs(siblings))}."
        )
    folder = path[: path.rfind("/") + 1]
    return [
        replace(siblings[part], path=part.removeprefix(folder), folder=folder)
        for part in _parts(reference, path, siblings)
    ]


def _choose_weights(
    hub: Hub,
    reference: Reference,
    commit: str,
    siblings: dict[str, WantedFile],
    top: dict[str, WantedFile],
) -> list[str]:
    if INDEX in top:
        return _shards(hub, reference, commit, top)
    safetensors = [path for path in top if path.endswith(".safetensors")]
    if safetensors:
        whole = "model.safetensors"
        return [whole] if whole in safetensors else safetensors
    # A file in a folder is never meant unless it is named: it may be of another model.
    ggufs = _ggufs(top) or _ggufs(siblings)
    if len(ggufs) > 1 or (ggufs and "/" in ggufs[0]):
        noun = "GGUF file" if len(ggufs) == 1 else "GGUF files"
        raise UsageError(
            f"{reference.repo} holds {len(ggufs)} {noun}: {_enumerate(ggufs)}.",
            f"Name one: {reference.repo}/{_escaped(ggufs[0])}",
        )
    if not ggufs:
        pickles = [path for path in top if path.endswith(PICKLES)]
        why = "no .safetensors or .gguf file"
        if pickles:
            why = f"pickles only ({pickles[0]!a}), which can run code; llmrun never reads one"
        raise ModelFileError(
            f"As weights {reference.repo} holds {why}.",
            "Look for a version of the model in safetensors or GGUF.",
        )
    return _parts(reference, ggufs[0], top)


PROJECTOR = "mmproj"
"""In the name of a GGUF file that holds the eyes of a model, not the model."""


def _ggufs(files: Iterable[str]) -> list[str]:
    """The GGUF files that are models, of a split one the first."""
    models = (path for path in files if path.endswith(".gguf") and PROJECTOR not in path)
    return sorted({names.first_part_of(path) for path in models})


def _parts(reference: Reference, first: str, files: dict[str, WantedFile]) -> list[str]:
    parts = names.parts_of(first)
    missing = [part for part in parts if part not in files]
    if missing:
        raise ModelFileError(
            f"{reference.repo} holds {len(parts) - len(missing)} of the {len(parts)} parts of a "
            f"split model; {_escaped(missing[0])} is missing.",
            "Tell the publisher, or use another revision.",
        )
    return parts


def _shards(hub: Hub, reference: Reference, commit: str, top: dict[str, WantedFile]) -> list[str]:
    """The weight files the index names: repositories often hold a second copy beside them."""
    url = _file_url(hub, reference, commit, INDEX)
    try:
        weight_map = json.loads(read_small(hub, url, INDEX_BYTES, reference, top[INDEX]))[
            "weight_map"
        ]
        shards = sorted(set(weight_map.values()))
        if len(weight_map) > INDEX_ENTRIES or not shards:
            raise ValueError("too many entries, or none")
        missing = [shard for shard in shards if shard not in top]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ModelFileError(
            f"{INDEX} of {reference.repo} is damaged.", "Tell the publisher, or use another model."
        ) from err
    if missing:
        raise ModelFileError(
            f"{INDEX} of {reference.repo} names {ascii(missing[0])[:100]}, "
            "which the repository does not hold.",
            "Tell the publisher, or use another revision.",
        )
    return shards


def _compare_with_pins(reference: Reference, files: tuple[WantedFile, ...]) -> None:
    listed = {file.path: file for file in files}
    for pin in reference.pinned.files if reference.pinned else ():
        file = listed.get(pin.path)
        if file is None or file.size != pin.size or file.sha256 not in (None, pin.sha256):
            raise _pin_mismatch(reference, pin.path)


def _pin_mismatch(reference: Reference, path: str) -> DownloadError:
    return DownloadError(
        f"{path} of {reference.repo} is not the file models.toml pins.",
        "Do not use it; check HF_ENDPOINT, and report it if that is the official hub.",
    )


def _drop_strangers(folder: Path, listing: Listing, disk: Disk) -> None:
    """Remove what an earlier try left and this listing does not want."""
    known = {file.path + end for file in listing.files for end in ("", ".part", ".etag")}
    for path in folder.iterdir():
        if path.name not in known:
            disk.remove_tree(path)


def _enumerate(found: list[str]) -> str:
    shown = ", ".join(map(_escaped, found[:12])) or "none"
    return shown + (f" and {len(found) - 12} more" if len(found) > 12 else "")


def _escaped(path: str) -> str:
    return ascii(path)[1:-1]


SOURCE = HubSource()
