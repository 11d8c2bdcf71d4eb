"""Help pages, exit codes, the config file, and what starting costs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmrun import errors
from llmrun.cli import app, exits

COMMANDS = sorted(app.found())
ERRORS = [
    error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, errors.LlmrunError)
]


def write_config(environment: dict[str, str], text: str) -> None:
    folder = Path(environment["HOME"]) / ".config" / "llmrun"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text, "utf-8")


def test_the_commands_of_this_version_are_found() -> None:
    assert COMMANDS == [
        "bench", "chat", "doctor", "eval", "list", "pull", "quantize", "rm", "run", "show", "tune",
    ]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_a_command_does(llmrun: Any, name: str) -> None:
    result = llmrun(name, "--help")
    assert result.code == 0
    assert f"llmrun {name}" in result.out
    assert "--offline" in result.out
    assert result.err == ""
    summary = next(
        line for line in llmrun("--help").out.splitlines() if line.startswith(f"  {name} ")
    )
    assert not summary.endswith("...")


def test_without_a_command_the_help_is_shown(llmrun: Any) -> None:
    assert llmrun().out == llmrun("--help").out


def test_version(llmrun: Any) -> None:
    assert llmrun("--version").out.startswith("llmrun ")


@pytest.mark.parametrize("error", ERRORS)
def test_each_error_class_has_its_exit_code(llmrun: Any, error: type[errors.LlmrunError]) -> None:
    result = llmrun("run", "x", env={"FAKE_FAILURE": error.__name__})
    assert result.code == error.exit_code
    assert result.out == ""
    if error.exit_code not in (130, 141):
        assert result.err.endswith("error: It failed.\nType something else.\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonsense"], 2),
        (["run", "x", "--nonsense"], 2),
        (["run", "x", "--ctx", "many"], 2),
        (["run", "x", "--ctx", "0"], 2),
        (["run", "x", "-n", "0"], 2),
        (["run", "x", "--temperature", "hot"], 2),
        (["run", "x", "--temperature", "-1"], 2),
        (["run", "x", "--json", "--json-stream"], 2),
        (["run", "x", "--stats", "some"], 2),
        (["run", "x", "--kv", "int3"], 9),
        (["run", "x", "--kv", "k8v4"], 9),
        (["run", "x", "--device", "tpu"], 9),
        (["run", "x", "--device", "mps"], 9),
        (["run", "x", "-q", "int3"], 9),
        (["run", "x", "-m", "missing"], 3),
        (["run", "x CRASH"], 1),
        (["run", "x MEMORY"], 6),
        (["run", "x CARD"], 6),
        (["chat", "one", "-m", "other"], 2),
        (["rm"], 2),
        (["quantize", "x"], 2),
    ],
)
def test_exit_codes(llmrun: Any, arguments: list[str], code: int) -> None:
    result = llmrun(*arguments)
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith(("error: ", "note: "))
    assert "Traceback" not in result.err
    lines = result.err.splitlines()
    said = next(i for i, line in enumerate(lines) if line.startswith("error: "))
    assert lines[said + 1 :], "the next step is missing"


def test_ctx_auto_is_accepted(llmrun: Any) -> None:
    assert llmrun("run", "x", "--ctx", "auto").code == 0


def test_debug_shows_the_traceback(llmrun: Any) -> None:
    result = llmrun("run", "CRASH", "--debug")
    assert result.code == 1
    assert "Traceback" in result.err
    assert "ZeroDivisionError: a fault" in result.err
    assert "Run again with --debug" in llmrun("run", "CRASH").err
    assert "Run again" not in result.err


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("CUDA error: out of memory", 6),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 6),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 bytes", 6),
        ("CUDA error: an illegal memory access was encountered", 1),
        ("out of resource: shared memory, Required: 1, Hardware limit: 0", 1),
    ],
)
def test_how_libraries_say_that_memory_ran_out(said: str, code: int) -> None:
    assert exits.named(RuntimeError(said)).exit_code == code
    assert exits.is_survivable(RuntimeError(said)) == (code == 6)


def test_a_full_card_is_explained_with_numbers(llmrun: Any) -> None:
    result = llmrun("run", "CARD")
    assert result.code == 6
    assert "2.00 GiB more were needed, 1.20 GiB of 23.64 GiB are free" in result.err
    assert "--offload" in result.err
    assert "PyTorch" not in result.err


@pytest.mark.parametrize(
    ("device", "name"), [("mps", "Apple"), ("xpu", "Intel"), ("rocm", "AMD"), ("hip:0", "AMD")]
)
def test_gpus_of_other_makers_are_not_supported_yet(llmrun: Any, device: str, name: str) -> None:
    result = llmrun("run", "x", "--device", device)
    assert result.code == 9
    assert name in result.err
    assert "not supported yet" in result.err


def test_memory_errors_of_torch_are_known_without_importing_it(
    llmrun: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    class Torch:
        pass

    Torch.OutOfMemoryError = OutOfMemoryError  # type: ignore[attr-defined]

    def fail(*arguments: object) -> None:
        raise OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(sys.modules, "torch", Torch)
    monkeypatch.setattr(fakes.Model, "forward", fail)
    result = llmrun("run", "x")
    assert result.code == 6
    assert "CUDA out of memory" in result.err


def test_the_config_file_gives_defaults(llmrun: Any, environment: dict[str, str]) -> None:
    write_config(environment, 'max-tokens = 3\nstop = ["zz"]\nctx = 99\nquiet = true\n')
    result = llmrun("run", "hello", "--json")
    assert json.loads(result.out)["text"] == "You"
    assert json.loads(result.out)["usage"]["context"] == 99
    assert result.err == ""
    assert json.loads(llmrun("run", "hello", "--json", "-n", "2").out)["text"] == "Yo"


@pytest.mark.parametrize(("text", "shown"), [("debug = true", True), ("debug = false", False)])
def test_tracebacks_can_be_asked_for_in_the_config_file(
    llmrun: Any, environment: dict[str, str], text: str, shown: bool
) -> None:
    write_config(environment, text)
    assert ("Traceback" in llmrun("run", "CRASH").err) == shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_tokens = 3", "'max-tokens'"),
        ("model = 'x'", "'model'"),
        ("temprature = 0", "'temperature'"),
        ("max-tokens = 'many'", "--max-tokens"),
        ("= broken", "cannot be read"),
    ],
)
def test_a_bad_config_file_is_a_usage_error(
    llmrun: Any, environment: dict[str, str], text: str, said: str
) -> None:
    write_config(environment, text)
    result = llmrun("run", "hello")
    assert result.code == 2
    assert said in result.err


@pytest.mark.slow
def test_starting_is_light() -> None:
    code = (
        "import sys, llmrun.cli.app as app; app.build();"
        "print([m for m in ('torch', 'numpy', 'rich.table', 'rich.progress', 'prompt_toolkit',"
        " 'huggingface_hub', 'tokenizers', 'jinja2', 'llmrun.cli.assemble') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.slow
def test_assembling_needs_no_torch_and_nothing_of_the_terminal() -> None:
    code = (
        "import sys, llmrun.cli.assemble, llmrun.cli.one_shot;"
        "print([m for m in ('torch', 'prompt_toolkit', 'rich.progress') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
