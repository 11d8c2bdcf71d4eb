"""Which variable wins, and where files are kept."""

from pathlib import Path

import pytest

from llmrun.cli.session import Session
from llmrun.cli.settings import Settings, read_settings
from llmrun.cli.terminal import Terminal
from llmrun.errors import UsageError


def settings(home: Path, **environ: str) -> Settings:
    return read_settings(environ, platform="linux", home=home)


def test_the_store_is_where_llmrun_home_says(tmp_path: Path) -> None:
    assert settings(tmp_path).store_root == tmp_path / ".cache" / "llmrun"
    assert settings(tmp_path, XDG_CACHE_HOME="/c").store_root == Path("/c/llmrun")
    both = settings(tmp_path, XDG_CACHE_HOME="/c", LLMRUN_HOME="/h")
    assert both.store_root == Path("/h")


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_every_platform_has_its_folders(tmp_path: Path, platform: str) -> None:
    read = read_settings({}, platform=platform, home=tmp_path)
    for path in (read.store_root, read.config_file, read.history_file):
        assert path.is_relative_to(tmp_path)


def test_blank_variables_count_as_unset(tmp_path: Path) -> None:
    read = settings(tmp_path, HF_ENDPOINT=" ", HF_TOKEN=" ", LLMRUN_MODEL="", HF_HUB_OFFLINE="0")
    assert read.endpoint == "https://huggingface.co"
    assert read.token is None
    assert read.model is None
    assert not read.offline


@pytest.mark.parametrize("value", ["1", "true", "YES", "On"])
def test_hub_offline_is_honoured(tmp_path: Path, value: str) -> None:
    assert settings(tmp_path, HF_HUB_OFFLINE=value).fetch_settings().offline


def test_the_token_comes_from_the_variable_or_the_hubs_own_file(tmp_path: Path) -> None:
    file = tmp_path / ".cache" / "huggingface" / "token"
    file.parent.mkdir(parents=True)
    file.write_text("hf_from_file\n")
    from_file = settings(tmp_path).token
    assert from_file is not None
    assert (from_file.value, from_file.source) == ("hf_from_file", str(file))
    from_variable = settings(tmp_path, HF_TOKEN="hf_x").token
    assert from_variable is not None
    assert (from_variable.value, from_variable.source) == ("hf_x", "HF_TOKEN")


def test_the_token_is_not_in_any_repr(tmp_path: Path) -> None:
    read = settings(tmp_path, HF_TOKEN="hf_canary")
    assert "hf_canary" not in repr(read)
    assert "hf_canary" not in repr(read.fetch_settings())


def test_the_order_of_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    def chosen(named: str | None, **environ: str) -> str:
        read = settings(tmp_path, **environ)
        return Session(read, Terminal(read, sys.stdout, sys.stderr)).model(named)

    assert chosen(None) == "smollm2-135m"
    config = tmp_path / ".config" / "llmrun" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('default = "of-config"')
    assert chosen(None) == "of-config"
    assert chosen(None, LLMRUN_MODEL="of-variable") == "of-variable"
    assert chosen("named", LLMRUN_MODEL="of-variable") == "named"
    config.write_text("default = 3")
    with pytest.raises(UsageError, match="default"):
        chosen(None)
