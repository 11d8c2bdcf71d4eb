"""A config's keys are read, known, switched off, or refused by name."""

import json
from pathlib import Path

import pytest

from llmrun.errors import ModelFileError
from llmrun.formats.method_config import MethodConfig, method_config, method_of


def _config(**values: object) -> MethodConfig:
    return MethodConfig(values, Path("config.json"), "Take another one.")


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_key_may_be_switched_off(value: object) -> None:
    _config(novelty=value).check_keys((), frozenset())


@pytest.mark.parametrize("value", [True, 0, 1.0, "x", [0], {"a": 0}])
def test_an_unknown_key_is_refused_by_name(value: object) -> None:
    with pytest.raises(ModelFileError) as caught:
        _config(novelty=value).check_keys(("bits",), frozenset(("lr",)))
    assert f"'novelty' is {value!r}" in caught.value.what
    assert caught.value.next_step == "Take another one."


def test_known_keys_are_let_through() -> None:
    config = _config(bits=4, lr=0.1, quant_method="x", meta={"a": 1}, _private=1)
    config.check_keys(("bits",), frozenset(("lr",)))


def test_values_have_the_type_and_range_asked_for() -> None:
    config = _config(bits=4, sym=True, format="GEMM", unset=None, skipped=["lm_head"])
    assert config.integer("bits", (2, 4)) == 4
    assert config.integer("absent", (2, 4), 2) == 2
    assert config.integer("unset", (2, 4), 2) == 2
    assert config.flag("sym", False)
    assert not config.flag("unset", False)
    assert config.word("format", ("gemm",)) == "gemm"
    assert config.word("unset", ("gemm",), "gemm") == "gemm"
    config.names("skipped")
    config.names("unset")
    for wrong in (
        lambda: config.integer("bits", (2, 8)),
        lambda: config.integer("sym", (0, 1)),
        lambda: config.integer("absent", (2, 4)),
        lambda: config.flag("bits", False),
        lambda: config.word("format", ("gemv",)),
        lambda: config.word("bits", ("4",)),
        lambda: config.names("format"),
    ):
        with pytest.raises(ModelFileError, match="which llmrun does not read"):
            wrong()


def test_the_method_is_read_from_the_folder(tmp_path: Path) -> None:
    assert method_of(tmp_path) is None
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert method_of(tmp_path) is None
    path.write_text(json.dumps({"quantization_config": {"quant_method": 7}}))
    assert method_of(tmp_path) is None
    path.write_text(json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert method_of(tmp_path) == "gptq"
    assert method_config(tmp_path, "").values["bits"] == 4
