"""One GET to a hub: where the token may go, which redirects are followed, what refusals mean.

The token goes to the configured origin (scheme, host, port) only, and no more once a redirect
has left it, even if a later one leads back. Redirects from https to http are refused. Bodies are
taken as they are: a content encoding would make lengths and ranges meaningless.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import SplitResult, urljoin, urlsplit

from llmrun.errors import DownloadError, LlmrunError, ModelNotFoundError
from llmrun.store.reference import Reference
from llmrun.store.settings import FetchSettings

MAX_REDIRECTS = 10
MAX_PAUSE_S = 60.0
REDIRECTS = (301, 302, 303, 307, 308)
PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504)
RETRIES_UNREACHED = 2  # while the hub was never reached at all
DEFAULT_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True)
class Hub:
    """A hub to talk to: its origin, the user's token, and the HTTP session to use.

    ``transport_errors`` are the session's exceptions for connections that fail, and
    ``connect_errors`` those for connections that never came about.
    """

    endpoint: str
    token: str | None = field(repr=False)
    session: Any
    transport_errors: tuple[type[Exception], ...]
    connect_errors: tuple[type[Exception], ...]
    settings: FetchSettings


class Response(Protocol):
    """What this room uses of the session's answers."""

    status_code: int
    headers: Mapping[str, str]

    def iter_raw(self) -> Iterator[bytes]:
        """The body as it arrives. Asked for blocks of a size, a lost connection loses the last."""


class ConnectionLostError(Exception):
    """A try failed in a way that another try may mend.

    ``reached``: the other side had answered, so the network is there.
    """

    def __init__(self, why: str, wait_s: float = 0.0, *, reached: bool = True) -> None:
        super().__init__(why)
        self.wait_s = wait_s
        self.reached = reached


class Patience:
    """Counts failures in a row and pauses between tries, twice as long each time."""

    def __init__(self, hub: Hub, reference: Reference) -> None:
        self._hub = hub
        self._reference = reference
        self._failures = 0
        self._reached = False

    def gained(self) -> None:
        """Something new arrived: start counting again."""
        self._failures = 0
        self._reached = True

    def failed(self, err: ConnectionLostError) -> None:
        """Pause before the next try. DownloadError if there were too many."""
        settings = self._hub.settings
        self._reached = self._reached or err.reached
        # Nobody wants to watch half a minute of tries where there is no network at all.
        retries = settings.retries if self._reached else min(settings.retries, RETRIES_UNREACHED)
        if self._failures >= retries:
            raise DownloadError(
                f"Downloading {self._reference.name} from {self._hub.endpoint} failed "
                f"{self._failures + 1} times in a row: {err}.",
                "Check the network, proxy and HF_ENDPOINT, then run the command again"
                + ("; what arrived so far is kept." if self._reached else "."),
            ) from err
        pause_s = max(settings.backoff_s * 2**self._failures, err.wait_s)
        self._failures += 1
        time.sleep(min(pause_s, MAX_PAUSE_S))


@contextmanager
def get(
    hub: Hub, url: str, reference: Reference, headers: Mapping[str, str] | None = None
) -> Iterator[Response]:
    """Yield the streamed answer (200, 206 or 416) to a GET of ``url``.

    ConnectionLostError, also from within the block, for what another try may mend; else the
    error of llmrun that the hub's refusal means.
    """
    home, at_home = _origin(hub.endpoint), True
    for _ in range(MAX_REDIRECTS):
        at_home = at_home and _origin(url) == home
        try:
            with hub.session.stream(
                "GET",
                url,
                headers={**_headers(hub.token if at_home else None), **(headers or {})},
                timeout=hub.settings.timeout_s,
                follow_redirects=False,
            ) as response:
                if response.status_code in REDIRECTS and response.headers.get("location"):
                    url = _next_url(url, response.headers["location"])
                    continue
                _check(hub, response, reference)
                yield response
                return
        except hub.transport_errors as err:
            reached = not isinstance(err, hub.connect_errors)
            why = f"{type(err).__name__}: {_plain(str(err))}"
            raise ConnectionLostError(why, reached=reached) from err
    raise DownloadError(
        f"The hub redirected {reference.name} more than {MAX_REDIRECTS} times.",
        "Check HF_ENDPOINT and any proxy.",
    )


def _headers(token: str | None) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity", "User-Agent": "llmrun"}
    return {**headers, "Authorization": f"Bearer {token}"} if token else headers


def _origin(url: str) -> tuple[str, str, int]:
    parts = _split(url)
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    return parts.scheme, (parts.hostname or "").lower(), port


def _next_url(url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
    except ValueError as err:
        raise _no_address(location) from err
    if _split(url).scheme == "https" and _split(target).scheme != "https":
        raise DownloadError(
            f"{urlsplit(url).hostname} redirected from https to an unencrypted address; "
            "llmrun does not follow.",
            "Check HF_ENDPOINT and any proxy.",
        )
    return target


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError as err:
        raise _no_address(url) from err
    if not usable:
        raise _no_address(url)
    return parts


def _no_address(url: str) -> DownloadError:
    return DownloadError(f"{_plain(url)} is not a usable address.", "Check HF_ENDPOINT.")


def _check(hub: Hub, response: Response, reference: Reference) -> None:
    status = response.status_code
    if status in PASSING_STATUSES:
        wait = response.headers.get("retry-after", "")
        wait_s = float(wait) if wait.isascii() and wait.isdigit() else 0.0
        raise ConnectionLostError(f"the hub answers {status}", wait_s)
    if status not in (200, 206, 416):
        raise _refusal(hub, status, response.headers.get("x-error-code", ""), reference)
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise DownloadError(
            f"The hub, or a proxy in between, sends {reference.name} compressed although it was "
            "asked not to.",
            "Check HF_ENDPOINT and any proxy.",
        )


def _refusal(hub: Hub, status: int, code: str, reference: Reference) -> LlmrunError:
    """What a refusal means. With no token a hub answers 401 for missing and private alike."""
    repo, link = reference.repo, f"{hub.endpoint}/{reference.repo}"
    token = hub.token
    seen = f"Your token (...{token[-4:] if len(token) > 12 else ''}) was seen" if token else ""
    if code == "GatedRepo" and not token:
        return DownloadError(
            f"{repo} is gated: its owner grants access to accounts (HTTP {status}).",
            f"Ask for access at {link}, then set HF_TOKEN to a token of that account.",
        )
    if status == 404 or (token and code in ("RepoNotFound", "RevisionNotFound", "EntryNotFound")):
        what = {
            "RevisionNotFound": f"{repo} has no revision {reference.revision or 'main'}",
            "EntryNotFound": f"{repo} lists a file that it does not have",
        }.get(code, f"{repo} does not exist on {hub.endpoint}")
        return ModelNotFoundError(f"{what}.", f"Check the spelling at {link}.")
    if status == 401 and not token:
        return DownloadError(
            f"The hub answers 401 for {repo}: it does not exist, or it is private or gated.",
            "Check the spelling; for a private or gated model set HF_TOKEN.",
        )
    if status == 401:
        return DownloadError(
            f"{seen}, but the hub does not accept it (HTTP 401).",
            "Make a new token and set HF_TOKEN.",
        )
    if status == 403:
        return DownloadError(
            f"{seen or 'No token was sent'}, access to {repo} is not granted (HTTP 403).",
            f"Ask for access at {link}, with the account the token belongs to.",
        )
    return DownloadError(f"The hub answers {status} for {repo}.", "Check HF_ENDPOINT, try later.")


def _plain(text: str) -> str:
    """Foreign text as it may go to a terminal: one line, no control characters, not endless."""
    return "".join(c if c.isprintable() else " " for c in text[:200])
