"""The one reader of environment variables and of the user's config file.

Everything below gets what it needs from ``Settings``. The config file is TOML; its keys are the
long option names without dashes in front (``temperature = 0.7``, ``max-tokens = 200``) and
``default``, the model used when none is named. Which keys exist is checked by ``app``, which knows
the options.
"""

import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmrun.errors import UsageError
from llmrun.store.settings import FetchSettings

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = frozenset({"1", "on", "yes", "true"})


@dataclass(frozen=True)
class Token:
    """The hub's token and where it was found."""

    value: str = field(repr=False)
    source: str


@dataclass(frozen=True)
class Folders:
    """Where this platform keeps a program's files; none of them need exist."""

    cache: Path
    config: Path
    state: Path


@dataclass(frozen=True)
class Settings:
    """What the environment and the config file say; options on the command line win.

    ``model``: LLMRUN_MODEL. ``config``: the config file as parsed, ``default`` included.
    ``environment``: the whole environment, for programs that llmrun starts.
    """

    store_root: Path
    config_file: Path
    history_file: Path
    config: Mapping[str, object]
    model: str | None
    endpoint: str
    token: Token | None
    offline: bool
    no_color: bool
    term: str
    columns: int | None
    environment: Mapping[str, str] = field(repr=False)

    @property
    def debug(self) -> bool:
        """Whether the config file wants tracebacks of errors."""
        return str(self.config.get("debug")).lower() in _TRUE

    def fetch_settings(self) -> FetchSettings:
        """The part that concerns downloads."""
        return FetchSettings(
            offline=self.offline,
            endpoint=self.endpoint,
            token=self.token.value if self.token else None,
            environment=self.environment,
        )


def read_settings(
    environ: Mapping[str, str], *, platform: str = sys.platform, home: Path | None = None
) -> Settings:
    """Read them. UsageError for a config file that cannot be read."""
    home = home or Path.home()
    places = folders(environ, platform, home)
    config_file = places.config / "config.toml"
    root = environ.get("LLMRUN_HOME")
    columns = environ.get("COLUMNS", "")
    return Settings(
        store_root=Path(root).expanduser() if root else places.cache,
        config_file=config_file,
        history_file=places.state / "history",
        config=_read_config(config_file),
        model=environ.get("LLMRUN_MODEL") or None,
        endpoint=(environ.get("HF_ENDPOINT", "").strip() or DEFAULT_ENDPOINT).rstrip("/"),
        token=_find_token(environ, home),
        offline=environ.get("HF_HUB_OFFLINE", "").strip().lower() in _TRUE,
        no_color=bool(environ.get("NO_COLOR")),
        term=environ.get("TERM", ""),
        columns=int(columns) if columns.isdecimal() and int(columns) else None,
        environment=dict(environ),
    )


def folders(environ: Mapping[str, str], platform: str, home: Path) -> Folders:
    """The folders of llmrun; the XDG variables count on every platform."""

    def place(variable: str, fallback: Path) -> Path:
        value = environ.get(variable)
        return Path(value) / "llmrun" if value and os.path.isabs(value) else fallback

    if platform == "darwin":
        support = home / "Library" / "Application Support" / "llmrun"
        cache, config, state = home / "Library" / "Caches" / "llmrun", support, support
    elif platform == "win32":
        local = Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "llmrun"
        roaming = Path(environ.get("APPDATA") or home / "AppData" / "Roaming") / "llmrun"
        cache, config, state = local / "cache", roaming, local
    else:
        cache, config = home / ".cache" / "llmrun", home / ".config" / "llmrun"
        state = home / ".local" / "state" / "llmrun"
    return Folders(
        cache=place("XDG_CACHE_HOME", cache),
        config=place("XDG_CONFIG_HOME", config),
        state=place("XDG_STATE_HOME", state),
    )


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise UsageError(
            f"The config file {path} cannot be read: {err}", "Correct it or move it away."
        ) from err


def _find_token(environ: Mapping[str, str], home: Path) -> Token | None:
    """HF_TOKEN, else the file that ``hf auth login`` writes."""
    value = environ.get("HF_TOKEN", "").strip()
    if value:
        return Token(value, "HF_TOKEN")
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub_home = Path(environ.get("HF_HOME") or cache / "huggingface").expanduser()
    path = Path(environ.get("HF_TOKEN_PATH") or hub_home / "token").expanduser()
    try:
        value = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):  # no login, or not for us to read
        return None
    return Token(value, str(path)) if value else None
