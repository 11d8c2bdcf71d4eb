"""Templates render as the reference does, escape nowhere, and always end."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.errors import InternalError, LlmrunError, ModelFileError, UsageError
from llmrun.text import render_child
from llmrun.text.limits import MIB, TEMPLATE_FILE_BYTES, RenderLimits
from llmrun.text.message import Message
from llmrun.text.render_child import sandbox
from llmrun.text.render_process import OutOfBoundsError, RenderProcess
from llmrun.text.template import ChatTemplate, FoundTemplate, find_template, gguf_template

HELLO = [Message("user", "hello")]
TIGHT = RenderLimits(seconds=0.4, memory_bytes=64 * MIB, output_bytes=64 * 1024)


@pytest.fixture(scope="module")
def shared() -> Iterator[list[ChatTemplate]]:
    """One child for many sources: ``render_source`` swaps the source of this template."""
    template = ChatTemplate("", "<s>", "</s>")
    yield [template]
    template.close()


def _render(shared: list[ChatTemplate], source: str, **extra: object) -> str:
    template = shared[0]
    template._source = source
    return template.render(HELLO, extra=extra)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hello</s>"),
        ("{% for m in messages %}\n{{ m['role'] }}\n{% endfor %}\n", "user\n"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 5 %}{{ ns.x }}", "5"),
        ("{% set ns = namespace([('a', 1)], b=2) %}{{ ns.a + ns.b }}", "3"),
        ("{{ dict(a=1) }}", "{'a': 1}"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
        ("{{ {'é': '<>&\\''} | tojson }}", '{"é": "<>&\'"}'),
        ("{{ {'b': [1], 'a': 2} | tojson(indent=1, sort_keys=true) }}", None),
        ("{{ 'yes' if tools is none and not nothing else 'no' }}", "yes"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ ' x '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ messages | length }}", "xb1"),
        ("{% if add_generation_prompt %}go{% endif %}{{ enable_thinking }}", "goTrue"),
        ("{%- macro f(x) -%}[{{ x }}]{%- endmacro -%}{{ f('y') }}", "[y]"),
    ],
)
def test_what_templates_use_works(
    source: str, expected: str | None, shared: list[ChatTemplate]
) -> None:
    expected = expected or json.dumps({"a": 2, "b": [1]}, indent=1)
    assert _render(shared, source, enable_thinking=True) == expected


def test_equals_the_reference_renderer(shared: list[ChatTemplate]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """{%- set ns = namespace(last=-1) %}
    {%- for m in messages %}
        {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {%- endfor %}
  {% for m in messages %}
    {# a comment #}
<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ {'last': ns.last} | tojson }}
  {% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
    turns = [{"role": "user", "content": "  <b>é</b>\n"}, {"role": "assistant", "content": "x"}]
    expected, _ = render_jinja_template([turns], chat_template=source, add_generation_prompt=True)
    shared[0]._source = source
    messages = [Message(t["role"], t["content"]) for t in turns]
    assert [shared[0].render(messages)] == expected


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ [].__class__.__mro__[1].__subclasses__()[104].__init__.__globals__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ (''|attr('__class__')|attr('__mro__'))() }}",
    "{{ ''|attr('__cl' ~ 'ass__')|attr('__base__')|attr('__subclasses__')() }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('mro')() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment.loader.x }}",
    "{{ namespace.__init__.__globals__['os'].system('touch CANARY') }}",
    "{{ namespace().__class__.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ namespace(_x=1) }}",
    "{{ namespace({'__init__': 1}) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace() %}{% set ns._Namespace__attrs = {} %}",
    "{{ dict.__class__.mro() }}",
    "{{ dict.fromkeys([1]) }}",
    "{{ dict.mro() }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ range.__class__.__mro__.x }}",
    "{{ range(1).__class__.__base__.__subclasses__() }}",
    "{{ range(100001) | list }}",
    "{{ range(10**9) | list }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ cycler('a') }}",
    "{{ joiner(',') }}",
    "{{ lipsum() }}",
    "{{ raise_exception.__globals__.sys }}",
    "{{ strftime_now.__globals__.sys }}",
    "{{ strftime_now.__closure__[0].cell_contents }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__class__.__base__}'.format(a='') }}",
    "{{ '{a.__class__.__base__}'.format_map({'a': ''}) }}",
    "{{ '%s' | format(''.__class__.__mro__) }}",
    "{{ 'x'.format.__self__.__class__.x }}",
    "{{ ['']|map(attribute='__class__.__mro__')|list|first|first }}",
    "{{ (['']|map('attr', '__class__')|first).__mro__ }}",
    "{{ [{}]|groupby('__class__.__mro__.x.y') }}",
    "{{ ['']|sum(attribute='__class__.__mro__') }}",
    "{{ ['']|sort(attribute='__class__.__mro__.x')|join('x').y.z }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].pop('role') }}",
    "{% set x = {} %}{{ x.setdefault('a', 1) }}",
    "{% set x = [] %}{{ x.extend([1]) }}",
    "{{ (1).__class__.__bases__[0].__subclasses__() }}",
    "{{ true.__class__.__mro__.x }}",
    "{{ none.__class__.__mro__.x }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% from 'os' import system %}{{ system('touch CANARY') }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% include 'CANARY' ignore missing %}{{ open('CANARY', 'w') }}",
    "{{ open('CANARY', 'w').write('x') }}",
    "{{ __import__('os').system('touch CANARY') }}",
    "{{ eval('1') }}",
    "{{ exec('import os') }}",
    "{{ getattr('', '__class__') }}",
    "{{ globals()['os'] }}",
    "{{ caller.__globals__.x }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__.x }}",
    "{% for i in [1] %}{{ loop.__init__.__globals__.os }}{% endfor %}",
    "{% for i in [1] %}{{ loop._iterable.x }}{% endfor %}",
    "{{ ''.join.__call__.__self__.x }}",
    "{% call(x) foo.__class__.__mro__() %}{% endcall %}",
    "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "{{ (messages|select).gi_code.co_code }}",
    "{% set x %}{{ ''.__class__.mro().__len__() }}{% endset %}",
    "{{ ().__reduce_ex__(2) }}",
    "{% trans %}x{% endtrans %}",
    "{% do messages.append(1) %}",
    "{% debug %}",
    "{{ messages|tojson(cls=''.__class__.__mro__) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_sec01_escapes_end_in_a_template_error(
    source: str, shared: list[ChatTemplate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match="does not work"):
        _render(shared, source)
    assert not list(tmp_path.iterdir())


def test_sec01_escapes_open_no_file_socket_or_process(tmp_path: Path) -> None:
    """The same sandbox in this process, under an audit hook."""
    seen: list[str] = []
    watching = False

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        watched = ("open", "socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn")
        if watching and event.startswith(watched):
            seen.append(f"{event} {arguments}")

    environment = sandbox()
    turns = {"messages": [{"role": "user", "content": "x"}]}
    sys.addaudithook(hook)
    survivors = []
    for source in ESCAPES:
        try:
            compiled = environment.from_string(source.replace("CANARY", str(tmp_path / "canary")))
            watching = True
            compiled.render(turns)
            survivors.append(source)
        except Exception:
            continue  # each must end here; what it touched on the way is in ``seen``
        finally:
            watching = False
    # What only the child adds (a missing clock here) may end one of them early, none may survive.
    assert not survivors
    assert [event for event in seen if "canary" in event or "open" not in event] == []
    assert len(ESCAPES) >= 60


def test_sec01_only_the_child_makes_jinja_environments() -> None:
    package = Path(render_child.__file__).parents[1]
    maker = re.compile(r"\b(import|from) jinja2|\b(Template|\w*Environment)\(")
    users = [p.name for p in package.rglob("*.py") if maker.search(p.read_text())]
    assert users == ["render_child.py"]


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(999) %}x"
    "{% endfor %}{% endfor %}",
    "nested loops in a macro": "{% macro f(n) %}{% for i in range(99) %}{{ f(n - 1) if n }}"
    "{% endfor %}{% endmacro %}{{ f(99) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "string power": "{{ 'a' * 10**10 }}",
    "string power at run time": "{{ messages[0].content * 10**9 }}",
    "list power": "{{ (messages * 10**9) | length }}",
    "doubling": "{% set ns = namespace(s='a') %}{% for i in range(64) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "number power": "{{ 9 ** (9 ** 9) }}",
    "number power at run time": "{{ (messages | length + 9) ** (10 ** 8) }}",
    "padding": "{{ 'a'.ljust(10**10) }}",
    "centre": "{{ 'a' | center(10**10) }}",
    "format width": "{{ '%9999999999d' % 1 }}",
    "format method width": "{{ '{:>9999999999}'.format('a') }}",
    "indent": "{{ ('\\n' * 99999) | indent(99999) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "join": "{{ range(99999) | join('x' * 99999) }}",
    "clock width": "{{ strftime_now('%9999999999d' * 1000) }}{{ 'a' * 10**9 }}",
    "batch": "{{ range(99999) | batch(99999999999, 'x') | list }}",
    "too much output": "{% for i in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}",
    "slow sort": "{% for i in range(99999) %}{% set x = range(99999) | sort %}{% endfor %}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "slow regular expression": "{% for i in range(99999) %}{{ ('http://' * 9999) | urlize }}"
    "{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_sec02_bombs_end_within_the_limits(name: str) -> None:
    assert len(BOMBS) >= 20
    with ChatTemplate(BOMBS[name], limits=TIGHT) as template:
        template._process.start()
        start = time.monotonic()
        with pytest.raises(ModelFileError, match=r"was stopped|does not work"):
            template.render(HELLO)
        assert time.monotonic() - start < TIGHT.seconds + 3
        template._source = "{{ messages[0].content }}"
        assert template.render(HELLO) == "hello"


def test_sec02_memory_is_watched_where_the_system_has_no_limit(tmp_path: Path) -> None:
    """A child that does not cap itself: the parent sees it grow and ends it."""
    script = tmp_path / "child.py"
    script.write_text(
        "import sys, time\n"
        "def say(data): sys.stdout.buffer.write(len(data).to_bytes(4, 'big') + data)\n"
        "say(b'{\"ready\": true}'); sys.stdout.flush()\n"
        "sys.stdin.buffer.read(4); held = bytearray(200 << 20); time.sleep(60)\n"
    )
    process = RenderProcess([str(script)], RenderLimits(seconds=20, memory_bytes=64 * MIB))
    start = time.monotonic()
    with pytest.raises(OutOfBoundsError, match="64 MiB"):
        process.ask({}, 1000)
    assert time.monotonic() - start < 10


def test_output_may_be_large_when_the_input_is() -> None:
    words = "é" * 30_000
    with ChatTemplate("{{ messages[0].content * times }}", limits=TIGHT) as template:
        assert template.render([Message("user", words)], extra={"times": 8}) == words * 8
        with pytest.raises(ModelFileError, match="output"):
            template.render([Message("user", words)], extra={"times": 9})


def test_a_child_that_dies_is_a_named_error_and_the_next_render_works() -> None:
    with ChatTemplate("{{ messages[0].content }}") as template:
        assert template.render(HELLO) == "hello"
        assert template._process._process is not None
        template._process._process.kill()
        try:
            answer = template.render(HELLO)  # the death may be noticed before the question is put
        except LlmrunError:
            answer = template.render(HELLO)
        assert answer == "hello"


def test_a_child_that_cannot_start_is_an_internal_error(tmp_path: Path) -> None:
    process = RenderProcess([str(tmp_path / "missing.py")], RenderLimits())
    with pytest.raises(InternalError, match="did not start"):
        process.ask({}, 1000)


def test_the_child_gets_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "canary")
    with ChatTemplate("x") as template:
        template.render(HELLO)
        assert template._process._process is not None
        environment = Path(f"/proc/{template._process._process.pid}/environ")
        if not environment.exists():
            pytest.skip("needs /proc to look into the child")
        assert environment.read_bytes() == b""


def test_any_text_goes_through_unchanged() -> None:
    words = "\x00\x1b[31m {{ x }} {% raw %} <b> é 🦀 \ud83e \u2028"
    with ChatTemplate("{{ messages[0].content }}") as template:
        assert template.render([Message("user", words)]) == words


def test_r039_r040_a_refusal_is_a_usage_error_with_the_templates_words() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported\\x1b[31m') }}{% endif %}{% endfor %}"
    )
    with (
        ChatTemplate(source) as template,
        pytest.raises(UsageError, match=r"System role not supported\n") as error,
    ):
        template.render([Message("system", "be brief")])
    assert "\x1b" not in str(error.value)


def test_a_broken_template_of_the_user_is_a_usage_error() -> None:
    with (
        ChatTemplate("{% if %}", given_by_user=True) as template,
        pytest.raises(UsageError, match="TemplateSyntaxError"),
    ):
        template.render(HELLO)


def test_starting_ahead_takes_no_time_and_is_idempotent() -> None:
    with ChatTemplate("x") as template:
        template.start()
        first = template._process._process
        template.start()
        assert template._process._process is first
        assert template.render(HELLO) == "x"


PARENT = """
import sys, threading, time
from llmrun.text.limits import RenderLimits
from llmrun.text.message import Message
from llmrun.text.template import ChatTemplate
source, render, wait = sys.argv[1:]
template = ChatTemplate(source, limits=RenderLimits(seconds=1 if wait == "busy" else 60))
template.start()
if render == "render":
    template.render([Message("user", "hello")])
if wait == "busy":
    arguments = ([Message("user", "hello")],)
    threading.Thread(target=template.render, args=arguments, daemon=True).start()
    time.sleep(0.5)
print(template._process._process.pid, flush=True)
if wait != "exit":
    time.sleep(60)
"""


def _runs(pid: int) -> bool:
    """Whether a process is there and not only waits to be collected."""
    listing = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(listing.stdout.strip()) and not listing.stdout.startswith("Z")


def _ends(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _runs(pid)


def _parent(source: str, render: str, wait: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PARENT, source, render, wait]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="uses ps")
@pytest.mark.parametrize("render", ["render", "start only"])
def test_a_process_that_exits_waits_for_no_child_and_leaves_none(render: str) -> None:
    with _parent("x", render, "exit") as parent:
        out, err = parent.communicate(timeout=30)
    assert (parent.returncode, err) == (0, "")
    assert _ends(int(out), 10)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="uses ps and SIGKILL")
@pytest.mark.parametrize(
    ("source", "render", "wait"),
    [
        ("x", "render", "idle"),
        ("x", "start only", "idle"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "start only",
            "busy",
        ),
    ],
)
def test_a_killed_process_leaves_no_child(source: str, render: str, wait: str) -> None:
    with _parent(source, render, wait) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _runs(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=30)
    # An idle child reads the end of its input; a busy one is ended by its limit of processor time.
    assert _ends(pid, 10 if wait == "idle" else 30)


def test_r042_both_places_and_named_lists(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert find_template(tmp_path, {"chat_template": "c"}).source == "c"
    assert find_template(tmp_path, {"chat_template": named}).source == "d"
    assert find_template(tmp_path, {"chat_template": named[:1]}).source == "t"
    with pytest.raises(ModelFileError, match="a, b"):
        find_template(tmp_path, {"chat_template": [{"name": n, "template": n} for n in ("b", "a")]})
    (tmp_path / "chat_template.jinja").write_text("é")
    found = find_template(tmp_path, {"chat_template": "c"})
    assert (found.source, found.origin, found.is_fallback) == ("é", "chat_template.jinja", False)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="UTF-8"):
        find_template(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (TEMPLATE_FILE_BYTES + 1))
    with pytest.raises(ModelFileError, match="larger"):
        find_template(tmp_path, {})


def test_r042_an_older_repository_keeps_the_template_in_its_own_json_file(tmp_path: Path) -> None:
    older = tmp_path / "chat_template.json"
    older.write_text(json.dumps({"chat_template": "older é"}))
    found = find_template(tmp_path, {"chat_template": "config"})
    assert found == FoundTemplate("older é", "chat_template.json")
    named = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    older.write_text(json.dumps({"chat_template": named}))
    assert find_template(tmp_path, {}).source == "d"
    older.write_text("{}")
    assert find_template(tmp_path, {"chat_template": "config"}).source == "config"
    older.write_text("{")
    with pytest.raises(ModelFileError, match=r"chat_template\.json is not valid JSON"):
        find_template(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert find_template(tmp_path, {}).source == "newest"


def test_r043_the_fallback_is_named_and_only_used_without_a_template(tmp_path: Path) -> None:
    found = find_template(tmp_path, {})
    assert found.is_fallback
    assert gguf_template({}) == found
    assert not gguf_template({"tokenizer.chat_template": "x"}).is_fallback
    messages = [Message("system", "Be brief."), *HELLO, Message("assistant", "Hi."), *HELLO]
    with ChatTemplate(found.source, "<s>") as template:
        assert template.render(messages) == (
            "<s>Be brief.\n\nUser: hello\nAssistant: Hi.\nUser: hello\nAssistant:"
        )
