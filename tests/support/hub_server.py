"""A model hub on 127.0.0.1, with its CDN on a second port and switches for faults.

Speaks the parts of the Hugging Face URL layout that a download needs: the file list of a
revision, the tree, and ``resolve`` with ETag, X-Repo-Commit, X-Linked-Etag, X-Linked-Size, range
requests and a redirect to the CDN for large files. Load it with
``importlib.util.spec_from_file_location`` and use ``HubServer`` as a context manager.
"""

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")


@dataclass(frozen=True)
class Fault:
    """One fault of one answer that carries a file.

    ``kind``: cut (close after ``value`` bytes), flip (change byte ``value``), empty (200 without
    bytes), short (an honest length, ``value`` bytes less), long (``value`` bytes more), status
    (answer ``value``), status_range (the same, to a range only), etag (another strong etag),
    no_etag, cut_no_etag (both), ignore_range (200 for a range),
    shift_range (a 206 that starts ``value`` bytes early), gzip (an encoding nobody asked for).
    """

    kind: str
    value: int = 0
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Seen:
    """A request as it arrived; ``server`` is hub or cdn."""

    server: str
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Repo:
    """Commits (files by path) and what branches point at."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    license: str = "apache-2.0"
    refusal: tuple[int, str] | None = None
    token: str | None = None


class HubServer:
    """The hub and its CDN; ``endpoint`` is the URL to configure."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.seen: list[Seen] = []
        self.faults: dict[str, list[Fault]] = {}
        self.bytes_per_s: float | None = None
        self.listing_extra: list[dict[str, Any]] = []
        self.redirect_back = False
        self._lock = threading.Lock()
        self._servers = [_serve(self, "hub"), _serve(self, "cdn")]
        self.endpoint, self.cdn = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )

    def __enter__(self) -> "HubServer":
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, repo: str, files: dict[str, bytes], ref: str = "main") -> str:
        """Commit ``files`` (all of them) to a branch; returns the commit."""
        shape = json.dumps([[path, _sha256(data)] for path, data in sorted(files.items())])
        commit = hashlib.sha1(shape.encode()).hexdigest()
        entry = self.repos.setdefault(repo, Repo())
        entry.commits[commit] = files
        entry.refs[ref] = commit
        return commit

    def fail(self, path: str, *faults: Fault) -> None:
        """Let the next answers that carry ``path`` fail, one fault each; ``*`` is any answer."""
        self.faults.setdefault(path, []).extend(faults)

    def take_fault(self, path: str) -> Fault | None:
        """The next fault of a path, used up."""
        with self._lock:
            queue = self.faults.get(path) or self.faults.get("*")
            return queue.pop(0) if queue else None

    def note(self, seen: Seen) -> None:
        """Record a request."""
        with self._lock:
            self.seen.append(seen)

    def bodies(self, path: str) -> list[Seen]:
        """The requests that asked for a file's bytes, wherever they are served."""
        return [s for s in self.seen if s.method == "GET" and urlsplit(s.path).path.endswith(path)]


def blob_id(data: bytes) -> str:
    """The git blob id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _serve(hub: HubServer, name: str) -> ThreadingHTTPServer:
    class Handler(_Handler):
        owner = hub
        server_name_here = name

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement
    owner: HubServer
    server_name_here: str

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        """As GET, without the body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Serve the API, a small file or a redirect (hub), or a blob (CDN)."""
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.owner.note(Seen(self.server_name_here, self.command, self.path, headers))
        path = unquote(urlsplit(self.path).path)
        try:
            if found := re.fullmatch(r"/api/models/(.+?)/(revision|tree)/(.+)", path):
                self._api(*found.groups())
            elif found := re.fullmatch(r"/(?:cdn/)?(.+?)/resolve/([^/]+)/(.+)", path):
                self._file(*found.groups(), path=path)
            else:
                self._plain(404, {"X-Error-Code": "RepoNotFound"})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _commit(self, repo: str, revision: str) -> str | None:
        entry = self.owner.repos.get(repo)
        if entry is None:
            self._plain(404, {"X-Error-Code": "RepoNotFound"})
            return None
        if entry.refusal:
            self._plain(entry.refusal[0], {"X-Error-Code": entry.refusal[1]})
            return None
        if entry.token and self.headers.get("Authorization") != f"Bearer {entry.token}":
            self._plain(401, {"X-Error-Code": "RepoNotFound"})
            return None
        commit = entry.refs.get(revision, revision)
        if commit not in entry.commits:
            self._plain(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit

    def _api(self, repo: str, kind: str, revision: str) -> None:
        fault = self.owner.take_fault("api")
        if fault:
            self._plain(fault.value, dict(fault.headers))
            return
        commit = self._commit(repo, revision.partition("/")[0] if kind == "tree" else revision)
        if commit is None:
            return
        entry = self.owner.repos[repo]
        rows = [_row(path, data) for path, data in sorted(entry.commits[commit].items())]
        if kind == "tree":
            body: object = [{"type": "file", "path": r["rfilename"], **r} for r in rows]
        else:
            rows += self.owner.listing_extra
            card = {"license": entry.license}
            body = {"id": repo, "sha": commit, "siblings": rows, "cardData": card}
        self._plain(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _file(self, repo: str, revision: str, name: str, path: str) -> None:
        if self.server_name_here == "hub":
            commit = self._commit(repo, revision)
            if commit is None:
                return
            if name not in self.owner.repos[repo].commits[commit]:
                self._plain(404, {"X-Error-Code": "EntryNotFound"})
                return
        else:
            commit = revision
        data = self.owner.repos[repo].commits[commit][name]
        common = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        back = "back=1" in self.path
        if self.server_name_here == "hub" and name.endswith(LARGE) and not back:
            linked = {"X-Linked-Etag": f'"{_sha256(data)}"', "X-Linked-Size": str(len(data))}
            target = f"{self.owner.cdn}/cdn{path}"
            self._plain(302, {**common, **linked, "Location": target})
            return
        if self.server_name_here == "cdn" and self.owner.redirect_back:
            target = f"{self.owner.endpoint}{path.removeprefix('/cdn')}?back=1"
            self._plain(302, {"Location": target})
            return
        etag = _sha256(data) if name.endswith(LARGE) else blob_id(data)
        self._body(data, f'"{etag}"', common, self.owner.take_fault(name))

    def _body(self, data: bytes, etag: str, headers: dict[str, str], fault: Fault | None) -> None:
        kind, value = (fault.kind, fault.value) if fault else ("", 0)
        if kind == "status":
            self._plain(value, dict(fault.headers) if fault else {})
            return
        if kind == "etag":
            etag = f'"{value:064x}"'
        status, first = 200, 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        same = self.headers.get("If-Range", etag) == etag
        if asked and kind == "status_range":
            self._plain(value, {})
            return
        if asked and same and kind != "ignore_range":
            status, first = 206, int(asked[1])
            if kind == "shift_range":
                first -= value
            headers = {**headers, "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        body = bytearray(data[first:])
        if kind == "flip":
            body[value] ^= 1
        body = bytearray() if kind == "empty" else body
        body = body[: len(body) - value] if kind == "short" else body
        body = body + b"x" * value if kind == "long" else body
        if kind == "gzip":
            headers = {**headers, "Content-Encoding": "gzip"}
        self.send_response(status)
        for key, text in headers.items():
            self.send_header(key, text)
        if not kind.endswith("no_etag"):
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(bytes(body[:value] if kind.startswith("cut") else body))
        if kind.startswith("cut"):
            self.close_connection = True

    def _send(self, body: bytes) -> None:
        rate = self.owner.bytes_per_s
        step = len(body) or 1 if rate is None else max(1, int(rate / 50))
        for at in range(0, len(body), step):
            self.wfile.write(body[at : at + step])
            self.wfile.flush()
            if rate is not None:
                time.sleep(step / rate)

    def _plain(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, text in headers.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _row(path: str, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob_id(data)}
    if path.endswith(LARGE):
        row["lfs"] = {"sha256": _sha256(data), "size": len(data), "pointerSize": 134}
    return row
