"""``llmrun chat``: through a pipe, and by a person at a terminal."""

import signal
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CTRL_C, CTRL_D = "\x03", "\x04"
READY = "leaves.\n\n>"
Window = Callable[..., Any]


def test_r003_piped_stdin_is_one_prompt_and_ends(llmrun: Any) -> None:
    result = llmrun("chat", stdin=b"one\ntwo\n")
    assert result.code == 0
    assert result.out == "You said: one\ntwo.\n"
    assert "TTFT" in result.err


def test_r003_empty_stdin_ends_at_once(llmrun: Any) -> None:
    result = llmrun("chat", stdin=b"")
    assert (result.code, result.out) == (0, "")


@pytest.mark.slow
def test_a_conversation_streams_measures_and_remembers(window: Window) -> None:
    chat = window("chat")
    screen = chat.wait(READY)
    assert "fake · int4 (4.00 bits per weight) · cpu (fake) · context 4,096 tokens" in screen
    chat.send("hello\r")
    chat.wait("You said: hello.")
    assert "TTFT" in chat.wait("· prefill ")
    chat.send("SHOW\r")
    chat.wait("assistant= You said: hello.\nuser: SHOW")
    chat.send(CTRL_D)
    assert chat.end() == 0
    shared = len("user: hello\nassistant: You said: hello.")
    assert f"(+{shared} cached)" in chat.text()


@pytest.mark.slow
def test_r004_r005_ctrl_c_stops_the_answer_and_keeps_it(window: Window) -> None:
    chat = window("chat", env={"FAKE_DELAY_MS": "20"})
    chat.wait(READY)
    chat.send("a long message that takes time to say again\r")
    chat.wait("You said: a lo")
    chat.send(CTRL_C)
    chat.wait("interrupted")
    time.sleep(0.2)
    chat.send("SHOW\r")
    chat.wait("user: SHOW", 60)
    assert "assistant= You said: a lo" in chat.text()
    assert "assistant= You said: a long message that takes time to say again" not in chat.text()
    chat.wait("cached", 60)
    chat.send(CTRL_D)
    assert chat.end() == 0


@pytest.mark.slow
def test_r004_ctrl_c_in_prefill_keeps_the_question(window: Window) -> None:
    chat = window("chat", env={"FAKE_DELAY_MS": "150"})
    chat.wait(READY)
    chat.send("x" * 400 + "\r")
    chat.wait("prefill ")
    chat.send(CTRL_C)
    chat.wait("interrupted before the first token")
    chat.send("/show\r")
    chat.wait("1 questions so far")
    chat.send("/exit\r")
    assert chat.end() == 0


@pytest.mark.slow
def test_r004_ctrl_c_while_the_prompt_is_rendered_keeps_the_chat(window: Window) -> None:
    chat = window("chat", env={"FAKE_RENDER_MS": "1500"})
    chat.wait(READY)
    chat.send("hello\r")
    time.sleep(0.5)
    chat.send(CTRL_C)
    chat.wait("interrupted before the first token")
    chat.send("/show\r")
    chat.wait("1 questions so far, 1 replies interrupted")
    chat.send("/tokens\r")
    time.sleep(0.5)
    chat.send(CTRL_C)
    chat.wait("The conversation has")
    chat.send("/exit\r")
    assert chat.end() == 0


@pytest.mark.slow
def test_r004_ctrl_c_twice_at_the_prompt_leaves_with_130(window: Window) -> None:
    chat = window("chat")
    chat.wait(READY)
    chat.send(CTRL_C)
    chat.wait("Ctrl-C again leaves")
    time.sleep(1.2)
    chat.send(CTRL_C)
    time.sleep(0.3)
    chat.send(CTRL_C)
    assert chat.end() == 130
    assert b"Traceback" not in chat.raw


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_r001_r002_signals_give_the_terminal_back(window: Window, number: int) -> None:
    chat = window("chat", env={"FAKE_DELAY_MS": "20", "FAKE_REPLY": "word " * 500})
    before = termios.tcgetattr(chat.child.child_fd)
    chat.wait(READY)
    chat.send("x\r")
    chat.wait("word word")
    chat.child.kill(number)
    assert chat.end() == -number
    assert chat.raw.rstrip().endswith(b"\x1b[0m\x1b[?25h\x1b[?2004l")
    del before


@pytest.mark.slow
@pytest.mark.parametrize("leave", [CTRL_D, "/exit\r"])
def test_r001_leaving_restores_the_terminals_modes(window: Window, leave: str) -> None:
    chat = window("chat")
    before = termios.tcgetattr(chat.child.child_fd)
    chat.wait(READY)
    chat.send("hello\r")
    chat.wait("· prefill ")
    chat.send(leave)
    deadline = time.monotonic() + 20
    while termios.tcgetattr(chat.child.child_fd) != before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert chat.end() == 0
    assert not chat.screen.cursor.hidden


@pytest.mark.slow
def test_several_lines(window: Window) -> None:
    chat = window("chat")
    chat.wait(READY)
    chat.send('"""/one\rtwo"""\r')
    chat.wait("You said: /one\ntwo.")
    chat.wait("· prefill ")
    chat.send("three\x1b\rfour\r")
    chat.wait("You said: three\nfour.")
    chat.wait("+45 cached")
    time.sleep(0.3)
    chat.send("\x1b[200~five\nsix\x1b[201~")
    time.sleep(0.3)
    chat.send("\r")
    chat.wait("You said: five\nsix.")
    chat.send(CTRL_D)
    assert chat.end() == 0


@pytest.mark.slow
def test_commands(window: Window) -> None:
    chat = window("chat", lines=60)
    chat.wait(READY)
    for typed, shown in (
        ("/help", "take back the last question"),
        ("/sett", "Did you mean /set?"),
        ("/set temperature 0.25", "temperature 0.25 ·"),
        ("/set temperature -1", "out of range"),
        ("/set warmth 3", "no setting 'warmth'"),
        ("/system Be kind.", "The system message is set"),
        ("/system", "Be kind."),
        ("/stats", "Nothing has been measured yet"),
        ("/regen", "Nothing has been asked yet"),
        ("SHOW", "system: Be kind.\nuser: SHOW"),
        ("/stats", "first sample"),
        ("/tokens", "the context holds 4,096"),
        ("/undo", "are gone"),
        ("/show", "0 questions so far"),
        ("again", "You said: again."),
        ("/regen", "You said: again.\n"),
        ("/clear", "The conversation is empty"),
    ):
        chat.send(typed + "\r")
        chat.wait(shown)
        time.sleep(0.1)
    chat.send(CTRL_D)
    assert chat.end() == 0


@pytest.mark.slow
def test_r050_a_message_that_does_not_fit_leaves_the_chat_alive(window: Window) -> None:
    chat = window("chat", env={"FAKE_CONTEXT": "80"})
    chat.wait(READY)
    chat.send("y" * 90 + "\r")
    chat.wait("the context holds 80")
    chat.wait("the chat goes on")
    chat.send("hello there, dear model\r")
    chat.wait("You said: hello there, dear model.")
    chat.wait("% of the context is used")
    chat.send("MEMORY\r")
    chat.wait("the context holds 80")
    chat.send("/clear\r")
    chat.wait("The conversation is empty")
    chat.send("MEMORY\r")
    chat.wait("Memory ran out")
    chat.send("CARD\r")
    chat.wait("The memory of the GPU ran out")
    chat.send("hi\r")
    chat.wait("You said: hi.")
    chat.send(CTRL_D)
    assert chat.end() == 0


@pytest.mark.slow
def test_the_history_is_private_and_clean(window: Window, environment: dict[str, str]) -> None:
    chat = window("chat")
    chat.wait(READY)
    chat.send("remember this\r")
    chat.wait("You said: remember this.")
    chat.send(CTRL_D)
    assert chat.end() == 0
    history = Path(environment["HOME"]) / ".local" / "state" / "llmrun" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+remember this" in history.read_text("utf-8")


@pytest.mark.slow
def test_r024_model_output_cannot_drive_the_terminal(window: Window) -> None:
    run = window("run", "x", env={"FAKE_REPLY": "safe\x1b]0;owned\x07\x1b[2J [/b] text"})
    run.wait("safe [/b] text")
    assert run.end() == 0
    assert b"owned" not in run.raw
    assert run.screen.title != "owned"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "columns", "has_live_line"),
    [({}, 80, True), ({}, 15, False), ({"TERM": "dumb"}, 80, False)],
)
def test_the_live_line_is_there_while_it_decodes(
    window: Window, env: dict[str, str], columns: int, has_live_line: bool
) -> None:
    run = window(
        "run", "x", "--stats", "line",
        env={"FAKE_REPLY": "word " * 20, "FAKE_DELAY_MS": "10", **env},
        columns=columns,
    )  # fmt: skip
    run.wait("word word")
    run.wait("word\nTTFT" if columns == 80 and not has_live_line else "TTFT", 30)
    assert run.end() == 0
    drawn = run.raw.count(b"ITL p50")
    assert (drawn > 3) == has_live_line
    assert "last" not in run.text().replace("\n", ""), "the live line is still there"


@pytest.mark.slow
def test_full_statistics_show_mbu_while_it_decodes(window: Window) -> None:
    env = {"FAKE_REPLY": "word " * 20, "FAKE_DELAY_MS": "10"}
    run = window("run", "x", "--stats", "full", env=env, columns=100)
    assert run.end() == 0
    assert b"measuring the memory bandwidth" in run.raw
    assert b"MBU " in run.raw
    line = window("run", "x", env=env, columns=100)
    assert line.end() == 0
    assert b"MBU" not in line.raw


@pytest.mark.slow
def test_stats_off_in_a_chat_takes_the_live_line_too(window: Window) -> None:
    chat = window("chat", env={"FAKE_REPLY": "word " * 20, "FAKE_DELAY_MS": "10"})
    chat.wait(READY)
    chat.send("/stats off\r")
    chat.wait("Nothing has been measured")
    chat.send("x\r")
    chat.wait("word word")
    chat.send(CTRL_D)
    assert chat.end() == 0
    assert b"ITL p50" not in chat.raw


@pytest.mark.slow
def test_json_on_a_terminal_cannot_drive_it(window: Window) -> None:
    run = window(
        "run", "x", "--json", "--quiet", env={"FAKE_REPLY": "a\x9b2Jb\u202ec"}, columns=200
    )
    assert run.end() == 0
    assert r"a\u009b2Jb\u202ec" in run.text()
    assert "\u202e".encode() not in run.raw


@pytest.mark.slow
def test_no_color_means_no_styles(window: Window) -> None:
    run = window("run", "hello", env={"NO_COLOR": "1"})
    assert run.end() == 0
    assert b"\x1b[2m" not in run.raw
    styled = window("run", "hello")
    assert styled.end() == 0
    assert b"\x1b[2m" in styled.raw


@pytest.mark.slow
def test_text_at_the_bottom_scrolls_with_the_live_line_below(window: Window) -> None:
    reply = "".join(f"line {i}\n" for i in range(40))
    run = window("run", "x", env={"FAKE_REPLY": reply, "FAKE_DELAY_MS": "2"}, lines=10)
    assert run.end() == 0
    assert "line 37\nline 38\nline 39\nTTFT" in run.text()


@pytest.mark.slow
def test_r014_a_terminal_and_a_piped_stdout_keep_reading(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Answers go to the file, the prompt and what is said about it to the terminal."""
    import sys

    import pexpect

    program = Path(__file__).with_name("fake_program.py")
    out = tmp_path / "answers.txt"
    command = f"exec {sys.executable} {program} chat > {out}"
    child = pexpect.spawn("/bin/sh", ["-c", command], env=environment, timeout=20)
    child.expect("leaves")
    child.expect(">")
    child.send("one\r")
    child.expect("TTFT")
    child.send("two\r")
    child.expect("TTFT")
    child.send(CTRL_D)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert out.read_text("utf-8") == "You said: one.\nYou said: two.\n"
