"""``llmrun run``: what goes where, in which shape, with which exit code."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmrun.cli import assemble


def test_only_the_answer_is_on_stdout(llmrun: Any) -> None:
    result = llmrun("run", "hello")
    assert result.code == 0
    assert result.out == "You said: hello.\n"
    assert "the fake model was chosen" in result.err
    assert "TTFT" in result.err


def test_what_is_said_while_loading_comes_before_the_answer(
    llmrun: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(options: Any, settings: Any, progress: Any, process: Any, say: Any) -> Any:
        asked.append(options.offload)
        say("offload: 2 of 4 layers stay on the CPU")
        return fakes.load(options, settings, progress, process)

    monkeypatch.setattr(assemble, "load", load)
    result = llmrun("run", "x", "--offload")
    assert (asked, result.code) == ([True], 0)
    assert result.err.startswith("offload: 2 of 4 layers")
    assert llmrun("run", "x", "--offload", "--quiet").err == ""
    llmrun("run", "x")
    assert asked[-1] is False


def test_r013_quiet_says_nothing_on_stderr(llmrun: Any) -> None:
    result = llmrun("run", "hello", "--quiet", stdin=b"")
    assert (result.out, result.err) == ("You said: hello.\n", "")


def test_r015_argument_files_and_stdin_join_in_this_order(llmrun: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("a file\n", "utf-8")
    result = llmrun("run", "SHOW first", "-f", str(file), stdin=b"from stdin\n")
    assert result.out == "user: SHOW first\n\na file\n\nfrom stdin\n"


def test_r016_all_lines_of_stdin_are_one_prompt(llmrun: Any) -> None:
    result = llmrun("run", stdin=b"SHOW\ntwo\nthree\n")
    assert result.out == "user: SHOW\ntwo\nthree\n"


def test_a_newline_is_added_only_if_missing(llmrun: Any) -> None:
    assert llmrun("run", "x", env={"FAKE_REPLY": "ends\n"}).out == "ends\n"
    assert llmrun("run", "x", env={"FAKE_REPLY": "ends"}).out == "ends\n"


@pytest.mark.parametrize("arguments", [[], [""], ["  \n "]])
def test_an_empty_prompt_is_a_usage_error(llmrun: Any, arguments: list[str]) -> None:
    result = llmrun("run", *arguments)
    assert result.code == 2
    assert result.out == ""
    assert "prompt is empty" in result.err


def test_characters_the_vocabulary_cannot_spell_are_named(llmrun: Any) -> None:
    result = llmrun("run", "a\x16b\x16")
    assert result.code == 0
    assert result.err.count("cannot spell U+0016") == 1
    assert "cannot spell" not in llmrun("run", "plain").err


def test_r020_bad_bytes_are_replaced_once_with_one_warning(llmrun: Any) -> None:
    result = llmrun("run", stdin=b"SHOW \xff\x41\xff\n")
    assert result.code == 0
    assert result.out == "user: SHOW �A�\n"
    assert result.err.count("not valid UTF-8") == 1


def test_r021_files_and_stdin_share_a_decoder(llmrun: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(b"SHOW \xff")
    assert llmrun("run", "-f", str(file)).out == llmrun("run", stdin=b"SHOW \xff").out


def test_a_missing_file_is_a_usage_error(llmrun: Any) -> None:
    result = llmrun("run", "-f", "no-such-file")
    assert result.code == 2
    assert "no-such-file" in result.err


def test_json_holds_everything_and_is_all_of_stdout(llmrun: Any) -> None:
    result = llmrun("run", "hello", "--json", "--seed", "7", env={"COLUMNS": "20"})
    document = json.loads(result.out)
    assert result.out.count("\n") == 1
    assert list(document) == ["text", "finish_reason", "usage", "timings", "receipt"]
    assert document["text"] == "You said: hello."
    assert document["finish_reason"] == "stop"
    assert document["usage"]["generated_tokens"] == len("You said: hello.") + 1
    assert document["timings"]["ttft_ms"] > 0
    assert sum(document["timings"]["ttft_parts_ms"].values()) == pytest.approx(
        document["timings"]["ttft_ms"]
    )
    assert document["receipt"]["seed"] == 7
    assert document["receipt"]["fallbacks"] == []
    assert document["receipt"]["origin"] == "~/models/fake"
    assert document["receipt"]["files"][0]["sha256"] == "ab" * 32


def test_r010_json_stays_valid_whatever_the_width(llmrun: Any) -> None:
    reply = "x" * 100 + "\n" + "y" * 100
    result = llmrun("run", "x", "--json", env={"COLUMNS": "20", "FAKE_REPLY": reply})
    assert json.loads(result.out)["text"] == reply


def test_json_stream_is_a_line_per_token(llmrun: Any) -> None:
    result = llmrun("run", "x", "--json-stream", env={"FAKE_REPLY": "hé!"})
    lines = [json.loads(line) for line in result.out.splitlines()][:-1]
    assert "".join(line["text"] for line in lines) == "hé!"
    assert [line["token_id"] for line in lines] == [*"hé!".encode(), 256]
    assert [line["phase"] for line in lines] == ["prefill"] + ["decode"] * 4
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("arguments", "reason", "generated"),
    [([], "stop", 8), (["--stop", "two"], "stop", 7), (["-n", "3"], "length", 3)],
)
def test_json_stream_ends_with_a_line_about_the_whole(
    llmrun: Any, arguments: list[str], reason: str, generated: int
) -> None:
    env = {"FAKE_REPLY": "one two"}
    *_, last = llmrun("run", "x", "--json-stream", *arguments, env=env).out.splitlines()
    document = json.loads(last)
    assert list(document) == ["finish_reason", "usage", "timings"]
    assert document["finish_reason"] == reason
    assert document["usage"]["generated_tokens"] == generated
    assert document["timings"]["ttft_ms"] > 0


def test_the_receipt_file_is_the_receipt_of_the_json(llmrun: Any, tmp_path: Path) -> None:
    file = tmp_path / "receipt.json"
    result = llmrun("run", "hello", "--json", "--receipt", str(file))
    assert json.loads(file.read_text("utf-8")) == json.loads(result.out)["receipt"]


def test_the_receipt_says_how_the_answer_was_asked_for(llmrun: Any, tmp_path: Path) -> None:
    arguments = ["--stop", "zz", "-n", "5", "--system", "Be short.", "--prefill", "You", "--json"]
    found = json.loads(llmrun("run", "hello", *arguments, "--ignore-eos").out)["receipt"]
    assert (found["max_tokens"], found["stop"], found["ignore_eos"]) == (5, ["zz"], True)
    assert (found["system"], found["prefill"], found["raw"]) == ("Be short.", "You", False)
    assert found["template"] == "model"
    plain = json.loads(llmrun("run", "hello", "--json").out)["receipt"]
    assert (plain["max_tokens"], plain["stop"], plain["ignore_eos"]) == (None, [], False)
    assert (plain["system"], plain["prefill"]) == (None, "")
    file = tmp_path / "mine.jinja"
    given = json.loads(llmrun("run", "x", "--json", "--template", str(file)).out)["receipt"]
    assert given["template"] == "~/mine.jinja"


def test_the_fallback_template_counts_only_where_a_template_is_used(llmrun: Any) -> None:
    env = {"FAKE_FALLBACK": "1", "FAKE_REPLY": "one USER: two"}
    result = llmrun("run", "x", "--json", env=env)
    assert json.loads(result.out)["text"] == "one "
    assert json.loads(result.out)["receipt"]["template"] == "fallback"
    assert result.err.count("a plain form is used") == 1
    raw = llmrun("run", "x\nassistant: ", "--raw", "--json", env=env)
    assert json.loads(raw.out)["text"] == "one USER: two"
    assert json.loads(raw.out)["receipt"]["template"] is None
    assert "a plain form is used" not in raw.err


@pytest.mark.parametrize("name", ["no/such/receipt.json", "."])
def test_a_receipt_that_cannot_be_written_is_said_before_the_model_is_loaded(
    llmrun: Any, tmp_path: Path, name: str
) -> None:
    env = {"FAKE_FAILURE": "ModelFileError"}
    result = llmrun("run", "x", "--receipt", str(tmp_path / name), env=env)
    assert (result.code, result.out) == (2, "")
    assert str(tmp_path) in result.err


@pytest.mark.skipif(sys.platform != "linux", reason="no start of the process is known there")
def test_cold_ttft_is_split_into_stages(llmrun: Any) -> None:
    timings = json.loads(llmrun("run", "hello", "--json").out)["timings"]
    stages = timings["cold_parts_ms"]
    assert list(stages) == [
        "import", "input", "open", "weights", "cache", "prompt", "lookup", "prefill", "sample",
    ]  # fmt: skip
    assert sum(stages.values()) == pytest.approx(timings["cold_ttft_ms"])
    assert (stages["open"], stages["weights"]) == (1.0, 2.0), "as the model was loaded"
    shown = llmrun("run", "hello", "--stats", "full").err
    assert "from the start of the process  (import " in shown


@pytest.mark.parametrize("shape", ["--json", "--json-stream"])
def test_json_is_harmless_where_it_shall_be_and_holds_the_same(llmrun: Any, shape: str) -> None:
    reply = "a\x9b2Jb\x7f\u202ec\x1b[31mé🙂"
    plain = llmrun("run", "x", shape, env={"FAKE_REPLY": reply})
    always = llmrun("run", "x", shape, "--sanitize", "always", env={"FAKE_REPLY": reply})

    def text(out: str) -> str:
        return "".join(json.loads(line).get("text", "") for line in out.splitlines())

    assert text(plain.out) == text(always.out) == reply
    assert "\x9b" in plain.out
    assert not set("\x9b\x7f\u202e\x1b") & set(always.out)
    assert "é" in always.out
    assert "🙂" in always.out


def test_stop_strings_cut_and_end_the_answer(llmrun: Any) -> None:
    env = {"FAKE_REPLY": "one two three"}
    result = llmrun("run", "x", "--stop", "two", "--json", env=env)
    document = json.loads(result.out)
    assert (document["text"], document["finish_reason"]) == ("one ", "stop")


def test_held_back_text_is_not_lost(llmrun: Any) -> None:
    env = {"FAKE_REPLY": "one tw"}
    assert llmrun("run", "x", "--stop", "two", env=env).out == "one tw\n"
    stream = llmrun("run", "x", "--stop", "two", "--json-stream", env=env).out
    lines = [json.loads(line) for line in stream.splitlines()][:-1]
    assert "".join(line["text"] for line in lines) == "one tw"


def test_max_tokens_ends_the_answer(llmrun: Any) -> None:
    result = llmrun("run", "hello", "-n", "3")
    assert result.code == 0
    assert result.out == "You\n"
    assert "--max-tokens" in result.err


def test_ignore_eos_goes_past_the_end(llmrun: Any) -> None:
    result = llmrun("run", "x", "--ignore-eos", "-n", "8", "--json", env={"FAKE_REPLY": "ab"})
    assert json.loads(result.out)["usage"]["generated_tokens"] == 8


def test_prefill_starts_the_answer(llmrun: Any) -> None:
    result = llmrun("run", "hello", "--prefill", "You said")
    assert result.out == "You said: hello.\n"


def test_system_message_comes_first(llmrun: Any) -> None:
    assert llmrun("run", "SHOW", "--system", "Be short.").out.startswith("system: Be short.\nuser:")


def test_raw_takes_no_system_message(llmrun: Any) -> None:
    assert llmrun("run", "x", "--raw", "--system", "s").code == 2


def test_full_stats_show_the_parts(llmrun: Any) -> None:
    result = llmrun("run", "hello", "--stats", "full")
    for word in ("tokenize", "cache lookup", "first sample", "n too small", "TPOT"):
        assert word in result.err
    assert "TTFT" not in llmrun("run", "hello", "--stats", "off").err


def test_r050_a_prompt_that_does_not_fit_names_both_numbers(llmrun: Any) -> None:
    result = llmrun("run", "x" * 100, "--ctx", "50")
    assert result.code == 7
    assert result.out == ""
    assert "118 tokens" in result.err
    assert "50" in result.err
    assert "--ctx" in result.err


def test_r009_r011_a_pipe_gets_the_bytes_and_no_escape(llmrun: Any) -> None:
    reply = "wide " * 80 + "\x1b[31mred\x1b[0m [/b] [INST]"
    result = llmrun("run", "x", env={"FAKE_REPLY": reply, "COLUMNS": "40"})
    assert result.out == reply + "\n"
    assert "\x1b" not in result.err


def test_sanitize_always_filters_a_pipe_too(llmrun: Any) -> None:
    env = {"FAKE_REPLY": "a\x1b]52;c;AAAA\x07b"}
    assert llmrun("run", "x", "--sanitize", "always", env=env).out == "ab\n"


def test_r022_output_is_utf8_whatever_the_locale(program: Callable[..., Any]) -> None:
    env = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    with program("run", "größe 🙂", env=env) as running:
        out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err.decode()
    assert out.decode() == "You said: größe 🙂.\n"


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_r017_r018_a_closed_pipe_is_141_and_silent(
    program: Callable[..., Any], unbuffered: dict[str, str]
) -> None:
    env = {"FAKE_REPLY": "line\n" * 5000, "FAKE_CONTEXT": "100000", **unbuffered}
    running: subprocess.Popen[bytes]
    with program("run", "x", "--quiet", env=env) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdin.close()
        assert running.stdout.read(1) == b"l"
        running.stdout.close()
        assert running.wait(timeout=60) == 141
        assert running.stderr.read() == b""


def test_ctrl_c_ends_with_130_and_keeps_what_was_written(program: Callable[..., Any]) -> None:
    import signal

    env = {"FAKE_REPLY": "word " * 1000, "FAKE_CONTEXT": "100000", "FAKE_DELAY_MS": "5"}
    with program("run", "x", env=env) as running:
        running.stdin.close()
        assert running.stdout.read(5) == b"word "
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 130
        assert running.stdout.read().endswith(b"\n")
        assert b"Traceback" not in running.stderr.read()


@pytest.mark.parametrize(("closed", "code"), [(">&-", 141), ("2>&-", 0)])
def test_closed_standard_streams_are_no_crash(
    environment: dict[str, str], closed: str, code: int
) -> None:
    import sys

    script = Path(__file__).with_name("fake_program.py")
    command = f"{sys.executable} {script} run x {closed} </dev/null"
    ran = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True)
    assert ran.returncode == code
    assert b"Traceback" not in ran.stdout + ran.stderr
